"""6 update, 7 prediction. Which of the candidates is given? The one of highest expected quality, by rehearsed margins.

The images of a stream share their site, so what is expected of a candidate is averaged along the stream. Without a
rehearsal nothing can be expected: then candidates are mixed by their entropy, a published choice that needs no label.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dltta.core.adapter import Adapter, Mode
from dltta.core.objectives.source import Source
from dltta.core.passes import accept
from dltta.errors import NonFiniteError
from dltta.models.calibration import Calibration, LayerSamples, OODScore
from dltta.models.predictions import probabilities
from dltta.models.quantiles import SourceValues
from dltta.quality.candidates import BATCH, BLENDED, ENTROPY, SOURCE, Arms, Plan, mixture_weights, possible_arms
from dltta.quality.decision import Decision, Outcome, Reason, of_batch
from dltta.quality.estimate import Expected, QualityModel
from dltta.quality.guarded import GuardedStep
from dltta.quality.measures import (
    IMAGE_SIGNALS,
    SIGNALS,
    Table,
    Usual,
    agreement,
    agreements,
    candidate_signals,
    entropies,
    log_score,
    measure,
)

WINDOW = 20  # images that an expected quality is averaged over
ENOUGH = 8  # images of a batch whose mean prediction says something about the classes


@dataclass(frozen=True)
class Policy:
    """How the candidate is chosen from what is expected of each.

    `weight` of this image, the rest of the stream's mean. `default` is the candidate that was best in rehearsal; it and
    the source model are preferred by margins.
    """

    default: str
    weight: float = 0.0
    default_margin: float = 0.0
    source_margin: float = 0.0

    def margins(self, candidates: Sequence[str]) -> Table:
        return np.array([
            (self.default_margin if name == self.default else 0.0) + (self.source_margin if name == SOURCE else 0.0)
            for name in candidates
        ])  # fmt: skip

    def values(self, expected: Table, smoothed: Table, candidates: Sequence[str]) -> Table:
        """What each candidate is worth, from what is expected of it now and along the stream, (…, K) each."""
        found: Table = self.weight * expected + (1 - self.weight) * smoothed + self.margins(candidates)
        return found


class StreamMean:
    """The mean of what was expected over the latest images, the batch at hand included."""

    def __init__(self, count: int, window: int = WINDOW) -> None:
        self.window = window
        self.images = 0
        self.mean: Table = np.zeros(count)

    def add(self, expected: Table) -> Table:
        """With the images (B, K) of a batch: (K,)."""
        before = min(self.images, max(self.window - len(expected), 0))
        self.mean = (before * self.mean + expected.sum(0)) / (before + len(expected))
        self.images = before + len(expected)
        return self.mean

    def state_dict(self) -> dict[str, Any]:
        return {"images": self.images, "mean": self.mean.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.images, self.mean = int(state["images"]), np.array(state["mean"])


@dataclass(frozen=True)
class Rehearsed:
    """What rehearsal found for one batch size and effort."""

    plan: Plan
    policy: Policy
    quality: QualityModel
    radius: float  # half the width of the 90 % interval
    review_below: float  # expected quality

    def expect(self, score: float) -> Expected:
        score = float(score)  # not numpy's: it goes into files
        low, high = max(score - self.radius, 0.0), min(score + self.radius, 1.0)
        return Expected(score, low, high, score < self.review_below)

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.as_json(), "policy": asdict(self.policy), "quality": self.quality.as_json(),
            "radius": self.radius, "review_below": self.review_below,
        }  # fmt: skip

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Rehearsed":
        return cls(
            Plan(tuple(saved["plan"]["arms"]), saved["plan"]["flip"]), Policy(**saved["policy"]),
            QualityModel.from_json(saved["quality"]), saved["radius"], saved["review_below"],
        )  # fmt: skip


@dataclass(frozen=True)
class Yardstick:
    """What is usual at the source site, measured there without labels."""

    usual: Usual | None = None
    values: SourceValues | None = None
    calibration: Calibration | None = None


@dataclass(frozen=True)
class Views:
    """What the arms gave for one batch; probabilities are (B, C, *positions)."""

    logits: Mapping[str, Tensor]
    plain: Mapping[str, Tensor]
    flipped: Mapping[str, Tensor]  # flipped back; empty without a flip
    image: Table  # (B, I) the signals of the images


def look(arms: Arms, names: Sequence[str], flip: int | None, x: Tensor, yardstick: Yardstick) -> Views:
    """Run arms on a batch x (B, C, *spatial)."""
    samples = LayerSamples()
    watched = yardstick.calibration is not None and bool(yardstick.calibration.layers)
    logits = {name: arms.logits(name, x, samples=samples if watched and name == SOURCE else None) for name in names}
    flipped = {} if flip is None else {name: arms.flipped(name, x, flip) for name in names}
    plain = {name: probabilities(each) for name, each in logits.items()}
    return Views(logits, plain, flipped, image_signals(x, samples, yardstick))


def image_signals(x: Tensor, samples: LayerSamples, yardstick: Yardstick) -> Table:
    """(B, I): OOD scores of the first layer and over all layers, and the distance of the values; 0 where unknown."""
    table = np.zeros((len(x), len(IMAGE_SIGNALS)))
    if yardstick.calibration is not None and samples.layers:
        scores = OODScore(yardstick.calibration)(samples.stacked())  # (layers, B)
        table[:, 0] = [log_score(score) for score in scores[0].tolist()]
        table[:, 1] = [log_score(score) for score in scores.median(0).values.tolist()]
    if yardstick.values is not None:
        table[:, 2] = [log_score(yardstick.values.distance(image)) for image in x]
    return table


@dataclass(frozen=True)
class Candidates:
    """The predictions of a plan for one batch, and their signals."""

    predictions: Tensor  # (B, K, C, *positions)
    signals: Table  # (B, K, S); without a yardstick all 0


def assemble(plan: Plan, views: Views, usual: Usual | None) -> Candidates:
    """Arms, averaged with their flips if the plan has one, then mixtures of them."""
    arms = torch.stack([_given(views, name, plan) for name in plan.arms], 1).cpu()  # (B, A, C, *positions)
    flips = np.array([[_changed(views, name, i, plan) for name in plan.arms] for i in range(len(arms))])  # (B, A)
    kinds = plan.candidates[len(plan.arms) :]
    predictions, changed = [], []
    for image, flip in zip(arms, flips, strict=True):
        entropy = entropies(image)
        weights = torch.stack([mixture_weights(entropy, kind) for kind in kinds]) if kinds else image.new_zeros(0)
        mixed = torch.tensordot(weights, image, dims=1) if kinds else image[:0]
        predictions.append(torch.cat([image, mixed]))
        changed.append(np.concatenate([flip, weights.double().numpy() @ flip]) if kinds else flip)
    stacked = torch.stack(predictions)
    if usual is None:
        return Candidates(stacked, np.zeros((*stacked.shape[:2], len(SIGNALS))))
    dense = stacked.ndim > 3
    marginals = stacked.mean(0) if not dense and len(stacked) >= ENOUGH else None
    signals = np.stack([
        candidate_signals(measure(each, usual, flip.tolist(), marginals), agreements(each), len(plan.arms), image)
        for each, flip, image in zip(stacked, changed, views.image, strict=True)
    ])  # fmt: skip
    return Candidates(stacked, signals)


def _given(views: Views, name: str, plan: Plan) -> Tensor:
    return views.plain[name] if plan.flip is None else (views.plain[name] + views.flipped[name]) / 2


def _changed(views: Views, name: str, position: int, plan: Plan) -> float:
    """How much of a prediction the flip changes."""
    if plan.flip is None:
        return 0.0
    return 1 - agreement(views.plain[name][position].cpu(), views.flipped[name][position].cpu())


class ChoosingAdapter(Adapter):
    """Gives, for every image, the candidate of highest expected quality; a drop-in for `model(x)` like every adapter.

    Without `rehearsed` it gives the entropy-weighted mixture of source, blended and batch statistics. Hard checks stay:
    the source model predicts constant images, and all images where another arm's prediction is not finite.
    """

    def __init__(
        self,
        model: nn.Module,
        rehearsed: Rehearsed | None = None,
        yardstick: Yardstick | None = None,
        *,
        batch_size: int = 1,
        mode: Mode = "continual",
    ) -> None:
        super().__init__(model, Source(), mode=mode)
        self.rehearsed, self.yardstick = rehearsed, yardstick or Yardstick()
        self.plan = rehearsed.plan if rehearsed is not None else unrehearsed_plan(model)
        with torch.inference_mode(False):
            self._arms = Arms(
                self.model, self.plan.arms, calibration=self.yardstick.calibration, values=self.yardstick.values,
                batch_size=batch_size,
            )  # fmt: skip
            self._buffered = [*self._buffered, *self._arms.buffered()]
            self._source = self._snapshot()
        self._stream = StreamMean(len(self.plan.candidates))

    def step(self, x: Tensor, *, case: str | None = None) -> GuardedStep:
        """Predict one batch x (B, C, *spatial) by the candidate that is expected to be best for each image."""
        stream = self._stream.state_dict()
        try:
            with self._all_or_nothing(case), torch.inference_mode(False), torch.no_grad():
                x = self._begin(x)
                logits, decisions = self._choose(x)
                if decisions[0].reason != Reason.NON_FINITE:  # statistics that led to no number are not kept
                    self._arms.commit()
                self.batches_seen += 1
                return GuardedStep(logits, (), of_batch(decisions))
        except BaseException:
            self._stream.load_state_dict(stream)
            raise

    def predict(self, x: Tensor) -> Tensor:
        """What `step` would give, learning nothing and changing nothing."""
        stream = self._stream.state_dict()
        try:
            with torch.inference_mode(False), torch.no_grad():
                return self._choose(accept(self.model, x))[0]
        finally:
            self._stream.load_state_dict(stream)

    def reset(self) -> None:
        super().reset()
        self._stream = StreamMean(len(self.plan.candidates))

    def _begin(self, x: Tensor) -> Tensor:
        if self.mode == "image-specific":
            self._stream = StreamMean(len(self.plan.candidates))
        return super()._begin(x)

    def _choose(self, x: Tensor) -> tuple[Tensor, list[Decision]]:
        """Logits (B, C, *positions) and a decision for each image."""
        try:
            views = look(self._arms, self.plan.arms, self.plan.flip, x, self.yardstick)
        except NonFiniteError as error:
            logits = self._arms.logits(SOURCE, x)  # raises again if it is the source model's
            return logits, [Decision(Outcome.SOURCE, Reason.NON_FINITE, str(error))] * len(x)
        made = assemble(self.plan, views, self.yardstick.usual)
        chosen, expected = self._best(made.signals)
        logits = views.logits[SOURCE].clone()
        constant = _constant(x)
        decisions = []
        for i, name in enumerate(chosen):
            if constant[i]:
                decisions.append(Decision(Outcome.SOURCE, Reason.CONSTANT_IMAGE, "the image is constant"))
                continue
            plain = name in self.plan.arms and self.plan.flip is None
            given = made.predictions[i, self.plan.candidates.index(name)]
            logits[i] = views.logits[name][i] if plain else as_logits(given, len(logits[i])).to(logits)
            decisions.append(_decision(name, None if expected is None else expected[i]))
        return logits, decisions

    def _best(self, signals: Table) -> tuple[list[str], list[Expected] | None]:
        """The candidate for each image, and what is expected of it."""
        names = self.plan.candidates
        if self.rehearsed is None:
            return [ENTROPY if ENTROPY in names else SOURCE] * len(signals), None
        expected = self.rehearsed.quality.expected(signals)  # (B, K)
        smoothed = self._stream.add(expected)
        best = self.rehearsed.policy.values(expected, smoothed, names).argmax(1)
        scores = expected[np.arange(len(best)), best]
        return [names[k] for k in best], [self.rehearsed.expect(score) for score in scores]

    def get_extra_state(self) -> dict[str, Any]:
        return {**super().get_extra_state(), "arms": self._arms.state_dict(), "stream": self._stream.state_dict()}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        if "arms" in state:
            self._arms.load_state_dict(state["arms"])
            self._stream.load_state_dict(state["stream"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ChoosingAdapter":
        super()._apply(fn, recurse)
        self._arms.apply(fn)
        return self


def unrehearsed_plan(model: nn.Module) -> Plan:
    """What InTEnt mixes, for a network that was not rehearsed with."""
    return Plan(tuple(arm for arm in possible_arms(model, None, None) if arm in (SOURCE, BLENDED, BATCH)))


def as_logits(prediction: Tensor, channels: int) -> Tensor:
    """Logits (channels, *positions) that stand for these probabilities (C, *positions)."""
    logarithms = prediction.clamp_min(1e-8).log()
    return logarithms if channels > 1 else (logarithms[1] - logarithms[0])[None]


def _constant(x: Tensor) -> list[bool]:
    flat = x.flatten(2)
    found: list[bool] = (flat.amax(2) == flat.amin(2)).all(1).tolist()
    return found


def _decision(name: str, expected: Expected | None) -> Decision:
    """The source model, or an adapted prediction."""
    if name == SOURCE:
        return Decision(
            Outcome.SOURCE, Reason.QUALITY, "the source model is expected to be best", None, (), name, expected
        )
    return Decision(Outcome.ACCEPTED, candidate=name, expected=expected)
