"""6 update. May this image teach anything, and is the answer that it led to one to be trusted?

A collapsed network agrees with its own memory: the discrepancy goes to zero and the collapse stays. So the guard looks
elsewhere, at signals that need no label. At first sight it sorts the images of a batch (`triage`): some look like those
of the source, where the network as it was trained knows best; some are too strange to teach anything. `Adapter` adapts
to the others, asks again (`object`), and on an objection tries in turn: the state before the update, the last good
state, the source parameters, and at last the source network as it was trained.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dltta.core.discrepancy import batch_discrepancy
from dltta.errors import SettingError
from dltta.models.calibration import Calibration, OODScore
from dltta.models.predictions import most_likely

Network = Callable[[Tensor], Tensor]  # images to probabilities (B, C, *positions)
Verdict = Literal["accepted", "at home", "skipped", "rolled back", "source"]
GRAVITY: tuple[Verdict, ...] = ("accepted", "at home", "skipped", "rolled back", "source")  # from harmless to grave


@dataclass(frozen=True)
class Ruling:
    """What was decided about one batch, and why; `signals` are the numbers that were looked at.

    - `accepted`: the update is kept, the adapted network answers
    - `at home`: the images look like the source's; the network as it was trained answers, nothing is learned
    - `skipped`: no update, or it is undone; the network as it is without it answers
    - `rolled back`: more is undone; what is then the network answers
    - `source`: the network as it was trained answers, nothing is learned
    """

    verdict: Verdict
    reason: str | None = None
    signals: Mapping[str, float] | None = None
    apart: Mapping[int, "Ruling"] = field(default_factory=dict)  # images of the batch that were ruled on alone

    def of(self, position: int) -> "Ruling":
        """What was decided about one image of the batch."""
        return self.apart.get(position, self)


@dataclass(frozen=True)
class Look:
    """What can be known about images (B, C, *spatial) before anything is learned from them."""

    images: Tensor
    layers: Mapping[str, tuple[Tensor, Tensor]]  # what enters each batch normalization as trained: means, variances
    source: Tensor  # the answer of the network as it was trained
    trained: Network  # more passes, for images that need them: the network as it was trained,
    alone: Network  # with every image normalized by its own statistics,
    prepared: Network  # with the statistics that it adapts with and the source's parameters


@dataclass(frozen=True)
class Evidence:
    """What can be known about an answer without a label. Predictions are probabilities (B, C, *positions)."""

    answer: Tensor  # of the adapted network
    unmoved: Tensor  # of the same network with the source's parameters
    source: Tensor  # of the network as it was trained, with its stored statistics
    drift: float  # ‖θ − θ₀‖ / ‖θ₀‖ over the adapted parameters
    rate: float | None  # of the update that led here; None without one
    images: Tensor  # more passes, for answers that need them:
    adapted: Network  # the adapted network,
    still: Network  # the same with the source's parameters


class Guard(Protocol):
    """Objections in words, or None."""

    def triage(self, look: Look, /) -> list[Ruling | None]:
        """For each image None, to be adapted to; or who else shall answer it, and why.

        `skipped` is for the network with the source's parameters and the statistics that it adapts with, the other
        verdicts for the network as it was trained.
        """
        ...

    def object(self, evidence: Evidence, /) -> str | None:
        """Why this answer, and the state it comes from, is not to be trusted."""
        ...

    def signals(self, evidence: Evidence, /) -> dict[str, float]:
        """The numbers that the objections are made of."""
        ...


STEADIER = 0.7


@dataclass(frozen=True)
class Limits:
    """How far images and answers may go; None where nobody measured it on source images.

    Images:
    - `home`: up to this ood_score, at the first layer and over all, images are at home
    - `far`: from this ood_score on, over all layers, nothing is learned from an image
    - `entropy`: nor above this entropy of its answer, in nats
    - `steadier`: the source network answers if mirrors change less than this part of what they change of the other
      answer; 0.7 was best on source images with other contrast, brightness, noise and sharpness (docs/guard.md)

    Answers:
    - `rate`: no published setting comes near 1
    - `drift`: beyond half of their own length the parameters are no longer those that were trained
    - `changed`: the moved parameters may mark so much of what is marked otherwise than the source's; more than a
      fiftieth, and points are at stake
    - `swayed`: the same for the class of whole images, as probability that changes hands
    - `overrule`: more than that is allowed if mirrors change less than this part of what they change of the answer with
      the source's parameters
    - `shares`: per class, the least and the greatest share of an image
    - `margin`: how much wider than measured the shares may be, as a factor of the odds
    - `collapse`: the entropy of the mean answer may fall to this part of the source network's
    """

    home: tuple[float, float] | None = None
    far: float | None = None
    entropy: float | None = None
    steadier: float | None = None
    rate: float = 1.0
    drift: float = 0.5
    changed: float = 0.02
    swayed: float = 0.1
    overrule: float | None = None
    shares: tuple[tuple[float, float], ...] | None = None
    margin: float = 4.0
    collapse: float = 0.5

    def __post_init__(self) -> None:
        for name in ("rate", "drift", "changed", "swayed"):
            if not getattr(self, name) > 0:
                raise SettingError(f"the limit of the {name} must be positive, got {getattr(self, name)}")
        if self.margin < 1 or not 0 <= self.collapse <= 1:
            raise SettingError(f"margin is at least 1 and collapse from 0 to 1, got {self.margin} and {self.collapse}")

    @classmethod
    def calibrated(cls, answers: Mapping[str, Any], overrule: float = STEADIER) -> "Limits":
        """From what the network did on source images (`Calibration.answers`); `overrule` depends on the objective.

        At home is up to half as strange as 95 % of source images. Nothing is learned from an image that is more than
        halfway from the source's images to their negatives and to noise, or whose entropy is more than halfway
        from theirs to those for shuffled pixels; unless that, too, happens at home.
        """
        shares = tuple((float(low), float(high)) for low, high in answers["shares"])
        strange, entropy = answers.get("ood_score"), answers.get("entropy")
        home = far = unsure = steadier = None
        if strange is not None:
            home = strange["first"] / 2, strange["usual"] / 2
            useless = max(strange["negative"], strange["noise"])
            far = max((1 + useless) / 2, 2 * strange["usual"])
        if entropy is not None:
            unsure = max((entropy["median"] + entropy["shuffled"]) / 2, entropy["usual"])
            steadier = STEADIER
        return cls(home, far, unsure, steadier, shares=shares, overrule=overrule if entropy is not None else None)


class SourceGuard:
    """Compares with the source network on the same images and with what it did on source images.

    Without a `calibration` it cannot tell strange images from others, only constant ones.
    """

    def __init__(self, limits: Limits | None = None, calibration: Calibration | None = None) -> None:
        self.limits = limits or Limits()
        self._ood_score = OODScore(calibration) if calibration is not None and calibration.layers else None

    def triage(self, look: Look, /) -> list[Ruling | None]:
        flat = look.images.flatten(2)
        constant = (flat.amax(2) == flat.amin(2)).all(1)  # (B,): every channel
        rulings = [Ruling("source", "the image is constant") if each else None for each in constant.tolist()]
        if self._ood_score is not None and look.layers:
            self._sort_by_ood_score(rulings, self._ood_score(look.layers))
        if None in rulings and self.limits.entropy is not None:
            self._sort_by_doubt(rulings, look.alone(look.images), self.limits.entropy)
        if self.limits.steadier is not None and _unsettled(rulings):
            self._sort_by_steadiness(rulings, look, self.limits.steadier)
        return rulings

    def _sort_by_ood_score(self, rulings: list[Ruling | None], ood_score: Tensor) -> None:
        """Rule on images (layers, B) that are too strange one by one, on those that are at home as one."""
        first, layers = ood_score[0].tolist(), ood_score.median(0).values.tolist()
        far, home = self.limits.far, self.limits.home
        for i in _open(rulings):
            if far is not None and layers[i] > far:
                reason = f"ood_score {layers[i]:.3g}, limit {far:.3g}: no image of this kind"
                rulings[i] = Ruling("skipped", reason, {"ood_score": layers[i]})
        left = _open(rulings)
        if not left or home is None:
            return
        means = {"first": fmean(first[i] for i in left), "ood_score": fmean(layers[i] for i in left)}
        if means["first"] <= home[0] and means["ood_score"] <= home[1]:
            for i in left:
                rulings[i] = Ruling("at home", f"ood_score {means['first']:.3g}, as at the source", means)

    def _sort_by_doubt(self, rulings: list[Ruling | None], answer: Tensor, limit: float) -> None:
        entropies = [entropy(image) / image[0].numel() for image in answer]
        for i in _open(rulings):
            if entropies[i] > limit:
                reason = f"entropy {entropies[i]:.3g}, limit {limit:.3g}: nothing to be seen"
                rulings[i] = Ruling("skipped", reason, {"entropy": entropies[i]})

    def _sort_by_steadiness(self, rulings: list[Ruling | None], look: Look, part: float) -> None:
        """The source network answers where it is clearly steadier in mirrors and no less plausible.

        Whoever says the same everywhere is no steadier for that: one that is blind at a new site is so in mirrors.
        """
        prepared = look.prepared(look.images)
        ours = unsteadiness(look.prepared, look.images, prepared)
        theirs = unsteadiness(look.trained, look.images, look.source)
        for i in _unsettled(rulings):
            source = look.source[i : i + 1]
            blind = _one_class(look.source if look.source.ndim == 2 else source)
            if theirs[i] < part * ours[i] and not blind and self._as_plausible(source, prepared[i : i + 1]):
                reason = f"{ours[i]:.2g} of the answer changes in mirrors, of the source network's {theirs[i]:.2g}"
                rulings[i] = Ruling("source", reason, {"unsteady": ours[i], "source_unsteady": theirs[i]})

    def _as_plausible(self, answer: Tensor, other: Tensor) -> bool:
        """Whether the shares of its classes lie no farther outside those of source images, and within the margin."""
        outside = beyond(marginal(answer), self.limits.shares)
        return outside <= min(beyond(marginal(other), self.limits.shares), math.log(self.limits.margin))

    def object(self, evidence: Evidence, /) -> str | None:
        found, limits = self.signals(evidence), self.limits
        if evidence.rate is not None and evidence.rate > limits.rate:
            return f"rate {evidence.rate:.3g} above {limits.rate:g}"
        if evidence.drift > limits.drift:
            return f"parameters moved by {evidence.drift:.3g} of their length, limit {limits.drift:g}"
        limit = limits.changed if evidence.answer.ndim > 2 else limits.swayed
        if found["changed"] > limit and not self._steadier(evidence):
            return f"{found['changed']:.2g} of the answer changed, limit {limit:g}"
        if found["implausible"] > max(found["source_implausible"], math.log(limits.margin)):
            return f"a class takes a share e^{found['implausible']:.2g} in odds beyond all source images"
        if found["marginal_entropy"] < limits.collapse * found["source_marginal_entropy"]:
            return (
                f"entropy of the mean answer {found['marginal_entropy']:.3g}, "
                f"the source network's {found['source_marginal_entropy']:.3g}"
            )
        return None

    def _steadier(self, evidence: Evidence) -> bool:
        """Whether mirrors change so much less of the answer than of that with the source's parameters."""
        if self.limits.overrule is None or _one_class(evidence.answer):
            return False
        now = fmean(unsteadiness(evidence.adapted, evidence.images, evidence.answer))
        return now < self.limits.overrule * fmean(unsteadiness(evidence.still, evidence.images, evidence.unmoved))

    def signals(self, evidence: Evidence, /) -> dict[str, float]:
        answer, source = marginal(evidence.answer), marginal(evidence.source)
        return {
            "drift": evidence.drift,
            "changed": changed(evidence.answer, evidence.unmoved),
            "from_source": batch_discrepancy(evidence.answer, evidence.source),
            "marginal_entropy": entropy(answer),
            "source_marginal_entropy": entropy(source),
            "implausible": beyond(answer, self.limits.shares),
            "source_implausible": beyond(source, self.limits.shares),
        }


