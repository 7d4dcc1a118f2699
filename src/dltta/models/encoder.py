"""2 networks. Running a network only as far as some layer, and knowing which parameters that part has."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from dltta.errors import SettingError
from dltta.models.features import find_layer


class _ReachedError(Exception):
    """Ends a forward pass at the layer that was asked for."""


def encode(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What the layer gives for x; nothing behind it is computed."""
    return encode_levels(model, (layer,), x)[layer]


def encode_levels(model: nn.Module, layers: Collection[str], x: Tensor) -> dict[str, Tensor]:
    """What each layer gives for x; nothing behind the last of them is computed."""
    reached: dict[str, Any] = {}

    def record(layer: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            reached[layer] = output
            if len(reached) == len(layers):
                raise _ReachedError

        return hook

    handles = [find_layer(model, layer).register_forward_hook(record(layer)) for layer in layers]
    try:
        model(x)
    except _ReachedError:
        pass
    finally:
        for handle in handles:
            handle.remove()
    for layer in layers:
        if not isinstance(reached.get(layer), Tensor):
            raise SettingError(f"layer {layer!r} gives no tensor in a forward pass; choose another")
    return {layer: reached[layer] for layer in layers}


def shared_parameters(model: nn.Module, layer: str, x: Tensor) -> list[str]:
    """Names of the parameters that the layer's output depends on, found by asking for its gradient on x."""
    named = dict(model.named_parameters())
    flags = {name: parameter.requires_grad for name, parameter in named.items()}
    for parameter in named.values():
        parameter.requires_grad_(True)
    with torch.enable_grad():
        total = encode(model, layer, x).sum()
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    for name, parameter in named.items():
        parameter.requires_grad_(flags[name])
    return [name for name, gradient in zip(named, gradients, strict=True) if gradient is not None]
