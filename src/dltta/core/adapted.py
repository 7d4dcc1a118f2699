"""6 update. The adapter's own copy of a network with all that moves: made, saved, restored, brought to a device."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dltta.core.memory import MemoryBank
from dltta.core.objectives.objective import Objective, Preparation
from dltta.core.passes import placement
from dltta.core.rates import AnyRate
from dltta.core.snapshot import Snapshot, load_state, state_of
from dltta.errors import DlttaError, NothingToAdaptError, SettingError, StateError
from dltta.models.compiled import require_layers
from dltta.models.fast import speed_up
from dltta.models.features import find_layer
from dltta.models.statistics import stateful_layers

Layout = Literal["auto", "given"]
OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


class AdaptedNetwork(nn.Module):
    """A copy of a network as an objective prepared it, with optimizer, memory and rate; `state_dict` is all of it.

    The caller's network, memory and rate are never changed. `train()` and `eval()` do not reach the network: it always
    runs in evaluation mode, as the objective prepared it.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective | Preparation,
        rate: AnyRate | None,
        memory: MemoryBank | None,
        optimizer: OptimizerFactory,
        layout: Layout,
    ) -> None:
        super().__init__()
        require_layers(model)
        with torch.inference_mode(False):
            self.model = copy.deepcopy(model).requires_grad_(False).eval()
            self.objective = copy.deepcopy(objective)
            if layout == "auto":
                for network in (self.model, *self._own_networks()):
                    speed_up(network)
            self.rate = copy.deepcopy(rate)
            self.memory = copy.deepcopy(memory)
            self.batches_seen = 0
            self._adapted = self._prepare()
            self._names = _names(self.model, self._adapted)
            self._stateful = stateful_layers(self.model)
            self._buffered = [module for module in self.model.modules() if module._buffers]
            self._optimizer = self._make_optimizer(optimizer)
            if memory is not None and memory.layer is not None:
                find_layer(self.model, memory.layer)
            self._source = self._snapshot()
            self._initial = AdaptedNetwork.get_extra_state(self)

    def reset(self) -> None:
        """Back to the moment of construction, bit for bit: network, optimizer, memory, rate, objective and counter."""
        self._source.restore()
        self._load_extra_state(self._initial)

    def adapted_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that move, by their name in the network."""
        chosen = {id(parameter) for parameter in self._adapted}
        return {name: parameter for name, parameter in self.model.named_parameters() if id(parameter) in chosen}

    def train(self, mode: bool = True) -> "AdaptedNetwork":
        """Only marks the adapter: whether layers behave as in training is the objective's choice, not the caller's."""
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Everything that a resumed stream needs, as a snapshot: later steps do not change it."""
        return _contiguous(copy.deepcopy(super().state_dict(*args, **kwargs)))

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "adapted": list(self.adapted_parameters()),
            "optimizer": None if self._optimizer is None else copy.deepcopy(self._optimizer.state_dict()),
            "memory": None if self.memory is None else self.memory.state_dict(),
            "rate": state_of(self.rate),
            "objective": state_of(self.objective),
            "batches_seen": self.batches_seen,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        names = list(self.adapted_parameters())
        if state["adapted"] != names:
            raise StateError(
                f"the saved state moves {len(state['adapted'])} parameters, this adapter {len(names)} others; "
                "load it with the objective and the network it was saved with"
            )
        self._load_extra_state(state)

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        if (state["memory"] is None) != (self.memory is None):
            raise StateError("one of the saved state and this adapter has a memory, the other has none")
        if self.memory is not None:
            self.memory.load_state_dict(state["memory"])
        if self._optimizer is not None:
            self._optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        load_state(self.rate, state["rate"])
        load_state(self.objective, state["objective"])
        self.batches_seen = state["batches_seen"]

    def _snapshot(self) -> Snapshot:
        return Snapshot(self._adapted, self._buffered, self._optimizer, self.objective)

    @contextmanager
    def _all_or_nothing(self, case: str | None) -> Iterator[Snapshot]:
        """The state at the start of a step; it comes back if the step fails, and the error says for which case."""
        before, rate = self._snapshot(), state_of(self.rate)
        try:
            yield before
        except BaseException as error:
            before.restore()
            load_state(self.rate, rate)
            if isinstance(error, DlttaError):
                raise type(error)(f"{case or f'batch {self.batches_seen + 1} of the stream'}: {error}") from error
            raise

    @contextmanager
    def _unnoticed(self) -> Iterator[None]:
        """Passes within this context do not count for the statistics of the stream."""
        latest = [layer.latest for layer in self._stateful]
        try:
            yield
        finally:
            for layer, kept in zip(self._stateful, latest, strict=True):
                layer.latest = kept

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AdaptedNetwork":
        """Moves the objective's networks, optimizer and memory along with the network (`adapter.to(device)`)."""
        nn.Module._apply(self, fn, recurse)
        for network in self._own_networks():
            network._apply(fn, recurse)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(self._optimizer.state_dict())  # casts its state to the parameters
        if self.memory is not None:
            self.memory.to(placement(self.model)[0])
        return self

    def _own_networks(self) -> list[nn.Module]:
        """Those that are attributes of the objective: heads, auto-encoders, a teacher."""
        parts = getattr(self.objective, "__dict__", {}).values()
        return [part for part in parts if isinstance(part, nn.Module)]

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

    def _make_optimizer(self, optimizer: OptimizerFactory) -> torch.optim.Optimizer | None:
        if not self._adapted:
            return None
        apart = getattr(self.rate, "per_parameter", False)
        return optimizer([{"params": [parameter]} for parameter in self._adapted] if apart else self._adapted)


def _names(model: nn.Module, parameters: list[nn.Parameter]) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    unknown = sum(id(parameter) not in names for parameter in parameters)
    if unknown:
        raise NothingToAdaptError(
            f"prepare() must return parameters of the network it was given, found {unknown} others; put them into it"
        )
    if len(set(map(id, parameters))) < len(parameters):
        raise SettingError("prepare() must name each parameter once, found one twice")
    return [names[id(parameter)] for parameter in parameters]


def _contiguous(state: Any) -> Any:
    """The state with every tensor in it contiguous, as files want it, however the network is computed."""
    if isinstance(state, Tensor):
        return state.contiguous()
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = _contiguous(value)
    return state
