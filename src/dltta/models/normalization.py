"""2 networks. Which statistics do the normalization layers use, and which of their parameters can move?"""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dltta.errors import InputError

NORMALIZATIONS: tuple[type[nn.Module], ...] = (_BatchNorm, _InstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def normalization_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every normalization layer of the network with its name."""
    return ((name, layer) for name, layer in model.named_modules() if isinstance(layer, NORMALIZATIONS))


def affine_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Scale and shift of every normalization layer that has them."""
    found = (getattr(layer, name, None) for _, layer in normalization_layers(model) for name in ("weight", "bias"))
    return list(dict.fromkeys(parameter for parameter in found if isinstance(parameter, nn.Parameter)))


def use_test_statistics(model: nn.Module) -> None:
    """Normalize with the statistics of the images at hand instead of those of the training set.

    Batch normalization takes mean and variance from the current batch; instance normalization that tracked running
    statistics takes them from the current image. The stored statistics stay in place, unused and unchanged, so the
    network's state dict keeps its keys. Group and layer normalization never used anything else.
    """
    stand_ins: dict[nn.Module, TestBatchNorm] = {}  # a layer used under two names keeps being one layer
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, _BatchNorm) and name:
            stand_in = stand_ins.setdefault(layer, TestBatchNorm(layer, name))
            model.set_submodule(name, stand_in)
        elif isinstance(layer, _InstanceNorm):
            layer.track_running_stats = False


class TestBatchNorm(_BatchNorm):
    """Batch normalization by the statistics of the current batch, in training and evaluation mode alike.

    Shares parameters and stored statistics with the layer it stands in for.
    """

    __test__ = False  # not a test, whatever its name begins with

    def __init__(self, layer: _BatchNorm, name: str) -> None:
        super().__init__(1, eps=layer.eps, momentum=layer.momentum, affine=False, track_running_stats=False)
        self.num_features = layer.num_features
        self.affine = layer.affine
        self._parameters = layer._parameters
        self._buffers = layer._buffers
        self._name = name

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of spatial axes."""

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() == input.shape[1]:
            raise InputError(
                f"layer {self._name!r} gets a single value per channel (one image, one position), which has no "
                "statistics of its own; use a larger batch or larger images, or the source statistics"
            )
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps)
