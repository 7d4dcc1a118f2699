"""2 networks. From a description that fits in JSON to a network: the one builder."""

import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from dltta.errors import SettingError
from dltta.models.nets.densenet import densenet
from dltta.models.nets.style import ENCODER_LAYERS, VGG_LAYERS, Restyled, Restyling
from dltta.models.nets.translation import Generator, Translated
from dltta.models.nets.unet import unet
from dltta.models.nets.vgg import vgg19

BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "unet": unet,
    "densenet121": densenet,
    "densenet_small": partial(densenet, blocks=(2, 2, 2, 2), growth=16, width=32),  # the same family, for two cores
}


def translated(
    spatial_dims: int, in_channels: int, classes: int, *, network: dict[str, Any], generator: dict[str, Any]
) -> nn.Module:
    """A generator in front of a network; `network` has its `name` and `options`, `generator` its arguments."""
    inner = Architecture(network["name"], spatial_dims, in_channels, classes, network["options"])
    return Translated(
        Generator(in_channels, **generator), inner.build(), torch.zeros(in_channels), torch.ones(in_channels)
    )


def restyled(
    spatial_dims: int,
    in_channels: int,
    classes: int,
    *,
    network: dict[str, Any],
    vgg: bool,
    restyling: dict[str, Any],
    channels: list[int],
) -> nn.Module:
    """A network that restyles its images; `network` has its `name` and `options`, `channels` are the style layers'."""
    inner = Architecture(network["name"], spatial_dims, in_channels, classes, network["options"])
    layers = VGG_LAYERS if vgg else ENCODER_LAYERS[network["name"]]
    return Restyled(inner.build(), vgg19() if vgg else None, Restyling(**restyling), layers, channels)


BUILDERS["translated"] = translated
BUILDERS["restyled"] = restyled


@dataclass(frozen=True)
class Architecture:
    """`name` is a builder, `options` its keyword arguments beyond the first three."""

    name: str
    spatial_dims: int
    in_channels: int
    classes: int
    options: dict[str, Any] = field(default_factory=dict)

    def build(self, *, seed: int | None = None) -> nn.Module:
        """A new network; with a seed its initial weights are repeatable and the global random state is left alone."""
        builder = BUILDERS.get(self.name)
        if builder is None:
            close = difflib.get_close_matches(self.name, BUILDERS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(BUILDERS)}"
            raise SettingError(f"no architecture {self.name!r}; {hint}")
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            try:
                return builder(self.spatial_dims, self.in_channels, self.classes, **self.options)
            except TypeError as error:
                raise SettingError(f"architecture {self.name!r}: {error}") from error

    def as_json(self) -> dict[str, Any]:
        """Counterpart of `Architecture(**…)`, without the file that initial weights came from."""
        description = asdict(self)
        description["options"].pop("weights", None)
        return description
