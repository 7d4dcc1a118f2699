"""Source and target together. Layer-wise adaptive rates, for large batches (You et al. 2017)."""

from typing import Any

import torch


class LARS(torch.optim.SGD):
    """SGD with momentum in which each parameter's rate is multiplied by `trust` · ‖w‖ / (‖g‖ + decay · ‖w‖).

    A parameter or gradient that is zero has the plain rate.
    """

    def __init__(self, params: Any, lr: float, *, momentum: float, weight_decay: float, trust: float = 1e-3) -> None:
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=0.0)
        self.trust, self.decay = trust, weight_decay

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # gradients are there already
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = self._scaled(parameter, parameter.grad)
        super().step()

    def _scaled(self, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        size, slope = weight.norm(), gradient.norm()
        ratio = self.trust * size / (slope + self.decay * size)
        return (gradient + self.decay * weight) * torch.where((size > 0) & (slope > 0), ratio, torch.ones_like(ratio))
