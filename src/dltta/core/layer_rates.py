"""5 rate. How far should each layer move? Rules that give every adapted parameter a rate of its own.

Both ask the network once more: they look at the gradient of a loss other than the objective's, at the parameters before
the update.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dltta.core.rates import Signals, require_rate
from dltta.errors import SettingError
from dltta.models.predictions import log_probabilities, most_likely

TINY = 1e-8  # of both papers


class LAW:
    """η_l = α · ((v_l − min v) / (max v − min v)) ** τ, v_l = √ of the mean of all squared gradients so far (LAW).

    Layer-wise test-time adaptation, Park et al., WACV 2024: the gradient is that of the negative log-likelihood of the
    network's own most likely class. A layer that such gradients reach weakly stays, the one that they reach most moves
    at α; so does a single one, which has none to be compared with (ours). The sums never fade. Differs from the
    released program: its gradient still holds that of the update before, which we take for a slip; and its Adam begins
    anew at each step, ours goes on.
    """

    per_parameter: ClassVar[bool] = True
    needs_memory: ClassVar[bool] = False

    def __init__(self, alpha: float, *, tau: float = 1.0) -> None:
        require_rate("alpha", alpha)
        if not (math.isfinite(tau) and tau > 0):
            raise SettingError(f"tau must be a positive number, got {tau!r}")
        self.alpha, self.tau = alpha, tau
        self.sums: dict[str, float] = {}  # by parameter: of the mean squared gradients

    def __call__(self, signals: Signals) -> Sequence[float]:
        if len(signals.parameters) == 1:
            return [self.alpha]
        for name, gradient in gradients(signals, _own_labels).items():
            self.sums[name] = self.sums.get(name, 0.0) + gradient.double().square().mean().item()
        lengths = [math.sqrt(self.sums.get(name, 0.0)) for name in signals.parameters]
        least, span = min(lengths), max(lengths) - min(lengths)
        return [self.alpha * ((length - least) / (span + TINY)) ** self.tau for length in lengths]

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self.sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = dict(state["sums"])


class PALM:
    """η_l = α · mean of |s − s̄| / s̄ over a parameter's numbers: those whose sensitivity s changes move (PALM).

    Maharana et al., AAAI 2025: g is the gradient of the cross-entropy to a uniform prediction at `temperature`;
    s = |θ · g|, and s̄ is its moving average from zero on, `decay` of the old. Only parameters with ‖g‖₁ ≤ `limit` are
    selected; the others stay where they are. As in the released program the uniform prediction is written as ones, so g
    is as many times larger as there are classes. Differs from it: there a parameter that is no longer selected goes on
    at its last rate, which we take for a slip; and Adam goes on from step to step.
    """

    per_parameter: ClassVar[bool] = True
    needs_memory: ClassVar[bool] = False

    def __init__(
        self, alpha: float, *, temperature: float = 50.0, limit: float = 1.0, decay: float = 0.5
    ) -> None:  # the authors', CIFAR-10-C
        require_rate("alpha", alpha)
        if not (temperature > 0 and limit > 0 and 0 <= decay < 1):
            raise SettingError(
                "temperature and limit are positive, decay lies from 0 to below 1, "
                f"got {temperature}, {limit} and {decay}"
            )
        self.alpha, self.temperature, self.limit, self.decay = alpha, temperature, limit, decay
        self.usual: dict[str, Tensor] = {}  # by parameter: s̄

    def __call__(self, signals: Signals) -> Sequence[float]:
        found = gradients(signals, lambda logits: _to_uniform(logits, self.temperature))
        return [
            self._rate(name, parameter, found[name])
            if name in found and found[name].abs().sum().item() <= self.limit
            else 0.0
            for name, parameter in signals.parameters.items()
        ]

    def _rate(self, name: str, parameter: Tensor, gradient: Tensor) -> float:
        sensitivity = (parameter * gradient).abs()
        before = self.usual.get(name, torch.zeros_like(sensitivity)).to(sensitivity)
        usual = self.usual[name] = self.decay * before + (1 - self.decay) * sensitivity
        return self.alpha * (((sensitivity - usual).abs() + TINY) / (usual + TINY)).mean().item()

    def state_dict(self) -> dict[str, Any]:
        return {"usual": dict(self.usual)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.usual = dict(state["usual"])


def gradients(signals: Signals, loss: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Of a loss of the logits with respect to the adapted parameters, in one pass more; those it reaches, by name."""
    named = dict(signals.model.named_parameters())
    with torch.enable_grad():
        parts = torch.autograd.grad(
            loss(signals.model(signals.images)), [named[name] for name in signals.parameters], allow_unused=True
        )
    return {name: part for name, part in zip(signals.parameters, parts, strict=True) if part is not None}


def _own_labels(logits: Tensor) -> Tensor:
    """Negative log-likelihood of the most likely class, mean over images and positions."""
    if logits.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(logits.float(), (logits.detach() >= 0).float())
    return F.cross_entropy(logits.float(), most_likely(logits.detach()))


def _to_uniform(logits: Tensor, temperature: float) -> Tensor:
    """− Σ_c log p_c at a temperature, mean over images and positions."""
    return -log_probabilities(logits / temperature).sum(1).mean()
