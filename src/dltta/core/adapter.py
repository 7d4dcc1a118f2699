"""6 update, 7 prediction. Adapts a network to every batch of a stream: `Adapter.step` is Algorithm 1."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dltta.core.adapted import AdaptedNetwork, Layout, OptimizerFactory
from dltta.core.discrepancy import batch_discrepancy
from dltta.core.gradients import Gradient, reached
from dltta.core.memory import MemoryBank
from dltta.core.objectives.objective import Objective, Preparation
from dltta.core.passes import accept, run
from dltta.core.rates import AnyRate, Signals, ask, mean_rate
from dltta.core.snapshot import load_state, state_of
from dltta.core.step import Step, Update
from dltta.core.update import after_update, before_batch, collapsed, loss_gradient, move, predicted
from dltta.errors import SettingError
from dltta.models.features import Seen
from dltta.models.predictions import probabilities

Mode = Literal["continual", "image-specific"]
Predict = Literal["after", "before"]


class Adapter(AdaptedNetwork):
    """Adapts a copy of the network to each batch before predicting it; a drop-in for `model(x)`.

    `objective` says what to minimize and what may move, `rate` how far, from the discrepancy that `memory` yields;
    methods without a loss (`Source`, `PTBN`) need neither. All that is given is copied.

    `optimizer` makes the optimizer from the parameters (plain SGD is Eq. (2)); its learning rate is owned by `rate`.
    `steps` gradient steps are taken per batch. `mode="image-specific"` returns network, optimizer and what the
    objective remembers to the source before every batch; the memory goes on. `predict="before"` predicts from the pass
    before the last update and saves the pass after it. `layout="auto"` makes the network faster where that was measured
    to help (convolutions on a CPU: weights channels-last), which changes predictions by rounding; `layout="given"`
    leaves it as it is.

    A step that raises leaves everything as it was.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | Preparation,
        rate: AnyRate | None = None,
        *,
        memory: MemoryBank | None = None,
        optimizer: OptimizerFactory = torch.optim.SGD,
        steps: int = 1,
        mode: Mode = "continual",
        predict: Predict = "after",
        layout: Layout = "auto",
    ) -> None:
        _check_settings(objective, rate, memory, steps)
        _check_choices(mode=(mode, Mode), predict=(predict, Predict), layout=(layout, Layout))
        super().__init__(model, objective, rate, memory, optimizer, layout)
        self.steps = steps if isinstance(objective, Objective) else 0
        self.mode: Mode = mode
        self._predict_from: Predict = predict

    def forward(self, x: Tensor) -> Tensor:
        """The adapted prediction, (B, C, *positions)."""
        return self.step(x).logits

    def step(self, x: Tensor, *, case: str | None = None) -> Step:
        """Adapt to one batch x (B, C, *spatial), predict it, remember it; `case` names it in errors."""
        with self._all_or_nothing(case), torch.inference_mode(False):
            x = self._begin(x)
            seen, updates = self._adapt(x)
            logits = self._predicted(x, seen.logits)
            self._remember(seen)
            self.batches_seen += 1
            return Step(logits, updates)

    def _adapt(self, x: Tensor) -> tuple[Seen, tuple[Update, ...]]:
        """Algorithm 1 for one batch, up to the memory."""
        before_batch(self.objective, self.model, x)
        seen = self._forward(x, learning=self.steps > 0)  # q = h(x), v = g(q) with θ_t
        updates = []
        for remaining in reversed(range(self.steps)):
            discrepancy = self._discrepancy(seen)  # Eq. (3), (4), (5)
            with self._unnoticed():
                loss, gradient = loss_gradient(self.objective, self.model, x, seen.logits, self._adapted)
                rates = ask(self.rate, self._signals(x, seen, discrepancy, loss, gradient))  # Eq. (6)
            moved = move(self._optimizer, self._adapted, gradient, rates)  # Eq. (2)
            if moved:
                self._follow_update()
            updates.append(Update(loss, discrepancy, mean_rate(rates)))
            if remaining or (moved and self._predict_from == "after"):
                seen = self._forward(x, learning=remaining > 0)  # with θ_{t+1}
        return seen, tuple(updates)

    def _follow_update(self) -> None:
        """What the objective does now that the network has moved; a collapsed network returns to the source."""
        after_update(self.objective, self.model)
        if collapsed(self.objective):
            self._source.restore()

    def predict(self, x: Tensor) -> Tensor:
        """The prediction (B, C, *positions) of the network as it now is, learning nothing and changing nothing."""
        with torch.inference_mode(False):
            x = accept(self.model, x)
            return self._tried(x, self._forward(x, learning=False).logits)

    def again(self, x: Tensor, step: Step) -> Tensor:
        """The prediction of another view x of the batch of the latest step, predicted as that was; learns nothing."""
        return self.predict(x)

    def _begin(self, x: Tensor) -> Tensor:
        x = accept(self.model, x)
        if self.mode == "image-specific":
            self._source.restore()
        return x

    def _forward(self, x: Tensor, *, learning: bool) -> Seen:
        layer = None if self.memory is None else self.memory.layer
        return run(self.model, x, features=self.memory is not None, layer=layer, learning=learning)

    def _predicted(self, x: Tensor, logits: Tensor) -> Tensor:
        """What is given for these logits of the network: they themselves, or what the objective predicts."""
        with self._unnoticed():
            return predicted(self.objective, self.model, x, logits)

    def _tried(self, x: Tensor, logits: Tensor) -> Tensor:
        """The same without a trace in what the objective remembers."""
        state = state_of(self.objective)
        try:
            return self._predicted(x, logits)
        finally:
            load_state(self.objective, state)

    def _discrepancy(self, seen: Seen) -> float | None:
        """None while there is nothing to compare with."""
        if self.memory is None or seen.features is None:
            return None
        prediction = probabilities(seen.logits.detach())
        self.memory.check(seen.features, prediction)
        reference = self.memory.recall(seen.features, prediction.shape[1:])
        return None if reference is None else batch_discrepancy(prediction, reference, positions=self.memory.positions)

    def _signals(self, x: Tensor, seen: Seen, discrepancy: float | None, loss: float, gradient: Gradient) -> Signals:
        auxiliary = getattr(self.objective, "auxiliary_gradient", None)
        second = None if auxiliary is None else reached(self._names, auxiliary)
        parameters = {name: part.detach() for name, part in zip(self._names, self._adapted, strict=True)}
        first = reached(self._names, gradient)
        return Signals(discrepancy, loss, first, parameters, self.model, x, seen.logits.detach(), second)

    @torch.no_grad()
    def _remember(self, seen: Seen) -> None:
        """Statistics of the stream, then the pair (q, v) of the prediction."""
        for layer in self._stateful:
            layer.commit()
        if self.memory is not None and seen.features is not None:
            prediction = probabilities(seen.logits.detach())
            self.memory.check(seen.features, prediction)
            self.memory.layer = seen.layer
            self.memory.push(seen.features, prediction)


