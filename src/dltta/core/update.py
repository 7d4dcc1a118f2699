"""6 update. One gradient step: the loss and its gradient, then the move — at the rate that somebody else decides."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dltta.core.gradients import Gradient, differentiated
from dltta.core.objectives.objective import (
    ComputesGradient,
    FollowsUpdates,
    MeetsBatches,
    Objective,
    Predicts,
    Preparation,
    Recovers,
)
from dltta.core.passes import require_finite
from dltta.errors import NonFiniteError, SettingError
from dltta.models.predictions import all_finite


@torch.no_grad()
def before_batch(objective: object, model: nn.Module, x: Tensor) -> None:
    """What the objective does once the images are known, if anything."""
    if isinstance(objective, MeetsBatches):
        objective.before_batch(model, x)


def loss_gradient(
    objective: Objective | Preparation, model: nn.Module, x: Tensor, logits: Tensor, adapted: Sequence[nn.Parameter]
) -> tuple[float, Gradient]:
    """The test-time loss and its gradient; `logits` carry the graph of the pass that gave them."""
    if not isinstance(objective, Objective):
        raise SettingError(f"{type(objective).__name__} has no loss to take a step on")
    with torch.enable_grad():
        if isinstance(objective, ComputesGradient):
            loss, gradient = objective.gradient(model, x, logits, adapted)
        else:
            loss, gradient = differentiated(objective(model, x, logits), adapted)
    if not loss.isfinite():
        raise NonFiniteError(f"the loss is {loss.item()}")
    if len(gradient) != len(adapted):
        raise SettingError(f"{type(objective).__name__} gives {len(gradient)} gradients for {len(adapted)} parameters")
    if not all(all_finite(part) for part in gradient if part is not None):
        raise NonFiniteError("the gradient has NaN or infinite values")
    return loss.item(), gradient


def move(
    optimizer: torch.optim.Optimizer | None,
    adapted: Sequence[nn.Parameter],
    gradient: Gradient,
    rates: Sequence[float],
) -> bool:
    """One optimizer step; `rates` has one for each parameter, all alike for those of one group.

    Without any gradient there is no step, and what the optimizer remembers does not move the parameters either.
    """
    if optimizer is None:
        raise SettingError("the objective names no parameter to move")
    if all(part is None for part in gradient):
        return False
    rate_of = dict(zip(adapted, rates, strict=True))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            group["lr"] = rate_of[parameter]
    for parameter, part in zip(adapted, gradient, strict=True):
        parameter.grad = part
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    torch.clear_autocast_cache()  # else the next pass under autocast would still see the old weights
    return True


@torch.no_grad()
def after_update(objective: object, model: nn.Module) -> None:
    """What the objective does once the network has moved, if anything."""
    if isinstance(objective, FollowsUpdates):
        objective.after_update(model)


def collapsed(objective: object) -> bool:
    """Whether the objective finds that the network must return to the source."""
    return isinstance(objective, Recovers) and objective.collapsed()


@torch.no_grad()
def predicted(objective: object, model: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
    """The network's logits (B, C, *positions), or what the objective predicts instead."""
    logits = logits.detach()
    if not isinstance(objective, Predicts):
        return logits
    given = objective.predict(model, x, logits).detach()
    require_finite(given)
    if given.shape != logits.shape:
        raise SettingError(
            f"{type(objective).__name__}.predict gives {tuple(given.shape)}, logits have {tuple(logits.shape)}"
        )
    return given
