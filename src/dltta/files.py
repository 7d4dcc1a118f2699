"""Files that are whole or not there at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write beside the place, flush to the disk, then rename: at any moment the old file or the new one is there."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def open_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file to write that takes its place when the block ends; nothing happens when the block raises.

    What a killed process leaves behind is hidden and ends in `.part`, so that nobody takes it for a result.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


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
