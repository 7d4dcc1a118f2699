"""1 images. How does a PNG, TIFF or NIfTI file become an array, and a mask a file that fits its image?

DICOM has a file of its own (`dicom.py`) and shares `Image` and `Geometry`.

Intensities stay in the file's units (0..255, 0..65535, Hounsfield units, ...): scaling them is preprocessing, done
elsewhere. Axes stay in the file's order too: rows and columns in PNG and TIFF, the voxel axes in NIfTI.
What a mask needs to lie on its image again (format, size, affine, header) travels in `Geometry`.

Rules for the unusual: an alpha channel is dropped, colors as stored; a PNG with a palette gives the palette's RGB
colors as an image and its indices as a mask; what cannot be read without loss or guessing (CMYK, a TIFF palette,
16-bit color PNG, several pages, 4-D NIfTI, more pixels than Pillow's limit) is refused in one sentence.
"""

import gzip
import logging
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO, Literal

import nibabel as nib
import numpy as np
import tifffile
from nibabel.affines import apply_affine, voxel_sizes
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError
from numpy.typing import ArrayLike, NDArray
from PIL import Image as Pillow

from dltta.errors import DataError
from dltta.files import open_atomically

Kind = Literal["png", "tiff", "nifti", "dicom"]

# Our errors say what is wrong with a file; where nobody set up logging, tifffile would say it again on the terminal.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

ENDINGS: dict[str, Kind] = {".png": "png", ".tif": "tiff", ".tiff": "tiff", ".nii.gz": "nifti", ".nii": "nifti"}

_NAMES: dict[Kind, str] = {"png": "PNG", "tiff": "TIFF", "nifti": "NIfTI", "dicom": "DICOM"}
_PNG_CHANNELS = {"1": 1, "L": 1, "LA": 1, "I": 1, "I;16": 1, "I;16B": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3}
_DEFLATE_RATIO = 1032  # at most so many bytes come from one compressed byte
_MALFORMED = (
    OSError,
    EOFError,
    ValueError,
    SyntaxError,
    TypeError,
    LookupError,
    MemoryError,
    ArithmeticError,
    struct.error,
    zlib.error,
    tifffile.TiffFileError,
    ImageFileError,
    HeaderDataError,
)


@dataclass(frozen=True)
class Geometry:
    """Where an image's positions lie, and what a mask on it must look like on disk."""

    kind: Kind
    shape: tuple[int, ...]  # spatial, as the array's axes after the channel
    channels: int = 1
    limit: int | None = None  # largest value that the pixels can hold, 255 or 65535 in most pictures; None in NIfTI
    spacing: tuple[float, ...] | None = None  # mm along each spatial axis; None in PNG and TIFF, which do not say
    affine: NDArray[np.float64] | None = field(
        default=None, compare=False, repr=False
    )  # (4, 4) voxel to mm, in volumes: right, anterior, superior
    header: Any = field(default=None, compare=False, repr=False)  # nibabel's header, or `dicom.Series`


@dataclass(frozen=True)
class Image:
    """One image file: values in the file's units, and where they lie."""

    array: NDArray[np.float32]  # (C, *spatial), finite
    geometry: Geometry


def ending(path: Path) -> str | None:
    """The ending of a file that we read, as written in `ENDINGS`, or None."""
    name = path.name.lower()
    return next((e for e in ENDINGS if name.endswith(e) and len(name) > len(e)), None)


def read_geometry(path: Path | str) -> Geometry:
    """Size, spacing and orientation of an image file, from its header alone."""
    path = Path(path)
    kind = _kind(path)
    with _reading(path, kind):
        return _GEOMETRY[kind](path)


def read_image(path: Path | str) -> Image:
    """An image file as float32 (C, *spatial); integers of up to 16 bits arrive exactly."""
    path = Path(path)
    kind = _kind(path)
    with _reading(path, kind):
        geometry = _GEOMETRY[kind](path)
        stored = _PIXELS[kind](path)
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
    kind = _kind(path)
    with _reading(path, kind):
        stored = _INDICES[kind](path)
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
    return Image(array, replace(images[0].geometry, channels=len(array)))


