"""2 networks. What do source images, features and predictions look like? The auto-encoders of ATTA (He et al. 2021)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.models.features import find_layer
from dltta.models.predictions import probabilities


@dataclass(frozen=True)
class Levels:
    """Where auto-encoders look and where adaptors stand in a network.

    `watched`: for each level the layers whose outputs are concatenated along the channels. `adapted`: the layers that
    an adaptor follows. `output`: whether the prediction is watched too.
    """

    watched: tuple[tuple[str, ...], ...]
    adapted: tuple[str, ...]
    output: bool = True

    def check(self, model: nn.Module) -> None:
        """Raise `LayerNotFoundError` if the network lacks one of the layers."""
        for layer in (*self.adapted, *(layer for level in self.watched for layer in level)):
            find_layer(model, layer)


UNET_LEVELS = Levels(
    watched=(("down_1", "upcat_2"), ("down_2", "upcat_3"), ("down_3", "upcat_4"), ("down_4",)),
    adapted=("conv_0", "down_1", "down_2"),
)
DENSENET_LEVELS = Levels(
    watched=(("features.transition1",), ("features.transition2",), ("features.transition3",), ("features",)),
    adapted=("features.pool0", "features.transition1", "features.transition2"),
    output=False,
)


class Reconstruction(nn.Module):
    """A U-Net without skip connections and with instance normalization, three levels: x (B, C, *spatial) to its like.

    Padded to what the strides divide and cut back. `strides` says at which levels the resolution halves.
    """

    def __init__(self, spatial_dims: int, channels: int, widths: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        from monai.networks.nets import AutoEncoder  # here: importing any part of MONAI imports all of it

        self.multiple = math.prod(strides)
        self.network = AutoEncoder(
            spatial_dims, channels, channels, tuple(widths), tuple(strides), norm="instance", act="leakyrelu"
        )

    def forward(self, x: Tensor) -> Tensor:
        spatial = x.shape[2:]
        padding = [(0, -size % self.multiple) for size in reversed(spatial)]
        padded = F.pad(x, [amount for pair in padding for amount in pair])
        reconstruction: Tensor = self.network(padded)[(..., *(slice(size) for size in spatial))]
        return reconstruction


class AutoEncoders(nn.Module):
    """One auto-encoder for the image, one per feature level, one for the prediction.

    Built for the shapes (C, *spatial) of what each will see; what has a single position has no shape to learn and gets
    none. `width` n gives channels (n/2, n/4, n/8) to image and
    prediction and (n, n/2, n/4) to features, as published for n = 64.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]], *, width: int = 64) -> None:
        super().__init__()
        self.shapes = {name: tuple(shape) for name, shape in shapes.items() if math.prod(shape[1:]) > 1}
        self.width = width
        self.parts = nn.ModuleDict({name: self._part(name, shape, width) for name, shape in self.shapes.items()})

    @staticmethod
    def _part(name: str, shape: tuple[int, ...], width: int) -> Reconstruction:
        channels, *spatial = shape
        widths = (
            [width // 2, width // 4, width // 8] if name in ("image", "output") else [width, width // 2, width // 4]
        )
        strides, smallest = [1], min(spatial)
        for _ in widths[1:]:  # instance normalization needs more than one position
            strides.append(2 if smallest >= 4 else 1)
            smallest = -(-smallest // strides[-1])
        return Reconstruction(len(spatial), channels, widths, strides)

    def errors(self, seen: dict[str, Tensor]) -> dict[str, Tensor]:
        """Mean squared error of the reconstruction of each thing seen."""
        return {name: F.mse_loss(part(seen[name]), seen[name]) for name, part in self.parts.items()}


class LevelOutputs:
    """Remembers, while gradients are recorded, the image, features and prediction of a network's last forward pass.

    Survives copying with the network it watches: `attach` puts hooks on a network and keeps no other reference to it.
    """

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self._seen: dict[str, Tensor] = {}

    def attach(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(_Record(self._seen, "image", of_input=True))
        for layer in sorted({layer for level in self.levels.watched for layer in level}):
            model.get_submodule(layer).register_forward_hook(_Record(self._seen, layer))
        if self.levels.output:
            model.register_forward_hook(_Record(self._seen, "output"))

    def take(self) -> dict[str, Tensor]:
        """What was seen, by auto-encoder; forgotten here, so that no graph outlives its use. One take per pass."""
        seen = {"image": self._seen["image"]}
        for number, layers in enumerate(self.levels.watched):
            seen[f"level_{number}"] = torch.cat([self._seen[layer] for layer in layers], dim=1)
        if self.levels.output:
            seen["output"] = probabilities(self._seen["output"]).to(seen["image"].dtype)
        self._seen.clear()
        return seen


@dataclass(frozen=True)
class _Record:
    into: dict[str, Tensor]
    name: str
    of_input: bool = False

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Any = None) -> None:
        if torch.is_grad_enabled():
            self.into[self.name] = inputs[0] if self.of_input else output
