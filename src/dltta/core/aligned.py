"""5 rate. Do two losses agree on where to go? The cosine of their gradients sets the rate (GraTa, AAAI 2025)."""

import math
from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from dltta.core.gradients import differentiated, reached
from dltta.core.rates import Signals
from dltta.errors import SettingError
from dltta.models.features import forward_pass
from dltta.models.predictions import probabilities
from dltta.models.views import cross_entropy, flips, mean_prediction

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (model, images, logits that carry a graph) -> scalar


def flip_consistency(model: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
    """Cross-entropy of a prediction against its mean with those of the flipped images; one pass per flip."""
    views = flips(x)
    mirrored = mean_prediction(lambda images: forward_pass(model, images).logits, x, views[1:]) if views[1:] else None
    own = probabilities(logits.detach())
    target = own if mirrored is None else (own + (len(views) - 1) * mirrored) / len(views)
    return cross_entropy(logits, target)


class Aligned:
    """η = α · ¼ (1 + cos)², cos between the gradient of the objective and that of another loss: α if they agree.

    The other loss is `auxiliary`; unless given, it is what the objective itself computes beside its own (GraTa: the
    entropy), else flip consistency. A loss of one's own costs a forward and a backward pass besides what it does
    itself; flip consistency two forward passes more. The cosine is over all adapted parameters as one vector; a zero
    gradient is orthogonal to all. `alpha` 1e-4 and the form are GraTa's.
    """

    needs_memory: ClassVar[bool] = False

    def __init__(self, alpha: float = 1e-4, auxiliary: Loss | None = None) -> None:
        if not (math.isfinite(alpha) and alpha >= 0):
            raise SettingError(f"alpha must be a finite number ≥ 0, got {alpha!r}; GraTa uses 1e-4")
        self.alpha, self.auxiliary = alpha, auxiliary

    def __call__(self, signals: Signals) -> float:
        if self.auxiliary is None and signals.auxiliary is not None:
            other = signals.auxiliary
        else:
            other = _gradient_of(self.auxiliary or flip_consistency, signals)
        return self.alpha * (1 + cosine(signals.gradient, other)) ** 2 / 4


def cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Between two gradients by parameter, each one long vector; a parameter that one lacks is zero there."""
    product = sum((part * other[name]).sum().item() for name, part in one.items() if name in other)
    lengths = [math.sqrt(sum(part.square().sum().item() for part in parts.values())) for parts in (one, other)]
    return max(-1.0, min(1.0, product / max(lengths[0] * lengths[1], 1e-12)))


def _gradient_of(loss: Loss, signals: Signals) -> dict[str, Tensor]:
    """By name, at the present parameters."""
    named = dict(signals.model.named_parameters())
    with torch.enable_grad():
        logits = forward_pass(signals.model, signals.images).logits
        _, gradient = differentiated(
            loss(signals.model, signals.images, logits), [named[name] for name in signals.parameters]
        )
    return reached(list(signals.parameters), gradient)
