"""6 update, 7 prediction. Algorithm 1 for the images that a guard lets through; the source model predicts the others.

A collapsed network agrees with its own memory: the discrepancy goes to zero and the collapse stays. So the guard looks
elsewhere, at signals that need no label. Before the update it sorts the images of a batch: some look like the source's,
some are too far out of distribution to learn from. The others are adapted to, and the guard is asked again. On an
objection the adapter falls back in turn to the state before the update, the last accepted state, the source's
parameters, and at last the source model.
"""

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dltta.core.adapted import Layout
from dltta.core.adapter import Adapter
from dltta.core.objectives.objective import Objective, Predicts, Preparation
from dltta.core.passes import accept, run
from dltta.core.rates import AnyRate
from dltta.core.snapshot import Snapshot
from dltta.core.step import Step, Update
from dltta.errors import InputError, NonFiniteError
from dltta.models.calibration import LayerSamples
from dltta.models.fast import speed_up
from dltta.models.features import Seen
from dltta.models.normalization import use_test_statistics
from dltta.models.statistics import InstanceStatistics
from dltta.quality.decision import Decision, Outcome, Reason, of_batch
from dltta.quality.guard import Guard, Scores
from dltta.quality.signals import Candidate, ImageSignals, Network, UpdateSignals


@dataclass(frozen=True)
class GuardedStep(Step):
    """A step and what the guard decided about it."""

    decision: Decision


def decision_of(step: Step) -> Decision | None:
    """What the guard decided about a step; None without one."""
    return step.decision if isinstance(step, GuardedStep) else None


