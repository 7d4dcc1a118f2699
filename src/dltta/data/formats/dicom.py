"""1 images. How does a DICOM series become a volume, and class values a DICOM segmentation that lies on it?

A volume's axes are columns, rows, slices, and its affine leads from these indices to millimeters towards the patient's
right, anterior and superior side, as in NIfTI: the transpose of a slice as `pydicom` gives it, slices in the order of
their place along the normal (row direction x column direction), never of their names. Frames of one file that have
places (Enhanced CT, MR, ...) are slices of a volume too. A single image has the axes rows, columns, as in PNG. Values
are the modality's (Hounsfield units, ...): rescale slope and intercept, or the modality's table, are applied slice by
slice; MONOCHROME1, where large values are dark, is turned round within its stored bits.

Nothing of a header reaches an error message but sizes and distances: headers name patients.
"""

import hashlib
import io
import logging
import os
import struct
import unicodedata
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from nibabel.affines import voxel_sizes
from numpy.typing import ArrayLike, NDArray

from dltta.data.formats.format import Geometry, Image, ending_among, within_file, within_limit
from dltta.data.formats.images import class_values, finite, writing
from dltta.errors import DataError, SettingError
from dltta.version import __version__

ENDINGS = (".dcm", ".dicom", ".ima")

_NOT_IMAGES = {  # pixels that are not an image of the patient: our own predictions, doses of planning systems
    "1.2.840.10008.5.1.4.1.1.66.4": "segmentation",
    "1.2.840.10008.5.1.4.1.1.66.7": "label map segmentation",
    "1.2.840.10008.5.1.4.1.1.30": "parametric map",
    "1.2.840.10008.5.1.4.1.1.481.2": "radiotherapy dose",
}
_COPIED = (  # into every segmentation, as its standard demands; all may be empty
    "PatientID",
    "PatientName",
    "PatientBirthDate",
    "PatientSex",
    "AccessionNumber",
    "StudyID",
    "StudyDate",
    "StudyTime",
    "SliceThickness",
)
_PLACING = (  # what a segmentation needs of an image, and no more
    "SOPClassUID",
    "SOPInstanceUID",
    "SeriesInstanceUID",
    "StudyInstanceUID",
    "FrameOfReferenceUID",
    "PositionReferenceIndicator",
    "Modality",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "PixelSpacing",
    "SliceThickness",
    "SpacingBetweenSlices",
    "Rows",
    "Columns",
    "NumberOfFrames",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
    "LossyImageCompression",
    "LossyImageCompressionRatio",
    "LossyImageCompressionMethod",
)
_IDENTIFYING = (  # beside names, dates and the groups of patient and trial
    "AccessionNumber",
    "StudyID",
    "StudyDescription",
    "SeriesDescription",
    "ProtocolName",
    "ImageComments",
    "InstitutionName",
    "InstitutionAddress",
    "InstitutionalDepartmentName",
    "StationName",
    "DeviceSerialNumber",
    "RequestAttributesSequence",
    "FrameOfReferenceUID",
)
_FRAMES = "PerFrameFunctionalGroupsSequence"
_PER_FRAME = {  # groups of a multi-frame file that say what one slice's header says
    "PlanePositionSequence": ("ImagePositionPatient",),
    "PlaneOrientationSequence": ("ImageOrientationPatient",),
    "PixelMeasuresSequence": ("PixelSpacing",),
    "PixelValueTransformationSequence": ("RescaleSlope", "RescaleIntercept"),
}
_NO_DATE = datetime(1900, 1, 1)  # where the standard demands one
_SERIES_NUMBER = 900
PREAMBLE, MAGIC = 132, b"DICM"  # bytes before the header, and the last of them
_PIXELS = (0x7FE00008, 0x7FE00009, 0x7FE00010)
_CLASS = "MediaStorageSOPClassUID"
_DEFLATED = "1.2.840.10008.1.2.1.99"
_UNDEFINED = 0xFFFFFFFF
_ALIKE = 1e-3  # headers store rounded numbers
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])
_MALFORMED = (
    OSError,
    EOFError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    MemoryError,
    ArithmeticError,
    NotImplementedError,
    RuntimeError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class Series:
    """The headers of a series in the order of its slices, without pixels: what a segmentation of it refers to."""

    headers: tuple[Any, ...] = field(repr=False)  # pydicom's data sets
    modified: float  # when the newest file was last written, seconds since 1970
    frames: tuple[int, ...] | None = None  # of a multi-frame file, in the order of slices


Uids = Literal["keep", "new"]


@dataclass(frozen=True)
class Anonymous:
    """How a segmentation is written that does not name its patient: a pseudonym, no dates, nothing else of the header.

    Identifiers are kept, so that the segmentation finds its images; with `uids="new"` they are replaced, alike wherever
    `secret` is alike, and nothing leads back to the images.
    """

    pseudonym: str
    uids: Uids = "keep"
    secret: str = field(default="", repr=False)


class Peek(NamedTuple):
    """What tells which files belong together, and whether one of them is damaged."""

    series: str | None  # SeriesInstanceUID; None where it cannot be read
    placed: bool  # a slice with a place in the patient, rather than an X-ray or an ultrasound image
    problem: str | None = None  # why it cannot be read, in one sentence
    complete: bool = True  # False: more bytes may still come


def looks_like(file: Path, start: bytes) -> bool:
    """Whether a file says that it is DICOM, by its ending or by its first bytes."""
    return file.name.lower().endswith(ENDINGS) or start[PREAMBLE - len(MAGIC) : PREAMBLE] == MAGIC


def stem(file: Path) -> str:
    """A file's name without DICOM's endings."""
    return file.name[: len(file.name) - len(ending_among(file, ENDINGS) or "")]


def peek(file: Path) -> Peek | None:
    """The series of an image file, looked up once per version; None for a DICOM file that holds no image."""
    try:
        status = file.stat()
    except OSError as error:
        return Peek(None, False, f"{file}: cannot be read ({error.strerror or error}); check that it is still there")
    return _peek(file, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _peek(file: Path, size: int, changed: int) -> Peek | None:
    if file.name == "DICOMDIR":
        return None
    start = b""
    try:
        with _reading(file), file.open("rb") as stream:
            start = stream.read(PREAMBLE)
            return _look(file, stream, size)
    except DataError as error:
        foreign = len(start) == PREAMBLE and any(start) and not start.endswith(MAGIC)
        return Peek(None, False, str(error), foreign)


def _look(file: Path, stream: BinaryIO, size: int) -> Peek | None:
    """The header up to the pixels, and whether all of them are there; none follow a header that is cut off."""
    pixels: list[tuple[int, int]] = []  # length of the value, and where it begins

    def stop(tag: int, vr: object, length: int) -> bool:
        if tag in _PIXELS:
            pixels.append((length, stream.tell()))
        return tag in _PIXELS

    _refuse_deflated(file)
    stream.seek(0)
    names = ("SOPClassUID", "SeriesInstanceUID", "Rows", "ImagePositionPatient")
    wanted = [_library("pydicom.tag").Tag(name) for name in names]
    header = _library("pydicom.filereader").read_partial(stream, stop, specific_tags=wanted)
    meaning = _library("pydicom.uid").UID(str(header.get("SOPClassUID") or header.file_meta.get(_CLASS) or ""))
    if meaning in _NOT_IMAGES or (meaning.name != meaning and "Image Storage" not in meaning.name):
        return None
    if not pixels or "Rows" not in header or not _ends(stream, pixels[-1], size):
        problem = f"{file}: ends before its image does, or has none; copy it again from its source or leave it out"
        series = header.get("SeriesInstanceUID") if pixels else None  # else it may be cut off itself
        return Peek(series and str(series), bool(header.get("ImagePositionPatient")), problem, False)
    return Peek(str(header.SeriesInstanceUID), bool(header.get("ImagePositionPatient")))


def _ends(stream: BinaryIO, pixels: tuple[int, int], size: int) -> bool:
    """Whether the pixels end within the file."""
    length, begin = pixels
    if length != _UNDEFINED:
        return begin + length <= size
    stream.seek(begin)
    while len(item := stream.read(8)) == 8:
        group, element, length = struct.unpack("<HHI", item)
        if (group, element) == (0xFFFE, 0xE0DD):
            return True
        if (group, element) != (0xFFFE, 0xE000):
            return False
        stream.seek(length, os.SEEK_CUR)
    return False


def _refuse_deflated(file: Path) -> None:
    """A deflated header would be inflated whole when it is opened, to any size, and its pixels are not read anyway."""
    if _library("pydicom.filereader").read_file_meta_info(file).get("TransferSyntaxUID") == _DEFLATED:
        raise DataError(f"{file}: a deflated file; export it uncompressed")


def keywords() -> frozenset[str]:
    """Names of all elements that the standard knows."""
    return frozenset(_library("pydicom.datadict").keyword_dict)


def read_header(file: Path) -> Any:
    """A header as it is, without pixels."""
    with _reading(file):
        _refuse_deflated(file)
        return _library("pydicom").dcmread(file, stop_before_pixels=True)


def identifying(file: Path) -> tuple[str, ...]:
    """Names of the elements that name the patient, people, places or times, or lead to them; never their values."""
    header = read_header(file)
    with _reading(file):
        found = [element.keyword or "private elements" for element in header if _identifies(element)]
    return tuple(dict.fromkeys(found))


def _identifies(element: Any) -> bool:
    known = element.VR in ("PN", "DA", "DT", "TM") or element.keyword in _IDENTIFYING
    leads = element.VR == "UI" and element.keyword.endswith("InstanceUID")
    return bool(element.value) and (known or leads or element.tag.group in (0x0010, 0x0012) or element.tag.is_private)


def read_series(files: Sequence[Path]) -> Image:
    """The files of one series as a volume (1, columns, rows, slices); one file as an image (1 or 3, rows, columns)."""
    headers = [_header(file) for file in files]
    if len(files) == 1:
        return _multi_frame(files[0], headers[0]) if _FRAMES in headers[0] else _single(files[0], headers[0])
    return _volume(files, headers)


def write_segmentation(
    path: Path | str, labels: ArrayLike, like: Geometry, classes: Sequence[str], anonymous: "Anonymous | None" = None
) -> None:
    """Writes class values (*spatial) as a DICOM segmentation (SEG) of the series they belong to.

    Every class but the first, the background, is a binary segment with the class's value as its number. Slices without
    any are left out, as the standard allows, unless all are empty. Patient and study are the series', as the standard
    asks, unless it is written `anonymous`. The same labels for the same files give the same bytes: identifiers come
    from the content, dates from the files' time.
    """
    path = Path(path)
    if like.kind != "dicom" or not isinstance(like.header, Series):
        raise DataError(
            f"{path}: a DICOM segmentation refers to a DICOM series, the image is {like.kind}; use its format"
        )
    values = class_values(path, labels, like)
    if len(classes) < 2 or values.max(initial=0) >= len(classes):
        raise DataError(f"{path}: class value {values.max(initial=0)}, but {len(classes)} classes; name all, from 0 on")
    with _referring(path):
        content = _segmentation(values, like.header, classes, anonymous)
    with writing(path) as file:
        file.write(content)


# reading


def _header(file: Path) -> Any:
    """A header without pixels; what segmentations must repeat is there, empty where it is missing or malformed."""
    header = read_header(file)
    with _reading(file):
        frames = int(header.get("NumberOfFrames") or 1)
        if frames > 1 and _FRAMES not in header:
            raise DataError(
                f"{file}: a multi-frame file of {frames} frames without places; export one file per slice, or NIfTI"
            )
        within_limit(file, int(header.Rows) * int(header.Columns))
        for name in _COPIED:
            if name not in header or not _valid(name, str(header.get(name) or "")):
                setattr(header, name, None)
    return header


def _valid(name: str, value: str) -> bool:
    """Whether a segmentation accepts the value: dates such as "unknown" would keep it from being written."""
    kinds = _library("pydicom.valuerep")
    kind = {"PatientBirthDate": kinds.DA, "StudyDate": kinds.DA, "StudyTime": kinds.TM}.get(name, str)
    try:
        kind(value)
    except ValueError:
        return False
    return name != "PatientSex" or value in ("", "M", "F", "O")


def _single(file: Path, header: Any) -> Image:
    with _reading(file):
        shape = int(header.Rows), int(header.Columns)
        array = _values(file, header)
        spacing = _spacing(file, header, "PixelSpacing", "ImagerPixelSpacing", "NominalScannedPixelSpacing")
        series = Series((header,), file.stat().st_mtime)
        return Image(finite(file, array), Geometry("dicom", shape, len(array), _limit(header), spacing, None, series))


def _multi_frame(file: Path, header: Any) -> Image:
    """The frames of one file as a volume; a single one as an image."""
    with _reading(file):
        frames = [_frame(header, number) for number in range(len(header[_FRAMES].value))]
        names = [file.with_name(f"{file.name} (frame {number})") for number in range(1, len(frames) + 1)]
        if len(frames) != int(header.get("NumberOfFrames") or 0):
            raise DataError(
                f"{file}: has {len(frames)} places for {header.get('NumberOfFrames')} frames; export it again"
            )
        within_file(file, len(frames) * int(header.Rows) * int(header.Columns) * int(header.BitsAllocated) // 8)
        modified = file.stat().st_mtime
    order, affine = _place(names, frames) if len(frames) > 1 else ([0], None)
    with _reading(file):
        stored = _stored(file, header).reshape(len(frames), int(header.Rows), int(header.Columns))
        slices = np.stack([finite(names[n], _in_units(stored[n], frames[n])) for n in order]).astype(np.float32)
        series = Series((header,), modified, tuple(order))
        if affine is None:
            spacing = _spacing(file, frames[0], "PixelSpacing")
            return Image(slices, Geometry("dicom", slices.shape[1:], 1, _limit(frames[0]), spacing, None, series))
    spacing = tuple(float(s) for s in voxel_sizes(affine))
    shape = slices.shape[::-1]
    return Image(np.ascontiguousarray(slices.T)[None], Geometry("dicom", shape, 1, None, spacing, affine, series))


def _frame(header: Any, number: int) -> Any:
    """What a file of its own would say of one frame: its place, spacing and values, of its own or shared by all."""
    found = _library("pydicom").Dataset()
    for name in (*_PLACING, "RescaleSlope", "RescaleIntercept"):
        if name in header:
            setattr(found, name, header[name].value)
    for groups in (*header.get("SharedFunctionalGroupsSequence", ())[:1], header[_FRAMES].value[number]):
        for group, names in _PER_FRAME.items():
            for name in names if groups.get(group) else ():
                if name in groups[group].value[0]:
                    setattr(found, name, groups[group].value[0][name].value)
    found.SOPInstanceUID = str(number)  # tells frames apart, as it does files
    return found


def _volume(files: Sequence[Path], headers: Sequence[Any]) -> Image:
    order, affine = _place(files, headers)
    shape = int(headers[0].Columns), int(headers[0].Rows), len(files)
    with _reading(files[0]):
        slices = np.empty(shape[::-1], np.float32)  # (slices, rows, columns)
        modified = max(file.stat().st_mtime for file in files)
    for number, index in enumerate(order):
        with _reading(files[index]):
            found = _values(files[index], headers[index])
            if len(found) != 1:
                raise DataError(f"{files[index]}: a slice in color; volumes have one value per position, leave it out")
            slices[number] = finite(files[index], found)[0]
    spacing = tuple(float(s) for s in voxel_sizes(affine))
    series = Series(tuple(headers[index] for index in order), modified)
    return Image(np.ascontiguousarray(slices.T)[None], Geometry("dicom", shape, 1, None, spacing, affine, series))


def _place(files: Sequence[Path], headers: Sequence[Any]) -> tuple[list[int], NDArray[np.float64]]:
    """The order of the slices along their normal, and the affine from (column, row, slice) to millimeters.

    Slices may be shifted against each other by the same amount each (a tilted gantry), but lie at even distances.
    """
    for file, header in zip(files[1:], headers[1:], strict=True):
        _check_alike(file, header, headers[0], files[0].name)
    _check_distinct(files, headers)
    with _reading(files[0]):
        across, down = _directions(files[0], headers[0])
        between = _distances(files[0], headers[0], "PixelSpacing")
        positions = np.array([_numbers(f, h, "ImagePositionPatient", 3) for f, h in zip(files, headers, strict=True)])
    along = positions @ np.cross(across, down)
    order = np.argsort(along, kind="stable")
    _check_distances([files[index] for index in order], along[order])
    positions = positions[order]
    step = (positions[-1] - positions[0]) / (len(positions) - 1)
    line = positions[0] + np.arange(len(positions))[:, None] * step
    off = float(np.linalg.norm(positions - line, axis=1).max())
    if off > 0.1 * np.linalg.norm(step):
        raise DataError(f"{files[0].parent}: slices are up to {off:.3g} mm off an even grid; resample the series")
    affine = np.eye(4)
    affine[:3] = np.stack([across * between[1], down * between[0], step, positions[0]], axis=1)
    return order.tolist(), _LPS_TO_RAS @ affine


def _check_alike(file: Path, header: Any, first: Any, name: str) -> None:
    """Slices of one volume share series, size, orientation and spacing."""
    with _reading(file):
        if header.SeriesInstanceUID != first.SeriesInstanceUID:
            raise DataError(f"{file}: of another series than {name}; put each series in a folder of its own")
        if (header.Rows, header.Columns) != (first.Rows, first.Columns):
            found, wanted = (f"{h.Columns} x {h.Rows}" for h in (header, first))
            raise DataError(f"{file}: {found} pixels, {name} has {wanted}; take out what is no slice of the volume")
        turned = np.subtract(_directions(file, header), _directions(file, first))
        if np.abs(turned).max() > _ALIKE:
            raise DataError(f"{file}: another orientation than {name}; take out scouts and reformatted slices")
        between = _distances(file, header, "PixelSpacing")
        if not np.allclose(between, _distances(file, first, "PixelSpacing"), rtol=_ALIKE):
            raise DataError(f"{file}: another PixelSpacing than {name}; take out what is no slice of the volume")
        if header.get("FrameOfReferenceUID") != first.get("FrameOfReferenceUID"):
            raise DataError(f"{file}: another frame of reference than {name}; the patient may have moved, split them")


def _check_distinct(files: Sequence[Path], headers: Sequence[Any]) -> None:
    first: dict[str, Path] = {}
    for file, header in zip(files, headers, strict=True):
        same = first.setdefault(str(header.get("SOPInstanceUID")), file)
        if same is not file:
            raise DataError(f"{file}: has the identifier of {same.name}; keep one of them, or export the series again")


def _check_distances(files: Sequence[Path], along: NDArray[np.float64]) -> None:
    """Sorted places (mm) must lie at even distances."""
    folder, gaps = files[0].parent, np.diff(along)
    usual = float(np.median(gaps))
    if gaps.min() < 1e-3:
        one, other = (files[int(gaps.argmin()) + n].name for n in (0, 1))
        raise DataError(
            f"{folder}: {one} and {other} at one place; keep one image per place (no time points, no copies)"
        )
    if gaps.max() > 1.5 * usual:
        missing = int(np.rint(gaps / usual).sum()) - len(gaps)
        raise DataError(
            f"{folder}: {missing} slices are missing between others ({gaps.max():.3g} mm apart instead of "
            f"{usual:.3g}); export the whole series"
        )
    if gaps.min() < usual / 1.5:
        raise DataError(f"{folder}: slices {gaps.min():.3g} to {gaps.max():.3g} mm apart; resample the series evenly")


def _directions(file: Path, header: Any) -> NDArray[np.float64]:
    """Unit vectors (2, 3) in which columns and rows are counted, towards the patient's left, posterior, superior."""
    found = _numbers(file, header, "ImageOrientationPatient", 6).reshape(2, 3)
    if np.abs(found @ found.T - np.eye(2)).max() > 10 * _ALIKE:
        raise DataError(f"{file}: its orientation is not two directions at right angles; export the series again")
    return found


def _spacing(file: Path, header: Any, *names: str) -> tuple[float, ...] | None:
    """Millimeters between rows and between columns, from the first of these elements that is there."""
    name = next((name for name in names if header.get(name) is not None), None)
    return None if name is None else tuple(_distances(file, header, name).tolist())


def _distances(file: Path, header: Any, name: str) -> NDArray[np.float64]:
    found = _numbers(file, header, name, 2)
    if found.min() <= 0:
        raise DataError(f"{file}: {name} {found.tolist()} is no distance; export it again")
    return found


def _numbers(file: Path, header: Any, name: str, count: int) -> NDArray[np.float64]:
    stored = header.get(name)
    found = np.array([] if stored is None else [float(number) for number in np.atleast_1d(stored)])
    if found.shape != (count,) or not np.isfinite(found).all():
        raise DataError(f"{file}: {name} is missing or not {count} numbers; export it again, or convert it to NIfTI")
    return found


def _values(file: Path, header: Any) -> NDArray[Any]:
    """Values (1 or 3, rows, columns) in the modality's units, or colors."""
    stored = _stored(file, header)
    if not str(header.PhotometricInterpretation).startswith("MONOCHROME"):
        return np.moveaxis(stored, -1, 0)
    return _in_units(stored, header)[None]


def _stored(file: Path, header: Any) -> NDArray[Any]:
    """Pixels as they are stored, ([frames,] rows, columns[, 3])."""
    meaning, shape = str(header.PhotometricInterpretation), (int(header.Rows), int(header.Columns))
    if not meaning.startswith(("MONOCHROME", "RGB", "YBR")):
        raise DataError(f"{file}: pixels are neither grey nor RGB; export it as MONOCHROME2 or RGB")
    pixels = _library("pydicom.pixels")
    _check_decoder(file, pixels, header.file_meta.TransferSyntaxUID)
    stored: NDArray[Any] = pixels.pixel_array(file)
    frames = int(header.get("NumberOfFrames") or 1)
    wanted = (*((frames,) if frames > 1 else ()), *shape, *(() if meaning.startswith("MONOCHROME") else (3,)))
    if stored.shape != wanted:
        raise DataError(f"{file}: pixels of shape {stored.shape} do not fit its header; export it again")
    return stored


def _in_units(stored: NDArray[Any], header: Any) -> NDArray[Any]:
    """Grey values in the modality's units."""
    if header.PhotometricInterpretation == "MONOCHROME1":
        stored = _extremes(header) - stored.astype(np.int64)
    in_units: NDArray[Any] = _library("pydicom.pixels").apply_modality_lut(stored, header)
    return in_units


def _check_decoder(file: Path, pixels: Any, syntax: Any) -> None:
    try:
        found = not syntax.is_compressed or pixels.get_decoder(syntax).is_available
    except NotImplementedError:  # a video, say
        found = False
    if not found:
        raise DataError(
            f"{file}: compressed as {syntax.name}, for which no decoder is installed; "
            "pip install 'pylibjpeg[all]', or export it uncompressed"
        )


def _extremes(header: Any) -> int:
    """The sum of the smallest and the largest value that the stored bits can hold."""
    return -1 if header.PixelRepresentation else (1 << int(header.BitsStored)) - 1


def _limit(header: Any) -> int | None:
    """The largest value of pixels that are stored as they are meant."""
    plain = header.get("RescaleSlope", 1) == 1 and header.get("RescaleIntercept", 0) == 0
    unsigned = plain and "ModalityLUTSequence" not in header and not header.PixelRepresentation
    return (1 << int(header.BitsStored)) - 1 if unsigned else None


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turns whatever a malformed file makes the library raise into one sentence, without the values it quotes."""
    try:
        yield
    except (DataError, SettingError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"{file}: no such file; check the name") from error
    except _malformed() as error:
        raise DataError(
            f"{file}: cannot be read as DICOM ({type(error).__name__}); copy it again from its source or leave it out"
        ) from None


def _malformed() -> tuple[type[Exception], ...]:
    """What pydicom raises for bytes that make no sense."""
    errors = _library("pydicom.errors")
    return (*_MALFORMED, errors.InvalidDicomError, errors.BytesLengthException)


# writing


def _segmentation(values: NDArray[Any], series: Series, classes: Sequence[str], anonymous: Anonymous | None) -> bytes:
    uid = _library("pydicom.uid").generate_uid
    planes = values.T if values.ndim == 3 else values[None]  # (slices, rows, columns)
    if series.frames is not None:
        planes = planes[np.argsort(series.frames)]  # as the frames lie in their file
    headers = series.headers if anonymous is None else [_without_identity(h, anonymous) for h in series.headers]
    source = str(headers[0].SeriesInstanceUID)
    images = [str(header.SOPInstanceUID) for header in headers]
    content = [*images, *classes, hashlib.sha256(planes.tobytes()).hexdigest(), str(series.modified), __version__]
    found = _library("highdicom").seg.Segmentation(
        source_images=headers,
        pixel_array=planes,
        segmentation_type="BINARY",
        segment_descriptions=[_segment(number, name) for number, name in enumerate(classes) if number],
        series_instance_uid=uid(entropy_srcs=[source, "series", __version__]),
        series_number=_SERIES_NUMBER,
        series_description="Segmentation (dltta)",
        sop_instance_uid=uid(entropy_srcs=content),
        instance_number=1,
        manufacturer="dltta",
        manufacturer_model_name="dltta",
        software_versions=__version__,
        device_serial_number="0",
        content_label="SEGMENTATION",
        content_description="Segmentation by a network adapted at test time",
        specific_character_set="ISO_IR 192",  # UTF-8: names of classes
    )
    moment = datetime.fromtimestamp(series.modified) if anonymous is None else _NO_DATE
    _without_chance(found, uid(entropy_srcs=[*content, "dimensions"]), moment)
    found.save_as(stream := io.BytesIO())
    return stream.getvalue()


def _without_identity(header: Any, anonymous: Anonymous) -> Any:
    """A header with the pseudonym and what places and describes the pixels; everything else is left out."""
    kept = _library("pydicom").Dataset()
    kept.file_meta = header.file_meta
    for name in _PLACING:
        if name in header:
            setattr(kept, name, header[name].value)
    for name in _COPIED:
        setattr(kept, name, header.get(name) if name in _PLACING else None)
    for name in ("SharedFunctionalGroupsSequence", _FRAMES) if _FRAMES in header else ():
        setattr(kept, name, [_only_places(groups) for groups in header.get(name, ())])
    kept.PatientName = kept.PatientID = anonymous.pseudonym
    if anonymous.uids == "new":
        make = _library("pydicom.uid").generate_uid
        for name in ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", "FrameOfReferenceUID"):
            if name in kept:
                setattr(kept, name, make(entropy_srcs=["uid", anonymous.secret, str(kept[name].value)]))
    return kept


def _only_places(groups: Any) -> Any:
    """Of a multi-frame file's groups: where frames lie, and nothing else."""
    kept = _library("pydicom").Dataset()
    for group, names in _PER_FRAME.items():
        if groups.get(group) and group != "PixelValueTransformationSequence":
            item = _library("pydicom").Dataset()
            for name in (*names, "SliceThickness", "SpacingBetweenSlices"):
                if name in groups[group].value[0]:
                    setattr(item, name, groups[group].value[0][name].value)
            setattr(kept, group, [item])
    return kept


@contextmanager
def _referring(path: Path) -> Iterator[None]:
    """Turns a header that no segmentation can refer to into one sentence, without the values that are quoted."""
    try:
        yield
    except (DataError, SettingError):
        raise
    except _malformed() as error:
        raise DataError(
            f"{path}: a DICOM segmentation cannot refer to this series ({type(error).__name__} in its headers); "
            "convert the series to NIfTI"
        ) from None


def _segment(number: int, name: str) -> Any:
    """One class. Its meaning is known by its label only: the coded one is the general "tissue"."""
    highdicom, codes = _library("highdicom"), _library("pydicom.sr.codedict").codes
    label = "".join(" " if c == "\\" or unicodedata.category(c).startswith("C") else c for c in name).strip()
    return highdicom.seg.SegmentDescription(
        segment_number=number,
        segment_label=label[:64] or f"class {number}",
        segmented_property_category=codes.SCT.Tissue,
        segmented_property_type=codes.SCT.Tissue,
        algorithm_type="AUTOMATIC",
        algorithm_identification=highdicom.AlgorithmIdentificationSequence(
            name="dltta", version=__version__, family=codes.DCM.ArtificialIntelligence
        ),
    )


def _without_chance(segmentation: Any, dimensions: str, moment: datetime) -> None:
    """Puts our identifier and the files' time where random numbers and the clock were."""
    for item in (*segmentation.DimensionOrganizationSequence, *segmentation.DimensionIndexSequence):
        item.DimensionOrganizationUID = dimensions
    for equipment in segmentation.get("ContributingEquipmentSequence", ()):
        equipment.ContributionDateTime = moment.strftime("%Y%m%d%H%M%S")
    for kind in ("Content", "Series", "InstanceCreation"):
        setattr(segmentation, f"{kind}Date", moment.strftime("%Y%m%d"))
        setattr(segmentation, f"{kind}Time", moment.strftime("%H%M%S"))


@lru_cache
def _library(name: str) -> Any:
    """A module of the extra `dicom`, without the warnings that quote headers."""
    try:
        import_module(name.partition(".")[0])
        found = import_module(name)
    except ImportError as error:
        raise SettingError("DICOM images need two more packages; pip install 'dltta[dicom]'") from error
    warnings.filterwarnings("ignore", module=r"pydicom|highdicom|dltta\.data\.formats\.dicom")
    for logger in ("pydicom", "highdicom"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    return found
