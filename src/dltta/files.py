"""Files that are whole or not there at all, never written through a symbolic link; tables that are only text."""

import csv
import errno
import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PRIVATE, PRIVATE_FOLDER = 0o600, 0o700  # for the owner alone
_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")  # what spreadsheets compute; apostrophes before it are told apart
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # not on every system


def write_atomically(path: Path, content: bytes | str, *, mode: int = 0o666) -> None:
    """Write beside the place, flush to the disk, then rename: at any moment the old file or the new one is there."""
    with open_atomically(path, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomically(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file to write that takes its place when the block ends; nothing happens when the block raises.

    A symbolic link in its place is replaced, not followed. What a killed process leaves behind is hidden and ends in
    `.part`, so that nobody takes it for a result.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "w+b", opener=lambda place, flags: _create(Path(place), mode)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def csv_table(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV without formulas: a text that a spreadsheet would compute gets an apostrophe in front."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_as_text(cell) for cell in row] for row in rows)
    return text.getvalue()


def from_csv(cell: str) -> str:
    """The text that `csv_table` was given."""
    return cell[1:] if _FORMULA.match(cell[1:]) and cell.startswith("'") else cell


def _as_text(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    text = f"'{cell}" if _FORMULA.match(cell) and not _is_number(cell) else cell
    return text.replace("\r", " ")  # it would end the row


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text == text.strip()


def open_in_place(path: Path, flags: int, *, mode: int = 0o666) -> int:
    """A descriptor of the file itself; raises `OSError` if there is a symbolic link in its place."""
    try:
        return os.open(path, flags | _NOFOLLOW, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _is_link(path) from error
        raise


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Create a folder unless it is there; raises `OSError` if there is a symbolic link in its place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode)
    require_no_link(path)


def require_no_link(path: Path) -> None:
    """Raise `OSError` if there is a symbolic link in the place of a file or folder."""
    if path.is_symlink():
        raise _is_link(path)


def sync_folder(folder: Path) -> None:
    """Flush a folder to the disk: after a power cut, files renamed into it are still there."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_parts(folder: Path) -> None:
    """Remove what killed processes left of files that they were writing into this folder."""
    for beside in folder.glob(".*.part"):
        beside.unlink(missing_ok=True)


def _create(path: Path, mode: int) -> int:
    """A new file; what is in its place, left by a killed process of the same number, goes first."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return open_in_place(path, flags, mode=mode)
    except FileExistsError:
        path.unlink()
        return open_in_place(path, flags, mode=mode)


def _is_link(path: Path) -> OSError:
    return OSError(errno.ELOOP, "it is a symbolic link, which is never followed", str(path))
