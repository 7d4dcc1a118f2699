"""3 objectives. Sharpness-aware and reliable entropy minimization (SAR, Niu et al., ICLR 2023)."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from dltta.core.gradients import Gradient, differentiated, displaced
from dltta.errors import SettingError
from dltta.models.normalization import (
    BATCH_STATISTICS,
    NormalizationStatistics,
    require_affine_parameters,
    use_test_statistics,
)
from dltta.models.predictions import entropy, greatest_entropy

STAGES = ("layer4", "blocks.9", "blocks.10", "blocks.11", "denseblock4")
LAST_STAGE = (*(f"{stage}.*" for stage in STAGES), *(f"*.{stage}.*" for stage in STAGES), "norm", "features.norm5")
"""Layers that stay: the last stage of ResNets and ViTs, as the authors choose, and of DenseNets, as we add."""


class SAR:
    """Entropy of certain predictions, made small all around: the worst place nearby gives the gradient.

    Predictions with an entropy below `margin` · ln C count, each position of a dense one by itself. Their gradient g
    leads to the place θ + `radius` · g / ‖g‖; of what counted, what is still certain there gives the gradient that is
    applied at θ. A running mean of that loss (`momentum` of the old) below `recovery` · ln C is a collapse: network,
    optimizer and running mean return to the source. Normalization layers whose names fit `excluded` do not move.
    """

    def __init__(
        self,
        *,
        margin: float = 0.4,
        radius: float = 0.05,
        recovery: float = 0.2 / math.log(1000),
        momentum: float = 0.9,
        excluded: Sequence[str] = LAST_STAGE,
        statistics: NormalizationStatistics = BATCH_STATISTICS,
    ) -> None:
        if margin <= 0 or radius < 0 or recovery < 0:
            raise SettingError(
                f"margin must be above 0, radius and recovery at least 0, got {margin}, {radius} and {recovery}"
            )
        if not 0 <= momentum < 1:
            raise SettingError(f"momentum lies from 0 to below 1, got {momentum}")
        self.margin, self.radius, self.recovery, self.momentum = margin, radius, recovery, momentum
        self.excluded, self.statistics = tuple(excluded), statistics
        self._mean: float | None = None  # running mean of the loss
        self._limit = 0.0  # below which it is a collapse; known with the number of classes

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        parameters = require_affine_parameters("SAR", model, without=self.excluded)
        use_test_statistics(model, self.statistics)
        return parameters

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """The loss at θ, whose gradient only shows the way up; without a graph if no prediction counts."""
        entropies = entropy(logits).flatten()
        certain = entropies.detach() < self.margin * greatest_entropy(logits)
        return entropies[certain].mean() if certain.any() else entropies.new_zeros(())

    def gradient(
        self, model: nn.Module, x: Tensor, logits: Tensor, parameters: Sequence[nn.Parameter], /
    ) -> tuple[Tensor, Gradient]:
        """The loss and its gradient at the worst place nearby; None for all if nothing counts there."""
        nothing: Gradient = [None] * len(parameters)
        margin = self.margin * greatest_entropy(logits)
        entropies = entropy(logits).flatten()
        certain = entropies.detach() < margin
        if not certain.any():
            return entropies.new_zeros(()), nothing
        loss, uphill = differentiated(entropies[certain].mean(), parameters)
        with displaced(parameters, ascent(uphill, self.radius)):
            entropies = entropy(model(x)).flatten()
            still = certain & (entropies.detach() < margin)
            if not still.any():
                return loss.detach(), nothing
            loss, gradient = differentiated(entropies[still].mean(), parameters)
        self._track(loss.item(), logits)
        return loss.detach(), gradient

    def collapsed(self) -> bool:
        """Whether the network has become certain of everything, and returns to the source."""
        return self._mean is not None and self._mean < self._limit

    def _track(self, loss: float, logits: Tensor) -> None:
        self._mean = loss if self._mean is None else self.momentum * self._mean + (1 - self.momentum) * loss
        self._limit = self.recovery * greatest_entropy(logits)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean, "limit": self._limit}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._mean, self._limit = state["mean"], state["limit"]


def ascent(uphill: Gradient, radius: float) -> Gradient:
    """Along the gradient, all parts together as long as `radius`."""
    length = math.sqrt(sum(part.square().sum().item() for part in uphill if part is not None))
    return [None if part is None else part * (radius / (length + 1e-12)) for part in uphill]