def _check_settings(objective: object, rate: AnyRate | None, memory: MemoryBank | None, steps: int) -> None:
    name = type(objective).__name__
    if not isinstance(objective, Objective | Preparation):
        raise SettingError(f"{name} is not an objective: it has no prepare(model); pass an instance such as Tent()")
    if isinstance(objective, type):
        raise SettingError(f"{objective.__name__} is a class; pass an instance: {objective.__name__}()")
    if isinstance(objective, Objective) and rate is None:
        raise SettingError(f"{name} needs a learning rate; pass Fixed(1e-3) or Proportional(1e-3) with a memory")
    if not isinstance(objective, Objective) and (rate is not None or memory is not None):
        raise SettingError(
            f"{name} takes no gradient step, so a rate or a memory has nothing to decide; leave them out"
        )
    if getattr(rate, "needs_memory", False) and memory is None:
        raise SettingError(f"{type(rate).__name__} follows the discrepancy, which needs memory=MemoryBank(…)")
    if steps < 1:
        raise SettingError(f"steps must be at least 1, got {steps}")


def _check_choices(**choices: tuple[str, Any]) -> None:
    for name, (found, known) in choices.items():
        if found not in get_args(known):
            raise SettingError(f"{name} must be {' or '.join(map(repr, get_args(known)))}, got {found!r}")
