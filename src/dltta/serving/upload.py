"""1 images. Bytes from the network as files in a folder; an archive cannot write outside it or fill the disk."""

import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from dltta.data.formats.format import endings, recognize
from dltta.errors import DataError
from dltta.files import PRIVATE

MOST_MEMBERS = 4096  # slices of a series
MOST_RATIO = 200  # how many times larger than the archive its members may be together
MOST_BYTES = 4 << 30  # of its members together
HEADER = 64 << 20  # bytes that hold the header of any DICOM file
ZIP = b"PK\x03\x04"


def unpack_upload(folder: Path, filename: str, content: bytes) -> None:
    """Write the one file of an upload, or the members of a zip, into an empty folder, under names of our own."""
    if not content:
        raise DataError("the request has no content; send the bytes of an image")
    if content.startswith(ZIP):
        _unzip(folder, content)
        return
    known = next((end for end in sorted(endings(), key=len, reverse=True) if filename.lower().endswith(end)), None)
    if known is None:
        found = recognize(content[:512])
        known = ".dcm" if content[128:132] == b"DICM" else None if found is None else found.endings[0]
    if known is None:
        raise DataError("neither the name nor the first bytes are those of a PNG, TIFF, NIfTI or DICOM image")
    _write(folder / f"image{known}", content)


def first_bytes(content: bytes) -> bytes:
    """How the one file of an upload begins, or the first member of a zip."""
    return next(_members(content, most=HEADER)) if content.startswith(ZIP) else content[:HEADER]


def _unzip(folder: Path, content: bytes) -> None:
    series = folder / "series"
    for number, member in enumerate(_members(content)):
        series.mkdir(mode=0o700, exist_ok=True)
        _write(series / f"{number:05d}.dcm", member)


def _members(content: bytes, most: int = MOST_BYTES) -> Iterator[bytes]:
    """The files of an archive, which may be so many and so large; `most` bytes of each."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        members = [member for member in archive.infolist() if not member.is_dir()]
        if not 0 < len(members) <= MOST_MEMBERS:
            raise DataError(f"the archive has {len(members)} files; send one DICOM series of up to {MOST_MEMBERS}")
        size = sum(member.file_size for member in members)
        if size > MOST_RATIO * len(content):
            raise DataError(f"the archive unpacks to more than {MOST_RATIO} times its size; send the files as they are")
        if size > MOST_BYTES:
            raise DataError(f"the archive unpacks to {size} bytes, more than {MOST_BYTES}; send fewer slices")
        for member in members:
            with archive.open(member) as packed:
                yield packed.read(min(member.file_size, most))  # never more than it says
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the archive cannot be read ({error}); send it again") from error


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=PRIVATE)
    path.write_bytes(content)
