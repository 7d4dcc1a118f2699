"""3 objectives. What must a method offer so that any network can be adapted with it?

A method is one class in one file. It sees the network and the images; never labels, the learning rate, the memory or a
configuration. Both kinds are plain protocols: nothing to inherit, nothing to register. `dltta.testing.check_objective`
checks a class of yours against this contract.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn


@runtime_checkable
class Preparation(Protocol):
    """A method without a loss: prepares the network once and then only predicts."""

    def prepare(self, model: nn.Module, /) -> object:
        """Change the adapter's own copy of the network (already in evaluation mode) as the method needs."""
        ...


@runtime_checkable
class Objective(Protocol):
    """A method with a loss L_tt whose gradient moves some of the network's parameters."""

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        """Change the adapter's own copy of the network as the method needs; the parameters that may move."""
        ...

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """The scalar loss for images x (B, C, *spatial).

        Called once right after the forward pass that gave these logits, whose graph they carry.
        """
        ...
