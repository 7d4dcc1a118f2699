"""2 networks. Small layers put into a frozen network so that it can be bent to a new site (ATTA, He et al. 2021)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class InputAdaptor(nn.Module):
    """x + a pixel-wise perceptron of x: 1×1 convolutions C → width → width → C, LeakyReLU 0.2, instance normalization.

    The last convolution starts at zero, so the adaptor starts as the identity, exactly. The original is not residual
    and is first fitted to reproduce the image; this form needs no such fit.
    """

    def __init__(self, spatial_dims: int, channels: int, width: int = 64) -> None:
        super().__init__()
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[spatial_dims]
        norm = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[spatial_dims]
        act = nn.LeakyReLU(0.2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same start for every stream
            first, second, last = conv(channels, width, 1), conv(width, width, 1), conv(width, channels, 1)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        self.layers = nn.Sequential(first, norm(width), act, second, norm(width), act, last)

    def forward(self, x: Tensor) -> Tensor:
        moved: Tensor = x + self.layers(x)
        return moved


class FeatureAdaptor(nn.Module):
    """A c → c 1×1 convolution that starts as the identity: identity weight, zero bias."""

    def __init__(self, spatial_dims: int, channels: int) -> None:
        super().__init__()
        self.convolution = {2: nn.Conv2d, 3: nn.Conv3d}[spatial_dims](channels, channels, 1)
        nn.init.dirac_(self.convolution.weight)
        nn.init.zeros_(self.convolution.get_parameter("bias"))
        start = torch.randn(channels, generator=torch.Generator().manual_seed(channels))
        self.register_buffer("start", start, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.convolution(x)
        return adapted

    def orthogonality(self) -> Tensor:
        """Squared spectral norm of WᵀW − I by one power iteration from a fixed vector; zero for orthogonal W."""
        weight = self.convolution.weight.flatten(1)
        excess = weight.T @ weight - torch.eye(len(weight), device=weight.device, dtype=weight.dtype)
        start = self.get_buffer("start").to(weight)
        direction = excess.detach() @ start
        length = direction.norm()
        direction = direction / length if length > 0 else start / start.norm()
        penalty: Tensor = (excess @ direction).square().sum()
        return penalty


def insert_input_adaptor(model: nn.Module, adaptor: nn.Module) -> None:
    """From now on the network sees adaptor(x)."""
    insert_in_front(model, "input_adaptor", adaptor)


def insert_in_front(model: nn.Module, name: str, part: nn.Module) -> None:
    """From now on the network has a part of that name and sees part(x)."""
    model.add_module(name, part)
    if type(model).forward is nn.Sequential.forward:  # runs whatever it has, in order: the part comes first
        for other in [key for key in model._modules if key != name]:
            model._modules[other] = model._modules.pop(other)
    else:
        model.register_forward_pre_hook(_BeforeNetwork(part))


def insert_feature_adaptor(model: nn.Module, layer: str, adaptor: nn.Module) -> None:
    """From now on the layer gives adaptor(its output)."""
    model.add_module(f"adaptor_behind_{layer.replace('.', '_')}", adaptor)
    model.get_submodule(layer).register_forward_hook(_BehindLayer(adaptor))


@dataclass(frozen=True)
class _BeforeNetwork:
    adaptor: nn.Module

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.adaptor(inputs[0]), *inputs[1:])


@dataclass(frozen=True)
class _BehindLayer:
    adaptor: nn.Module

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        return self.adaptor(output)