class GuardedAdapter(Adapter):
    """An adapter whose updates a `guard` may undo; all other settings are those of `Adapter`.

    Costs one to eleven more passes on a 2-D image, and some more where the guard objects.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | Preparation,
        rate: AnyRate | None = None,
        *,
        guard: Guard,
        layout: Layout = "auto",
        **settings: Any,
    ) -> None:
        super().__init__(model, objective, rate, layout=layout, **settings)
        self.guard = guard
        self._references = _references(model, layout)  # in a list: not part of this module's state
        self._last_accepted = self._source

    def step(self, x: Tensor, *, case: str | None = None) -> GuardedStep:
        """As `Adapter.step`, as far as the guard allows."""
        with self._all_or_nothing(case) as begun, torch.inference_mode(False):
            x = self._begin(x)
            signals = self._image_signals(x)
            decisions = self.guard.before(signals)
            chosen = [i for i, decision in enumerate(decisions) if decision is None]
            kept = [i for i, decision in enumerate(decisions) if decision and not decision.outcome.by_source]
            logits = signals.source.logits.clone()
            updates: tuple[Update, ...] = ()
            if kept:
                logits[kept] = self._unadapted(signals, [*kept, *chosen])[: len(kept)]
            if chosen:
                before = begun if self.mode == "continual" else self._source
                result = self._adapt_guarded(self._of(signals, chosen), before)
                updates = result.updates
                if result.logits is not None:
                    logits[chosen] = result.logits
                if result.seen is not None:
                    self._remember(result.seen)
                decisions = [decision or result.decision for decision in decisions]
            self.batches_seen += 1
            made = [decision for decision in decisions if decision is not None]
            return GuardedStep(logits.detach(), updates, of_batch(self._scored(made, signals)))

    def again(self, x: Tensor, step: Step) -> Tensor:
        """By the model that predicted the latest step: the adapted one, the unadapted one or the source model."""
        decision = decision_of(step)
        if decision is None or decision.images:
            raise InputError("other views are predicted for one image at a time; use a batch size of 1")
        with torch.inference_mode(False):
            x = accept(self.model, x)
            if decision.outcome.by_source:
                return _logits(self._references[0])(x)
            if decision.outcome == Outcome.KEPT and not step.updates and decision.reason != Reason.NON_FINITE:
                return self._with(self._start(), x)
            return self.predict(x)

    def reset(self) -> None:
        super().reset()
        self._last_accepted = self._source

    def _adapt_guarded(self, signals: ImageSignals, before: Snapshot) -> "_Result":
        """Algorithm 1 if the guard accepts what it leads to, else what there is to fall back to."""
        x = signals.images
        updates: tuple[Update, ...] = ()
        try:
            seen, updates = self._adapt(x)
            logits = self._predicted(x, seen.logits)
        except NonFiniteError as error:
            rejected = Decision(Outcome.SOURCE, Reason.NON_FINITE, str(error))
        else:
            review = self.guard.after(self._update_signals(signals, logits, signals.unadapted, updates))
            if review.objection is None:
                self._last_accepted = before
                return _Result(logits, seen, updates, Decision(Outcome.ACCEPTED, signals=review.numbers))
            rejected = Decision(Outcome.SOURCE, review.objection.reason, review.objection.detail, review.numbers)
        return self._fall_back(signals, before, updates, rejected)

    def _fall_back(
        self, signals: ImageSignals, before: Snapshot, updates: tuple[Update, ...], rejected: Decision
    ) -> "_Result":
        """The first state whose prediction the guard does not object to, each tried once; at last the source model."""
        x = signals.images
        outcomes = {before: Outcome.KEPT}
        for earlier in (self._last_accepted, self._source):
            outcomes.setdefault(earlier, Outcome.ROLLED_BACK)
        for state, outcome in outcomes.items():
            state.restore()
            try:
                seen = self._forward(x, learning=False)
                logits = self._tried(x, seen.logits)
            except NonFiniteError:
                continue
            unadapted = signals.unadapted if state is before else Candidate(self._network(self._start()), x)
            if self.guard.after(self._update_signals(signals, logits, unadapted, ())).objection is None:
                return _Result(logits, seen, updates, replace(rejected, outcome=outcome))
        return _Result(None, None, updates, rejected)

    def _scored(self, decisions: list[Decision], signals: ImageSignals) -> list[Decision]:
        """With the OOD score of each image, if the guard knows it."""
        scores = self.guard.ood_scores(signals) if isinstance(self.guard, Scores) else None
        if scores is None:
            return decisions
        return [replace(decision, ood_score=score) for decision, score in zip(decisions, scores, strict=True)]

    def _image_signals(self, x: Tensor) -> ImageSignals:
        """All that the guard may ask about before the update; the source model's pass is the only one that is made."""
        source, instance = self._references
        samples = LayerSamples()
        with samples.watching(source):
            logits = _logits(source)(x)
        return ImageSignals(
            x,
            samples.stacked(),
            source=Candidate(_logits(source), x, logits),
            instance=Candidate(_logits(instance), x),
            unadapted=Candidate(self._network(self._start()), x),
        )

    def _of(self, signals: ImageSignals, chosen: list[int]) -> ImageSignals:
        """The signals of some images of the batch, which normalize each other without the others."""
        if len(chosen) == len(signals.images):
            return signals
        x = signals.images[chosen]
        return replace(
            signals,
            images=x,
            source=Candidate(_logits(self._references[0]), x, signals.source.logits[chosen]),
            unadapted=Candidate(self._network(self._start()), x),
        )

    def _unadapted(self, signals: ImageSignals, chosen: list[int]) -> Tensor:
        """Logits of the source's parameters for these images, in this order, which normalize each other."""
        if chosen == list(range(len(signals.images))):
            return signals.unadapted.logits
        return self._with(self._start(), signals.images[chosen])

    @torch.no_grad()
    def _update_signals(
        self, signals: ImageSignals, logits: Tensor, unadapted: Candidate, updates: Sequence[Update]
    ) -> UpdateSignals:
        x, start = signals.images, self._start()
        moved = _length(now - then for now, then in zip(self._adapted, start.values(), strict=True))
        drift = moved / max(_length(start.values()), 1e-12)
        adapted = Candidate(lambda images: self._tried(images, self._with({}, images)), x, logits)
        if drift == 0 and not isinstance(self.objective, Predicts):  # the same model: nothing to compute
            unadapted = adapted
        rate = max((update.rate for update in updates), default=None)
        return UpdateSignals(adapted, unadapted, signals.source, drift, rate)

    def _start(self) -> dict[str, Tensor]:
        """The adapted parameters as source training left them, by name."""
        return dict(zip(self._names, self._source.parameters(), strict=True))

    def _network(self, parameters: dict[str, Tensor]) -> Network:
        """The network with these parameters in the place of its own."""
        return lambda images: self._with(parameters, images)

    @torch.no_grad()
    def _with(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """Logits of the network with these parameters in the place of its own."""
        with self._unnoticed():
            logits: Tensor = functional_call(self.model, parameters, (x,))
        return logits

    def get_extra_state(self) -> dict[str, Any]:
        return {**super().get_extra_state(), "last_accepted": self._last_accepted.state_dict()}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        super()._load_extra_state(state)
        if "last_accepted" in state:
            self._last_accepted = self._snapshot().load_state_dict(state["last_accepted"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "GuardedAdapter":
        super()._apply(fn, recurse)
        for reference in self._references:
            reference._apply(fn, recurse)
        return self


@dataclass(frozen=True)
class _Result:
    """What became of the images that were adapted to; without logits the source model predicts them."""

    logits: Tensor | None
    seen: Seen | None
    updates: tuple[Update, ...]
    decision: Decision


def _references(model: nn.Module, layout: Layout) -> list[nn.Module]:
    """Copies of the source model that never change: with its stored statistics, and with instance statistics.

    They share their parameters.
    """
    with torch.inference_mode(False):
        source = copy.deepcopy(model).requires_grad_(False).eval()
        if layout == "auto":
            speed_up(source)
        instance = copy.deepcopy(source, {id(parameter): parameter for parameter in source.parameters()})
        use_test_statistics(instance, InstanceStatistics())
    return [source, instance]


def _logits(model: nn.Module) -> Network:
    return lambda images: run(model, images, features=False, learning=False).logits


def _length(parts: Iterable[Tensor]) -> float:
    return math.sqrt(sum(part.square().sum().item() for part in parts))
