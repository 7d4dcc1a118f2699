"""The audit log of a stream: one JSON line per case, each carrying the hash of the one before.

A line is written whole, flushed to the disk, and only then counts: what it says happened. A line that a crash cut off
has no line end and is taken away when the log is opened again. Changing, removing or reordering lines breaks the chain,
which `verify` finds.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dltta.errors import StateError

START = "0" * 64  # what the first line is chained to


class Journal:
    """Lines appended to a file; opening one that exists checks the whole chain."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        self._last = START
        if path.exists():
            self._repair()
            self.entries, problem = read_chain(path)
            if problem is not None:
                raise StateError(f"{problem}; look with `dltta state verify`")
            self._last = self.entries[-1]["hash"] if self.entries else START

    @property
    def head(self) -> str:
        """The hash of the last line."""
        return self._last

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Add lines that belong together, in one write; on return they are on the disk."""
        chained, last = [], self._last
        for entry in entries:
            chained.append(chain(entry, last))
            last = chained[-1]["hash"]
        text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in chained).encode()
        new = not self.path.exists()
        try:
            self._write(text)
        except OSError as error:
            raise StateError(
                f"{self.path}: cannot be written ({error.strerror or error}); free space and resume"
            ) from error
        if new:
            _sync_folder(self.path.parent)
        self.entries += chained
        self._last = last

    def drop(self, count: int) -> None:
        """Take away the last lines: a group of which a crash left only the beginning."""
        if not count:
            return
        kept = self.entries[: len(self.entries) - count]
        size = sum(len((json.dumps(entry, ensure_ascii=False) + "\n").encode()) for entry in kept)
        with self.path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
        self.entries = kept
        self._last = kept[-1]["hash"] if kept else START

    def _write(self, text: bytes) -> None:
        with self.path.open("ab") as file:
            size = file.tell()
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise

    def _repair(self) -> None:
        """A last line without its end was never finished."""
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            with self.path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
                os.fsync(file.fileno())


def chain(entry: Mapping[str, Any], previous: str) -> dict[str, Any]:
    """The entry with the hash of the line before it and its own, over all the rest."""
    linked = {**entry, "previous": previous}
    return {**linked, "hash": hashlib.sha256(_canonical(linked)).hexdigest()}


def read_chain(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """The lines up to the first that is not what was written, and in words which that is."""
    entries: list[dict[str, Any]] = []
    last = START
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            entry = json.loads(line)
            claimed = entry.pop("hash")
            intact = claimed == hashlib.sha256(_canonical(entry)).hexdigest()
            follows = entry["previous"] == last
        except (ValueError, AttributeError, KeyError, TypeError):
            return entries, f"{path}: line {number} is not a line of this log"
        if not intact:
            return entries, f"{path}: line {number} was altered"
        if not follows:
            return entries, f"{path}: before line {number} lines are missing or were moved"
        last = claimed
        entries.append({**entry, "hash": claimed})
    return entries, None


def _canonical(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
