"""2 networks. Normalization when one image is a poor sample of its site: between source and test statistics.

The paper normalizes by batch statistics (`BatchStatistics`). With one small image they say as
much about what the image shows as about the scanner. The choices here keep part of what the source knows;
each is given to an objective: `Tent(Shrinkage(checkpoint.calibration.moments()))`. The statistics are constants to the
gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltta.errors import SettingError
from dltta.models.normalization import BatchNormWrapper, TestBatchNorm

PIECE = 16384  # rows whose values are summed one after the other; sums of more lose digits


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

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        return _Blended(layer, name, self.weight)


@dataclass(frozen=True)
class Running:
    """Test statistics that go on along the stream: each batch moves them by `momentum`, starting from the source's."""

    momentum: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.momentum <= 1:
            raise SettingError(f"momentum lies above 0 and up to 1, got {self.momentum}")

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        return _Running(layer, name, self.momentum)


@dataclass(frozen=True)
class Pooled:
    """The image's own statistics averaged with those of the most similar of the latest images, layer by layer.

    Similar means close in mean and log variance to what this layer gets. In a stream of one site many images pool;
    where sites alternate each pools with its own. `neighbors` of the latest `capacity` batches are averaged in.
    """

    capacity: int = 20
    neighbors: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.neighbors <= self.capacity:
            raise SettingError(f"neighbors lie between 1 and the capacity of {self.capacity}, got {self.neighbors}")

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        return _Pooled(layer, name, self.capacity, self.neighbors)


@dataclass(frozen=True)
class Shrinkage:
    """As far from the source's statistics towards the image's as the shift exceeds what source images show.

    A layer's mean deviates from the source's by z_c source-image standard deviations in channel c. Were this an image
    of the source, Σ z² would be about C. What is beyond is shift: the share w = max(0, 1 − C / Σ z²) of the deviation
    is followed, the rest is taken for chance. The same for log variances. So images of the source keep the source's
    statistics, a slightly different scanner is half followed, a very different one fully (w → 1 is the paper's
    normalization). There is nothing to choose; `moments` come from source training. An empirical Bayes estimate (James
    and Stein 1961), layer by layer.

    With a `window` above 1 the deviation is the mean over about so many of the latest images, this one included, and
    counts as that many: n Σ z² stands for Σ z². Better where a stream is all of one site, but on held-out images of two
    source sites it costs one to two points, so 1 is the default.
    """

    moments: Mapping[str, Moments]
    window: int = 1

    def __post_init__(self) -> None:
        if self.window < 1:
            raise SettingError(f"window must be at least 1, got {self.window}")

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        if name not in self.moments:
            raise SettingError(f"the calibration knows nothing of layer {name!r}; calibrate this network again")
        return _Shrinkage(layer, name, self.moments[name], self.window)


@dataclass(frozen=True)
class InstanceStatistics:
    """Those of each image, whatever else is in the batch; a layer with a single position keeps the source's."""

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        return _Instance(layer, name)


class _Instance(BatchNormWrapper):
    def forward(self, input: Tensor) -> Tensor:
        if input[0, 0].numel() == 1:
            return self.normalized(input, *self.stored())
        return F.instance_norm(input, None, None, self.weight, self.bias, use_input_stats=True, eps=self.eps)


@dataclass(frozen=True)
class AvailableStatistics:
    """Those of the batch; a layer that gets a single value per channel keeps the source's instead of refusing it."""

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        return _Available(layer, name)


