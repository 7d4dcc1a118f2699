"""6 update. Everything that a step may change in a network, kept so that it can be put back bit for bit."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dltta.core.objectives.objective import Stateful


class Snapshot:
    """The adapted parameters, the buffers, the optimizer and the objective's own state at one moment."""

    def __init__(
        self,
        adapted: Sequence[nn.Parameter],
        buffered: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None,
        objective: object,
    ) -> None:
        self._adapted, self._buffered = adapted, buffered
        self._optimizer, self._objective = optimizer, objective
        self._tensors = [tensor.detach().clone() for tensor in self._live()]
        self._optimizer_state = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
        self._objective_state = state_of(objective)

    def restore(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for tensor, copied in zip(self._live(), self._tensors, strict=True):
                tensor.copy_(copied)
        if self._optimizer is not None and self._optimizer_state is not None:
            self._optimizer.load_state_dict(copy.deepcopy(self._optimizer_state))
            self._optimizer.zero_grad(set_to_none=True)
        load_state(self._objective, self._objective_state)

    def parameters(self) -> list[Tensor]:
        """The adapted parameters as they were, in the type and on the device that they now have."""
        return [copied.to(tensor) for tensor, copied in zip(self._adapted, self._tensors, strict=False)]

    def state_dict(self) -> dict[str, Any]:
        return {
            "tensors": [copied.clone() for copied in self._tensors],
            "optimizer": copy.deepcopy(self._optimizer_state),
            "objective": copy.deepcopy(self._objective_state),
        }

    def load_state_dict(self, state: dict[str, Any]) -> "Snapshot":
        kept = zip(self._live(), state["tensors"], strict=True)
        self._tensors = [tensor.to(live, copy=True) for live, tensor in kept]
        self._optimizer_state = copy.deepcopy(state["optimizer"])
        self._objective_state = copy.deepcopy(state["objective"])
        return self

    def _live(self) -> list[Tensor]:
        """The parameters and buffers themselves; buffers are looked up, because `to` replaces them."""
        buffers = [buffer for module in self._buffered for buffer in module._buffers.values() if buffer is not None]
        return [*self._adapted, *buffers]


def state_of(part: object) -> dict[str, Any] | None:
    """A copy of what an objective or a rate remembers; None if it remembers nothing."""
    return copy.deepcopy(part.state_dict()) if isinstance(part, Stateful) else None


def load_state(part: object, state: dict[str, Any] | None) -> None:
    """Counterpart of `state_of`; copies, because the owner may change its state in place."""
    if isinstance(part, Stateful) and state is not None:
        part.load_state_dict(copy.deepcopy(state))
