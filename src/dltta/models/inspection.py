"""2 networks. What is a network made of, and what would a method change in it? Seen with one image of noise."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from dltta.errors import SettingError
from dltta.models.fast import FASTER
from dltta.models.features import forward_pass, forward_with_features, recorded_outputs
from dltta.models.normalization import normalization_layers

REPEATED = 5  # so many neighbors of one build are shown as one


@dataclass(frozen=True)
class Layer:
    """A layer that computes something itself, or a run of neighbors like the one before it."""

    name: str
    kind: str
    output: tuple[int, ...] | None  # (C, *positions) for one image; None when it is not run or gives no tensor
    parameters: int
    repeats: int = 0  # of a run: how many neighbors it stands for


@dataclass(frozen=True)
class Normalization:
    """The normalization layers of one kind."""

    kind: str
    layers: int
    affine: int  # of these, with scale and shift
    stored: int  # of these, with statistics of the training set


@dataclass(frozen=True)
class NetworkSummary:
    """Layers, normalization and default feature layer of a network, as one pass shows them."""

    kind: str
    input: tuple[int, ...]  # (C, *positions)
    output: tuple[int, ...]
    parameters: int
    layers: tuple[Layer, ...]
    normalization: tuple[Normalization, ...]
    feature_layer: str | None  # the layer that a memory uses unless another is named; None if none can be found
    key: tuple[int, ...]  # what it gives for one image
    bytes_per_image: int  # of its key and probabilities in a memory


def summarize(model: nn.Module, x: Tensor) -> NetworkSummary:
    """The summary of a network, which is run on x (1, C, *spatial)."""
    with torch.no_grad(), recorded_outputs(dict(model.named_modules()), _shape) as shapes:
        logits = forward_pass(model, x).logits
        layer, key = _features(model, x)
    output = tuple(logits.shape[1:])
    value = (max(output[0], 2), *output[1:])  # a sigmoid channel is remembered as two probabilities
    width = logits.element_size()
    return NetworkSummary(
        kind=type(model).__name__,
        input=tuple(x.shape[1:]),
        output=output,
        parameters=count(model),
        layers=tuple(_layers(model, "", shapes, set())),
        normalization=tuple(_normalization(model)),
        feature_layer=layer,
        key=key,
        bytes_per_image=width * math.prod(key) + max(width, 4) * math.prod(value),
    )


def _features(model: nn.Module, x: Tensor) -> tuple[str | None, tuple[int, ...]]:
    """The layer that a memory would use and the shape of what it gives for one image."""
    try:
        seen = forward_with_features(model, None, x)
    except SettingError:  # the pass itself has just worked, so it is that there is no such layer
        return None, ()
    return seen.layer, () if seen.features is None else tuple(seen.features.shape[1:])


def count(model: nn.Module) -> int:
    """How many numbers there are in a network's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def statistics_changed(before: nn.Module, after: nn.Module) -> int:
    """How many layers normalize by other statistics than they did."""
    then = dict(before.named_modules())
    return sum(
        type(layer) not in (kind := type(then[name]), FASTER.get(kind)) or _tracks(layer) != _tracks(then[name])
        for name, layer in normalization_layers(after)
        if name in then
    )


def _tracks(layer: nn.Module) -> bool:
    return bool(getattr(layer, "track_running_stats", False))


def _shape(_layer: str, output: Any) -> tuple[int, ...] | None:
    """What one image gives; None if it is no tensor."""
    return tuple(output.shape[1:]) if isinstance(output, Tensor) else None


def _layers(
    module: nn.Module, name: str, shapes: dict[str, tuple[int, ...] | None], seen: set[nn.Module]
) -> Iterator[Layer]:
    """Those with parameters of their own and those without children; of long runs of one build only the first.

    A layer that a network has under several names, as nnU-Net's do, is shown under the first.
    """
    seen.add(module)
    children = [(part, child) for part, child in module.named_children() if child not in seen]
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    if own or not list(module.children()):
        yield Layer(name or "network", type(module).__name__, shapes.get(name), own)
    for _, group in groupby(children, key=lambda child: _build(child[1])):
        run = [(f"{name}.{part}" if name else part, child) for part, child in group]
        shown = run[:1] if len(run) >= REPEATED else run
        for path, child in shown:
            yield from _layers(child, path, shapes, seen)
        if hidden := run[len(shown) :]:
            path, last = hidden[-1]
            total = sum(count(child) for _, child in hidden)
            seen.update(each for _, child in hidden for each in child.modules())
            between = f"{hidden[0][0]} … {path.rpartition('.')[2]}"
            yield Layer(between, type(last).__name__, shapes.get(path), total, len(hidden))


def _build(module: nn.Module) -> tuple[Any, ...]:
    """What a module is made of, whatever the sizes."""
    return (type(module), *(_build(child) for child in module.children()))


def _normalization(model: nn.Module) -> Iterator[Normalization]:
    layers = sorted((layer for _, layer in normalization_layers(model)), key=lambda layer: type(layer).__name__)
    for kind, group in groupby(layers, key=lambda layer: type(layer).__name__):
        found = list(group)
        affine = sum(isinstance(getattr(layer, "weight", None), nn.Parameter) for layer in found)
        stored = sum(getattr(layer, "running_mean", None) is not None for layer in found)
        yield Normalization(kind, len(found), affine, stored)
