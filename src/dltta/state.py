"""A stream on disk: what the adapter had learned after each batch, so that it can stop at any moment and go on.

OUT/state/
  stream.json                 the network and the settings; what a resumed stream must share
  versions/000012.safetensors what moved, the optimizer and counters after version 12
  memory/000012.safetensors   the pairs that version 12 put into the memory
A version is written before the line of the log that names it; one that no line names never was.
"""

import fcntl
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from dltta.adapter import Adapter
from dltta.errors import StateError
from dltta.files import write_atomically

KEEP = 20  # versions that one can roll back to


@dataclass(frozen=True)
class Version:
    """The adapter after some batch: nested dictionaries of tensors and numbers, memory pairs by where they are."""

    number: int
    state: dict[str, Any]  # parameters, buffers, extra
    pairs: tuple[tuple[int, int], ...]  # (version that pushed them, how many), oldest first
    head: str  # the log's last line when it was written


class StateFolder:
    """Versions of one stream; `save` after each batch, `load` to go on."""

    def __init__(self, folder: Path, *, keep: int = KEEP) -> None:
        self.folder, self.keep = folder, keep
        self._pairs: tuple[tuple[int, int], ...] = ()
        self._pushed = 0  # pairs in the adapter's memory that are on disk
        self._oldest: dict[int, int] = {}  # version: the oldest file of pairs that it needs

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time works on a stream."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise StateError(f"{self.folder}: another process works on this stream; wait for it") from error
            yield

    def save(self, number: int, adapter: Adapter, head: str) -> None:
        """Write version `number`; older ones beyond `keep` go."""
        extra = adapter.get_extra_state()
        memory = extra.pop("memory")
        if memory is not None:
            self._save_pairs(number, memory)
            extra["memory"] = {"layer": memory["layer"], "pushed": memory["pushed"]}
        state = {"moving": _moving(adapter), "extra": extra}
        description = {"pairs": [list(pair) for pair in self._pairs], "head": head}
        write_atomically(self._version(number), pack(state, description))
        self._forget(number)

    def load(self, number: int, adapter: Adapter) -> None:
        """Bring an adapter of the same network and settings to version `number`; later versions never were."""
        version = self.read(number)
        extra = dict(version.state["extra"])
        memory = extra.get("memory")
        extra["memory"] = None if memory is None else {**memory, **self._read_pairs(version.pairs, memory["pushed"])}
        _restore(adapter, version.state["moving"], extra)
        self._pairs, self._pushed = version.pairs, memory["pushed"] if memory else 0
        for later in self.numbers():
            if later > number:
                self._version(later).unlink()
                self._oldest.pop(later, None)

    def read(self, number: int) -> Version:
        """One version as it is on disk."""
        state, description = unpack(self._version(number))
        pairs = tuple((int(version), int(count)) for version, count in description["pairs"])
        return Version(number, state, pairs, description["head"])

    def numbers(self) -> list[int]:
        """The versions on disk, oldest first."""
        return _numbers(self.folder / "versions")

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Write what a resumed stream must share."""
        write_atomically(self.folder / "stream.json", json.dumps(settings, indent=1, sort_keys=True) + "\n")

    def description(self) -> dict[str, Any]:
        path = self.folder / "stream.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            return found
        except (OSError, ValueError) as error:
            raise StateError(f"{path} cannot be read; is {self.folder.parent} the output of dltta adapt?") from error

    def _save_pairs(self, number: int, memory: Mapping[str, Any]) -> None:
        held = len(memory["values"])
        new = min(memory["pushed"] - self._pushed, held)
        if new:
            slots = [push % max(held, 1) for push in range(memory["pushed"] - new, memory["pushed"])]
            pairs = {"keys": memory["keys"][slots], "values": [memory["values"][slot] for slot in slots]}
            write_atomically(self._memory(number), pack(pairs, {}))
            self._pairs = _latest((*self._pairs, (number, new)), held)
            self._pushed = memory["pushed"]

    def _read_pairs(self, pairs: Sequence[tuple[int, int]], pushed: int) -> dict[str, Any]:
        """Keys and values in the slots they had: pair p of all that were ever pushed lies in slot p mod capacity."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for number, count in pairs:
            content, _ = unpack(self._memory(number))
            keys += list(content["keys"])[-count:]
            values += content["values"][-count:]
        first = pushed % len(keys) if keys else 0  # slot of the oldest once the bank has gone round
        order = [*range(len(keys) - first, len(keys)), *range(len(keys) - first)]
        return {
            "keys": torch.stack([keys[i] for i in order]) if keys else None,
            "values": [values[i] for i in order],
        }

    def _forget(self, newest: int) -> None:
        self._oldest[newest] = min((number for number, _ in self._pairs), default=newest)
        for number in self.numbers():
            if number <= newest - self.keep:
                self._version(number).unlink(missing_ok=True)
                self._oldest.pop(number, None)
            elif number not in self._oldest:
                self._oldest[number] = min((pair[0] for pair in self.read(number).pairs), default=number)
        needed = min(self._oldest.values())
        for number in _numbers(self.folder / "memory"):
            if number < needed:
                self._memory(number).unlink(missing_ok=True)

    def _version(self, number: int) -> Path:
        return self.folder / "versions" / f"{number:06d}.safetensors"

    def _memory(self, number: int) -> Path:
        return self.folder / "memory" / f"{number:06d}.safetensors"


