"""2 networks. A state dict from a file, whoever wrote it, without running anything that is in it."""

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from dltta.errors import StateError
from dltta.models.compiled import program_kind

NESTS = ("state_dict", "model_state_dict", "model", "network_weights", "network", "net")  # where trainers put it
PREFIXES = ("module.", "_orig_mod.", "model.", "network.", "net.")  # what wrappers put before every name


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill the network from a `.safetensors` file or one that `torch.save` wrote; every tensor must have its place."""
    saved = read_weights(path)
    own = model.state_dict()
    fitting = next((each for each in _spellings(saved) if each.keys() == own.keys()), saved)
    require_fit(str(path), fitting, own)
    model.load_state_dict(dict(fitting))


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; a dict that nests them, as trainers save it, is looked into."""
    if path.is_file() and (kind := program_kind(path)) is not None:
        raise StateError(f"{path} is {kind}; give the state dict of the network that it was made from")
    try:
        if path.suffix == ".safetensors":
            return load_tensors(path.read_bytes())
        with warnings.catch_warnings(action="ignore"):  # torch warns of TorchScript before it refuses it
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{path} is damaged or holds more than tensors, which would run code when loaded; "
            "save the state dict alone: torch.save(model.state_dict(), …)"
        ) from error
    except (SafetensorError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StateError(
            f"{path} is not a state dict ({reason[:90]}); give a .safetensors, .pt or .pth file"
        ) from error
    return _tensors(path, found)


def _tensors(path: Path, found: Any) -> dict[str, Tensor]:
    for key in NESTS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            return _tensors(path, found[key])
    if isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values()):
        return {str(name): tensor for name, tensor in found.items()}
    raise StateError(
        f"{path} holds no state dict: expected tensors by name, there or under {' or '.join(map(repr, NESTS[:3]))}; "
        "save it with torch.save(model.state_dict(), …)"
    )


def _spellings(saved: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """As saved, and without what a wrapper put before every name, if it did."""
    yield saved
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in saved):
            yield from _spellings({name.removeprefix(prefix): tensor for name, tensor in saved.items()})


def require_fit(what: str, saved: Mapping[str, Tensor], own: Mapping[str, Any]) -> None:
    """Raise `StateError` unless the saved tensors are, by name and shape, those of a network."""
    missing = sorted(own.keys() - saved.keys())
    foreign = sorted(saved.keys() - own.keys())
    misfit = sorted(name for name in own.keys() & saved.keys() if _shape(own[name]) != _shape(saved[name]))
    if missing or foreign or misfit:
        raise StateError(
            f"{what} does not fit the network: {len(missing)} tensors missing, {len(foreign)} foreign, {len(misfit)} "
            f"of another shape, the first {(misfit + missing + foreign)[0]!r}; give the weights of this architecture"
        )


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None
