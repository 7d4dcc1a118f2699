"""1 images. NIfTI: one 2-D or 3-D image per file, plain or gzipped, on the grid that its affine describes."""

import gzip
import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import nibabel as nib
import numpy as np
from nibabel.affines import voxel_sizes
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError
from numpy.typing import NDArray

from dltta.data.formats.format import Geometry, ends_in_zeros, within_file
from dltta.errors import DataError

_BLOCK = 1 << 20
_TEXTS = ("descrip", "aux_file", "db_name", "intent_name", "data_type")  # free text; some are NIfTI-1's alone


class NIfTI:
    """NIfTI-1 and NIfTI-2, through nibabel."""

    name = "NIfTI"
    endings = (".nii", ".nii.gz")

    def begins(self, start: bytes) -> bool:
        start = _unzipped(start) if start.startswith(b"\x1f\x8b") else start
        return start[344:348] in (b"n+1\0", b"ni1\0") or start[4:8] in (b"n+2\0", b"ni2\0")

    def read_geometry(self, path: Path) -> Geometry:
        header = _open_whole(path).header
        affine = np.asarray(header.get_best_affine(), dtype=np.float64)
        shape = tuple(int(n) for n in header.get_data_shape())
        if len(shape) not in (2, 3):
            raise DataError(f"{path}: {len(shape)}-D NIfTI {shape}; save one 3-D file per channel or time point")
        spacing = tuple(float(s) for s in voxel_sizes(affine)[: len(shape)])
        if 0 in shape or not np.isfinite(affine).all() or min(spacing) <= 0:
            raise DataError(f"{path}: size {shape} and spacing {spacing} describe no volume; correct the header")
        return Geometry("nifti", shape, 1, None, spacing, affine, header)

    def read_pixels(self, path: Path) -> NDArray[Any]:
        return self.read_classes(path)[None]

    def read_classes(self, path: Path) -> NDArray[Any]:
        stored: NDArray[Any] = np.asanyarray(_open_whole(path).dataobj)  # slope and intercept applied
        return stored

    def write_classes(self, file: BinaryIO, labels: NDArray[Any], like: Geometry, ending: str) -> None:
        write_volume(file, labels, like, compressed=ending == ".nii.gz")

    def complete(self, path: Path) -> bool | None:
        """Whether the file holds as many bytes as its header says, unzipped."""
        zipped = path.name.lower().endswith(".gz")
        size = _unzipped_size(path) if zipped else path.stat().st_size
        if size is None or size < 348:
            return False
        stored = _open(path).dataobj
        wanted = stored.offset + math.prod(stored.shape) * stored.dtype.itemsize
        if size < wanted:
            return False
        return True if zipped or not ends_in_zeros(path) else None

    def identifying(self, path: Path) -> tuple[str, ...]:
        header = _open(path).header
        named = tuple(name for name in _texts(header) if bytes(header[name]).strip(b" \0"))
        return (*named, *["extensions"] * bool(header.extensions))

    def without_identity(self, like: Geometry) -> Geometry:
        header = like.header.copy()
        for name in _texts(header):
            header[name] = b""
        header.extensions = type(header.extensions)()  # `copy` shares them
        return replace(like, header=header)


def _texts(header: Any) -> list[str]:
    return [name for name in _TEXTS if name in header]


def _unzipped_size(path: Path) -> int | None:
    """Bytes that a gzipped file holds; None where its end, with a checksum of all, is missing."""
    size, stream = 0, zlib.decompressobj(wbits=31)
    with path.open("rb") as file:
        while not stream.eof and (block := stream.unconsumed_tail or file.read(_BLOCK)):
            size += len(stream.decompress(block, _BLOCK))
    return size if stream.eof else None


def _unzipped(start: bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(start, 348)
    except zlib.error:
        return b""


def write_volume(file: BinaryIO, stored: NDArray[Any], like: Geometry, *, compressed: bool) -> None:
    """A NIfTI file on the grid of another: affine, forms, units and description are kept, its display window is not."""
    header = like.header.copy()
    header.set_data_dtype(stored.dtype)
    header["cal_min"] = header["cal_max"] = 0
    volume = nib.Nifti2Image if isinstance(header, nib.Nifti2Header) else nib.Nifti1Image
    image = volume(stored, like.affine, header)
    if not compressed:
        image.to_stream(file)
        return
    with gzip.GzipFile("", "wb", 1, file, mtime=0) as packed:  # no name and no time: the same mask, the same bytes
        image.to_stream(packed)


def _open(path: Path) -> Any:
    try:
        image = nib.load(path)
    except (ImageFileError, HeaderDataError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(image, nib.Nifti1Image | nib.Nifti2Image):
        raise DataError(f"{path}: {type(image).__name__} instead of NIfTI; convert it")
    return image


def _open_whole(path: Path) -> Any:
    """Refused where the header promises more than the file can hold: nibabel takes that memory before it reads."""
    image = _open(path)
    shape = [int(length) for length in image.header.get_data_shape()]
    within_file(path, math.prod(shape) * image.header.get_data_dtype().itemsize)
    return image


FORMAT = NIfTI()