def together(rulings: Sequence[Ruling | None], rest: Ruling | None) -> Ruling:
    """One ruling on a batch: that on the images which were adapted to, or without any the gravest at first sight."""
    apart = {i: ruling for i, ruling in enumerate(rulings) if ruling is not None}
    if not apart and rest is not None:
        return rest
    gravest = max(apart.values(), key=lambda ruling: GRAVITY.index(ruling.verdict))
    if len(rulings) == 1:
        return gravest
    alike = sum(ruling.verdict == gravest.verdict for ruling in apart.values())
    note = f"{alike} of {len(rulings)} images: {gravest.reason}"
    if rest is None:
        return replace(gravest, reason=note, apart=apart)
    return replace(rest, reason=note if rest.reason is None else f"{rest.reason}; {note}", apart=apart)


def unsteadiness(network: Network, images: Tensor, answer: Tensor) -> list[float]:
    """How much of each answer changes when the image is mirrored and the answer mirrored back; mean over the axes."""
    axes, dense = range(2, images.ndim), answer.ndim > 2
    mirrored = [network(images.flip(axis)).flip(axis if dense else ()) for axis in axes]
    return [fmean(changed(answer[i : i + 1], other[i : i + 1]) for other in mirrored) for i in range(len(images))]


def changed(answer: Tensor, other: Tensor) -> float:
    """How much of an answer another one contradicts, both probabilities (B, C, *positions).

    Dense: the share of the positions that either marks (a class other than the first) that they do not mark alike.
    Whole images: the mean probability that is given to another class.
    """
    if answer.ndim == 2:
        return 0.5 * (answer - other).abs().sum(1).mean().item()
    first, second = most_likely(answer), most_likely(other)
    marked = ((first > 0) | (second > 0)).sum().item()
    return (first != second).sum().item() / max(marked, 1)


def _one_class(answer: Tensor) -> bool:
    """Whether it says the same of many positions or images."""
    return answer[:, 0].numel() > 1 and len(most_likely(answer).unique()) == 1


def marginal(prediction: Tensor) -> Tensor:
    """The mean prediction of a batch, over images and positions: (C,)."""
    return prediction.transpose(0, 1).flatten(1).mean(1)


def entropy(probabilities: Tensor) -> float:
    """In nats, summed over positions (C, *positions)."""
    return -(probabilities * probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()).sum().item()


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


def _unsettled(rulings: Sequence[Ruling | None]) -> list[int]:
    """The images that the network as it was trained does not answer so far."""
    return [i for i, ruling in enumerate(rulings) if ruling is None or ruling.verdict == "skipped"]


def _open(rulings: Sequence[Ruling | None]) -> list[int]:
    """The images that nothing was decided about."""
    return [i for i, ruling in enumerate(rulings) if ruling is None]
