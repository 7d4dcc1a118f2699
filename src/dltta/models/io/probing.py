"""2 networks. What does a network that comes without a description take and give? Asked by running it once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dltta.data.case import Task
from dltta.errors import SettingError
from dltta.models.features import forward_pass

SIZES = {1: (1024, 256), 2: (128, 256, 224, 64), 3: (64, 96, 128, 32)}  # tried in this order along every axis
FAILURES = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)


@dataclass(frozen=True)
class Probe:
    """One pass of a network on an image of noise."""

    task: Task
    spatial_dims: int
    in_channels: int
    size: tuple[int, ...]
    channels: int  # of the logits


def probe(model: nn.Module, *, in_channels: int | None = None, size: Sequence[int] | None = None) -> Probe:
    """Runs the network on the first image of those it might take; what is not given is read off its convolutions."""
    failure = "it has no convolution that tells the number of axes and channels"
    for channels, spatial in _candidates(model, in_channels, size):
        try:
            logits = noise_pass(model, channels, spatial)
        except FAILURES as error:
            if isinstance(error, SettingError):
                raise
            failure = (" ".join(str(error).split()) or type(error).__name__)[:160]
            continue
        _require_logits(model, logits)
        return Probe(_task(logits, spatial), len(spatial), channels, spatial, logits.shape[1])
    raise SettingError(
        f"{type(model).__name__} cannot be tried out ({failure}); say what it takes: --channels 3, --resize 128x128 "
        "(inspect: --size 128x128)"
    )


def noise(channels: int, size: Sequence[int]) -> Tensor:
    """One image (1, C, *size) of normally distributed values, always the same."""
    return torch.randn((1, channels, *size), generator=torch.Generator().manual_seed(0))


def noise_pass(model: nn.Module, channels: int, size: Sequence[int]) -> Tensor:
    """Logits of that image; the network is left as it was."""
    x = noise(channels, size)
    like = next((p for p in model.parameters() if p.is_floating_point()), x)
    with torch.no_grad():
        return forward_pass(model, x.to(like)).logits


def axes_of(model: nn.Module) -> int:
    """The number of spatial axes, read off the first convolution; 2 if there is none."""
    return next((len(layer.kernel_size) for layer in model.modules() if isinstance(layer, _ConvNd)), 2)


def _candidates(
    model: nn.Module, in_channels: int | None, size: Sequence[int] | None
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Channels and sizes to try; a given size is tried small first, which is quick and which most networks take."""
    convolutions = [layer for layer in model.modules() if isinstance(layer, _ConvNd)]
    widths = [in_channels] if in_channels else list(dict.fromkeys(layer.in_channels for layer in convolutions))[:3]
    sizes = [(edge,) * axes_of(model) for edge in SIZES[axes_of(model)]]
    if size:
        sizes = list(dict.fromkeys([tuple(min(edge, SIZES[len(size)][0]) for edge in size), tuple(size)]))
    yield from product(widths, sizes)


def class_names(task: Task, channels: int) -> tuple[str, ...]:
    """Names for classes that nobody named; a single channel tells a second class from the first."""
    numbers = [f"class_{number}" for number in range(max(channels, 2))]
    return tuple(["background", *numbers[1:]] if task == "segmentation" else numbers)


def _task(logits: Tensor, size: tuple[int, ...]) -> Task:
    if logits.ndim == 2:
        return "classification"
    if tuple(logits.shape[2:]) == tuple(size):
        return "segmentation"
    raise SettingError(
        f"the network gives {_text(logits.shape[1:])} for an image of {_text(size)}; a prediction has one value per "
        "class, or one per class and position of the image"
    )


def _require_logits(model: nn.Module, logits: Tensor) -> None:
    """Probabilities sum to one over the classes; logits do not."""
    if logits.shape[1] > 1 and logits.min() >= 0 and (logits.sum(dim=1) - 1).abs().max() < 1e-4:
        raise SettingError(
            f"{type(model).__name__} gives probabilities, but adapting needs the logits before its softmax; "
            "leave the softmax out of the network"
        )


def _text(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
