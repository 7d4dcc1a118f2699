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
    """Mean and covariance of source features, and how far single batches of the source are from them."""

    mean: Tensor  # (D,)
    covariance: Tensor  # (D, D)
    mean_distance: float  # of source batches, see `mean_distance`
    covariance_distance: float

    def distance(self, features: Tensor) -> Tensor:
        """Of features (N, D): distances of covariance and mean, each in units of the usual one; fewer than two have no
        covariance.
        """
        total = mean_distance(features.mean(0), self.mean.to(features)) / max(self.mean_distance, TINY)
        if len(features) < 2:
            return total
        return total + covariance_distance(covariance(features), self.covariance.to(features)) / max(
            self.covariance_distance, TINY
        )


TINY = 1e-12


def covariance(features: Tensor) -> Tensor:
    """Of rows (N, D), unbiased: (D, D)."""
    centered = features - features.mean(0)
    return centered.T @ centered / (len(features) - 1)


def covariance_distance(one: Tensor, other: Tensor) -> Tensor:
    """‖Σ − Σ'‖² / (4 D²)."""
    return (one - other).square().sum() / (4 * len(one) ** 2)


def mean_distance(one: Tensor, other: Tensor) -> Tensor:
    """Half the mean square of μ − μ'."""
    return (one - other).square().mean() / 2


def feature_moments(batches: Sequence[Tensor]) -> FeatureMoments:
    """Of all rows of source batches (N, D) each, and the mean distance of the batches from them."""
    rows = torch.cat(list(batches)).double()
    mean, spread = rows.mean(0), covariance(rows)
    far = [mean_distance(batch.double().mean(0), mean).item() for batch in batches]
    wide = [covariance_distance(covariance(batch.double()), spread).item() for batch in batches if len(batch) > 1]
    return FeatureMoments(mean.float(), spread.float(), sum(far) / len(far), sum(wide) / len(wide) if wide else 0.0)
