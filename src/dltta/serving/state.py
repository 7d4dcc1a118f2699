"""What the adapter had learned after each batch, on disk, so that a stream can stop at any moment and resume.

OUT/state/
  stream.json                 the model and the settings, which a resumed stream must share
  head                        where the log ends (`journal.py`)
  versions/000012.safetensors what moved, the optimizer and counters after version 12
  memory/000012.safetensors   the pairs that version 12 put into the memory
A version is written before the line of the log that names it and its hash; a version that no line names does not count.
The same state gives the same bytes.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor

from dltta.core.ensemble import AnyAdapter
from dltta.errors import StateError
from dltta.files import (
    PRIVATE,
    PRIVATE_FOLDER,
    make_folder,
    remove_parts,
    sync_folder,
    write_atomically,
)
from dltta.serving.journal import on_disk
from dltta.serving.lock import is_locked, locked

KEEP = 20  # versions that one can roll back to
ROOM = 1 << 30  # bytes that they may take together; the latest two are kept whatever they take


@dataclass(frozen=True)
class Pairs:
    """Pairs of the memory in one file: the latest `count` of those that version `number` pushed."""

    number: int
    count: int
    sha256: str


@dataclass(frozen=True)
class Version:
    """The adapter after a batch: nested dictionaries of tensors and numbers, and the files that hold its memory."""

    number: int
    sha256: str
    state: dict[str, Any]  # moving: parameters and buffers; extra: all else
    pairs: tuple[Pairs, ...]  # oldest first


@dataclass(frozen=True)
class Packed:
    """The bytes of a version that is not on the disk yet, and of the pairs that are new with it."""

    number: int
    content: bytes
    new_pairs: bytes | None

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


class StateFolder:
    """Versions of one stream; `save` after each batch, `load` to go on.

    `save` is `pack`, `put` and `forget`: after `pack` the adapter may go on, while `put` waits for the disk; `forget`
    removes old versions once the log says which are kept.
    """

    def __init__(self, folder: Path, *, keep: int = KEEP, room: int = ROOM) -> None:
        self.folder, self.keep, self.room = folder, max(keep, 2), room
        self._pairs: tuple[Pairs, ...] = ()  # of the latest version
        self._pushed = 0  # pairs in the adapter's memory that are on disk
        self._needs: dict[int, tuple[int, ...]] = {}  # version: the files of pairs that it needs

    @property
    def head_file(self) -> Path:
        """Where the hash of the log's last line is kept."""
        return self.folder / "head"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process at a time works on a stream."""
        with on_disk(self.folder):
            self._make_folders()
        taken = f"{self.folder.parent}: another process works on this stream; wait until it ends"
        with locked(self.folder / "lock", taken):
            yield

    def in_use(self) -> bool:
        """Whether a process works on the stream at this moment; changes nothing."""
        return is_locked(self.folder / "lock")

    def clean(self) -> None:
        """Remove what killed processes left half written."""
        for folder in (self.folder, *self._folders()):
            remove_parts(folder)

    def save(self, number: int, adapter: AnyAdapter) -> str:
        """Write version `number` and return its hash; the oldest go when there are too many or they take too much."""
        packed = self.pack(number, adapter)
        self.put(packed)
        self.forget(self.oldest())
        return packed.sha256

    def pack(self, number: int, adapter: AnyAdapter) -> Packed:
        """Version `number` as bytes; the version before it must be on the disk."""
        extra = adapter.get_extra_state()
        memory = extra.pop("memory")
        new_pairs = None
        if memory is not None:
            new_pairs = self._pack_pairs(number, memory)
            extra["memory"] = {"layer": memory["layer"], "pushed": memory["pushed"]}
        return Packed(number, pack({"moving": _moving(adapter), "extra": extra}, self._description()), new_pairs)

    def put(self, packed: Packed) -> None:
        """Write a packed version; on return it survives a power cut."""
        with on_disk(self.folder):
            self._make_folders()
            if packed.new_pairs is not None:
                write_atomically(self._memory(packed.number), packed.new_pairs, mode=PRIVATE)
            self._put(packed.number, packed.content)

    def load(self, number: int, sha256: str, adapter: AnyAdapter) -> None:
        """Bring an adapter of the same network and settings to version `number`, and remove later versions."""
        version = self.read(number, sha256)
        self.restore(version, adapter)
        memory = version.state["extra"].get("memory")
        self._pairs, self._pushed = version.pairs, memory["pushed"] if memory else 0
        with on_disk(self.folder):
            for later in self.numbers():
                if later > number:
                    self._version(later).unlink()
                    self._needs.pop(later, None)

    def restore(self, version: Version, adapter: AnyAdapter) -> None:
        """Bring an adapter of the same network and settings to a version; nothing on the disk changes."""
        extra = dict(version.state["extra"])
        memory = extra.get("memory")
        extra["memory"] = None if memory is None else {**memory, **self.memory(version)}
        _restore(adapter, version.state["moving"], extra)

    def read(self, number: int, sha256: str) -> Version:
        """One version; a file with another hash is not parsed."""
        state, description = unpack(_read(self._version(number), sha256), self._version(number))
        return Version(number, sha256, state, tuple(Pairs(**entry) for entry in description["pairs"]))

    def memory(self, version: Version) -> dict[str, Any]:
        """Keys and values in the slots they had: pair p of all that were ever pushed lies in slot p mod capacity."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for pairs in version.pairs:
            path = self._memory(pairs.number)
            held, _ = unpack(_read(path, pairs.sha256), path)
            keys += list(held["keys"])[-pairs.count :]
            values += held["values"][-pairs.count :]
        pushed = (version.state["extra"].get("memory") or {"pushed": 0})["pushed"]
        first = pushed % len(keys) if keys else 0  # slot of the oldest once the bank has gone round
        order = [*range(len(keys) - first, len(keys)), *range(len(keys) - first)]
        return {
            "keys": torch.stack([keys[i] for i in order]) if keys else None,
            "values": [values[i] for i in order],
        }

    def copy(self, number: int, sha256: str, new: int) -> None:
        """Write version `number` again as version `new`; both have the same hash."""
        self._pairs = self.read(number, sha256).pairs
        with on_disk(self.folder):
            self._make_folders()
            self._put(new, _read(self._version(number), sha256))

    def size(self, number: int) -> int:
        """Bytes of a version, without the pairs of its memory."""
        return self._version(number).stat().st_size

    def numbers(self) -> list[int]:
        """The versions on disk, oldest first."""
        return _numbers(self.folder / "versions")

    def files(self, numbers: Iterable[int]) -> Iterator[Path]:
        """The files of these versions that are on disk, and of the pairs that they need."""
        for number in set(numbers) & set(self.numbers()):
            yield self._version(number)
            yield from (self._memory(pairs) for pairs in self._needed(number))

    def describe(self, settings: Mapping[str, Any]) -> None:
        """Write the settings that a resumed stream must share."""
        with on_disk(self.folder):
            self._make_folders()
            text = json.dumps(settings, indent=1, sort_keys=True) + "\n"
            write_atomically(self.folder / "stream.json", text, mode=PRIVATE)

    def described(self) -> bool:
        """Whether a stream was begun here."""
        return (self.folder / "stream.json").is_file()

    def description(self) -> dict[str, Any]:
        path = self.folder / "stream.json"
        try:
            found = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise StateError(f"{path} cannot be read; is {self.folder.parent} the output of dltta adapt?") from error
        if not isinstance(found, dict):
            raise StateError(f"{path} was altered: it holds no settings")
        return found

    def _put(self, number: int, content: bytes) -> None:
        write_atomically(self._version(number), content, mode=PRIVATE)
        for folder in self._folders():
            sync_folder(folder)
        self._needs[number] = tuple(pairs.number for pairs in self._pairs)

    def _description(self) -> dict[str, Any]:
        return {"pairs": [vars(pairs) for pairs in self._pairs]}

    def _pack_pairs(self, number: int, memory: Mapping[str, Any]) -> bytes | None:
        """The pairs that version `number` pushed, None if there are none."""
        held = len(memory["values"])
        new = min(memory["pushed"] - self._pushed, held)
        if not new:
            return None
        slots = [push % held for push in range(memory["pushed"] - new, memory["pushed"])]
        content = pack({"keys": memory["keys"][slots], "values": [memory["values"][slot] for slot in slots]}, {})
        self._pairs = _latest((*self._pairs, Pairs(number, new, hashlib.sha256(content).hexdigest())), held)
        self._pushed = memory["pushed"]
        return content

    def oldest(self) -> int:
        """The oldest version that there is room for; those after it are kept too."""
        needed: set[int] = set()
        room, oldest = self.room, 0
        for place, number in enumerate(reversed(self.numbers())):
            more = {pairs for pairs in self._needed(number) if pairs not in needed}
            room -= self.size(number) + sum(_size(self._memory(pairs)) for pairs in more)
            if place >= 2 and (place >= self.keep or room < 0):
                break
            needed |= more
            oldest = number
        return oldest

    def forget(self, oldest: int) -> None:
        """Remove versions before `oldest`, and the pairs that none of the others needs."""
        with on_disk(self.folder):
            for number in self.numbers():
                if number < oldest:
                    self._version(number).unlink()
                    self._needs.pop(number, None)
            needed = {pairs for number in self.numbers() for pairs in self._needed(number)}
            for number in _numbers(self.folder / "memory"):
                if number not in needed:
                    self._memory(number).unlink()

    def _needed(self, number: int) -> tuple[int, ...]:
        """The files of pairs that a version needs; none if it is damaged, because nobody can go back to it."""
        if number not in self._needs:
            try:
                described = header(_read(self._version(number)))["description"]
                self._needs[number] = tuple(int(pairs["number"]) for pairs in described["pairs"])
            except (StateError, ValueError, LookupError, TypeError):
                self._needs[number] = ()
        return self._needs[number]

    def _make_folders(self) -> None:
        """For the owner alone, and not behind symbolic links."""
        for folder in (self.folder, self.folder / "versions", self.folder / "memory"):
            make_folder(folder, mode=PRIVATE_FOLDER)

    def _folders(self) -> list[Path]:
        return [folder for folder in (self.folder / "versions", self.folder / "memory") if folder.is_dir()]

    def _version(self, number: int) -> Path:
        return self.folder / "versions" / f"{number:06d}.safetensors"

    def _memory(self, number: int) -> Path:
        return self.folder / "memory" / f"{number:06d}.safetensors"


