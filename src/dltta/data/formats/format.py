"""1 images. What is an image format, and which ones are there?

A format is one class in one file. It is found as the `FORMAT` of a module in this package, through an entry point of
the group `dltta.formats` in somebody else's package, or by `register`. Nothing else names it.
"""

import pkgutil
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dltta.errors import DataError, SettingError

GROUP = "dltta.formats"  # of entry points
START = 512  # bytes of a file that tell its format
MALFORMED = (  # what a format may raise for a file that is damaged
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
)


@dataclass(frozen=True)
class Geometry:
    """Where an image's positions lie, and what a mask on it must look like on disk."""

    kind: str  # the format's name in lower case: png, tiff, nifti, dicom, ...
    shape: tuple[int, ...]  # spatial, as the array's axes after the channel
    channels: int = 1
    limit: int | None = None  # largest value that the pixels can hold, mostly 255 or 65535; None: no meaning
    spacing: tuple[float, ...] | None = None  # mm along each spatial axis; None in PNG and TIFF, which do not say
    affine: NDArray[np.float64] | None = field(
        default=None, compare=False, repr=False
    )  # (4, 4) voxel to mm, in volumes: right, anterior, superior
    header: Any = field(default=None, compare=False, repr=False)  # for its format alone: nibabel's, `dicom.Series`


@dataclass(frozen=True)
class Image:
    """One image file: values in the file's units, and where they lie."""

    array: NDArray[np.float32]  # (C, *spatial), finite
    geometry: Geometry


@runtime_checkable
class Format(Protocol):
    """How files of one format are recognized, read and written. `dltta.testing.check_format` checks the contract.

    A damaged file raises one of `MALFORMED`, which becomes one line for the user, or a `DataError`, which is that line.
    """

    @property
    def name(self) -> str:
        """As messages say it, "PNG"; in lower case the `kind` of its geometries."""
        ...

    @property
    def endings(self) -> tuple[str, ...]:
        """In lower case, with their dot."""
        ...

    def begins(self, start: bytes) -> bool:
        """Whether a file that starts with these bytes (512, fewer in a shorter file) is of this format."""
        ...

    def read_geometry(self, path: Path) -> Geometry:
        """From the header alone."""
        ...

    def read_pixels(self, path: Path) -> NDArray[Any]:
        """Values (C, *spatial) in the file's units, of any type of numbers."""
        ...

    def read_classes(self, path: Path) -> NDArray[Any]:
        """Class values (*spatial) of a label file."""
        ...

    def write_classes(self, file: BinaryIO, labels: NDArray[Any], like: Geometry, ending: str) -> None:
        """Writes class values (*spatial), 8 or 16 bits, on the grid of an image of this format."""
        ...


@runtime_checkable
class Completeness(Protocol):
    """What a format may add: whether a file that is being copied is all there."""

    def complete(self, path: Path) -> bool | None:
        """True: its end is there. False: more must come. None: cannot be told, as where the end may be empty space."""
        ...


@runtime_checkable
class Identity(Protocol):
    """What a format may add: what in its files names a patient, and how a mask is written without it."""

    def identifying(self, path: Path) -> tuple[str, ...]:
        """Names of the fields that hold text or dates about the patient, the place or the time; never their values."""
        ...

    def without_identity(self, like: Geometry) -> Geometry:
        """The same grid, with nothing in its header that would name a patient in a mask written like it."""
        ...


_registered: list[Format] = []


def register(format: Format) -> None:
    """Makes a format known to everything that reads or writes images."""
    _check(format, formats())
    _registered.append(format)


def formats() -> tuple[Format, ...]:
    """Ours, then installed ones, then registered ones."""
    return (*_installed(), *_registered)


def endings() -> tuple[str, ...]:
    """Every ending that is read, in the alphabet's order."""
    return tuple(sorted(ending for format in formats() for ending in format.endings))


def ending(path: Path) -> str | None:
    """The ending of a file that we read, in lower case, or None."""
    return ending_among(path, endings())


def ending_among(path: Path, known: Iterable[str]) -> str | None:
    """The longest of these endings that a file's name has, after at least one other character."""
    name = path.name.lower()
    return max((e for e in known if name.endswith(e) and len(name) > len(e)), key=len, default=None)


def format_of(path: Path) -> Format:
    """The format that a file's ending names."""
    found = ending(path)
    for format in formats():
        if found in format.endings:
            return format
    raise DataError(f"{path}: unsupported ending; use one of {' '.join(endings())}")


def recognize(start: bytes) -> Format | None:
    """The format that a file's first bytes (512) tell."""
    return next((format for format in formats() if format.begins(start)), None)


def complete(path: Path) -> bool | None:
    """Whether a file that is being copied is all there, as `Completeness` says it; None also for other formats.

    A file without its format's first bytes is not, if it is shorter than these or starts with zeros: some programs make
    room first and fill it later.
    """
    format = format_of(path)
    try:
        with path.open("rb") as file:
            start = file.read(START)
        if not any(start) or (len(start) < START and not format.begins(start)):
            return False
        if not format.begins(start):
            return None
        return format.complete(path) if isinstance(format, Completeness) else None
    except MALFORMED:  # reading it will say what is wrong
        return None


@cache
def _installed() -> tuple[Format, ...]:
    package = import_module(__package__)
    modules = [import_module(f"{package.__name__}.{found.name}") for found in pkgutil.iter_modules(package.__path__)]
    found: list[Format] = [module.FORMAT for module in modules if hasattr(module, "FORMAT")]
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
        except (ImportError, AttributeError) as error:
            raise SettingError(
                f"image format {entry.value} cannot be imported ({error}); repair or uninstall its package"
            ) from error
        format = loaded() if isinstance(loaded, type) else loaded
        _check(format, found)
        found.append(format)
    return tuple(found)


def _check(format: object, others: Sequence[Format]) -> None:
    if not isinstance(format, Format):
        raise SettingError(f"{format!r} is no image format; see dltta.data.formats.format.Format for what one needs")
    for other in others:
        taken = set(format.endings) & set(other.endings)
        if taken or format.name.lower() == other.name.lower():
            raise SettingError(f"image format {format.name} has the name or the endings of {other.name}; choose others")


# what formats share


def ends_in_zeros(path: Path) -> bool:
    """Whether the last 4096 bytes are zeros: an empty background, or space that is not filled yet."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        return not any(file.read())


def within_limit(path: Path, pixels: int) -> None:
    """Raises for a 2-D image of more pixels than Pillow reads."""
    limit = Pillow.MAX_IMAGE_PIXELS
    if limit is not None and pixels > limit:
        raise DataError(f"{path}: {pixels} pixels, more than Pillow's safety limit {limit}; cut the image into tiles")


def channels_first(stored: NDArray[Any], channels: int) -> NDArray[Any]:
    """(H, W) or (H, W, samples) to (C, H, W); samples after the channels are alpha and are dropped."""
    return stored[None] if stored.ndim == 2 else np.moveaxis(stored[..., :channels], -1, 0)


def only_channel(path: Path, stored: NDArray[Any]) -> NDArray[Any]:
    """(1, H, W) to (H, W); `path` is named in the error."""
    if len(stored) != 1:
        raise DataError(f"{path}: a mask has one channel, found {len(stored)} colors; save class values as grey")
    plane: NDArray[Any] = stored[0]
    return plane