def write_mask(path: Path | str, labels: ArrayLike, like: Geometry) -> None:
    """Writes class values (*spatial) in the format, size, spacing and orientation of the image they belong to.

    8 bits when the values fit, 16 otherwise. The file appears whole or not at all.
    """
    path = Path(path)
    kind = _kind(path)
    if kind != like.kind:
        raise DataError(
            f"{path}: the image is {_NAMES[like.kind]}, its mask cannot be {_NAMES[kind]}; change the ending"
        )
    stored = class_values(path, labels, like)
    with writing(path) as file:
        _WRITE[ending(path) or ""](file, stored, like)


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


def _kind(path: Path) -> Kind:
    found = ending(path)
    if found is None:
        raise DataError(f"{path}: unsupported ending; use one of {' '.join(ENDINGS)}")
    return ENDINGS[found]


@contextmanager
def _reading(path: Path, kind: Kind) -> Iterator[None]:
    """Turns whatever a malformed file makes the libraries raise into one sentence."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the name") from error
    except Pillow.DecompressionBombError as error:
        raise DataError(f"{path}: more pixels than Pillow's safety limit; cut the image into tiles") from error
    except _MALFORMED as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"{path}: cannot be read as {_NAMES[kind]} ({reason[:160]}); copy it again from its source or leave it out"
        ) from error


def _real(path: Path, stored: NDArray[Any]) -> None:
    if stored.dtype.kind not in "iubf":
        raise DataError(
            f"{path}: values of type {stored.dtype} are not intensities; save numbers, one channel per file"
        )


def within_limit(path: Path, pixels: int) -> None:
    """Raises for a picture of more pixels than Pillow reads."""
    limit = Pillow.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise DataError(f"{path}: {pixels} pixels, more than Pillow's safety limit {limit}; cut the image into tiles")


# PNG


def _open_png(path: Path) -> Pillow.Image:
    with path.open("rb") as file:
        start = file.read(26)
    depth, color = (start[24], start[25]) if len(start) == 26 else (8, 0)
    if start.startswith(b"\x89PNG") and depth == 16 and color != 0:
        raise DataError(f"{path}: 16-bit color PNG cannot be read exactly; save it as 16-bit TIFF")
    image = Pillow.open(path, formats=["PNG"])
    within_limit(path, image.width * image.height)
    if image.mode not in _PNG_CHANNELS:
        raise DataError(f"{path}: PNG of mode {image.mode} is not supported; save it as grey or RGB")
    return image


def _png_geometry(path: Path) -> Geometry:
    with _open_png(path) as image:
        limit = 1 if image.mode == "1" else 65535 if image.mode.startswith("I") else 255
        return Geometry("png", (image.height, image.width), _PNG_CHANNELS[image.mode], limit)


def _png_pixels(path: Path) -> NDArray[Any]:
    with _open_png(path) as image:
        flat = image.convert("RGB") if image.mode in ("P", "PA") else image
        return _channels_first(np.asarray(flat), _PNG_CHANNELS[image.mode])


def _png_indices(path: Path) -> NDArray[Any]:
    with _open_png(path) as image:
        return _single(path, _channels_first(np.asarray(image), _PNG_CHANNELS[image.mode]))


def _write_png(file: BinaryIO, stored: NDArray[Any], like: Geometry) -> None:
    # A mask is made of runs of one value: looking for nothing else gives files as small, several times faster.
    Pillow.fromarray(stored).save(file, format="PNG", compress_type=zlib.Z_RLE)


# TIFF


def _tiff_geometry(path: Path) -> Geometry:
    with tifffile.TiffFile(path) as file:
        return _tiff_layout(path, file)


def _tiff_layout(path: Path, file: Any) -> Geometry:
    page, axes, shape = file.pages[0], file.series[0].axes, file.series[0].shape
    if axes not in ("YX", "YXS", "SYX"):
        raise DataError(f"{path}: a TIFF holds one 2-D image, found axes {axes} {shape}; save pages apart or use NIfTI")
    if page.photometric == tifffile.PHOTOMETRIC.SEPARATED:
        raise DataError(f"{path}: CMYK images are not supported; save it as RGB")
    samples = shape[axes.index("S")] if "S" in axes else 1
    channels = samples - len(page.extrasamples)
    if channels not in (1, 3):
        raise DataError(f"{path}: {channels} channels in one TIFF; save one file per channel")
    rows, columns = shape[axes.index("Y")], shape[axes.index("X")]
    within_limit(path, rows * columns)
    whole = np.dtype(page.dtype).kind in "iu"
    return Geometry("tiff", (rows, columns), channels, int(np.iinfo(page.dtype).max) if whole else None)


def _tiff_pixels(path: Path) -> NDArray[Any]:
    with tifffile.TiffFile(path) as file:
        if file.pages[0].photometric == tifffile.PHOTOMETRIC.PALETTE:
            raise DataError(f"{path}: a TIFF with a palette is not an intensity image; save it as grey or RGB")
        return _tiff_stored(path, file)


def _tiff_indices(path: Path) -> NDArray[Any]:
    with tifffile.TiffFile(path) as file:
        return _single(path, _tiff_stored(path, file))


def _tiff_stored(path: Path, file: Any) -> NDArray[Any]:
    layout, series = _tiff_layout(path, file), file.series[0]
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
    return _channels_first(np.moveaxis(stored, 0, -1) if series.axes == "SYX" else stored, layout.channels)


def _write_tiff(file: BinaryIO, stored: NDArray[Any], like: Geometry) -> None:
    tifffile.imwrite(file, stored, photometric="minisblack", compression="zlib", metadata=None)


def _channels_first(stored: NDArray[Any], channels: int) -> NDArray[Any]:
    """(H, W) or (H, W, samples) to (C, H, W); samples after the channels are alpha and are dropped."""
    return stored[None] if stored.ndim == 2 else np.moveaxis(stored[..., :channels], -1, 0)


def _single(path: Path, stored: NDArray[Any]) -> NDArray[Any]:
    if len(stored) != 1:
        raise DataError(f"{path}: a mask has one channel, found {len(stored)} colors; save class values as grey")
    plane: NDArray[Any] = stored[0]
    return plane


# NIfTI


def _nifti_geometry(path: Path) -> Geometry:
    header = _open_nifti(path).header
    affine = np.asarray(header.get_best_affine(), dtype=np.float64)
    shape = tuple(int(n) for n in header.get_data_shape())
    if len(shape) not in (2, 3):
        raise DataError(f"{path}: {len(shape)}-D NIfTI {shape}; save one 3-D file per channel or time point")
    if math.prod(shape) * header.get_data_dtype().itemsize > _DEFLATE_RATIO * path.stat().st_size:
        raise DataError(f"{path}: its header says {shape}, more than the file can hold; copy it again from its source")
    spacing = tuple(float(s) for s in voxel_sizes(affine)[: len(shape)])
    if 0 in shape or not np.isfinite(affine).all() or min(spacing) <= 0:
        raise DataError(f"{path}: size {shape} and spacing {spacing} describe no volume; correct the header")
    return Geometry("nifti", shape, 1, None, spacing, affine, header)


def _open_nifti(path: Path) -> Any:
    image = nib.load(path)
    if not isinstance(image, nib.Nifti1Image | nib.Nifti2Image):
        raise DataError(f"{path}: {type(image).__name__} instead of NIfTI; convert it")
    return image


def _nifti_pixels(path: Path) -> NDArray[Any]:
    return _nifti_indices(path)[None]


def _nifti_indices(path: Path) -> NDArray[Any]:
    stored: NDArray[Any] = np.asanyarray(_open_nifti(path).dataobj)  # slope and intercept applied
    return stored


_GEOMETRY: dict[Kind, Callable[[Path], Geometry]] = {
    "png": _png_geometry,
    "tiff": _tiff_geometry,
    "nifti": _nifti_geometry,
}
_PIXELS: dict[Kind, Callable[[Path], NDArray[Any]]] = {
    "png": _png_pixels,
    "tiff": _tiff_pixels,
    "nifti": _nifti_pixels,
}
_INDICES: dict[Kind, Callable[[Path], NDArray[Any]]] = {
    "png": _png_indices,
    "tiff": _tiff_indices,
    "nifti": _nifti_indices,
}
_WRITE: dict[str, Callable[[BinaryIO, NDArray[Any], Geometry], None]] = {
    ".png": _write_png,
    ".tif": _write_tiff,
    ".tiff": _write_tiff,
    ".nii": partial(write_volume, compressed=False),
    ".nii.gz": partial(write_volume, compressed=True),
}
