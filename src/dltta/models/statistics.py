"""2 networks. Normalization when one image is a poor sample of its site: between source and test statistics.

The paper normalizes by the statistics of the test batch alone (`BatchStatistics`). With one small image they say as
much about what happens to be in the picture as about the scanner. The choices here keep part of what the source knows;
each is given to an objective: `Tent(Shrunken(checkpoint.calibration.moments()))`. The statistics are constants to the
gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltta.errors import SettingError
from dltta.models.normalization import StandIn


@dataclass(frozen=True)
class Moments:
    """What single source images look like to one layer, per channel: their means and log variances."""

    mean: Tensor  # (C,) mean over images of the image's mean
    mean_spread: Tensor  # (C,) standard deviation over images of the same
    log_variance: Tensor  # (C,) mean over images of the logarithm of the image's variance
    log_variance_spread: Tensor  # (C,)


@dataclass(frozen=True)
class Blended:
    """`weight` of the test batch's mean and variance, the rest of the source's; 0 is the source, 1 the paper."""

    weight: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1:
            raise SettingError(f"the weight of the test statistics lies between 0 and 1, got {self.weight}")

    def stand_in(self, layer: _BatchNorm, name: str) -> nn.Module:
        return _Blended(layer, name, self.weight)


@dataclass(frozen=True)
class Running:
    """Test statistics carried along the stream: each batch moves them by `momentum`, starting from the source's.

    They move in the pass that gives the answer, so the answer must come after the update (`predict="after"`).
    """

    momentum: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise SettingError(f"momentum lies above 0 and up to 1, got {self.momentum}")

    def stand_in(self, layer: _BatchNorm, name: str) -> nn.Module:
        return _Running(layer, name, self.momentum)


@dataclass(frozen=True)
class Shrunken:
    """As far from the source's statistics towards the image's as the shift exceeds what source images show.

    A layer's test mean deviates from the source's by z_c source-image standard deviations in channel c. An image of the
    source gives Σ z² ≈ C. What is beyond is shift: its share w = max(0, 1 − C / Σ z²) of the deviation is followed, the
    rest is taken for chance. The same for log variances. So source images are left alone, a slightly different scanner
    is half followed, a very different one fully (w → 1 is the paper's normalization). Nothing to choose; `moments` come
    from source training.
    """

    moments: Mapping[str, Moments]

    def stand_in(self, layer: _BatchNorm, name: str) -> nn.Module:
        if name not in self.moments:
            raise SettingError(f"the calibration knows nothing of layer {name!r}; calibrate this network again")
        return _Shrunken(layer, name, self.moments[name])


class _Blended(StandIn):
    def __init__(self, layer: _BatchNorm, name: str, weight: float) -> None:
        super().__init__(layer, name)
        self.weight_of_test = weight

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = batch_moments(input)
        w, (source_mean, source_variance) = self.weight_of_test, self.stored()
        return self.normalized(
            input, source_mean + w * (mean - source_mean), source_variance + w * (variance - source_variance)
        )


class _Running(StandIn):
    def __init__(self, layer: _BatchNorm, name: str, momentum: float) -> None:
        super().__init__(layer, name)
        mean, variance = self.stored()
        self._buffers = dict(self._buffers)  # its own: the stored statistics of the network stay as trained
        self.register_buffer("test_mean", mean.clone())
        self.register_buffer("test_variance", variance.clone())
        self.momentum_of_test = momentum

    test_mean: Tensor
    test_variance: Tensor

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = batch_moments(input)
        w = self.momentum_of_test
        moved = self.test_mean + w * (mean - self.test_mean), self.test_variance + w * (variance - self.test_variance)
        if not torch.is_grad_enabled():  # the answer's pass, one per batch, moves them
            self.test_mean.copy_(moved[0])
            self.test_variance.copy_(moved[1])
        return self.normalized(input, *moved)


class _Shrunken(StandIn):
    def __init__(self, layer: _BatchNorm, name: str, moments: Moments) -> None:
        super().__init__(layer, name)
        like = self.stored()[0]
        self._buffers = dict(self._buffers)  # the moments are constants: not part of the network's state
        for field in ("mean", "mean_spread", "log_variance", "log_variance_spread"):
            self.register_buffer(f"source_{field}", getattr(moments, field).to(like, copy=True), persistent=False)

    source_mean: Tensor
    source_mean_spread: Tensor
    source_log_variance: Tensor
    source_log_variance_spread: Tensor

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = batch_moments(input)
        source_mean, source_variance = self.stored()
        moved = mean - self.source_mean
        widened = (variance + self.eps).log() - self.source_log_variance
        mean = source_mean + excess(moved / self.source_mean_spread) * moved
        factor = (excess(widened / self.source_log_variance_spread) * widened).exp()
        return self.normalized(input, mean, (source_variance + self.eps) * factor - self.eps)


def excess(deviations: Tensor) -> Tensor:
    """Share of squared deviations (C,), in standard deviations of source images, that chance does not explain."""
    return (1 - len(deviations) / deviations.square().sum()).clamp_min(0)


def batch_moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel over batch and positions, (C,) each, without gradient."""
    with torch.no_grad():
        variance, mean = torch.var_mean(input, [0, *range(2, input.ndim)], correction=0)
    return mean, variance