def _latest(groups: tuple[Pairs, ...], held: int) -> tuple[Pairs, ...]:
    """The newest groups of pairs that together are `held`."""
    kept: list[Pairs] = []
    for pairs in reversed(groups):
        if held > 0:
            kept.append(Pairs(pairs.number, min(pairs.count, held), pairs.sha256))
            held -= pairs.count
    return tuple(reversed(kept))


def _numbers(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    found = (re.fullmatch(r"(\d{6,})\.safetensors", path.name) for path in folder.iterdir())
    return sorted(int(match[1]) for match in found if match)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _moving(adapter: AnyAdapter) -> dict[str, Tensor]:
    """Everything in the network that a step may change: adapted parameters and buffers."""
    moving: dict[str, Tensor] = {**adapter.adapted_parameters(), **dict(adapter.model.named_buffers())}
    return {name: tensor.detach().cpu() for name, tensor in moving.items()}


def _restore(adapter: AnyAdapter, moving: Mapping[str, Tensor], extra: dict[str, Any]) -> None:
    live: dict[str, Tensor] = {**adapter.adapted_parameters(), **dict(adapter.model.named_buffers())}
    if set(live) != set(moving) or any(live[name].shape != moving[name].shape for name in live):
        raise StateError("the saved state belongs to another network or method; resume with those it was saved with")
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(moving[name])
    device = next((parameter.device for parameter in adapter.model.parameters()), torch.device("cpu"))
    adapter.set_extra_state(_to(extra, device))


def _to(state: Any, device: torch.device) -> Any:
    if isinstance(state, Tensor):
        return state.to(device)
    if isinstance(state, dict):
        return {key: _to(value, device) for key, value in state.items()}
    return type(state)(_to(value, device) for value in state) if isinstance(state, list | tuple) else state


def _read(path: Path, sha256: str | None = None) -> bytes:
    """A file's bytes, which must have this hash."""
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise StateError(f"{path} is missing; roll back to another version with `dltta state rollback`") from error
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror or error})") from error
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise StateError(f"{path} was altered; roll back to another version with `dltta state rollback`")
    return content


def pack(state: Any, description: Mapping[str, Any]) -> bytes:
    """Nested dictionaries and lists of tensors and plain values as one safetensors file, the same bytes every time."""
    tensors: dict[str, Tensor] = {}
    skeleton = _fold(state, tensors)
    # One entry: safetensors writes several in an order of its own.
    return tensors_to_bytes(tensors, {"dltta": json.dumps({"skeleton": skeleton, "description": description})})


def header(content: bytes) -> dict[str, Any]:
    """Skeleton and description of a packed file."""
    length = int.from_bytes(content[:8], "little")
    found: dict[str, Any] = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["dltta"])
    return found


def unpack(content: bytes, path: Path) -> tuple[Any, dict[str, Any]]:
    """Counterpart of `pack`; runs no code. `path` is named in the error."""
    try:
        found = header(content)
        return _unfold(found["skeleton"], load_tensors(content)), found["description"]
    except (SafetensorError, LookupError, ValueError, TypeError, RecursionError) as error:
        raise StateError(f"{path} is damaged ({type(error).__name__}); roll back to another version") from error


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
