"""6 update, 7 prediction. Which of the candidates is given? The one of highest expected quality, by rehearsed margins.

The images of a stream share their site, so what is expected of a candidate is averaged along the stream. Without a
rehearsal nothing can be expected: then candidates are mixed by their entropy, a published choice that needs no label.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dltta.core.adapter import Adapter, Mode
from dltta.core.memory import MemoryBank
from dltta.core.objectives.source import Source
from dltta.core.passes import accept
from dltta.core.step import Step, Update
from dltta.errors import InputError, NonFiniteError
from dltta.models.calibration import Calibration, LayerSamples, OODScore
from dltta.models.predictions import probabilities
from dltta.models.quantiles import SourceValues
from dltta.quality.candidates import (
    BATCH,
    BLENDED,
    ENTROPY,
    SOURCE,
    TENT,
    Arms,
    Plan,
    is_step,
    mixture_weights,
    possible_arms,
)
from dltta.quality.decision import Decision, Outcome, Reason, of_batch
from dltta.quality.estimate import Expected, QualityModel
from dltta.quality.guarded import GuardedStep, decision_of
from dltta.quality.measures import (
    COARSE,
    IMAGE_SIGNALS,
    SIGNALS,
    Table,
    Usual,
    agreement_lost,
    agreements,
    candidate_signals,
    coarse,
    entropies,
    log_score,
    measure,
    products_of,
)
from dltta.quality.refusal import Refusal

MEMORY, NEIGHBORS = 20, 8  # of the paper, for images that come one by one
WINDOW = 20  # images that an expected quality is averaged over
ENOUGH = 8  # images of a batch whose mean prediction says something about the classes


@dataclass(frozen=True)
class Policy:
    """How the candidate is chosen from what is expected of each.

    `weight` of this image, the rest of the stream's mean. `default` is the candidate that was best in rehearsal; it and
    the source model are preferred by margins; a margin above 1 gives the default whatever is expected.
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
    refusal: Refusal | None = None  # what else is to be reviewed

    def expect(self, score: float, refused: bool = False) -> Expected:
        score = float(score)  # not numpy's: it goes into files
        low, high = max(score - self.radius, 0.0), min(score + self.radius, 1.0)
        return Expected(score, low, high, refused or score < self.review_below)

    def as_json(self) -> dict[str, Any]:
        return {
            "plan": self.plan.as_json(), "policy": asdict(self.policy), "quality": self.quality.as_json(),
            "radius": self.radius, "review_below": self.review_below,
            "refusal": None if self.refusal is None else self.refusal.as_json(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Rehearsed":
        return cls(
            Plan(tuple(saved["plan"]["arms"]), saved["plan"]["flip"]), Policy(**saved["policy"]),
            QualityModel.from_json(saved["quality"]), saved["radius"], saved["review_below"],
            None if saved.get("refusal") is None else Refusal.from_json(saved["refusal"]),
        )  # fmt: skip


@dataclass(frozen=True)
class Yardstick:
    """What is usual at the source site, measured there without labels."""

    usual: Usual | None = None
    values: SourceValues | None = None
    calibration: Calibration | None = None


class Recollection:
    """What earlier images of the stream were predicted as, coarsely, found again by the source model's logits."""

    def __init__(self, batch_size: int = 1) -> None:
        capacity = max(MEMORY, 4 * batch_size)  # the paper's: 20 batches of one image, or 4
        self.bank = MemoryBank(capacity=capacity, neighbors=NEIGHBORS, ready="neighbors", pool=COARSE)

    def recall(self, logits: Tensor) -> Tensor | None:
        """The mean prediction of similar images, (B, C, *coarse); None before there are enough."""
        return self.bank.recall(logits)

    def add(self, views: "Views") -> None:
        """The source model's logits and the mean of the first two arms, which every plan has."""
        first = list(views.plain)[:2]
        self.bank.push(views.logits[SOURCE].cpu(), coarse(torch.stack([views.plain[name] for name in first]).mean(0)))


class Views:
    """What the arms gave for one batch, on the CPU, and what can be said of it; everything is computed once.

    `plain` and `flipped` are probabilities (B, C, *positions), the latter flipped back and empty without a flip.
    """

    def __init__(
        self,
        logits: Mapping[str, Tensor],
        flipped: Mapping[str, Tensor],
        image: Table,
        reference: Tensor | None,
    ) -> None:
        self.logits = logits
        self.plain = {name: probabilities(each).cpu() for name, each in logits.items()}
        self.flipped = {name: each.cpu() for name, each in flipped.items()}
        self.image = image  # (B, I) the signals of the images
        self.reference = reference  # (B, C, *coarse)
        self._own: dict[tuple[str, bool], Table] = {}
        self._entropies: dict[tuple[str, bool], Tensor] = {}
        self._products: dict[bool, Table] = {}
        self._changed: dict[str, list[float]] = {}
        self._stacked: dict[bool, Tensor] = {}

    def given(self, name: str, flip: bool) -> Tensor:
        """The prediction of an arm, averaged with that of the flipped image if there is one."""
        if not flip:
            return self.plain[name]
        return self._stack(flip)[:, self._names(flip).index(name)]

    def stacked(self, names: Sequence[str], flip: bool) -> Tensor:
        """What the arms give, (B, A, C, *positions)."""
        every = self._names(flip)
        return self._stack(flip) if list(names) == every else self._stack(flip)[:, [every.index(n) for n in names]]

    def changed(self, name: str, flip: bool) -> list[float]:
        """How much of each prediction the flip changes."""
        if not flip:
            return [0.0] * len(self.image)
        if name not in self._changed:
            pairs = zip(self.plain[name], self.flipped[name], strict=True)
            self._changed[name] = [agreement_lost(*pair) for pair in pairs]
        return self._changed[name]

    def entropies(self, name: str, flip: bool) -> Tensor:
        """At each position, (B, positions)."""
        if (name, flip) not in self._entropies:
            self._entropies[name, flip] = entropies(self.given(name, flip))
        return self._entropies[name, flip]

    def own(self, name: str, flip: bool, usual: Usual) -> Table:
        """The signals `OWN` of an arm, (B, O)."""
        if (name, flip) not in self._own:
            given, entropy = self.given(name, flip)[:, None], self.entropies(name, flip)[:, None]
            changed = np.array(self.changed(name, flip))[:, None]
            self._own[name, flip] = self.measured(given, changed, usual, entropy)[:, 0]
        return self._own[name, flip]

    def measured(self, predictions: Tensor, changed: Table, usual: Usual, entropy: Tensor) -> Table:
        """The signals `OWN` of predictions (B, K, C, *positions), (B, K, O).

        A flip changes them by so much (B, K), and their entropies are these (B, K, positions).
        """
        batched = predictions.ndim == 3 and len(predictions) >= ENOUGH
        marginals = predictions.mean(0) if batched else None
        references = [None] * len(predictions) if self.reference is None else list(self.reference)
        return np.stack([
            measure(each, usual, flips.tolist(), marginals, reference, uncertain)
            for each, flips, uncertain, reference in zip(predictions, changed, entropy, references, strict=True)
        ])  # fmt: skip

    def products(self, names: Sequence[str], flip: bool) -> Table:
        """(B, A, A): sums of products of each two arms."""
        if flip not in self._products:
            self._products[flip] = np.stack([products_of(image) for image in self._stack(flip)])
        places = [self._names(flip).index(name) for name in names]
        return self._products[flip][:, places][:, :, places]

    def _names(self, flip: bool) -> list[str]:
        return [name for name in self.plain if not flip or name in self.flipped]

    def _stack(self, flip: bool) -> Tensor:
        """What all arms give, (B, A, C, *positions)."""
        if flip not in self._stacked:
            stacked = torch.stack([self.plain[name] for name in self._names(flip)], 1)
            if flip:
                stacked = stacked.add_(torch.stack([self.flipped[name] for name in self._names(flip)], 1)).div_(2)
            self._stacked[flip] = stacked
        return self._stacked[flip]


def look(
    arms: Arms,
    names: Sequence[str],
    flip: int | None,
    x: Tensor,
    yardstick: Yardstick,
    recollection: Recollection | None = None,
    *,
    turned: Collection[str] | None = None,
) -> Views:
    """Run arms on a batch x (B, C, *spatial); `turned` see it flipped too, all but steps unless given."""
    samples = LayerSamples()
    watched = yardstick.calibration is not None and bool(yardstick.calibration.layers)
    logits = arms.all_logits(names, x, samples=samples if watched else None)
    both = [name for name in names if not is_step(name) and (turned is None or name in turned)]
    flipped = {} if flip is None else {name: arms.flipped(name, x, flip) for name in both}
    reference = None if recollection is None else recollection.recall(logits[SOURCE].cpu())
    return Views(logits, flipped, image_signals(x, samples, yardstick), reference)


def image_signals(x: Tensor, samples: LayerSamples, yardstick: Yardstick) -> Table:
    """(B, I): OOD scores of the first layer and over all layers, and the distance of the values; NaN where unknown."""
    table = np.full((len(x), len(IMAGE_SIGNALS)), np.nan)
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

    arms: Tensor  # (B, A, C, *positions)
    mixtures: Tensor  # (B, M, C, *positions)
    signals: Table  # (B, A + M, S); without a yardstick all 0

    def of(self, image: int, place: int) -> Tensor:
        """The prediction (C, *positions) of an image by the candidate at this place of the plan."""
        arms = self.arms.shape[1]
        return self.arms[image, place] if place < arms else self.mixtures[image, place - arms]


def assemble(plan: Plan, views: Views, usual: Usual | None) -> Candidates:
    """Arms, averaged with their flips if the plan has one, then mixtures of them."""
    flip = plan.flip is not None
    arms = views.stacked(plan.arms, flip)
    kinds = plan.candidates[len(plan.arms) :]
    entropy = torch.stack([views.entropies(name, flip).mean(1) for name in plan.arms], 1)  # (B, A)
    weights = torch.stack([mixture_weights(entropy, kind) for kind in kinds], 1) if kinds else entropy[:, None][:, :0]
    mixed = torch.bmm(weights, arms.flatten(2)).reshape(len(arms), len(kinds), *arms.shape[2:])
    if usual is None:
        return Candidates(arms, mixed, np.zeros((len(arms), len(plan.candidates), len(SIGNALS))))
    whole = np.concatenate([np.broadcast_to(np.eye(len(plan.arms)), (len(arms), *[len(plan.arms)] * 2)), weights], 1)
    changed = np.stack([views.changed(name, flip) for name in plan.arms], 1)  # (B, A)
    own = np.stack([views.own(name, flip, usual) for name in plan.arms], 1)
    if kinds:
        turned = np.einsum("bma,ba->bm", weights.numpy(), changed)
        uncertain = entropies(mixed.flatten(0, 1)).unflatten(0, (len(arms), len(kinds)))
        own = np.concatenate([own, views.measured(mixed, turned, usual, uncertain)], 1)
    agreed = [agreements(w @ each @ w.T) for w, each in zip(whole, views.products(plan.arms, flip), strict=True)]
    signals = np.stack([
        candidate_signals(each, matrix, len(plan.arms), about)
        for each, matrix, about in zip(own, agreed, views.image, strict=True)
    ])  # fmt: skip
    return Candidates(arms, mixed, signals)


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
                self.model, self.plan.arms, calibration=self.yardstick.calibration,
                batch_size=batch_size,
            )  # fmt: skip
            self._buffered = [*self._buffered, *self._arms.buffered()]
            self._source = self._snapshot()
        self._batch_size = batch_size
        self._forget()

    def _forget(self) -> None:
        """What was expected and predicted along the stream."""
        self._stream = StreamMean(len(self.plan.candidates))
        self._recollection = Recollection(self._batch_size)

    def step(self, x: Tensor, *, case: str | None = None) -> GuardedStep:
        """Predict one batch x (B, C, *spatial) by the candidate that the policy gives each image."""
        stream = self._stream.state_dict()
        try:
            with self._all_or_nothing(case), torch.inference_mode(False), torch.no_grad():
                x = self._begin(x)
                logits, decisions, views = self._choose(x)
                if views is not None:
                    self._arms.commit()
                    self._recollection.add(views)
                self.batches_seen += 1
                return GuardedStep(logits, self._updates(decisions), of_batch(decisions))
        except BaseException:
            self._stream.load_state_dict(stream)
            raise

    def _updates(self, decisions: Sequence[Decision]) -> tuple[Update, ...]:
        """The step that was taken, where all images of the batch took the same."""
        taken = {decision.candidate for decision in decisions}
        name = taken.pop() if len(taken) == 1 else None
        if name is None or self._arms.steps is None or not is_step(name):
            return ()
        return (Update(self._arms.steps.loss, None, float(name.removeprefix(TENT))),)

    def predict(self, x: Tensor) -> Tensor:
        """What `step` would give, learning nothing and changing nothing."""
        stream = self._stream.state_dict()
        try:
            with torch.inference_mode(False), torch.no_grad():
                return self._choose(accept(self.model, x))[0]
        finally:
            self._stream.load_state_dict(stream)

    def again(self, x: Tensor, step: Step) -> Tensor:
        """By the candidate that the latest step gave, and at no more passes than that candidate needs."""
        decision = decision_of(step)
        if decision is None or decision.images:
            raise InputError("other views are predicted for one image at a time; use a batch size of 1")
        name = decision.candidate or SOURCE
        with torch.inference_mode(False), torch.no_grad():
            x = accept(self.model, x)
            if name in self.plan.arms and self.plan.flip is None:
                return self._arms.logits(name, x)
            logits = {arm: self._arms.logits(arm, x) for arm in self.plan.arms}  # steps go where they went
            flip = self.plan.flip
            flipped = {} if flip is None else {arm: self._arms.flipped(arm, x, flip) for arm in self.plan.arms}
            views = Views(logits, flipped, np.zeros((len(x), len(IMAGE_SIGNALS))), None)
            given = assemble(self.plan, views, None).of(0, self.plan.candidates.index(name))
            return as_logits(given, views.logits[SOURCE].shape[1]).to(x)[None]

    def reset(self) -> None:
        super().reset()
        self._forget()

    def _begin(self, x: Tensor) -> Tensor:
        if self.mode == "image-specific":
            self._forget()
        return super()._begin(x)

    def _choose(self, x: Tensor) -> tuple[Tensor, list[Decision], Views | None]:
        """Logits (B, C, *positions), a decision for each image, and what the arms gave.

        Statistics that led to no number are nothing to go on with: None.
        """
        try:
            views = look(self._arms, self.plan.arms, self.plan.flip, x, self.yardstick, self._recollection)
        except NonFiniteError as error:
            logits = self._arms.logits(SOURCE, x)  # raises again if it is the source model's
            return logits, [Decision(Outcome.SOURCE, Reason.NON_FINITE, str(error))] * len(x), None
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
            given = made.of(i, self.plan.candidates.index(name))
            logits[i] = views.logits[name][i] if plain else as_logits(given, len(logits[i])).to(logits)
            decisions.append(_decision(name, None if expected is None else expected[i]))
        scores = views.image[:, IMAGE_SIGNALS.index("ood")]
        return logits, [_scored(*each) for each in zip(decisions, scores, strict=True)], views

    def _best(self, signals: Table) -> tuple[list[str], list[Expected] | None]:
        """The candidate for each image, and what is expected of it."""
        names = self.plan.candidates
        if self.rehearsed is None:
            return [ENTROPY if ENTROPY in names else SOURCE] * len(signals), None
        expected = self.rehearsed.quality.expected(signals)  # (B, K)
        smoothed = self._stream.add(expected)
        best = self.rehearsed.policy.values(expected, smoothed, names).argmax(1)
        rows, refusal = np.arange(len(best)), self.rehearsed.refusal
        refused = [False] * len(best) if refusal is None else refusal.applies(signals[rows, best]).tolist()
        return [names[k] for k in best], list(map(self.rehearsed.expect, expected[rows, best], refused))

    def get_extra_state(self) -> dict[str, Any]:
        own = {"arms": self._arms.state_dict(), "stream": self._stream.state_dict()}
        return {**super().get_extra_state(), **own, "recollection": self._recollection.bank.state_dict()}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        if "arms" in state:
            self._arms.load_state_dict(state["arms"])
            self._stream.load_state_dict(state["stream"])
            self._recollection.bank.load_state_dict(state["recollection"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ChoosingAdapter":
        super()._apply(fn, recurse)
        self._arms.apply(fn)
        return self


def unrehearsed_plan(model: nn.Module) -> Plan:
    """What InTEnt mixes, for a network that was not rehearsed with."""
    return Plan(tuple(arm for arm in possible_arms(model, None) if arm in (SOURCE, BLENDED, BATCH)))


def as_logits(prediction: Tensor, channels: int) -> Tensor:
    """Logits (channels, *positions) that stand for these probabilities (C, *positions)."""
    logarithms = prediction.clamp_min(1e-8).log()
    return logarithms if channels > 1 else (logarithms[1] - logarithms[0])[None]


def _constant(x: Tensor) -> list[bool]:
    flat = x.flatten(2)
    found: list[bool] = (flat.amax(2) == flat.amin(2)).all(1).tolist()
    return found


def _scored(decision: Decision, log_score: float) -> Decision:
    """With the OOD score of its image, where it is known."""
    return decision if np.isnan(log_score) else replace(decision, ood_score=float(np.exp(log_score)))


def _decision(name: str, expected: Expected | None) -> Decision:
    """The source model, or an adapted prediction."""
    if name == SOURCE:
        return Decision(
            Outcome.SOURCE, Reason.QUALITY, "the source model is given, by rehearsal", None, (), name, expected
        )
    return Decision(Outcome.ACCEPTED, candidate=name, expected=expected)
