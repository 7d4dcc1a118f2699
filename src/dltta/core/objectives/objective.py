"""3 objectives. What must a method offer so that any network can be adapted with it?

A method is one class in one file. It sees the network and the images; never labels, the learning rate, the memory or a
configuration. All are plain protocols: nothing to inherit, nothing to register. `dltta.testing.check_objective` checks
a class of yours against this contract.

A method is a `Preparation` or an `Objective`. It may have more, and the adapter uses what it finds:

- `before_batch(model, x)`, called once per batch before the first pass: start from something that fits these images
- `gradient(model, x, logits, parameters) -> (loss, gradient)`, called instead of differentiating the loss: for methods
  whose gradient is taken elsewhere than at the present parameters, or from more than one loss. A second gradient that
  it computes on its way may stand in `auxiliary_gradient`, for rates that compare (`signals.auxiliary`)
- `after_update(model)`, called after every optimizer step: average a teacher, restore some weights
- `collapsed() -> bool`, asked after that: whether network, optimizer and what it remembers return to the source
- `predict(model, x, logits) -> logits`, called once per batch without gradient: what the adapter gives as its
  prediction instead of the network's logits, such as a teacher's
- `state_dict()` and `load_state_dict(state)`: everything that it remembers from batch to batch, in tensors, numbers,
  text, lists and dictionaries; saved, restored and rolled back with the network. Networks and other tensors that change
  belong there; those that never change do not
- `teacher`: the network that predicts, where that is not the one that moves; what an export writes
- `notice`: one sentence that a user must read before the first image, or None
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

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

        Called once right after the forward pass that gave these logits, whose graph they carry. A loss without a graph
        (`logits.new_zeros(())`) says that there is nothing to learn from these images: no step is taken, neither
        parameters nor optimizer change, and the rate of the update is 0.
        """
        ...


@runtime_checkable
class MeetsBatches(Protocol):
    """A method that does something once it sees the images, before the network does."""

    def before_batch(self, model: nn.Module, x: Tensor, /) -> None:
        """May change the adapted parameters and what it remembers; undone with the step if that fails."""
        ...


@runtime_checkable
class ComputesGradient(Protocol):
    """A method whose gradient is not simply that of its loss at the present parameters."""

    def gradient(
        self, model: nn.Module, x: Tensor, logits: Tensor, parameters: Sequence[nn.Parameter], /
    ) -> tuple[Tensor, list[Tensor | None]]:
        """The scalar loss and, for each of the parameters that `prepare` named, its gradient; None moves nothing.

        `logits` carry the graph of the pass that gave them. Gradients are recorded. The parameters may be changed on
        the way; at the end they are as they were, bit for bit.
        """
        ...


@runtime_checkable
class FollowsUpdates(Protocol):
    """A method that does something once the network has moved."""

    def after_update(self, model: nn.Module, /) -> None: ...


@runtime_checkable
class Recovers(Protocol):
    """A method that notices when the network has collapsed."""

    def collapsed(self) -> bool: ...


@runtime_checkable
class Predicts(Protocol):
    """A method that does not predict with the network's own logits."""

    def predict(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """Logits (B, C, *positions) for images x; `logits` are the network's own, after the update."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A method or a rate that remembers something from batch to batch."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...
