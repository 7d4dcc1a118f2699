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


def first_file(content: bytes) -> bytes:
    """The one file of an upload, or the first member of a zip."""
    return next(_members(content)) if content.startswith(ZIP) else content


def _unzip(folder: Path, content: bytes) -> None:
    series = folder / "series"
    for number, member in enumerate(_members(content)):
        series.mkdir(mode=0o700, exist_ok=True)
        _write(series / f"{number:05d}.dcm", member)


def _members(content: bytes) -> Iterator[bytes]:
    """The files of an archive, which may be so many and so large."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        members = [member for member in archive.infolist() if not member.is_dir()]
        if not 0 < len(members) <= MOST_MEMBERS:
            raise DataError(f"the archive has {len(members)} files; send one DICOM series of up to {MOST_MEMBERS}")
        if sum(member.file_size for member in members) > MOST_RATIO * len(content):
            raise DataError(f"the archive unpacks to more than {MOST_RATIO} times its size; send the files as they are")
        for member in members:
            with archive.open(member) as packed:
                bytes_ = packed.read(member.file_size + 1)
            if len(bytes_) > member.file_size:
                raise DataError("the archive holds more than it says; it may be damaged")
            yield bytes_
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the archive cannot be read ({error}); send it again") from error


def _write(path: Path, content: bytes) -> None:
    path.touch(mode=PRIVATE)
    path.write_bytes(content)
