"""6 update. What can be known about an image and its prediction without a label; each number is computed at most once.

Logits and predictions, which are probabilities, are (B, C, *positions).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import torch
from torch import Tensor

from dltta.core.discrepancy import batch_discrepancy
from dltta.models.predictions import most_likely, probabilities

Network = Callable[[Tensor], Tensor]  # images to logits
Shares = Sequence[tuple[float, float]]  # per class, the least and the greatest share of an image


class Candidate:
    """One model's prediction for a batch, and how it behaves; computed when first asked for, or given."""

    def __init__(self, network: Network, images: Tensor, logits: Tensor | None = None) -> None:
        self._network, self._images = network, images
        if logits is not None:
            self.logits = logits

    @cached_property
    def logits(self) -> Tensor:
        return self._network(self._images)

    @cached_property
    def prediction(self) -> Tensor:
        return probabilities(self.logits)

    @cached_property
    def flip_inconsistency(self) -> list[float]:
        """How much of each image's prediction changes when the image is flipped; mean over the axes."""
        axes, dense = range(2, self._images.ndim), self.prediction.ndim > 2
        flipped = [probabilities(self._network(self._images.flip(axis))).flip(axis if dense else ()) for axis in axes]
        return [
            fmean(change(self.prediction[i : i + 1], other[i : i + 1]) for other in flipped)
            for i in range(len(self._images))
        ]

    @cached_property
    def marginal(self) -> Tensor:
        """The mean prediction of the batch, over images and positions: (C,)."""
        return marginal(self.prediction)

    def one_class(self, position: int | None = None) -> bool:
        """Whether it says the same class of many positions or images; of one image if a position is given."""
        chosen = self.prediction if position is None else self.prediction[position : position + 1]
        return chosen[:, 0].numel() > 1 and len(most_likely(chosen).unique()) == 1


@dataclass(frozen=True)
class ImageSignals:
    """What can be known about images (B, C, *spatial) before anything is learned from them."""

    images: Tensor
    layers: Mapping[str, tuple[Tensor, Tensor]]  # means, variances at each batch normalization of the source model
    source: Candidate  # the source model
    instance: Candidate  # the same with instance statistics
    unadapted: Candidate  # the source's parameters with the statistics that the objective uses


@dataclass(frozen=True)
class UpdateSignals:
    """What can be known about a prediction after an update."""

    adapted: Candidate
    unadapted: Candidate  # the source's parameters with the statistics that the objective uses
    source: Candidate  # the source model
    drift: float  # ‖θ − θ₀‖ / ‖θ₀‖ over the adapted parameters
    rate: float | None  # the largest of the updates that led here; None without one

    def numbers(self, shares: Shares | None) -> dict[str, float]:
        """All of them by name, as they go into the log."""
        return {
            "drift": self.drift,
            "change": change(self.adapted.prediction, self.unadapted.prediction),
            "from_source": batch_discrepancy(self.adapted.prediction, self.source.prediction),
            "marginal_entropy": total_entropy(self.adapted.marginal),
            "source_marginal_entropy": total_entropy(self.source.marginal),
            "share_excess": share_excess(self.adapted.marginal, shares),
            "source_share_excess": share_excess(self.source.marginal, shares),
        }


def change(prediction: Tensor, other: Tensor) -> float:
    """How much of a prediction another one contradicts.

    Dense: the share of the positions where either is foreground (a class other than the first) at which they differ.
    Whole images: the mean probability that is given to another class.
    """
    if prediction.ndim == 2:
        return 0.5 * (prediction - other).abs().sum(1).mean().item()
    first, second = most_likely(prediction), most_likely(other)
    foreground = ((first > 0) | (second > 0)).sum().item()
    return (first != second).sum().item() / max(foreground, 1)


def marginal(prediction: Tensor) -> Tensor:
    """The mean prediction of a batch, over images and positions: (C,)."""
    return prediction.transpose(0, 1).flatten(1).mean(1)


def total_entropy(probabilities: Tensor) -> float:
    """In nats, summed over positions (C, *positions)."""
    return -(probabilities * probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()).sum().item()


def share_excess(marginal: Tensor, shares: Shares | None) -> float:
    """How far the worst class lies outside its range, as a difference of log odds; 0 inside or without ranges."""
    if shares is None:
        return 0.0
    outside = [
        max(_log_odds(low) - _log_odds(share), _log_odds(share) - _log_odds(high), 0.0)
        for share, (low, high) in zip(marginal.tolist(), shares, strict=True)
    ]
    return max(outside)


def _log_odds(share: float) -> float:
    share = min(max(share, 1e-6), 1 - 1e-6)
    return math.log(share / (1 - share))
