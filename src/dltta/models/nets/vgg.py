"""2 networks. VGG-19 up to `conv5_1`, from a local file: features that tell what images look like."""

from itertools import pairwise
from pathlib import Path

from torch import nn

from dltta.errors import StateError
from dltta.models.io.weights import read_weights

BLOCKS = ((64, 64), (128, 128), (256, 256, 256, 256), (512, 512, 512, 512), (512,))  # channels; pooling in between


def vgg19() -> nn.Sequential:
    """Convolutions, rectifiers and poolings, numbered as `features` of torchvision's `vgg19` are.

    Pooling takes the mean, not the maximum, as Gatys et al. do; no rectifier works in place, so that any layer's
    output can be looked at later.
    """
    layers: list[nn.Module] = []
    channels = 3
    for number, block in enumerate(BLOCKS):
        layers += [nn.AvgPool2d(2)] if number else []
        for before, after in pairwise((channels, *block)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        channels = block[-1]
    return nn.Sequential(*layers)


def load_vgg19(path: Path) -> nn.Sequential:
    """The network with the weights of a torchvision state dict, saved by torch or as safetensors."""
    network = vgg19()
    saved = read_weights(path)
    own = network.state_dict()
    given = {name: saved[f"features.{name}"] for name in own if f"features.{name}" in saved}
    misfit = sorted(name for name in own if name not in given or given[name].shape != own[name].shape)
    if misfit:
        raise StateError(
            f"{path.name} is not a state dict of VGG-19: {len(misfit)} tensors are missing or of another shape, the "
            f"first 'features.{misfit[0]}'; give the one of torchvision's vgg19"
        )
    network.load_state_dict(given)
    return network
