"""2 networks. Which layer's output tells what an image is like, and how is it taken along with the prediction?"""

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dltta.errors import InputError, LayerNotFoundError, SettingError


@dataclass(frozen=True)
class Seen:
    """One forward pass: the prediction, and the features of the layer that was asked for or found."""

    logits: Tensor  # (B, C, *positions)
    features: Tensor | None  # (B, …)
    layer: str | None


def find_layer(model: nn.Module, name: str) -> nn.Module:
    """The layer of that name; a wrong name raises with the nearest right ones."""
    try:
        if name:
            return model.get_submodule(name)
    except AttributeError:
        pass
    names = [layer for layer, _ in model.named_modules() if layer]
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names[:3]
    raise LayerNotFoundError(
        f"{type(model).__name__} has no layer {name!r}; did you mean {' or '.join(map(repr, close))}?"
    )


def forward_pass(model: nn.Module, x: Tensor) -> Seen:
    """The forward pass without features."""
    return Seen(_logits(model(x)), None, None)


def forward_with_features(model: nn.Module, layer: str | None, x: Tensor) -> Seen:
    """The forward pass and what the layer gave in it; None finds the layer in the same pass. No hook outlives the call.

    The features of a layer that runs more than once are those of its last run. They are a copy: an activation behind
    the layer may work in place, as those of MONAI's DenseNet do. A search copies nothing, so a network that overwrote
    what was found is run once more.
    """
    if layer is None:
        return _search(model, x)
    with recorded_outputs({layer: find_layer(model, layer)}, _copied) as outputs:
        logits = _logits(model(x))
    features = outputs.get(layer)
    if not isinstance(features, Tensor):
        found = "was not run" if layer not in outputs else f"gives a {type(features).__name__}, not a tensor"
        raise SettingError(f"layer {layer!r} {found}; choose a layer whose output is a tensor")
    return Seen(logits, features, layer)


def _search(model: nn.Module, x: Tensor) -> Seen:
    versions: dict[str, int] = {}

    def note(name: str, output: Any) -> Any:
        versions[name] = _version(output)
        return output

    with recorded_outputs(dict(model.named_modules()), note) as outputs:
        output = model(x)
    logits = _logits(output)
    layer = deepest_layer(outputs, output)
    if _version(outputs[layer]) != versions[layer]:
        return forward_with_features(model, layer, x)
    return Seen(logits, outputs[layer].detach(), layer)


def _copied(name: str, output: Any) -> Any:
    return output.detach().clone() if isinstance(output, Tensor) else output


def _version(output: Any) -> int:
    """How often a tensor was written to in place."""
    return output._version if isinstance(output, Tensor) and not output.is_inference() else 0


def find_feature_layer(model: nn.Module, x: Tensor) -> str:
    """The name of the layer that a memory uses for this network when none is given; runs the network once on `x`."""
    with torch.no_grad():
        return forward_with_features(model, None, x).layer or ""


def deepest_layer(outputs: dict[str, Any], logits: Tensor) -> str:
    """The layer that ends the feature extractor, judged by what every layer gave in one pass, in order of completion.

    Dense predictions: of the layers with the fewest positions the widest, and of these the last, which is a U-Net's
    bottleneck. Otherwise: the last direct child of the network before the one that gives the prediction; a child that
    has no sibling is searched in turn.
    """
    tensors = {
        name: output
        for name, output in outputs.items()
        if name and isinstance(output, Tensor) and output is not logits and len(output) == len(logits)
    }
    if not tensors:
        raise SettingError("no layer can be found whose output could serve as features; name one: MemoryBank('…')")
    return _coarsest(tensors, logits) if logits.ndim > 2 else _before_the_head(tensors)


def _coarsest(tensors: dict[str, Tensor], logits: Tensor) -> str:
    maps = {name: output for name, output in tensors.items() if output.ndim == logits.ndim}
    if not maps:
        return _before_the_head(tensors)
    maps = {name: output for name, output in maps.items() if output.shape[2:].numel() > 1} or maps  # 1: a squeeze
    return max(reversed(maps), key=lambda name: (-maps[name].shape[2:].numel(), maps[name].shape[1]))


def _before_the_head(tensors: dict[str, Tensor]) -> str:
    depth = min(name.count(".") for name in tensors)
    return [name for name in tensors if name.count(".") == depth][-1]


@contextmanager
def recorded_outputs(layers: dict[str, nn.Module], keep: Callable[[str, Any], Any]) -> Iterator[dict[str, Any]]:
    """What each layer gives while the context lasts, as kept, by name in order of completion."""
    outputs: dict[str, Any] = {}

    def record(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            outputs.pop(name, None)
            outputs[name] = keep(name, output)

        return hook

    handles = [layer.register_forward_hook(record(name)) for name, layer in layers.items()]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _logits(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise SettingError(
            f"the network returns a {type(output).__name__}, but logits must be one tensor; "
            "wrap it in a module that returns only the logits"
        )
    if output.ndim < 2:
        raise InputError(f"logits must be (B, C, *positions), the network gave {tuple(output.shape)}")
    return output.contiguous()
