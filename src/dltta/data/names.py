"""1 images. What does a file's name say: which case does it belong to, and which of its channels is it?"""

import re
from pathlib import Path

from dltta.data.formats import dicom
from dltta.data.formats.format import ending

_CHANNEL = re.compile(r"(.+)_(\d{4})")


def stem(file: Path) -> str:
    """A file's name without the ending of its format; other endings stay."""
    found = ending(file)
    return dicom.stem(file) if found is None else file.name[: -len(found)]


def split_channel(file: Path) -> tuple[str, int | None]:
    """Case and channel of nnU-Net's `<case>_<channel, four digits><ending>`; None where there are no digits."""
    match = _CHANNEL.fullmatch(stem(file))
    return (stem(file), None) if match is None else (match[1], int(match[2]))
