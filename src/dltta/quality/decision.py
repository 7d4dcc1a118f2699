"""6 update. What was decided about the images of a batch, and why: a code to count, a sentence to read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean

from dltta.quality.estimate import Expected


class Outcome(StrEnum):
    """Which model predicts, and what was learned; from harmless to severe."""

    ACCEPTED = "accepted"  # the update stays, the adapted model predicts
    IN_DISTRIBUTION = "in-distribution"  # the image looks like the source's: the source model predicts, nothing learned
    KEPT = "kept"  # no update, or it is undone: the model predicts as it was before
    ROLLED_BACK = "rolled-back"  # more than the update is undone: the model predicts as it then is
    SOURCE = "source"  # the source model predicts, nothing is learned

    @property
    def by_source(self) -> bool:
        """Whether the source model predicts, with its stored statistics."""
        return self in (Outcome.IN_DISTRIBUTION, Outcome.SOURCE)


class Reason(StrEnum):
    """The rule that led to an outcome."""

    CONSTANT_IMAGE = "constant-image"
    IN_DISTRIBUTION = "in-distribution"  # OOD score as low as that of source images
    OOD_SCORE = "ood-score"  # too high to learn from
    ENTROPY = "entropy"  # prediction too uncertain to learn from
    FLIP_CONSISTENCY = "flip-consistency"  # the source model's prediction changes clearly less under flips
    RATE = "rate"  # learning rate beyond any published one
    DRIFT = "drift"  # parameters too far from the source's
    CHANGE = "change"  # the update changed too much of the prediction
    CLASS_SHARE = "class-share"  # a class takes a share that it never takes on source images
    COLLAPSE = "collapse"  # predictions become one class
    QUALITY = "expected-quality"  # the source model is expected to predict best
    NON_FINITE = "non-finite"  # NaN or infinity in prediction, loss, gradient or rate


SEVERITY = tuple(Outcome)
EXPECTED = ("quality", "quality_low", "quality_high", "review")  # what is expected of a prediction, in log and tables


@dataclass(frozen=True)
class Decision:
    """What was decided about one batch; `images` has the decision about each of its images where they differ."""

    outcome: Outcome
    reason: Reason | None = None  # None: accepted without objection
    detail: str | None = None  # the reason in words, with numbers
    signals: Mapping[str, float] | None = None  # the numbers that were looked at
    images: tuple["Decision", ...] = ()
    candidate: str | None = None  # which of several predictions is given
    expected: Expected | None = None  # how good it probably is
    ood_score: float | None = None  # over all layers; source images have about 1

    def of(self, position: int) -> "Decision":
        """What was decided about one image of the batch."""
        return self.images[position] if self.images else self


def combine(decisions: Sequence[Decision], what: str = "images") -> Decision:
    """One decision for several images of a batch, or parts of an image: the most severe, and how many are like it."""
    severest = max(decisions, key=lambda decision: SEVERITY.index(decision.outcome))  # the first of these
    alike = sum(decision.outcome == severest.outcome for decision in decisions)
    severest = replace(
        severest,
        expected=_together([each.expected for each in decisions if each.expected is not None]),
        ood_score=_mean([each.ood_score for each in decisions if each.ood_score is not None]),
    )
    if len(decisions) == 1 or severest.detail is None:
        return severest
    return replace(severest, detail=f"{alike} of {len(decisions)} {what}: {severest.detail}")


def of_batch(decisions: Sequence[Decision]) -> Decision:
    """The decision about a batch from those about its images."""
    return replace(combine(decisions), images=tuple(decisions) if len(decisions) > 1 else ())


def _mean(scores: Sequence[float]) -> float | None:
    return fmean(scores) if scores else None


def _together(expected: Sequence[Expected]) -> Expected | None:
    """What is expected of a whole from its parts: the means; it is to be reviewed if most of its parts are."""
    if not expected:
        return None
    return Expected(
        fmean(each.score for each in expected),
        fmean(each.low for each in expected),
        fmean(each.high for each in expected),
        sum(each.review for each in expected) * 2 > len(expected),
    )
