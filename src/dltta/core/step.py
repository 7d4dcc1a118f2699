"""7 prediction. What does one step of a stream give back?"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Update:
    """One gradient step: what decided its size and how large it was."""

    loss: float
    discrepancy: float | None  # None while the memory is not ready, or without one
    rate: float  # the mean over parameters where each has its own


@dataclass(frozen=True)
class Step:
    """The prediction for one batch and how it came about.

    `loss`, `discrepancy` and `rate` are those of the first update, None for methods without a loss.
    """

    logits: Tensor  # (B, C, *positions)
    updates: tuple[Update, ...]  # empty for methods without a loss

    @property
    def loss(self) -> float | None:
        return self.updates[0].loss if self.updates else None

    @property
    def discrepancy(self) -> float | None:
        return self.updates[0].discrepancy if self.updates else None

    @property
    def rate(self) -> float | None:
        return self.updates[0].rate if self.updates else None
