"""2 networks. Which statistics do the normalization layers use, and which of their parameters can move?"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dltta.errors import InputError, NothingToAdaptError, SettingError

NORMALIZATIONS: tuple[type[nn.Module], ...] = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def normalization_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every normalization layer of the network with its name."""
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, NORMALIZATIONS))


def affine_parameters(model: nn.Module, *, without: Sequence[str] = ()) -> list[nn.Parameter]:
    """Scale and shift of every normalization layer that has them, but for layers whose name fits one of `without`.

    These are patterns as in a shell: `layer4.*` and `*.layer4.*`.
    """
    layers = [layer for name, layer in normalization_layers(model) if not any(fnmatchcase(name, p) for p in without)]
    found = (getattr(layer, name, None) for layer in layers for name in ("weight", "bias"))
    return list(dict.fromkeys(parameter for parameter in found if isinstance(parameter, nn.Parameter)))


def require_affine_parameters(method: str, model: nn.Module, *, without: Sequence[str] = ()) -> list[nn.Parameter]:
    """As `affine_parameters`; a `NothingToAdaptError` that names the method where there are none."""
    parameters = affine_parameters(model, without=without)
    if not parameters:
        all_excluded = bool(affine_parameters(model))
        raise NothingToAdaptError(
            f"{method} finds nothing to adapt in {type(model).__name__}: "
            + (
                f"all its normalization layers fit {', '.join(without)}; exclude fewer"
                if all_excluded
                else "it has no normalization layer with scale and shift; build it with affine normalization"
            )
        )
    return parameters


@contextmanager
def kept_statistics(model: nn.Module) -> Iterator[None]:
    """While the context lasts, passes in training mode leave the stored statistics as they are.

    The layers write into copies; in place, restored values would invalidate graphs that wait for their backward pass.
    """
    layers = [layer for _, layer in normalization_layers(model)]
    stored = [layer._buffers for layer in layers]
    for layer, buffers in zip(layers, stored, strict=True):
        layer._buffers = {name: None if value is None else value.clone() for name, value in buffers.items()}
    try:
        yield
    finally:
        for layer, buffers in zip(layers, stored, strict=True):
            layer._buffers = buffers


class NormalizationStatistics(Protocol):
    """Which mean and variance does a batch-normalization layer use at test time?"""

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        """A module that normalizes in the place of `layer` and shares its parameters and stored statistics."""
        ...


def use_test_statistics(model: nn.Module, statistics: NormalizationStatistics | None = None) -> None:
    """Normalize with the statistics of the images at hand instead of those of the training set.

    Batch normalization takes mean and variance from the current batch, or as `statistics` says; instance normalization
    that tracked running statistics takes them from the current image. The stored statistics stay in place, unchanged,
    so the network's state dict keeps its keys. Group and layer normalization never used anything else.
    """
    chosen = statistics or BatchStatistics()
    wrap_batch_norms(model, chosen.wrap)
    for layer in model.modules():
        if isinstance(layer, _InstanceNorm):
            layer.track_running_stats = False


def wrap_batch_norms(model: nn.Module, wrap: Callable[[_BatchNorm, str], nn.Module]) -> list[nn.Module]:
    """Put what `wrap` gives in the place of every batch-normalization layer, in order; these modules."""
    wrappers: dict[nn.Module, nn.Module] = {}  # a layer used under two names keeps being one layer
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, _BatchNorm) and name:
            if layer not in wrappers:
                wrappers[layer] = wrap(layer, name)
            model.set_submodule(name, wrappers[layer])
    return list(wrappers.values())


def stores_statistics(model: nn.Module) -> bool:
    """Whether a batch-normalization layer of the network normalizes by statistics of the training set."""
    return any(isinstance(layer, _BatchNorm) and layer.running_mean is not None for layer in model.modules())


class BatchNormWrapper(_BatchNorm):
    """Batch normalization by other statistics, the same in training and evaluation mode.

    Shares parameters and stored statistics with the layer it stands in for.
    """

    def __init__(self, layer: _BatchNorm, name: str) -> None:
        super().__init__(1, eps=layer.eps, momentum=layer.momentum, affine=False, track_running_stats=False)
        self.num_features = layer.num_features
        self.affine = layer.affine
        self._parameters = layer._parameters
        self._buffers = layer._buffers
        self._name = name

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of spatial axes."""

    def stored(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the training set, (C,) each."""
        if self.running_mean is None or self.running_var is None:
            raise SettingError(f"layer {self._name!r} stores no statistics of the source to keep a part of")
        return self.running_mean, self.running_var

    def normalized(self, input: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        """By these statistics (C,), then scale and shift of the layer."""
        return F.batch_norm(input, mean, variance, self.weight, self.bias, training=False, momentum=0.0, eps=self.eps)


class TestBatchNorm(BatchNormWrapper):
    """Batch normalization by the statistics of the current batch."""

    __test__ = False  # not a test, whatever its name begins with

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() == input.shape[1]:
            raise InputError(
                f"layer {self._name!r} gets a single value per channel (one image, one position), which has no "
                "statistics of its own; use a larger batch or larger images, or the source statistics"
            )
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps)


@dataclass(frozen=True)
class BatchStatistics:
    """Those of the current batch: the paper's, and the default."""

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        return TestBatchNorm(layer, name)


BATCH_STATISTICS = BatchStatistics()
