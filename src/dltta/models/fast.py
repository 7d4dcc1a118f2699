"""2 networks. The same network, computed faster: how its weights lie in memory and which kernels it runs.

What is done here was measured to be faster (docs/speed.md) and changes results by rounding only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def speed_up(module: nn.Module) -> None:
    """Make a convolutional network faster on a CPU, in place; others stay as they are.

    The channels of a position lie side by side ("channels last"): what a convolution with such weights gives lies the
    same way, and so everything behind it. Instance normalization runs on the kernels of its relatives. Networks with
    group normalization stay as they are: torch (2.13 at least) crashes in its channels-last backward pass when the
    gradient of scale and shift is asked for but not that of the input, as in the first layer that Tent adapts.
    """
    if any(isinstance(layer, nn.GroupNorm) for layer in module.modules()):
        return
    convolutions = [layer for layer in module.modules() if isinstance(layer, _ConvNd)]
    weights = [weight for layer in convolutions for weight in layer.parameters() if not is_lazy(weight)]
    if not weights or not all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights):
        return
    for weight in weights:
        if weight.ndim in CHANNELS_LAST:
            weight.data = _channels_last(weight.data)
    for layer in module.modules():
        layer.__class__ = FASTER.get(type(layer), type(layer))  # keeps parameters, hooks and places


class _Kernels(_InstanceNorm):
    """Instance normalization that neither rearranges its input nor takes the slow kernel of batch normalization.

    With one image it is batch normalization by the batch, otherwise group normalization with one channel per group.
    """

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        if self.track_running_stats or input.shape[2:].numel() == 1:  # a single position: let torch refuse it
            normalized: Tensor = super()._apply_instance_norm(input)  # type: ignore[no-untyped-call]  # torch's
            return normalized
        if len(input) == 1 and not input.is_contiguous():
            return F.batch_norm(input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps)
        return F.group_norm(input.contiguous(), input.shape[1], self.weight, self.bias, self.eps)


class FastInstanceNorm2d(_Kernels, nn.InstanceNorm2d):
    """Instance normalization of images."""


class FastInstanceNorm3d(_Kernels, nn.InstanceNorm3d):
    """Instance normalization of volumes."""


FASTER: dict[type[nn.Module], type[nn.Module]] = {
    nn.InstanceNorm2d: FastInstanceNorm2d,
    nn.InstanceNorm3d: FastInstanceNorm3d,
}


def _channels_last(weight: Tensor) -> Tensor:
    """A copy; `Tensor.contiguous` would leave the strides of a single channel as they are, which convolutions ask."""
    return torch.empty_like(weight, memory_format=CHANNELS_LAST[weight.ndim]).copy_(weight)
