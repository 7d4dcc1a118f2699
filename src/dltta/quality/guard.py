"""6 update. May this image be learned from, and may the prediction after the update be trusted?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from dltta.errors import SettingError
from dltta.models.calibration import Calibration, OODScore
from dltta.quality.decision import Decision, Outcome, Reason
from dltta.quality.signals import ImageSignals, UpdateSignals, marginal, share_excess, total_entropy


@dataclass(frozen=True)
class Objection:
    """Why a prediction, and the state it comes from, is not to be trusted."""

    reason: Reason
    detail: str


@dataclass(frozen=True)
class Review:
    """What a guard found after an update, and the numbers that it looked at."""

    objection: Objection | None
    numbers: Mapping[str, float]


class Guard(Protocol):
    """Looks at signals only: it never sees the adapter.

    What it may also have: `Scores`.
    """

    def before(self, signals: ImageSignals, /) -> list[Decision | None]:
        """For each image None, to be adapted to; or which other model predicts it, and why.

        `kept` is for the source's parameters with the objective's statistics, other outcomes for the source model.
        """
        ...

    def after(self, signals: UpdateSignals, /) -> Review:
        """Whether the prediction after an update, or of a fallback, may be given."""
        ...


@runtime_checkable
class Scores(Protocol):
    """A guard that knows how far each image is from source images."""

    def ood_scores(self, signals: ImageSignals, /) -> list[float] | None: ...


SOURCE_CONSISTENCY = 0.7


@dataclass(frozen=True)
class Limits:
    """How far images and predictions may go; None where nobody measured it on source images.

    Images:
    - `in_distribution`: up to this OOD score, at the first layer and over all, images are taken for the source's
    - `ood_score`: above this, over all layers, nothing is learned from an image
    - `entropy`: nor above this mean entropy of its prediction, in nats
    - `source_consistency`: the source model predicts if flips change less than this part of what they change of the
      other prediction; 0.7 was best on source images with other contrast, brightness, noise and sharpness
      (docs/guard.md)

    Predictions:
    - `rate`: no published setting comes near 1
    - `drift`: beyond half of their own length the parameters are no longer those that were trained
    - `max_change`: so much of the foreground may change against the source's parameters; more than a fiftieth, and
      points are at stake
    - `max_probability_shift`: the same for the class of whole images, as probability given to another class
    - `consistency_override`: more than that is allowed if flips change less than this part of what they change of the
      prediction with the source's parameters
    - `shares`: per class, the least and the greatest share of an image
    - `share_margin`: how much wider than measured the shares may be, as a factor of the odds
    - `collapse`: the entropy of the mean prediction may fall to this part of the source model's
    """

    in_distribution: tuple[float, float] | None = None
    ood_score: float | None = None
    entropy: float | None = None
    source_consistency: float | None = None
    rate: float = 1.0
    drift: float = 0.5
    max_change: float = 0.02
    max_probability_shift: float = 0.1
    consistency_override: float | None = None
    shares: tuple[tuple[float, float], ...] | None = None
    share_margin: float = 4.0
    collapse: float = 0.5

    def __post_init__(self) -> None:
        for name in ("rate", "drift", "max_change", "max_probability_shift"):
            if not getattr(self, name) > 0:
                raise SettingError(f"the limit {name} must be positive, got {getattr(self, name)}")
        if self.share_margin < 1 or not 0 <= self.collapse <= 1:
            raise SettingError(
                f"share_margin is at least 1 and collapse from 0 to 1, got {self.share_margin} and {self.collapse}"
            )

    @classmethod
    def calibrated(cls, predictions: Mapping[str, Any], consistency_override: float = SOURCE_CONSISTENCY) -> "Limits":
        """From what the source model did on source images (`Calibration.predictions`).

        In-distribution is up to half the OOD score of 95 % of source images. Nothing is learned from an image that is
        more than halfway from the source's images to their negatives and to noise, or whose entropy is more than
        halfway from theirs to that of shuffled pixels; unless source images themselves come that far.
        `consistency_override` depends on the objective.
        """
        shares = tuple((float(low), float(high)) for low, high in predictions["shares"])
        scores, entropies = predictions.get("ood_score"), predictions.get("entropy")
        inside = outside = uncertain = consistency = override = None
        if scores is not None:
            inside = scores["first"] / 2, scores["usual"] / 2
            useless = max(scores["negative"], scores["noise"])
            outside = max((1 + useless) / 2, 2 * scores["usual"])
        if entropies is not None:
            uncertain = max((entropies["median"] + entropies["shuffled"]) / 2, entropies["usual"])
            consistency, override = SOURCE_CONSISTENCY, consistency_override
        return cls(inside, outside, uncertain, consistency, consistency_override=override, shares=shares)


class SourceGuard:
    """Compares with the source model on the same images and with what it did on source images.

    Without a `calibration` it cannot tell images of other sites from those of the source, only constant ones.
    """

    def __init__(self, limits: Limits | None = None, calibration: Calibration | None = None) -> None:
        self.limits = limits or Limits()
        self._ood_score = OODScore(calibration) if calibration is not None and calibration.layers else None

    def before(self, signals: ImageSignals, /) -> list[Decision | None]:
        flat = signals.images.flatten(2)
        constant = (flat.amax(2) == flat.amin(2)).all(1)  # (B,): every channel
        blank = Decision(Outcome.SOURCE, Reason.CONSTANT_IMAGE, "the image is constant")
        decisions = [blank if each else None for each in constant.tolist()]
        if self._ood_score is not None and signals.layers:
            self._by_ood_score(decisions, self._ood_score(signals.layers))
        if None in decisions and self.limits.entropy is not None:
            self._by_entropy(decisions, signals.instance.prediction, self.limits.entropy)
        if self.limits.source_consistency is not None and _not_by_source(decisions):
            self._by_flip_consistency(decisions, signals, self.limits.source_consistency)
        return decisions

    def ood_scores(self, signals: ImageSignals, /) -> list[float] | None:
        """Of each image, over all layers; None where nobody measured source images."""
        if self._ood_score is None or not signals.layers:
            return None
        scores: list[float] = self._ood_score(signals.layers).median(0).values.tolist()
        return scores

    def _by_ood_score(self, decisions: list[Decision | None], scores: Tensor) -> None:
        """Decide on images (layers, B) that are too far out one by one, on those in distribution as one."""
        first, layers = scores[0].tolist(), scores.median(0).values.tolist()
        limit, inside = self.limits.ood_score, self.limits.in_distribution
        for i in _open(decisions):
            if limit is not None and layers[i] > limit:
                detail = f"OOD score {layers[i]:.3g}, limit {limit:.3g}"
                decisions[i] = Decision(Outcome.KEPT, Reason.OOD_SCORE, detail, {"ood_score": layers[i]})
        left = _open(decisions)
        if not left or inside is None:
            return
        means = {"first_layer": fmean(first[i] for i in left), "ood_score": fmean(layers[i] for i in left)}
        if means["first_layer"] <= inside[0] and means["ood_score"] <= inside[1]:
            detail = f"OOD score {means['first_layer']:.3g}, as on source images"
            for i in left:
                decisions[i] = Decision(Outcome.IN_DISTRIBUTION, Reason.IN_DISTRIBUTION, detail, means)

    def _by_entropy(self, decisions: list[Decision | None], prediction: Tensor, limit: float) -> None:
        entropies = [total_entropy(image) / image[0].numel() for image in prediction]
        for i in _open(decisions):
            if entropies[i] > limit:
                detail = f"predictive entropy {entropies[i]:.3g}, limit {limit:.3g}"
                decisions[i] = Decision(Outcome.KEPT, Reason.ENTROPY, detail, {"entropy": entropies[i]})

    def _by_flip_consistency(self, decisions: list[Decision | None], signals: ImageSignals, part: float) -> None:
        """The source model predicts where flips change clearly less of its prediction, and it is no less plausible.

        A model that says one class everywhere is not consistent for that reason.
        """
        ours, source = signals.unadapted, signals.source
        for i in _not_by_source(decisions):
            one_class = source.one_class(i if source.prediction.ndim > 2 else None)
            less = source.flip_inconsistency[i] < part * ours.flip_inconsistency[i]
            if less and not one_class and self._as_plausible(source.prediction[i : i + 1], ours.prediction[i : i + 1]):
                found = {
                    "flip_inconsistency": ours.flip_inconsistency[i],
                    "source_flip_inconsistency": source.flip_inconsistency[i],
                }
                detail = "flips change {:.2g} of the prediction, of the source model's {:.2g}".format(*found.values())
                decisions[i] = Decision(Outcome.SOURCE, Reason.FLIP_CONSISTENCY, detail, found)

    def _as_plausible(self, prediction: Tensor, other: Tensor) -> bool:
        """Whether the shares of its classes lie no farther outside those of source images, and within the margin."""
        shares = self.limits.shares
        excess, limit = share_excess(marginal(prediction), shares), math.log(self.limits.share_margin)
        return excess <= min(share_excess(marginal(other), shares), limit)

    def after(self, signals: UpdateSignals, /) -> Review:
        numbers = signals.numbers(self.limits.shares)
        return Review(self._objection(signals, numbers), numbers)

    def _objection(self, signals: UpdateSignals, found: Mapping[str, float]) -> Objection | None:
        limits = self.limits
        if signals.rate is not None and signals.rate > limits.rate:
            return Objection(Reason.RATE, f"rate {signals.rate:.3g} above {limits.rate:g}")
        if signals.drift > limits.drift:
            moved = f"parameters moved by {signals.drift:.3g} of their length, limit {limits.drift:g}"
            return Objection(Reason.DRIFT, moved)
        limit = limits.max_change if signals.adapted.prediction.ndim > 2 else limits.max_probability_shift
        if found["change"] > limit and not self._more_consistent(signals):
            return Objection(Reason.CHANGE, f"{found['change']:.2g} of the prediction changed, limit {limit:g}")
        if found["share_excess"] > max(found["source_share_excess"], math.log(limits.share_margin)):
            share = f"a class takes a share e^{found['share_excess']:.2g} in odds beyond all source images"
            return Objection(Reason.CLASS_SHARE, share)
        if found["marginal_entropy"] < limits.collapse * found["source_marginal_entropy"]:
            entropies = found["marginal_entropy"], found["source_marginal_entropy"]
            return Objection(
                Reason.COLLAPSE, "entropy of the mean prediction {:.3g}, the source model's {:.3g}".format(*entropies)
            )
        return None

    def _more_consistent(self, signals: UpdateSignals) -> bool:
        """Whether flips change so much less of the prediction than of that with the source's parameters."""
        if self.limits.consistency_override is None or signals.adapted.one_class():
            return False
        now, then = fmean(signals.adapted.flip_inconsistency), fmean(signals.unadapted.flip_inconsistency)
        return now < self.limits.consistency_override * then


def _not_by_source(decisions: Sequence[Decision | None]) -> list[int]:
    """The images that the source model does not predict so far."""
    return [i for i, decision in enumerate(decisions) if decision is None or not decision.outcome.by_source]


def _open(decisions: Sequence[Decision | None]) -> list[int]:
    """The images that nothing was decided about."""
    return [i for i, decision in enumerate(decisions) if decision is None]