class _Available(TestBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        return self.normalized(input, *self.stored()) if input.numel() == input.shape[1] else super().forward(input)


class StatefulWrapper(BatchNormWrapper):
    """Statistics that go on from batch to batch: `commit` takes over those of the latest pass, once per batch."""

    latest: tuple[Tensor, ...]

    def commit(self) -> None:
        raise NotImplementedError


def stateful_layers(model: nn.Module) -> list[StatefulWrapper]:
    return [layer for layer in model.modules() if isinstance(layer, StatefulWrapper)]


class _Blended(BatchNormWrapper):
    def __init__(self, layer: _BatchNorm, name: str, weight: float) -> None:
        super().__init__(layer, name)
        self.weight_of_test = weight

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = batch_moments(input)
        w, (source_mean, source_variance) = self.weight_of_test, self.stored()
        return self.normalized(
            input, source_mean + w * (mean - source_mean), source_variance + w * (variance - source_variance)
        )


class _Running(StatefulWrapper):
    def __init__(self, layer: _BatchNorm, name: str, momentum: float) -> None:
        super().__init__(layer, name)
        mean, variance = self.stored()
        self._buffers = dict(self._buffers)  # a copy: the stored statistics of the source model stay
        self.register_buffer("test_mean", mean.clone())
        self.register_buffer("test_variance", variance.clone())
        self.momentum_of_test = momentum
        self.latest = self.test_mean, self.test_variance

    test_mean: Tensor
    test_variance: Tensor

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = batch_moments(input)
        w = self.momentum_of_test
        moved = self.test_mean + w * (mean - self.test_mean), self.test_variance + w * (variance - self.test_variance)
        self.latest = moved
        return self.normalized(input, *moved)

    def commit(self) -> None:
        self.test_mean.copy_(self.latest[0])
        self.test_variance.copy_(self.latest[1])


class _Pooled(StatefulWrapper):
    def __init__(self, layer: _BatchNorm, name: str, capacity: int, neighbors: int) -> None:
        super().__init__(layer, name)
        like = self.stored()[0]
        self._buffers = dict(self._buffers)  # a copy: the stored statistics of the source model stay
        for field in ("means", "variances"):
            self.register_buffer(f"stream_{field}", like.new_zeros(capacity, len(like)))
        self.register_buffer("stream_batches", like.new_zeros(1))
        self.neighbors = neighbors
        self.latest = like, like

    stream_means: Tensor
    stream_variances: Tensor
    stream_batches: Tensor

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = self.latest = batch_moments(input)
        kept = min(int(self.stream_batches), len(self.stream_means))
        means, variances = self.stream_means[:kept], self.stream_variances[:kept]
        apart = (means - mean).square() / (variance + self.eps)
        apart = apart + ((variances + self.eps).log() - (variance + self.eps).log()).square()  # (kept, C)
        nearest = apart.sum(1).topk(min(self.neighbors, kept), largest=False).indices
        pooled_mean = torch.cat([mean[None], means[nearest]]).mean(0)
        within = torch.cat([variance[None], variances[nearest]]).mean(0)
        between = (torch.cat([mean[None], means[nearest]]) - pooled_mean).square().mean(0)
        return self.normalized(input, pooled_mean, within + between)  # as of all their positions together

    def commit(self) -> None:
        place = int(self.stream_batches) % len(self.stream_means)
        self.stream_means[place], self.stream_variances[place] = self.latest
        self.stream_batches += 1


class _Shrinkage(StatefulWrapper):
    def __init__(self, layer: _BatchNorm, name: str, moments: Moments, window: int) -> None:
        super().__init__(layer, name)
        like = self.stored()[0]
        self._buffers = dict(self._buffers)  # a copy: the stored statistics of the source model stay
        for field in ("mean", "mean_spread", "log_variance", "log_variance_spread"):
            self.register_buffer(f"source_{field}", getattr(moments, field).to(like, copy=True), persistent=False)
        for field in ("images", "moved", "widened"):  # sums over the images before, fading
            self.register_buffer(f"stream_{field}", torch.zeros_like(like if field != "images" else like[:1]))
        self.fading = 1 - 1 / window
        self.latest = self.stream_images, self.stream_moved, self.stream_widened

    source_mean: Tensor
    source_mean_spread: Tensor
    source_log_variance: Tensor
    source_log_variance_spread: Tensor
    stream_images: Tensor
    stream_moved: Tensor
    stream_widened: Tensor

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = batch_moments(input)
        source_mean, source_variance = self.stored()
        images = self.fading * self.stream_images + 1
        moved = self.fading * self.stream_moved + mean - self.source_mean
        widened = self.fading * self.stream_widened + (variance + self.eps).log() - self.source_log_variance
        self.latest = images, moved, widened
        moved, widened = moved / images, widened / images
        mean = source_mean + excess(moved / self.source_mean_spread, images) * moved
        factor = (excess(widened / self.source_log_variance_spread, images) * widened).exp()
        return self.normalized(input, mean, (source_variance + self.eps) * factor - self.eps)

    def commit(self) -> None:
        for kept, latest in zip((self.stream_images, self.stream_moved, self.stream_widened), self.latest, strict=True):
            kept.copy_(latest)


def excess(deviations: Tensor, images: Tensor | float = 1.0) -> Tensor:
    """Share of squared deviations (C,) of a mean over so many images that chance does not explain.

    Deviations are in standard deviations of single source images.
    """
    return (1 - len(deviations) / (images * deviations.square().sum())).clamp_min(0)


def batch_moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel over batch and positions, (C,) each, without gradient.

    In two passes, which are as exact as `torch.var_mean` and take a tenth of its time on a CPU; with channels last on a
    CPU by pieces, as exact in less than half the time of that.
    """
    with torch.no_grad():
        rows = input.movedim(1, -1)
        if rows.is_contiguous() and input.device.type == "cpu" and input.dtype == torch.float32:
            return _moments_of_rows(rows.flatten(0, -2))
        axes = [0, *range(2, input.ndim)]
        mean = input.mean(axes, keepdim=True)
        variance = (input - mean).square_().mean(axes)
    return mean.flatten(), variance


def image_moments(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each image's channels over positions, (B, C) each."""
    if len(input) == 1:
        mean, variance = batch_moments(input)
        return mean[None], variance[None]
    values = input.flatten(2)
    means = values.mean(2, keepdim=True)
    return means[..., 0], (values - means).square_().mean(2)


def _moments_of_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Of values (rows, C). What batch normalization sums plainly stays exact in pieces of a few thousand rows."""
    pieces = [torch.batch_norm_update_stats(piece, None, None, 0.0) for piece in rows.split(PIECE)]
    if len(pieces) == 1:
        return pieces[0]
    means, variances = (torch.stack(each) for each in zip(*pieces, strict=True))  # (pieces, C) each
    shares = torch.tensor([[min(PIECE, len(rows) - start) / len(rows)] for start in range(0, len(rows), PIECE)])
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)
