"""3 objectives. The gradient of a loss, also at other parameters than the present ones; what methods share."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Gradient = list[Tensor | None]  # one for each adapted parameter, None where the loss does not reach


def differentiated(loss: Tensor, parameters: Sequence[nn.Parameter], *, keep: bool = False) -> tuple[Tensor, Gradient]:
    """A loss and its gradient; a loss that is no number, or that carries no graph, has none.

    `keep` leaves the graph for another gradient.
    """
    if not loss.isfinite() or not loss.requires_grad:
        return loss, [None] * len(parameters)
    with torch.autocast(loss.device.type, enabled=False):
        return loss, list(torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=keep or None))


def reached(names: Sequence[str], gradient: Gradient) -> dict[str, Tensor]:
    """The gradient by the parameter's name, of those that the loss reaches."""
    return {name: part for name, part in zip(names, gradient, strict=True) if part is not None}


@contextmanager
def displaced(parameters: Sequence[nn.Parameter], by: Gradient) -> Iterator[None]:
    """While the context lasts, each parameter is so much larger; afterwards it is as it was, bit for bit.

    Graphs recorded before cannot be differentiated any more, those recorded within only within.
    """
    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter, part in zip(parameters, by, strict=True):
                if part is not None:
                    parameter.add_(part)
        torch.clear_autocast_cache()  # else passes under autocast would still see the old weights
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        torch.clear_autocast_cache()
