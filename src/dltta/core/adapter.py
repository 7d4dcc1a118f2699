"""6 update, 7 prediction. Adapts a network to every batch of a stream: `Adapter.step` is Algorithm 1."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dltta.core.discrepancy import batch_discrepancy
from dltta.core.memory import MemoryBank
from dltta.core.objectives.objective import Objective, Preparation
from dltta.core.rates import LearningRate
from dltta.errors import DlttaError, InputError, NonFiniteError, NothingToAdaptError, SettingError, StateError
from dltta.models.calibration import LayerSamples
from dltta.models.fast import speed_up
from dltta.models.features import Seen, find_layer, forward_pass, forward_with_features
from dltta.models.normalization import use_test_statistics
from dltta.models.predictions import all_finite, probabilities
from dltta.models.statistics import InstanceStatistics, stateful_layers
from dltta.quality.guard import Evidence, Guard, Look, Network, Ruling, Verdict, together

Mode = Literal["continual", "image-specific"]
Predict = Literal["after", "before"]
Layout = Literal["auto", "given"]
OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Update:
    """One gradient step: what decided its size and how large it was."""

    loss: float
    discrepancy: float | None  # None while the memory is not ready, or without one
    rate: float


@dataclass(frozen=True)
class Step:
    """The answer for one batch and how it came about.

    `loss`, `discrepancy` and `rate` are those of the first update, None for methods without a loss.
    """

    logits: Tensor  # (B, C, *positions)
    updates: tuple[Update, ...]  # empty for methods without a loss
    ruling: Ruling | None = None  # the guard's; None without one

    @property
    def loss(self) -> float | None:
        return self.updates[0].loss if self.updates else None

    @property
    def discrepancy(self) -> float | None:
        return self.updates[0].discrepancy if self.updates else None

    @property
    def rate(self) -> float | None:
        return self.updates[0].rate if self.updates else None


class Adapter(nn.Module):
    """Adapts a copy of the network to each batch before answering; a drop-in for `model(x)`.

    `objective` says what to minimize and what may move, `rate` how far, from the discrepancy that `memory` yields;
    methods without a loss (`Source`, `PTBN`) need neither. All that is given is copied: the caller's network is never
    changed, and two adapters never share a memory.

    `optimizer` makes the optimizer from the parameters (plain SGD is Eq. (2)); its learning rate is owned by `rate`.
    `steps` gradient steps are taken per batch. `mode="image-specific"` returns network and optimizer to the source
    before every batch; the memory goes on. `predict="before"` answers from the pass before the last update and saves
    the pass after it. `guard` may undo an update or answer with the network as it was given (`Step.ruling`), for the
    price of one to eleven more passes on a picture, and of some more where it objects. `layout="auto"` makes the
    network faster where that was measured to help (convolutions on a CPU: weights channels-last), which changes answers
    by rounding; `layout="given"` leaves it as it is.

    A step that raises leaves everything as it was. `train()` and `eval()` do not reach the network: it always runs in
    evaluation mode, as the objective prepared it.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | Preparation,
        rate: LearningRate | None = None,
        *,
        memory: MemoryBank | None = None,
        optimizer: OptimizerFactory = torch.optim.SGD,
        steps: int = 1,
        mode: Mode = "continual",
        predict: Predict = "after",
        guard: Guard | None = None,
        layout: Layout = "auto",
    ) -> None:
        super().__init__()
        _check_settings(objective, rate, memory, steps, mode, predict, layout)
        with torch.inference_mode(False):
            self.model = copy.deepcopy(model).requires_grad_(False).eval()
            self.objective = copy.deepcopy(objective)
            if layout == "auto":
                speed_up(self.model)
                for part in getattr(self.objective, "__dict__", {}).values():
                    if isinstance(part, nn.Module):
                        speed_up(part)
            self.rate = copy.deepcopy(rate)
            self.memory = copy.deepcopy(memory)
            self.steps = steps if isinstance(objective, Objective) else 0
            self.mode: Mode = mode
            self.predict: Predict = predict
            self.taken = 0  # batches adapted to so far
            self.guard = guard
            self._given = [] if guard is None else as_given(self.model)  # not part of this module's state
            self._adapted = self._prepare()
            self._stateful = stateful_layers(self.model)
            self._buffered = [module for module in self.model.modules() if module._buffers]
            self._optimizer = optimizer(self._adapted) if self._adapted else None
            if memory is not None and memory.layer is not None:
                find_layer(self.model, memory.layer)
            self._source = self._good = _Snapshot(self)
            self._initial = self._extra_state()

    def forward(self, x: Tensor) -> Tensor:
        """The adapted prediction, (B, C, *positions)."""
        return self.step(x).logits

    def step(self, x: Tensor, *, case: str | None = None) -> Step:
        """Adapt to one batch x (B, C, *spatial), answer it, remember it; `case` names it in errors."""
        with self._all_or_nothing(case), torch.inference_mode(False):
            x = self._accept(x)
            if self.mode == "image-specific":
                self._source.restore()
            if self.guard is None:
                seen, updates = self._adapt(x)
                done = _Done(seen.logits, seen, updates)
            else:
                done = self._adapt_guarded(x, self.guard)
            if done.seen is not None:
                self._remember(done.seen)
            self.taken += 1
            return Step(done.logits.detach(), tuple(done.updates), done.ruling)

    def answer(self, x: Tensor) -> Tensor:
        """The prediction (B, C, *positions) of the network as it stands, learning nothing and changing nothing."""
        with torch.inference_mode(False):
            return self._forward(self._accept(x), learning=False).logits

    def _adapt(self, x: Tensor) -> tuple[Seen, list[Update]]:
        """Algorithm 1 for one batch, up to the memory."""
        seen = self._forward(x, learning=self.steps > 0)  # q = h(x), v = g(q) with θ_t
        updates = []
        for remaining in reversed(range(self.steps)):
            discrepancy = self._discrepancy(seen)  # Eq. (3), (4), (5)
            rate = self._rate(discrepancy)  # Eq. (6)
            loss = self._update(x, seen.logits, rate)  # Eq. (2)
            updates.append(Update(loss, discrepancy, rate))
            if remaining or self.predict == "after":
                seen = self._forward(x, learning=remaining > 0)  # with θ_{t+1}
        return seen, updates

    def _adapt_guarded(self, x: Tensor, guard: Guard) -> "_Done":
        """Algorithm 1 for the images that the guard lets through; the source's parameters answer the others."""
        given, look = self._look(x)
        rulings = guard.triage(look)
        logits = given.logits.clone()
        through = [i for i, ruling in enumerate(rulings) if ruling is None]
        untaught = [i for i, ruling in enumerate(rulings) if ruling is not None and ruling.verdict == "skipped"]
        if untaught:  # normalized among all that are not the source network's
            logits[untaught] = self._with(self._start(), x[untaught + through])[: len(untaught)]
        if not through:
            return _Done(logits, None, [], together(rulings, None))
        alone = len(through) == len(x)
        still = look.prepared if alone else self._network(self._start())
        seen, updates, ruling = self._climb_down(x if alone else x[through], given.logits[through], still, guard)
        if seen is not None:
            logits[through] = seen.logits.detach()
        return _Done(logits, seen, updates, together(rulings, ruling))

    def _climb_down(
        self, x: Tensor, given: Tensor, still: Network, guard: Guard
    ) -> tuple[Seen | None, list[Update], Ruling]:
        """Algorithm 1, then the guard's ladder: the first answer that it does not object to, None if there is none."""
        before = _Snapshot(self)
        updates: list[Update] = []
        try:
            seen, updates = self._adapt(x)
        except NonFiniteError as error:
            reason, signals = str(error), None
        else:
            evidence = self._evidence(x, seen, given, still, updates)
            objection, signals = guard.object(evidence), guard.signals(evidence)
            if objection is None:
                self._good = before if self.mode == "continual" else self._source
                return seen, updates, Ruling("accepted", None, signals)
            reason = objection
        steps: list[tuple[Verdict, _Snapshot]] = [("skipped", before), ("rolled back", self._good)]
        for verdict, state in [*steps, ("rolled back", self._source)]:
            state.restore()
            try:
                seen = self._forward(x, learning=False)
            except NonFiniteError:
                continue
            if guard.object(self._evidence(x, seen, given, self._network(self._start()), [])) is None:
                return seen, updates, Ruling(verdict, reason, signals)
        return None, updates, Ruling("source", reason, signals)

    def reset(self) -> None:
        """Back to the moment of construction, bit for bit: network, optimizer, memory, rate and counter."""
        self._source.restore()
        self._good = self._source
        self._load_extra_state(self._initial)

    def adapted_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that move, by their name in the network."""
        chosen = {id(parameter) for parameter in self._adapted}
        return {name: parameter for name, parameter in self.model.named_parameters() if id(parameter) in chosen}

    def train(self, mode: bool = True) -> "Adapter":
        """Only marks the adapter: whether layers behave as in training is the objective's choice, not the caller's."""
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Everything that a resumed stream needs, as a snapshot: later steps do not change it."""
        return _in_given_layout(copy.deepcopy(super().state_dict(*args, **kwargs)))

    def get_extra_state(self) -> dict[str, Any]:
        return self._extra_state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        names = list(self.adapted_parameters())
        if state["adapted"] != names:
            raise StateError(
                f"the saved state moves {len(state['adapted'])} parameters, this adapter {len(names)} others; "
                "load it with the objective and the network it was saved with"
            )
        self._load_extra_state(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Adapter":
        """Moves optimizer and memory along with the network (`adapter.to(device)`)."""
        nn.Module._apply(self, fn, recurse)
        for given in self._given:
            given._apply(fn, recurse)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(self._optimizer.state_dict())  # casts its state to the parameters
        if self.memory is not None:
            self.memory.to(_placement(self.model)[0])
        return self

    def _prepare(self) -> list[nn.Parameter]:
        if not isinstance(self.objective, Objective):
            self.objective.prepare(self.model)
            return []
        adapted = list(self.objective.prepare(self.model))
        if not adapted:
            raise NothingToAdaptError(
                f"{type(self.objective).__name__} finds nothing to adapt in {type(self.model).__name__}; "
                "its prepare() returned no parameters"
            )
        for parameter in adapted:
            parameter.requires_grad_(True)
        return adapted

    def _look(self, x: Tensor) -> tuple[Seen, Look]:
        """What the network says as it was trained, statistics included, and what the guard sees at first sight."""
        trained, alone = self._given
        samples = LayerSamples()
        with samples.watching(trained):
            given = self._forward(x, learning=False, given=trained)

        def answering(network: nn.Module) -> Network:
            return lambda images: probabilities(self._forward(images, learning=False, given=network).logits)

        source, prepared = probabilities(given.logits), _Once(self._network(self._start()), x)
        return given, Look(x, samples.stacked(), source, answering(trained), answering(alone), prepared)

    @torch.no_grad()
    def _evidence(self, x: Tensor, seen: Seen, given: Tensor, still: Network, updates: Sequence[Update]) -> Evidence:
        start = self._start()
        moved = _length(now - then for now, then in zip(self._adapted, start.values(), strict=True))
        drift = moved / max(_length(start.values()), 1e-12)
        answer = probabilities(seen.logits.detach())
        unmoved = still(x) if drift > 0 else answer
        rate = max((update.rate for update in updates), default=None)
        return Evidence(answer, unmoved, probabilities(given), drift, rate, x, self._network({}), still)

    def _start(self) -> dict[str, Tensor]:
        """The adapted parameters as source training left them, by name."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {names[id(now)]: then for now, then in zip(self._adapted, self._source.parameters(), strict=True)}

    def _network(self, parameters: dict[str, Tensor]) -> Network:
        """The network with these parameters in the place of its own: images to probabilities."""
        return lambda images: probabilities(self._with(parameters, images))

    @torch.no_grad()
    def _with(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        """Logits of the network with these parameters; statistics that are carried along do not notice."""
        latest = [layer.latest for layer in self._stateful]
        answer: Tensor = functional_call(self.model, parameters, (x,))
        for layer, kept in zip(self._stateful, latest, strict=True):
            layer.latest = kept
        return answer

    def _accept(self, x: Tensor) -> Tensor:
        """The batch on the network's device and in its type, or an `InputError` that says what is wrong."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            found = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise InputError(f"images must be a floating-point tensor, got {found}; scale them as in training")
        if x.ndim < 2 or x.numel() == 0:
            raise InputError(f"images must be a non-empty batch (B, C, *spatial), got shape {tuple(x.shape)}")
        if not all_finite(x):
            raise InputError(f"{(~x.isfinite()).sum().item()} of {x.numel()} input values are NaN or infinite")
        device, dtype = _placement(self.model)
        x = x.detach().to(device, dtype)
        return x.clone() if x.is_inference() else x

    def _forward(self, x: Tensor, *, learning: bool, given: nn.Module | None = None) -> Seen:
        """One pass, of the network as it was `given` or of its adapted copy; with a graph only if an update follows."""
        try:
            with torch.set_grad_enabled(learning):
                if self.memory is None or given is not None:
                    seen = forward_pass(given or self.model, x)
                else:
                    seen = forward_with_features(self.model, self.memory.layer, x)
        except DlttaError:
            raise
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, IndexError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"the network cannot take images of shape {tuple(x.shape[1:])}: {reason}") from error
        if not all_finite(seen.logits):
            raise NonFiniteError("the prediction has NaN or infinite values")
        if len(seen.logits) != len(x):
            raise InputError(f"the network answers a batch of {len(x)} with {len(seen.logits)} predictions")
        return seen

    def _discrepancy(self, seen: Seen) -> float | None:
        """None while there is nothing to compare with."""
        if self.memory is None or seen.features is None:
            return None
        prediction = probabilities(seen.logits.detach())
        self.memory.check(seen.features, prediction)
        reference = self.memory.recall(seen.features, prediction.shape[1:])
        return None if reference is None else batch_discrepancy(prediction, reference, positions=self.memory.positions)

    def _rate(self, discrepancy: float | None) -> float:
        rate = float(self.rate(discrepancy)) if self.rate is not None else 0.0
        if not (math.isfinite(rate) and rate >= 0):
            raise NonFiniteError(f"the learning rate is {rate} at discrepancy {discrepancy}")
        return rate

    def _update(self, x: Tensor, logits: Tensor, rate: float) -> float:
        """One optimizer step on the adapted parameters; the loss before it."""
        objective, optimizer = self.objective, self._optimizer
        if not isinstance(objective, Objective) or optimizer is None:
            raise SettingError(f"{type(objective).__name__} has no loss to take a step on")
        with torch.enable_grad():
            loss = objective(self.model, x, logits)
        if not loss.isfinite():
            raise NonFiniteError(f"the loss is {loss.item()}")
        with torch.autocast(x.device.type, enabled=False):
            gradients = torch.autograd.grad(loss, self._adapted, allow_unused=True)
        if not all(all_finite(gradient) for gradient in gradients if gradient is not None):
            raise NonFiniteError("the gradient has NaN or infinite values")
        for group in optimizer.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(self._adapted, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.clear_autocast_cache()  # else the next pass under autocast would still see the old weights
        return loss.item()

    def _remember(self, seen: Seen) -> None:
        with torch.no_grad():
            for layer in self._stateful:
                layer.commit()
        if self.memory is None or seen.features is None:
            return
        prediction = probabilities(seen.logits.detach())
        self.memory.check(seen.features, prediction)
        self.memory.layer = seen.layer
        self.memory.push(seen.features, prediction)

    @contextmanager
    def _all_or_nothing(self, case: str | None) -> Iterator[None]:
        """Undo everything if the step fails, and say for which case."""
        before = _Snapshot(self)
        rate = _state(self.rate)
        try:
            yield
        except BaseException as error:
            before.restore()
            _load(self.rate, rate)
            if isinstance(error, DlttaError):
                raise type(error)(f"{case or f'batch {self.taken + 1} of the stream'}: {error}") from error
            raise

    def _extra_state(self) -> dict[str, Any]:
        return {
            "adapted": list(self.adapted_parameters()),
            "optimizer": None if self._optimizer is None else copy.deepcopy(self._optimizer.state_dict()),
            "memory": None if self.memory is None else self.memory.state_dict(),
            "rate": _state(self.rate),
            "taken": self.taken,
            "good": None if self.guard is None else self._good.state_dict(),
        }

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        if (state["memory"] is None) != (self.memory is None):
            raise StateError("one of the saved state and this adapter has a memory, the other has none")
        if self.memory is not None:
            self.memory.load_state_dict(state["memory"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        _load(self.rate, state["rate"])
        self.taken = state["taken"]
        if state.get("good") is not None:
            self._good = _Snapshot(self).load_state_dict(state["good"])


@dataclass(frozen=True)
class _Done:
    """What became of one batch."""

    logits: Tensor  # the answer
    seen: Seen | None  # what there is to remember
    updates: list[Update]
    ruling: Ruling | None = None


class _Once:
    """A network that answers these images only once, whoever asks; others every time."""

    def __init__(self, network: Network, images: Tensor) -> None:
        self._network, self._images = network, images
        self._answer: Tensor | None = None

    def __call__(self, images: Tensor) -> Tensor:
        if images is not self._images:
            return self._network(images)
        if self._answer is None:
            self._answer = self._network(images)
        return self._answer


class _Snapshot:
    """The adapted parameters, the buffers and the optimizer of an adapter at one moment."""

    def __init__(self, adapter: Adapter) -> None:
        self._optimizer = adapter._optimizer
        buffers = (buffer for module in adapter._buffered for buffer in module._buffers.values() if buffer is not None)
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in chain(adapter._adapted, buffers)]
        self._optimizer_state = copy.deepcopy(self._optimizer.state_dict()) if self._optimizer is not None else None

    def state_dict(self) -> dict[str, Any]:
        tensors = [copied.clone() for _, copied in self._tensors]
        return {"tensors": tensors, "optimizer": copy.deepcopy(self._optimizer_state)}

    def load_state_dict(self, state: dict[str, Any]) -> "_Snapshot":
        kept = zip(self._tensors, state["tensors"], strict=True)
        self._tensors = [(live, tensor.to(live, copy=True)) for (live, _), tensor in kept]
        self._optimizer_state = copy.deepcopy(state["optimizer"])
        return self

    def parameters(self) -> list[Tensor]:
        """The adapted parameters as they were."""
        return [copied for tensor, copied in self._tensors if isinstance(tensor, nn.Parameter)]

    def restore(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, copied in self._tensors:
                tensor.copy_(copied)
        if self._optimizer is not None and self._optimizer_state is not None:
            self._optimizer.load_state_dict(copy.deepcopy(self._optimizer_state))
            self._optimizer.zero_grad(set_to_none=True)


@runtime_checkable
class _Stateful(Protocol):
    """A learning rate that remembers something from image to image."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


def _state(part: object) -> dict[str, Any] | None:
    return copy.deepcopy(part.state_dict()) if isinstance(part, _Stateful) else None


def _load(part: object, state: dict[str, Any] | None) -> None:
    if isinstance(part, _Stateful) and state is not None:
        part.load_state_dict(copy.deepcopy(state))


def as_given(model: nn.Module) -> list[nn.Module]:
    """Copies of the network that stay as they are: as it was trained, and normalizing each image by its own statistics.

    They share their parameters.
    """
    trained = copy.deepcopy(model)
    alone = copy.deepcopy(trained, {id(parameter): parameter for parameter in trained.parameters()})
    use_test_statistics(alone, InstanceStatistics())
    return [trained, alone]


def _length(parts: Iterable[Tensor]) -> float:
    return math.sqrt(sum(part.square().sum().item() for part in parts))


def _in_given_layout(state: Any) -> Any:
    """The state with every tensor in it contiguous, as files want it, however the network is computed."""
    if isinstance(state, Tensor):
        return state.contiguous()
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = _in_given_layout(value)
    return state


def _placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and floating-point type of the network."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.float32


def _check_settings(
    objective: object,
    rate: LearningRate | None,
    memory: MemoryBank | None,
    steps: int,
    mode: str,
    predict: str,
    layout: str,
) -> None:
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
    if mode not in ("continual", "image-specific"):
        raise SettingError(f"mode must be 'continual' or 'image-specific', got {mode!r}")
    if predict not in ("after", "before"):
        raise SettingError(f"predict must be 'after' or 'before', got {predict!r}")
    if layout not in ("auto", "given"):
        raise SettingError(f"layout must be 'auto' or 'given', got {layout!r}")