def _latest(pairs: tuple[tuple[int, int], ...], held: int) -> tuple[tuple[int, int], ...]:
    """The newest groups of pairs that together are `held`."""
    kept: list[tuple[int, int]] = []
    for number, count in reversed(pairs):
        if held > 0:
            kept.append((number, min(count, held)))
            held -= count
    return tuple(reversed(kept))


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"(\d{6,})\.safetensors", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def _moving(adapter: Adapter) -> dict[str, Tensor]:
    """Everything in the network that a step may change: adapted parameters and buffers."""
    moving: dict[str, Tensor] = {**adapter.adapted_parameters(), **dict(adapter.model.named_buffers())}
    return {name: tensor.detach().cpu() for name, tensor in moving.items()}


def _restore(adapter: Adapter, moving: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
    live: dict[str, Tensor] = {**adapter.adapted_parameters(), **dict(adapter.model.named_buffers())}
    if set(live) != set(moving) or any(live[name].shape != moving[name].shape for name in live):
        raise StateError("the saved state belongs to another network or method; resume with those it was saved with")
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(moving[name])
    device = next(iter(live.values())).device
    adapter.set_extra_state(_to(extra, device))


def _to(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {key: _to(value, device) for key, value in state.items()}
    return type(state)(_to(value, device) for value in state) if isinstance(state, list | tuple) else state


def pack(state: Any, description: Mapping[str, Any]) -> bytes:
    """Nested dictionaries and lists of tensors and plain values as one safetensors file."""
    tensors: dict[str, Tensor] = {}
    skeleton = _fold(state, tensors)
    metadata = {"skeleton": json.dumps(skeleton), "description": json.dumps(description)}
    return tensors_to_bytes(tensors, metadata)


def unpack(path: Path) -> tuple[Any, dict[str, Any]]:
    """Counterpart of `pack`; runs no code."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, the file is no dictionary
        return _unfold(json.loads(metadata["skeleton"]), tensors), json.loads(metadata["description"])
    except FileNotFoundError as error:
        raise StateError(f"{path} is missing; roll back to another version with `dltta state rollback`") from error
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise StateError(f"{path} is damaged ({error}); roll back to another version") from error


def _fold(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        name = f"t{len(tensors)}"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):  # as pairs: keys may be numbers
        return {"dict": [[key, _fold(part, tensors)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_fold(part, tensors) for part in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StateError(f"a {type(value).__name__} cannot be saved; keep tensors, numbers, text, lists and dictionaries")


def _unfold(folded: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(folded, dict):
        return folded
    kind, content = next(iter(folded.items()))
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unfold(part, tensors) for key, part in content}
    parts = [_unfold(part, tensors) for part in content]
    return tuple(parts) if kind == "tuple" else parts
