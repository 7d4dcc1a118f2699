"""6 update. What would a gradient step give? One direction for a batch, and the prediction at any step size along it.

Every batch starts from the source's parameters: nothing accumulates, so a step that was wrong harms one batch, and what
was rehearsed is what happens later. The direction is that of Adam's first step, g / |g|: a step size then means
the same for every parameter and network.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from dltta.core.gradients import Gradient, displaced
from dltta.core.objectives.objective import Objective
from dltta.core.passes import run
from dltta.core.update import loss_gradient

EPSILON = 1e-8  # Adam's


class Steps:
    """A network and the parameters that an objective moves in it; `objective` must remember nothing between batches."""

    def __init__(self, network: nn.Module, objective: Objective) -> None:
        self.network, self.objective = network, objective
        self.parameters: Sequence[nn.Parameter] = list(objective.prepare(network))
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.loss = 0.0  # of the latest batch, before any step
        self._direction: Gradient = [None] * len(self.parameters)

    def begin(self, x: Tensor) -> Tensor:
        """Logits of a batch x (B, C, *spatial) before any step; its direction is kept for `logits`."""
        seen = run(self.network, x, features=False, learning=True)
        self.loss, gradient = loss_gradient(self.objective, self.network, x, seen.logits, self.parameters)
        self._direction = [None if part is None else -part / (part.abs() + EPSILON) for part in gradient]
        return seen.logits.detach()

    def logits(self, x: Tensor, size: float) -> Tensor:
        """After a step of this size along the direction of the latest batch."""
        with displaced(self.parameters, [None if part is None else size * part for part in self._direction]):
            return run(self.network, x, features=False, learning=False).logits
