"""Files that are whole or not there at all."""

import os
from pathlib import Path


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write beside the place, flush to the disk, then rename: at any moment the old file or the new one is there."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
