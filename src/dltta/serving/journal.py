"""The audit log of a stream: one JSON line per case, each carrying the hash of the one before.

Lines come in groups, the images of one batch: `of` says how many lines the group of a line has. A group counts when all
of it is on the disk; the rest of an unfinished one, which a crash left, is overwritten by the next group. Changing,
removing or reordering lines breaks the chain.

Lines removed or added at the end leave the chain whole, but not the head: a small file kept with the state, which holds
the hash of the last line, and while a group is being written the hash that the last line will have. With a key, every
line and the head are signed.
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
from dltta.files import PRIVATE, open_in_place, require_no_link, sync_folder
from dltta.serving.signing import Signer

START = "0" * 64  # the `previous` of the first line
UNSIGNED = "-" * 64  # in the place of the head's signature

Fields = dict[str, Any]


class Line(NamedTuple):
    """One line of the log, and where in the file it begins and ends."""

    begin: int
    end: int
    entry: Fields


class Head(NamedTuple):
    """Where the log ends: the hash of the last line, and of the last line once the current group is written."""

    last: str
    next: str


class Journal:
    """Groups of lines appended to a file; opening checks the chain, only the last hash stays in memory."""

    def __init__(self, path: Path, head_file: Path, signer: Signer | None = None) -> None:
        self.path, self.head_file, self.signer = path, head_file, signer
        self.last = START  # the hash of the last line
        self.size = 0  # bytes of all whole groups
        with on_disk_readable(path):
            self._end = _size(path)  # with what a crash left behind the last whole group
        head = read_head(head_file, signer)
        seen = head is not None and START in head
        for group in walk(path, signer):
            self.last, self.size = group[-1].entry["hash"], group[-1].end
            seen = seen or (head is not None and self.last in head)
        problem = wrong_end(path, head, self.last, seen=seen)
        if problem is not None and (self.size or head is not None):
            raise StateError(f"{problem}; look with `dltta state verify`")

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

    def mark(self) -> None:
        """Write the head, and remove what a crash left of a group behind the last whole one."""
        self._require_own_end()
        with on_disk(self.path):
            if _size(self.path) > self.size:
                _write(self.path, self.size, b"")
        self._end = self.size
        with on_disk(self.head_file):
            write_head(self.head_file, Head(self.last, self.last), self.signer)

    def append(self, entries: Sequence[Mapping[str, Any]]) -> list[Line]:
        """Add a group of lines, each with its `of`; on return it is on the disk.

        Raises if the file has grown since this journal wrote it: then somebody else did, and their lines stay.
        """
        lines: list[Line] = []
        texts, end, last = [], self.size, self.last
        for entry in entries:
            chained = chain({**entry, "of": len(entries)}, last, self.signer)
            texts.append(render(chained))
            lines.append(Line(end, end + len(texts[-1]), chained))
            end, last = lines[-1].end, chained["hash"]
        self._require_own_end()
        with on_disk(self.head_file):
            write_head(self.head_file, Head(self.last, last), self.signer, wait=True)
        with on_disk(self.path):
            _write(self.path, self.size, b"".join(texts))
            if self.size == 0:
                sync_folder(self.path.parent)
        self.last, self.size, self._end = last, end, end
        with on_disk(self.head_file):
            write_head(self.head_file, Head(last, last), self.signer)
        return lines

    def _require_own_end(self) -> None:
        """Raise if the file has grown since this journal read or wrote it."""
        with on_disk(self.path):
            if _size(self.path) > self._end:
                raise StateError(f"{self.path}: another process wrote this log; this one stops")


def chain(entry: Mapping[str, Any], previous: str, signer: Signer | None = None) -> Fields:
    """The entry with the hash of the line before it, a signature, and its own hash, over all bytes without it."""
    linked = {**entry, "previous": previous}
    if signer is not None:
        linked["signature"] = signer.sign(render(linked))
    return {**linked, "hash": hashlib.sha256(render(linked)).hexdigest()}


def render(entry: Mapping[str, Any]) -> bytes:
    """An entry as bytes; there is only this way to write it."""
    return (json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n").encode()


def walk(path: Path, signer: Signer | None = None) -> Iterator[list[Line]]:
    """The whole groups of a log; raises `StateError` at the first line that was altered, or is not signed."""
    group: list[Line] = []
    last = START
    for number, (begin, text) in enumerate(_texts(path), 1):
        entry = _intact(text)
        if entry is None:
            raise StateError(f"{path}: line {number} was altered")
        if entry["previous"] != last:
            raise StateError(f"{path}: before line {number} lines are missing or were moved")
        if signer is not None and not _signed(text, signer):
            raise StateError(f"{path}: line {number} is not signed with this key")
        last = entry["hash"]
        group.append(Line(begin, begin + len(text), entry))
        if len(group) == entry["of"]:
            yield group
            group = []


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    """Every line that ends in a newline, and where it begins."""
    with on_disk_readable(path):
        require_no_link(path)
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
        return entry if isinstance(entry["previous"], str) and isinstance(entry["of"], int) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _signed(text: bytes, signer: Signer) -> bool:
    """Whether a line that is intact carries the signature of its other bytes."""
    body, _, rest = text.rpartition(b', "signature": "')
    return bool(body) and signer.accepts(body + b"}\n", rest.partition(b'"')[0].decode(errors="replace"))


def read_head(path: Path, signer: Signer | None = None) -> Head | None:
    """The head, None if there is none, as before the first line; raises if it is not signed with this key."""
    try:
        require_no_link(path)
        found = re.fullmatch(rb"([0-9a-f]{64})\n([0-9a-f]{64})\n([0-9a-f]{64}|-{64})\n", path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror or error})") from error
    if found is None:
        return None
    head = Head(found[1].decode(), found[2].decode())
    if signer is not None and not signer.accepts("\n".join(head).encode(), found[3].decode()):
        raise StateError(f"{path} is not signed with this key")
    return head


def write_head(path: Path, head: Head, signer: Signer | None = None, *, wait: bool = False) -> None:
    """In place, because so few bytes are written as a whole; `wait` until they survive a power cut."""
    signature = UNSIGNED if signer is None else signer.sign("\n".join(head).encode())
    handle = open_in_place(path, os.O_WRONLY | os.O_CREAT, mode=PRIVATE)
    try:
        os.pwrite(handle, "".join(f"{text}\n" for text in (*head, signature)).encode(), 0)
        if wait:
            os.fsync(handle)
    finally:
        os.close(handle)


def wrong_end(path: Path, head: Head | None, last: str, *, seen: bool) -> str | None:
    """One sentence about a log that does not end where its head says; `seen` if it holds a line that the head names."""
    if head is None:
        return f"{path}: the head that says where it ends is gone or was altered"
    if last in head:
        return None
    return f"{path}: {'lines were added at its end' if seen else 'lines at its end are missing'}"


def unfinished(path: Path, size: int) -> bool:
    """Whether a log goes on behind its last whole group."""
    return _size(path) > size


@contextmanager
def on_disk(path: Path) -> Iterator[None]:
    """Turns an error of the disk while writing into one sentence."""
    try:
        yield
    except OSError as error:
        raise StateError(
            f"{path}: cannot be written ({error.strerror or error}); free space or allow writing, then --resume"
        ) from error


@contextmanager
def on_disk_readable(path: Path) -> Iterator[None]:
    """Turns an error of the disk while reading into one sentence."""
    try:
        yield
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror or error})") from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _write(path: Path, begin: int, text: bytes) -> None:
    """Write text at a place, end the file after it, wait for the disk; on failure the file ends at that place."""
    handle = open_in_place(path, os.O_RDWR | os.O_CREAT, mode=PRIVATE)
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
