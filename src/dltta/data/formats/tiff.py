"""1 images. TIFF: one 2-D image per file, grey or RGB, integers or floats, if it can be read exactly."""

import logging
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image as Pillow

from dltta.data.formats.format import Geometry, channels_first, ends_in_zeros, only_channel, within_file, within_limit
from dltta.errors import DataError

# Our errors say what is wrong with a file; where nobody set up logging, tifffile would say it again on the terminal.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

_RATIO = 4096  # bytes that one byte stands for at most, in the compressions that are common
_IDENTIFYING = (
    "DocumentName",
    "ImageDescription",
    "Make",
    "Model",
    "DateTime",
    "Artist",
    "HostComputer",
    "XMP",
    "IPTCNAA",
    "Copyright",
    "ExifTag",
    "GPSTag",
)


class TIFF:
    """Tagged Image File Format, through tifffile."""

    name = "TIFF"
    endings = (".tif", ".tiff")

    def begins(self, start: bytes) -> bool:
        return start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

    def read_geometry(self, path: Path) -> Geometry:
        with _open(path) as file:
            return _layout(path, file)

    def read_pixels(self, path: Path) -> NDArray[Any]:
        with _open(path) as file:
            if file.pages[0].photometric == tifffile.PHOTOMETRIC.PALETTE:
                raise DataError(f"{path}: a TIFF with a palette is not an intensity image; save it as grey or RGB")
            return _stored(path, file)

    def read_classes(self, path: Path) -> NDArray[Any]:
        with _open(path) as file:
            return only_channel(path, _stored(path, file))

    def write_classes(self, file: BinaryIO, labels: NDArray[Any], like: Geometry, ending: str) -> None:
        tifffile.imwrite(file, labels, photometric="minisblack", compression="zlib", metadata=None)

    def complete(self, path: Path) -> bool | None:
        """Whether the file holds its directory, which is often its end, and all strips or tiles that it names."""
        try:
            with tifffile.TiffFile(path) as file:
                begin, length = file.pages[0].dataoffsets, file.pages[0].databytecounts
        except (tifffile.TiffFileError, struct.error, LookupError, ValueError):
            return False
        if not begin or len(begin) != len(length):
            return False
        if max(b + n for b, n in zip(begin, length, strict=True)) > path.stat().st_size:
            return False
        return None if ends_in_zeros(path) else True

    def identifying(self, path: Path) -> tuple[str, ...]:
        with _open(path) as file:
            return tuple(tag.name for tag in file.pages[0].tags if tag.name in _IDENTIFYING and tag.count)

    def without_identity(self, like: Geometry) -> Geometry:
        return like


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with tifffile.TiffFile(path) as file:
            yield file
    except tifffile.TiffFileError as error:
        raise ValueError(str(error)) from error


def _layout(path: Path, file: Any) -> Geometry:
    page, axes, shape = file.pages[0], file.series[0].axes, file.series[0].shape
    if axes not in ("YX", "YXS", "SYX"):
        raise DataError(f"{path}: a TIFF holds one 2-D image, found axes {axes} {shape}; save pages apart or use NIfTI")
    if page.photometric == tifffile.PHOTOMETRIC.SEPARATED:
        raise DataError(f"{path}: CMYK images are not supported; save it as RGB")
    if page.dtype is None:
        raise DataError(f"{path}: values of an unknown type; save it with 8 or 16 bits")
    samples = shape[axes.index("S")] if "S" in axes else 1
    channels = samples - len(page.extrasamples)
    if channels not in (1, 3):
        raise DataError(f"{path}: {channels} channels in one TIFF; save one file per channel")
    rows, columns = shape[axes.index("Y")], shape[axes.index("X")]
    within_limit(path, rows * columns)
    within_file(path, max(rows * columns * samples, math.prod(page.chunks)) * page.dtype.itemsize, _RATIO)
    whole = page.dtype.kind in "iu"
    return Geometry("tiff", (rows, columns), channels, int(np.iinfo(page.dtype).max) if whole else None)


def _stored(path: Path, file: Any) -> NDArray[Any]:
    layout, series = _layout(path, file), file.series[0]
    try:
        stored = series.asarray()
    except (ValueError, NotImplementedError) as error:
        # A compression that tifffile leaves to an optional package; Pillow brings libtiff.
        stored = np.asarray(Pillow.open(path, formats=["TIFF"]))
        if stored.shape != series.shape or stored.dtype != series.dtype:
            raise DataError(
                f"{path}: TIFF compression {file.pages[0].compression} cannot be read exactly ({error}); "
                "save it uncompressed or deflated"
            ) from error
    except RuntimeError as error:  # a damaged strip, as imagecodecs says it where that package is installed
        raise ValueError(str(error)) from error
    return channels_first(np.moveaxis(stored, 0, -1) if series.axes == "SYX" else stored, layout.channels)


FORMAT = TIFF()
