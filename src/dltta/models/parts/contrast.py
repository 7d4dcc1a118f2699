"""2 networks. Two views of one image are alike, and features keep the source's moments: what TTT++ trains with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TEMPERATURE = 0.5
SCALE = 0.5 / 0.07  # the authors multiply the loss by it


class ProjectionHead(nn.Module):
    """Features pooled over positions (B, C) to projections (B, `size`), before their normalization."""

    def __init__(self, channels: int, size: int = 128) -> None:
        super().__init__()
        self.channels, self.size = channels, size
        self.layers = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, size))

    def forward(self, pooled: Tensor) -> Tensor:
        projections: Tensor = self.layers(pooled)
        return projections


def pooled(features: Tensor) -> Tensor:
    """The mean over positions: (B, C, *positions) to (B, C)."""
    return features.flatten(2).mean(2) if features.ndim > 2 else features


def contrast_loss(one: Tensor, other: Tensor) -> Tensor:
    """SimCLR's loss of the projections (B, D) of two views of B images, as TTT++ scales it.

    Each of the 2 B projections shall find its partner among all others by cosine at temperature 0.5. A single image has
    no other to be told from: zero.
    """
    z = F.normalize(torch.cat([one, other]).float(), dim=1)
    alike = z @ z.T / TEMPERATURE
    alike = alike.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
    partners = torch.arange(len(z), device=z.device).roll(len(one))
    return SCALE * F.cross_entropy(alike, partners)


@dataclass(frozen=True)
class FeatureMoments:
    """Mean and covariance of source features, and how far apart batches of the source usually are; 0 if unknown."""

    mean: Tensor  # (D,)
    covariance: Tensor  # (D, D)
    mean_distance: float  # see the function of that name
    covariance_distance: float

    def distance(self, features: Tensor) -> Tensor:
        """Of features (N, D): that of the covariance and half that of the mean, each in units of the usual one.

        Fewer than two features have no covariance. What has no usual distance to be measured by has no part.
        """
        total = features.new_zeros(())
        if self.mean_distance > 0:
            total = total + mean_distance(features.mean(0), self.mean.to(features)) / (2 * self.mean_distance)
        if self.covariance_distance > 0 and len(features) > 1:
            apart = covariance_distance(covariance(features), self.covariance.to(features))
            total = total + apart / self.covariance_distance
        return total


def covariance(features: Tensor) -> Tensor:
    """Of rows (N, D), unbiased: (D, D)."""
    centered = features - features.mean(0)
    return centered.T @ centered / (len(features) - 1)


def covariance_distance(one: Tensor, other: Tensor) -> Tensor:
    """‖Σ − Σ'‖² / (4 D²)."""
    return (one - other).square().sum() / (4 * len(one) ** 2)


def mean_distance(one: Tensor, other: Tensor) -> Tensor:
    """The mean square of μ − μ'."""
    return (one - other).square().mean()


def feature_moments(batches: Sequence[Tensor]) -> FeatureMoments:
    """Of all rows of source batches (N, D) each, and the mean distance of the other batches from the first."""
    rows = torch.cat(list(batches)).double()
    first, *others = (batch.double() for batch in batches)
    far = [mean_distance(batch.mean(0), first.mean(0)).item() for batch in others]
    wide = [
        covariance_distance(covariance(batch), covariance(first)).item()
        for batch in others
        if min(len(batch), len(first)) > 1
    ]
    usual = [sum(distances) / len(distances) if distances else 0.0 for distances in (far, wide)]
    return FeatureMoments(rows.mean(0).float(), covariance(rows).float(), *usual)
