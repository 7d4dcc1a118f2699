"""The audit log of a stream: one JSON line per case, each carrying the hash of the one before.

Lines come in groups, the images of one batch: `of` says how many lines the group of a line has. A group counts when all
of it is on the disk; the rest of an unfinished one, which a crash left, is overwritten by the next group. Changing,
removing or reordering lines breaks the chain. Lines removed at the end leave the chain whole, but not the anchor: a
small file kept with the state, which holds the hash of the last line.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from dltta.errors import StateError
from dltta.files import sync_folder

START = "0" * 64  # the `previous` of the first line

Fields = dict[str, Any]


class Line(NamedTuple):
    """One line of the log, and where in the file it begins and ends."""

    begin: int
    end: int
    entry: Fields


class Journal:
    """Groups of lines appended to a file; opening checks the chain, only the last hash stays in memory."""

    def __init__(self, path: Path, anchor: Path) -> None:
        self.path, self.anchor = path, anchor
        self.head = START  # the hash of the last line
        self.size = 0  # bytes of all whole groups
        anchored = read_anchor(anchor)  # read before the log, because it is written after it
        missing = anchored not in (None, START)
        for group in walk(path):
            self.head, self.size = group[-1].entry["hash"], group[-1].end
            missing = missing and self.head != anchored
        if missing or (anchored is None and self.size):
            raise StateError(f"{cut_off(path, anchored)}; look with `dltta state verify`")

    def __iter__(self) -> Iterator[Line]:
        """Every line, read again from the file."""
        for begin, text in _texts(self.path):
            if begin < self.size:
                yield Line(begin, begin + len(text), json.loads(text))

    def at(self, begin: int) -> Fields:
        """The line that begins at this byte."""
        with self.path.open("rb") as file:
            file.seek(begin)
            entry: Fields = json.loads(file.readline())
        return entry

    def append(self, entries: Sequence[Mapping[str, Any]]) -> list[Line]:
        """Add a group of lines, each with its `of`; on return it is on the disk."""
        lines: list[Line] = []
        texts, end, head = [], self.size, self.head
        for entry in entries:
            chained = chain({**entry, "of": len(entries)}, head)
            texts.append(render(chained))
            lines.append(Line(end, end + len(texts[-1]), chained))
            end, head = lines[-1].end, chained["hash"]
        with on_disk(self.path):
            _write(self.path, self.size, b"".join(texts))
            if self.size == 0:
                sync_folder(self.path.parent)
        self.head, self.size = head, end
        with on_disk(self.anchor):
            write_anchor(self.anchor, head)
        return lines


def chain(entry: Mapping[str, Any], previous: str) -> Fields:
    """The entry with the hash of the line before it and its own, over all bytes of the line without it."""
    linked = {**entry, "previous": previous}
    return {**linked, "hash": hashlib.sha256(render(linked)).hexdigest()}


def render(entry: Mapping[str, Any]) -> bytes:
    """An entry as bytes; there is only this way to write it."""
    return (json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n").encode()


def walk(path: Path) -> Iterator[list[Line]]:
    """The whole groups of a log; raises `StateError` at the first line that was altered."""
    group: list[Line] = []
    head = START
    for number, (begin, text) in enumerate(_texts(path), 1):
        entry = _intact(text)
        if entry is None:
            raise StateError(f"{path}: line {number} was altered")
        if entry["previous"] != head:
            raise StateError(f"{path}: before line {number} lines are missing or were moved")
        head = entry["hash"]
        group.append(Line(begin, begin + len(text), entry))
        if len(group) == entry["of"]:
            yield group
            group = []


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line that ends in a newline, and where it begins."""
    if not path.exists():
        return
    begin = 0
    with path.open("rb") as file:
        for text in file:
            if text.endswith(b"\n"):
                yield begin, text
            begin += len(text)


def _intact(text: bytes) -> Fields | None:
    """The entry of a line if its hash is that of its other bytes, else None."""
    body, _, claimed = text.rpartition(b', "hash": "')
    if claimed != hashlib.sha256(body + b"}\n").hexdigest().encode() + b'"}\n':
        return None
    try:
        entry: Fields = json.loads(text)
        return entry if {"previous", "of"} <= entry.keys() else None
    except (ValueError, AttributeError, RecursionError):
        return None


def read_anchor(path: Path) -> str | None:
    """The hash of the last line when the anchor was written; None without an anchor, as before the first line."""
    try:
        found = re.fullmatch(rb"([0-9a-f]{64})\n", path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror or error})") from error
    return found[1].decode() if found else None


def write_anchor(path: Path, head: str) -> None:
    """In place, because so few bytes are written as a whole; a power cut may leave an older hash, which still holds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        os.pwrite(handle, f"{head}\n".encode(), 0)
    finally:
        os.close(handle)


def cut_off(path: Path, anchored: str | None) -> str:
    """One sentence about a log that does not reach its anchor."""
    if anchored is None:
        return f"{path}: the anchor that says where it ends is gone"
    return f"{path}: lines at its end are missing"


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Turns an error of the disk into one sentence."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: cannot be written ({error.strerror or error}); free space or allow writing, then --resume"
        ) from error


def _write(path: Path, begin: int, text: bytes) -> None:
    """Write text at a place, end the file after it, wait for the disk; on failure the file ends at that place."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        os.ftruncate(handle, begin)
        try:
            written = 0
            while written < len(text):
                written += os.pwrite(handle, text[written:], begin + written)
            os.fsync(handle)
        except OSError:
            with suppress(OSError):
                os.ftruncate(handle, begin)
            raise
    finally:
        os.close(handle)
