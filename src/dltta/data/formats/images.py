"""1 images. How does an image file become an array, and a mask a file that fits its image?

Each format has a file of its own beside this one; DICOM series, several files that are one image, are read by
`dicom.py`.

Intensities stay in the file's units (0..255, 0..65535, Hounsfield units, ...): scaling them is preprocessing, done
elsewhere. Axes stay in the file's order too: rows and columns in PNG and TIFF, the voxel axes in NIfTI.
What a mask needs to lie on its image again (format, size, affine, header) travels in `Geometry`.

What cannot be read without loss or guessing (CMYK, a TIFF palette, 16-bit color PNG, several pages, 4-D NIfTI, more
pixels than Pillow's limit) is refused in one sentence.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from nibabel.affines import apply_affine
from numpy.typing import ArrayLike, NDArray
from PIL import Image as Pillow

from dltta.data.formats.format import MALFORMED, Format, Geometry, Identity, Image, ending, endings, format_of, register
from dltta.errors import DataError
from dltta.files import open_atomically

__all__ = [
    "Format",
    "Geometry",
    "Image",
    "difference",
    "ending",
    "endings",
    "read_channels",
    "read_geometry",
    "read_image",
    "read_mask",
    "register",
    "write_mask",
]


def read_geometry(path: Path | str) -> Geometry:
    """Size, spacing and orientation of an image file, from its header alone."""
    path = Path(path)
    format = format_of(path)
    with reading(path, format):
        return format.read_geometry(path)


def read_image(path: Path | str) -> Image:
    """An image file as float32 (C, *spatial); integers of up to 16 bits arrive exactly."""
    path = Path(path)
    format = format_of(path)
    with reading(path, format):
        geometry = format.read_geometry(path)
        stored = format.read_pixels(path)
        _real(path, stored)
        return Image(finite(path, stored), geometry)


def finite(path: Path, stored: NDArray[Any]) -> NDArray[np.float32]:
    """Values as float32, all of them numbers; `path` is named in the error."""
    with np.errstate(over="ignore"):  # a double beyond float32 becomes infinite and is refused
        array = np.ascontiguousarray(stored, dtype=np.float32)
    bad = int(np.count_nonzero(~np.isfinite(array)))
    if bad:
        raise DataError(
            f"{path}: {bad} of {array.size} values are NaN or infinite; replace them or leave this image out"
        )
    return array


def read_mask(path: Path | str) -> NDArray[np.int64]:
    """A label file as int64 (*spatial), one class value per position."""
    path = Path(path)
    format = format_of(path)
    with reading(path, format):
        stored = format.read_classes(path)
        _real(path, stored)
    if stored.dtype.kind == "f" and not (np.isfinite(stored).all() and (stored == np.rint(stored)).all()):
        raise DataError(
            f"{path}: a mask holds whole class values, found fractions or NaN; write it with an integer type"
        )
    labels = stored.astype(np.int64)
    if labels.size and labels.min() < 0:
        raise DataError(f"{path}: class values start at 0, found {labels.min()}; renumber the mask")
    return labels


def read_channels(files: Sequence[Path]) -> Image:
    """The channels of one case, from one file each or from one file that holds them all, as (C, *spatial)."""
    images = [read_image(file) for file in files]
    for file, image in zip(files[1:], images[1:], strict=True):
        found = difference(images[0].geometry, image.geometry)
        if found is not None:
            raise DataError(f"{file}: {found} in {files[0].name}; channels of a case must lie on each other")
    array = np.concatenate([image.array for image in images])
    limits = {image.geometry.limit for image in images}
    limit = limits.pop() if len(limits) == 1 else None  # of channels with different depths
    return Image(array, replace(images[0].geometry, channels=len(array), limit=limit))


def write_mask(path: Path | str, labels: ArrayLike, like: Geometry) -> None:
    """Writes class values (*spatial) in the format, size, spacing and orientation of the image they belong to.

    8 bits when the values fit, 16 otherwise. The file appears whole or not at all.
    """
    path = Path(path)
    format = format_of(path)
    if format.name.lower() != like.kind:
        raise DataError(f"{path}: the image is {like.kind}, its mask cannot be {format.name}; change the ending")
    stored = class_values(path, labels, like)
    with writing(path) as file:
        format.write_classes(file, stored, like, ending(path) or "")


def class_values(path: Path, labels: ArrayLike, like: Geometry) -> NDArray[np.uint8 | np.uint16]:
    """A mask in the smallest type that holds it, if it is one for that image; `path` is named in the error."""
    values = np.asarray(labels)
    if values.shape != like.shape:
        raise DataError(
            f"{path}: a mask has the size of its image {like.shape}, found {values.shape}; bring it back to that"
        )
    if values.dtype.kind not in "iub":
        raise DataError(f"{path}: a mask holds whole class values, found {values.dtype}; take the argmax first")
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low < 0 or high > np.iinfo(np.uint16).max:
        raise DataError(f"{path}: class values lie in 0..65535, found {low}..{high}; renumber the classes")
    return values.astype(np.uint8 if high <= np.iinfo(np.uint8).max else np.uint16)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A file that appears whole or not at all; a full disk or a read-only folder is one sentence."""
    try:
        with open_atomically(path) as file:
            yield file
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written ({error.strerror or error}); free space or choose another folder"
        ) from error


def without_identity(path: Path, like: Geometry) -> Geometry:
    """The same grid, with nothing that would name a patient in a mask written like it."""
    format = format_of(path)
    if isinstance(format, Identity):
        return format.without_identity(like)
    if like.header is not None:
        raise DataError(f"{path}: {format.name} cannot be written without what names a patient; convert the images")
    return like


def difference(image: Geometry, mask: Geometry) -> str | None:
    """How a mask's place differs from its image's, in words, or None when each position lies on its counterpart.

    NIfTI files may differ by less than half of the smallest voxel edge at any corner: headers store rounded numbers.
    """
    if image.shape != mask.shape:
        return f"size {mask.shape} instead of {image.shape}"
    if image.affine is None or mask.affine is None:
        return None
    half = min(image.spacing or (1.0,)) / 2
    corners = np.array([*product(*((0, n - 1) for n in (*image.shape, 1, 1)[:3]))])  # (8, 3)
    moved = apply_affine(mask.affine, corners) - apply_affine(image.affine, corners)
    if np.abs(moved).max() < half:
        return None
    if not np.allclose(image.spacing or (), mask.spacing or (), rtol=1e-3):
        return f"spacing {_mm(mask)} instead of {_mm(image)}"
    return f"orientation or origin differ by up to {np.abs(moved).max():.3g} mm"


def _mm(geometry: Geometry) -> str:
    return " x ".join(f"{s:.4g}" for s in geometry.spacing or ()) + " mm"


@contextmanager
def reading(path: Path, format: Format) -> Iterator[None]:
    """Turns whatever a malformed file makes the libraries raise into one sentence."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the name") from error
    except Pillow.DecompressionBombError as error:
        raise DataError(f"{path}: more pixels than Pillow's safety limit; cut the image into tiles") from error
    except MALFORMED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{path}: cannot be read as {format.name} ({reason[:160]}); copy it again from its source or leave it out"
        ) from error


def _real(path: Path, stored: NDArray[Any]) -> None:
    if stored.dtype.kind not in "iubf":
        raise DataError(
            f"{path}: values of type {stored.dtype} are not intensities; save numbers, one channel per file"
        )
