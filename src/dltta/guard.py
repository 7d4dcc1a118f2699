"""6 update. Is this update, and the answer it leads to, one to be trusted?

A collapsed network agrees with its own memory: the discrepancy goes to zero and the collapse stays. So the guard looks
elsewhere, at signals that need no label: the images, the rate, how far the parameters and the answers have moved from
where source training left them, and how much of an image each class takes. `Adapter` asks it before and after an
update, and on an objection tries in turn: the state before the update, the last good state, the source parameters, and
at last the source network as it was trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dltta.discrepancy import batch_discrepancy
from dltta.errors import SettingError

Verdict = Literal["accepted", "skipped", "rolled back", "source"]


@dataclass(frozen=True)
class Ruling:
    """What was decided about one batch, and why; `signals` are the numbers that were looked at."""

    verdict: Verdict
    reason: str | None = None
    signals: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Evidence:
    """What can be known about an answer without a label. Predictions are probabilities (B, C, *positions)."""

    answer: Tensor  # of the adapted network
    unmoved: Tensor  # of the same network with the source's parameters
    source: Tensor  # of the network as it was trained, with its stored statistics
    drift: float  # ‖θ − θ₀‖ / ‖θ₀‖ over the adapted parameters
    rate: float | None  # of the update that led here; None without one


class Guard(Protocol):
    """Objections in words, or None."""

    def refuse(self, x: Tensor, /) -> str | None:
        """Why nothing must be learned from these images (B, C, *spatial)."""
        ...

    def object(self, evidence: Evidence, /) -> str | None:
        """Why this answer, and the state it comes from, is not to be trusted."""
        ...

    def signals(self, evidence: Evidence, /) -> dict[str, float]:
        """The numbers that the objections are made of."""
        ...


@dataclass(frozen=True)
class Limits:
    """How far an answer may go; the first two hold for any network, the others come from source images.

    - `rate`: no published setting comes near 1.
    - `drift`: beyond half of their own length the parameters are no longer those that were trained.
    - `divergence` between the answers with moved and with source parameters: by default 0.1, about one position in
      twenty answered otherwise with confidence; with a calibration, what a harmless change of normalization does.
    - `shares`: per class, the least and the greatest share of an image; None where nobody measured them.
    - `margin`: how much wider than measured the shares may be, as a factor of the odds.
    - `collapse`: the entropy of the mean answer may fall to this part of the source network's.
    """

    rate: float = 1.0
    drift: float = 0.5
    divergence: float = 0.1
    shares: tuple[tuple[float, float], ...] | None = None
    margin: float = 4.0
    collapse: float = 0.5

    def __post_init__(self) -> None:
        for name in ("rate", "drift", "divergence"):
            if not getattr(self, name) > 0:
                raise SettingError(f"the limit of the {name} must be positive, got {getattr(self, name)}")
        if self.margin < 1 or not 0 <= self.collapse <= 1:
            raise SettingError(f"margin is at least 1 and collapse from 0 to 1, got {self.margin} and {self.collapse}")

    @classmethod
    def calibrated(cls, answers: Mapping[str, Any]) -> "Limits":
        """From what the network did on source images (`Calibration.answers`)."""
        shares = tuple((float(low), float(high)) for low, high in answers["shares"])
        return cls(divergence=max(float(answers["jitter"]), 0.01), shares=shares)


class SourceGuard:
    """Compares with the source network on the same images and with what it did on source images."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    def refuse(self, x: Tensor, /) -> str | None:
        flat = x.flatten(2)
        constant = (flat.amax(2) == flat.amin(2)).all(1)  # (B,): every channel
        return f"{int(constant.sum())} of {len(x)} images are constant" if constant.any() else None

    def object(self, evidence: Evidence, /) -> str | None:
        found, limits = self.signals(evidence), self.limits
        if evidence.rate is not None and evidence.rate > limits.rate:
            return f"rate {evidence.rate:.3g} above {limits.rate:g}"
        if evidence.drift > limits.drift:
            return f"parameters moved by {evidence.drift:.3g} of their length, limit {limits.drift:g}"
        if found["divergence"] > limits.divergence:
            return f"answer moved by {found['divergence']:.3g}, limit {limits.divergence:.3g}"
        if found["implausible"] > max(found["source_implausible"], math.log(limits.margin)):
            return f"a class takes a share e^{found['implausible']:.2g} in odds beyond all source images"
        if found["marginal_entropy"] < limits.collapse * found["source_marginal_entropy"]:
            return (
                f"entropy of the mean answer {found['marginal_entropy']:.3g}, "
                f"the source network's {found['source_marginal_entropy']:.3g}"
            )
        return None

    def signals(self, evidence: Evidence, /) -> dict[str, float]:
        answer, source = marginal(evidence.answer), marginal(evidence.source)
        return {
            "drift": evidence.drift,
            "divergence": batch_discrepancy(evidence.answer, evidence.unmoved),
            "from_source": batch_discrepancy(evidence.answer, evidence.source),
            "marginal_entropy": entropy(answer),
            "source_marginal_entropy": entropy(source),
            "implausible": beyond(answer, self.limits.shares),
            "source_implausible": beyond(source, self.limits.shares),
        }


def marginal(prediction: Tensor) -> Tensor:
    """The mean prediction of a batch, over images and positions: (C,)."""
    return prediction.transpose(0, 1).flatten(1).mean(1)


def entropy(marginal: Tensor) -> float:
    """In nats."""
    return -(marginal * marginal.clamp_min(torch.finfo(marginal.dtype).tiny).log()).sum().item()


def beyond(marginal: Tensor, shares: Sequence[tuple[float, float]] | None) -> float:
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
