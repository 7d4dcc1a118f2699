"""2 networks. What the source model does on source images: the yardstick for images of another site.

Measured once at the end of source training on source images and kept with the network: numbers about layers and
predictions, no image and no label. `Shrinkage` statistics, the relative learning rate, EATA and the guard measure with
it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltta.errors import SettingError
from dltta.models.statistics import Moments, image_moments

DRAWS = 256  # random batches that stand for "any batch of this size"


@dataclass(frozen=True)
class Calibration:
    """Of N source images: per layer each image's mean and variance, and what the predictions were like."""

    layers: Mapping[str, tuple[Tensor, Tensor]]  # batch-normalization layer: means (N, C) and variances (N, C)
    eps: Mapping[str, float]  # of those layers
    predictions: Mapping[str, Any] = field(default_factory=dict)  # numbers for the guard and the rate, see `training`
    fisher: Mapping[str, Tensor] = field(default_factory=dict)  # how much scales and shifts matter, for EATA; may lack

    def checksum(self) -> str:
        """Of everything that was measured, as lower-case hexadecimal."""
        digest = hashlib.sha256(json.dumps([dict(self.eps), dict(self.predictions)], sort_keys=True).encode())
        for name, parts in self.layers.items():
            digest.update(name.encode() + b"".join(part.cpu().numpy().tobytes() for part in parts))
        for name, part in sorted(self.fisher.items()):
            digest.update(f"fisher {name}".encode() + part.cpu().float().numpy().tobytes())
        return digest.hexdigest()

    def moments(self, batch_size: int = 1) -> dict[str, Moments]:
        """What batches of this size look like to each layer."""
        if batch_size < 1:
            raise SettingError(f"batch_size must be at least 1, got {batch_size}")
        return {name: self._moments(name, batch_size) for name in self.layers}

    def _moments(self, name: str, batch_size: int) -> Moments:
        means, variances = (part.double() for part in self.layers[name])
        if batch_size > 1:  # the moments of random batches put together from the images, drawn the same every time
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randint(len(means), (DRAWS, batch_size), generator=generator)
            squares = (variances + means.square())[drawn].mean(1)
            means = means[drawn].mean(1)
            variances = squares - means.square()
        logarithms = log_variances(variances, self.eps[name])
        tiny = torch.finfo(torch.float32).tiny
        parts = (means.mean(0), means.std(0).clamp_min(tiny), logarithms.mean(0), logarithms.std(0).clamp_min(tiny))
        return Moments(*(part.float() for part in parts))


class OODScore:
    """How far an image is from source images, layer by layer: the mean square of its deviations from them.

    A deviation is that of a channel's mean, or of the logarithm of its variance, in standard deviations between source
    images: an image of the source has a score of about 1.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._moments, self._eps = calibration.moments(), calibration.eps

    def __call__(self, layers: Mapping[str, tuple[Tensor, Tensor]]) -> Tensor:
        """Of B images, from what enters each layer (means and variances, (B, C)): (layers, B), in the layers' order."""
        unknown = [name for name in layers if name not in self._moments]
        if unknown:
            raise SettingError(f"the calibration knows nothing of layer {unknown[0]!r}; calibrate this network again")
        return torch.stack([self._of(name, *parts) for name, parts in layers.items()])

    def _of(self, name: str, means: Tensor, variances: Tensor) -> Tensor:
        source = self._moments[name]
        shifted = (means - source.mean) / source.mean_spread
        widened = (log_variances(variances, self._eps[name]) - source.log_variance) / source.log_variance_spread
        return torch.cat([shifted, widened], 1).square().mean(1)  # (B,)


def log_variances(variances: Tensor, eps: float) -> Tensor:
    """As a layer divides by them."""
    return (variances.clamp_min(0) + eps).log()


class LayerSamples:
    """Collects mean and variance of what enters each batch-normalization layer, image by image."""

    def __init__(self) -> None:
        self.layers: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        self.eps: dict[str, float] = {}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """While this lasts, every pass of the network is recorded."""
        named = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
        handles = []
        for name, layer in named:
            self.layers.setdefault(name, ([], []))
            self.eps[name] = layer.eps
            handles.append(layer.register_forward_pre_hook(self._record(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def stacked(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (torch.cat(means), torch.cat(variances)) for name, (means, variances) in self.layers.items()}

    def _record(self, name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            means, variances = image_moments(inputs[0].detach().float())
            self.layers[name][0].append(means.cpu())
            self.layers[name][1].append(variances.cpu())

        return hook
