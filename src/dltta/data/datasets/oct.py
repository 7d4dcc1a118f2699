"""1 images. What is one B-scan of the retinal OCT data sets, and where do its eight layers lie?

Two forms are read. As published: Heidelberg `.vol` files in `vol/` with JHU's manual delineations in `delineation/`.
Prepared: one PNG per B-scan in `image/` and one JSON file (ending `.txt` or `.json`) of the same name in `label/`,
whose `bds` holds nine boundaries x columns, counted from 1, `null` where missing; `lesion` is allowed and not used, a
lesion's pixels keep the layer they lie in.

Boundaries are rows counted from 1, as both sources write them. A boundary is the last row of the layer above it.

Preprocessing follows the paper: retina flattening, crop, resize to 128 x 1024; Cirrus slices are first resampled to
Spectralis' resolution. The paper does not say how the retina is found. Labels of the test site may not be used for it,
so Bruch's membrane is estimated from the intensities (`find_retina`), and image and boundaries are shifted alike.
Prepared images have the intensity normalization of the field's public preprocessing; B-scans as acquired (`.vol`, and
PNG files of a Cirrus macular cube, which are known by their size) get the same (`normalize_intensity`).
"""

import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.interpolate import CubicSpline
from scipy.io import loadmat
from scipy.io.matlab import MatReadError
from scipy.ndimage import gaussian_filter, median_filter
from torch.nn.functional import interpolate

from dltta.data.case import Case, Task
from dltta.data.formats.images import read_image
from dltta.errors import DataError

Floats = NDArray[np.float64]
Split = Literal["train", "val", "train+val", "test", "all"]

LAYERS = ("RNFL", "GCIP", "INL", "OPL", "ONL", "IS", "OS", "RPE")
BOUNDARIES = len(LAYERS) + 1
SIZE = (128, 1024)  # rows, columns of every prepared slice
SPECTRALIS_SPACING = (0.0039, 0.0058)  # mm per row and column, rounded as the data's authors state them
CIRRUS_SIZE = (1024, 512)  # rows, columns of a macular cube's B-scan: 2 mm deep, 6 mm wide
CIRRUS_SPACING = (2.0 / CIRRUS_SIZE[0], 6.0 / CIRRUS_SIZE[1])

# 12 + 3 + 20 subjects of 49 B-scans: the 588, 147 and 980 slices of the paper, by subject as the field splits them
SPECTRALIS_SPLIT: Mapping[str, tuple[str, ...]] = {
    "train": ("hc10", "hc11", "hc12", "hc13", "hc14", *(f"ms{n}" for n in range(15, 22))),
    "val": ("hc09", "ms13", "ms14"),
    "test": (*(f"hc{n:02d}" for n in range(1, 9)), *(f"ms{n:02d}" for n in range(1, 13))),
}

_FILE_HEADER = 2048  # bytes
_INVALID = 3e38  # the format marks pixels without data with the largest float32
_SUBJECT = re.compile(r"(hc|ms)\d\d")
_BELOW = 0.060  # mm kept below Bruch's membrane
_ABOVE = 0.030  # mm kept above a retina that is thicker than the crop


@dataclass(frozen=True)
class SliceEntry:
    """The files of one B-scan."""

    name: str
    group: str  # subject
    image: Path
    label: Path
    position: int | None  # B-scan of a volume, from 0; None for a PNG


class OCT:
    """The B-scans of one site, "spectralis" or "cirrus", each as (1, 128, 1024) with values in 0..1.

    `split` selects Spectralis subjects; Cirrus is a test site and has no split. `spacing` (mm per row and column) says
    that the PNG files are slices as acquired, still to be resampled, flattened and cropped. Without it strips are taken
    as prepared, and only resized when their size is not 128 x 1024; slices of Cirrus' macular cube are known by their
    size and prepared; others are refused.
    """

    task: Task = "segmentation"
    classes = ("background", *LAYERS)

    def __init__(
        self, folder: Path | str, site: str, *, split: Split = "all", spacing: tuple[float, float] | None = None
    ) -> None:
        if site not in ("spectralis", "cirrus"):
            raise DataError(f'no OCT site {site!r}; use "spectralis" or "cirrus"')
        if split != "all" and (site == "cirrus" or split not in get_args(Split)):
            raise DataError(
                f"no split {split!r} of {site}; Spectralis has train, val, train+val, test, all, Cirrus only all"
            )
        self.folder = find_site(Path(folder), site)
        self.spacing = spacing
        self.site = site
        entries = list_slices(self.folder)
        if split != "all":
            wanted = {subject for part in split.split("+") for subject in SPECTRALIS_SPLIT[part]}
            entries = [entry for entry in entries if entry.group in wanted]
        if not entries:
            raise DataError(f"{self.folder}: no slices of {split}; subjects are named hc01 ... ms21 (docs/data.md)")
        self.entries = tuple(entries)
        self.names = tuple(entry.name for entry in self.entries)
        self.groups = tuple(entry.group for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Case:
        entry = self.entries[index]
        image, boundaries, spacing = read_slice(entry, self.spacing)
        image, boundaries, spacing = resize(image, boundaries, spacing, SIZE)
        return Case(
            name=entry.name,
            site=self.site,
            group=entry.group,
            image=torch.from_numpy(image.astype(np.float32))[None],
            label=None if np.isnan(boundaries).all() else torch.from_numpy(layer_labels(boundaries, SIZE[0])),
            spacing=spacing,
        )


def find_site(folder: Path, site: str) -> Path:
    """The folder of one site; JHU's download may keep its name."""
    names = ("spectralis", "OCT_Manual_Delineations-2018_June_29") if site == "spectralis" else ("cirrus",)
    for name in names:
        if (folder / name).is_dir():
            return folder / name
    raise DataError(f"{folder}: no folder {names[0]}; put the {site} data there (docs/data.md)")


def list_slices(folder: Path) -> list[SliceEntry]:
    """The B-scans of a site, by subject and position."""
    if (folder / "vol").is_dir():
        return [entry for path in sorted((folder / "vol").glob("*.vol")) for entry in _volume_entries(folder, path)]
    if not (folder / "image").is_dir():
        raise DataError(f"{folder}: neither vol/ nor image/; see docs/data.md for both forms")
    files = sorted((folder / "image").glob("*.png"), key=lambda path: _natural(path.stem))
    return [
        SliceEntry(path.stem, subject(re.sub(r"_\d+$", "", path.stem)), path, _label_of(folder, path.stem), None)
        for path in files
    ]


def subject(volume: str) -> str:
    """The subject of a volume: hc01 ... ms21 at JHU, elsewhere the volume's name."""
    match = _SUBJECT.match(volume)
    return match[0] if match else volume


def read_slice(entry: SliceEntry, spacing: tuple[float, float] | None) -> tuple[Floats, Floats, tuple[float, float]]:
    """One B-scan, flattened and cropped: image in 0..1, boundaries (9, columns), spacing."""
    if entry.position is not None:
        header = read_vol_header(entry.image)
        image = normalize_intensity(display(read_bscan(entry.image, header, entry.position)))
        delineation = _cached_delineation(entry.label, header.columns)
        if len(delineation) != header.slices:
            found = f"{len(delineation)} B-scans, {entry.image.name} has {header.slices}"
            raise DataError(f"{entry.label}: {found}; use the volume's own file")
        return flatten_and_crop(image, delineation[entry.position], header.spacing)
    stored = read_image(entry.image)
    if len(stored.array) != 1:
        raise DataError(f"{entry.image}: a B-scan is grey, found {len(stored.array)} channels; save it as grey")
    image = stored.array[0].astype(np.float64) / (stored.geometry.limit or 1)
    boundaries = read_boundaries(entry.label, image.shape[1])
    spacing = spacing or acquired_spacing(entry.image, *image.shape)
    if spacing is None:
        return image, boundaries, SPECTRALIS_SPACING
    size = tuple(round(n * s / t) for n, s, t in zip(image.shape, spacing, SPECTRALIS_SPACING, strict=True))
    image, boundaries, spacing = resize(image, boundaries, spacing, (size[0], size[1]))
    return flatten_and_crop(normalize_intensity(image), boundaries, spacing)


def acquired_spacing(path: Path, rows: int, columns: int) -> tuple[float, float] | None:
    """The spacing of a slice that is still to be prepared, known by its size; None for a prepared one, a strip."""
    if (rows, columns) == CIRRUS_SIZE:
        return CIRRUS_SPACING
    if 4 * rows > columns:
        raise DataError(
            f"{path}: {rows} x {columns} pixels is neither a prepared strip ({SIZE[0]} x {SIZE[1]}) nor a slice of "
            f"Cirrus' macular cube ({CIRRUS_SIZE[0]} x {CIRRUS_SIZE[1]}); flatten and crop it, or give its spacing to "
            "dltta.data.datasets.oct.OCT"
        )
    return None


# Heidelberg .vol


@dataclass(frozen=True)
class VolHeader:
    """The fields of a `.vol` file's header that locate its B-scans."""

    version: str
    columns: int
    slices: int
    rows: int
    spacing: tuple[float, float]  # mm per row and column
    distance: float  # mm between B-scans
    overview: int  # bytes of the SLO image between the header and the first B-scan
    slice_header: int  # bytes before each B-scan's pixels

    def offset(self, position: int) -> int:
        """Where the pixels of a B-scan start in the file."""
        return _FILE_HEADER + self.overview + position * (self.slice_header + self.pixels) + self.slice_header

    @property
    def pixels(self) -> int:
        return 4 * self.rows * self.columns  # bytes, float32


def read_vol_header(path: Path) -> VolHeader:
    """The header of a Heidelberg `.vol` file, all numbers little-endian.

    From byte 0: version "HSF-OCT-1xx" (12 characters), SizeX, NumBScans, SizeZ (int32), ScaleX, Distance, ScaleZ
    (double, mm), SizeXSlo, SizeYSlo (int32); at byte 100 BScanHdrSize (int32). 2048 bytes in all.
    """
    try:
        with path.open("rb") as file:
            start = file.read(_FILE_HEADER)
        length = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the file") from error
    if len(start) < _FILE_HEADER or not start.startswith(b"HSF-OCT-"):
        raise DataError(f"{path}: not a Heidelberg .vol file; export it again")
    columns, slices, rows, scale_x, distance, scale_z, slo_x, slo_y = struct.unpack_from("<3i3d2i", start, 12)
    (slice_header,) = struct.unpack_from("<i", start, 100)
    version = start[:12].rstrip(b"\0 ").decode("ascii", "replace")
    header = VolHeader(version, columns, slices, rows, (scale_z, scale_x), distance, slo_x * slo_y, slice_header)
    if min(columns, slices, rows, slo_x + 1, slo_y + 1, slice_header) < 1 or not (scale_x > 0 and scale_z > 0):
        raise DataError(f"{path}: header says {slices} B-scans of {rows} x {columns}; export it again")
    needed = header.offset(slices - 1) + header.pixels
    if length < needed:
        raise DataError(f"{path}: {length} bytes instead of {needed}, it is cut short; copy it again")
    return header


def read_bscan(path: Path, header: VolHeader, position: int) -> Floats:
    """One B-scan as stored (rows, columns), NaN where the scanner has no data."""
    pixels = np.fromfile(path, "<f4", count=header.rows * header.columns, offset=header.offset(position))
    if pixels.size != header.rows * header.columns:
        raise DataError(f"{path}: B-scan {position + 1} is cut short; copy the file again")
    raw = pixels.reshape(header.rows, header.columns).astype(np.float64)
    return np.where(raw > _INVALID, np.nan, raw)


def display(raw: Floats) -> Floats:
    """Stored reflectivity to grey in 0..1: the fourth root, as the scanner shows it; pixels without data are 0."""
    return np.clip(np.nan_to_num(raw, nan=0.0), 0.0, 1.0) ** 0.25


def normalize_intensity(image: Floats) -> Floats:
    """Contrast stretched to 0..1 (Lang et al., Biomedical Optics Express 4, 2013), rows of Spectralis' resolution.

    What becomes 1 is 0.05 above the maximum after a median over 15 rows, so that single bright pixels do not decide.
    """
    brightest = float(median_filter(image, size=(15, 1), mode="constant").max())
    return np.clip(image / min(1.0, brightest + 0.05), 0.0, 1.0)


# boundaries


def read_delineation(path: Path, columns: int) -> Floats:
    """JHU's delineation of one volume (B-scans, 9, columns), NaN where a boundary is missing.

    A MATLAB file (before 7.3) with `bd_pts`, columns x B-scans x 9, or with `control_pts`, a cell array B-scans x 9 of
    n x 2 points (column, row): a natural cubic spline runs through them, goes on level beyond them, and no boundary
    rises above the one before. Where 11 boundaries are stored, the 3rd (between GCL and IPL) and the 11th are not of
    the nine.
    """
    content = _load_mat(path)
    if "clims_x" in content or "clims_y" in content:
        raise DataError(
            f"{path}: delineates a part of the volume (clims_x), which is not supported; use JHU's 2018 files"
        )
    if "bd_pts" in content:
        dense = np.asarray(content["bd_pts"], dtype=np.float64)
        if dense.ndim != 3 or dense.shape[0] != columns:
            raise DataError(f"{path}: bd_pts {dense.shape} do not fit {columns} columns; use the volume's own file")
        boundaries = np.moveaxis(dense, 0, -1)  # (B-scans, boundaries, columns)
        return _nine(path, np.where(boundaries > 0, boundaries, np.nan))
    if "control_pts" not in content:
        found = ", ".join(key for key in content if not key.startswith("__")) or "nothing"
        raise DataError(
            f"{path}: neither bd_pts nor control_pts, found {found}; see docs/data.md for the forms we read"
        )
    cells = np.asarray(content["control_pts"], dtype=object)
    if cells.ndim != 2:
        raise DataError(f"{path}: control_pts {cells.shape} is no table of B-scans x boundaries; see docs/data.md")
    curves = np.array([[_curve(path, points, columns) for points in row] for row in cells])
    nine = _nine(path, curves)
    below = np.fmax.accumulate(nine, axis=1)
    return np.where(np.isnan(nine), np.nan, below)


def _load_mat(path: Path) -> dict[str, object]:
    if not path.is_file():
        raise DataError(f"{path}: delineation missing; add it or remove its volume")
    try:
        content: dict[str, object] = loadmat(path)
    except NotImplementedError as error:
        raise DataError(f"{path}: MATLAB 7.3 file; save it again with -v7") from error
    except (MatReadError, OSError, ValueError, TypeError, LookupError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as a MATLAB file ({error}); copy it again") from error
    return content


@lru_cache(maxsize=4)
def _cached_delineation(path: Path, columns: int) -> Floats:
    return read_delineation(path, columns)  # 49 slices of a volume share one file


def _nine(path: Path, boundaries: Floats) -> Floats:
    found = boundaries.shape[1]
    if found == BOUNDARIES + 2:
        return np.delete(boundaries, [2, 10], axis=1)
    if found != BOUNDARIES:
        raise DataError(f"{path}: {found} boundaries instead of {BOUNDARIES}; see docs/data.md for the forms we read")
    return boundaries


def _curve(path: Path, cell: object, columns: int) -> Floats:
    """One boundary at every column, from its control points."""
    points = np.asarray(cell, dtype=np.float64)
    if points.size <= 1:
        return np.full(columns, np.nan)  # an empty cell: not delineated
    if points.ndim != 2 or points.shape[1] != 2:
        raise DataError(
            f"{path}: control points {points.shape} instead of n x 2; see docs/data.md for the forms we read"
        )
    x, first = np.unique(points[:, 0], return_index=True)
    y = points[first, 1]
    at = np.clip(np.arange(1, columns + 1), x[0], x[-1])
    return np.full(columns, y[0]) if len(x) == 1 else np.asarray(CubicSpline(x, y, bc_type="natural")(at))


def read_boundaries(path: Path, columns: int) -> Floats:
    """The boundaries (9, columns) of a prepared B-scan, NaN where missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
        boundaries = np.array(content["bds"], dtype=np.float64)
    except FileNotFoundError as error:
        raise DataError(f"{path}: label missing; add it or remove its image") from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = "no key bds" if isinstance(error, KeyError) else error
        raise DataError(f'{path}: no boundaries ({reason}); write {{"bds": [[...], ...]}} (docs/data.md)') from error
    if boundaries.shape != (BOUNDARIES, columns):
        raise DataError(f"{path}: bds {boundaries.shape} instead of {(BOUNDARIES, columns)}; use the image's own file")
    return boundaries


def layer_labels(boundaries: Floats, rows: int) -> NDArray[np.int64]:
    """Class values (rows, columns): k in the k-th layer, 0 outside the retina and where a boundary is missing."""
    edges = np.floor(boundaries + 0.5)  # rows from 1, halves away from zero
    row = np.arange(1, rows + 1)[:, None]  # (rows, 1)
    labels = np.zeros((rows, boundaries.shape[1]), dtype=np.int64)
    for layer, (upper, lower) in enumerate(pairwise(edges), start=1):
        labels[(row > upper) & (row <= lower)] = layer  # comparisons with NaN are false
    return labels


# flattening


def find_retina(image: Floats, spacing: tuple[float, float]) -> tuple[Floats, Floats]:
    """Top and bottom of the retina in each column, rows from 0, from the intensities alone.

    Going down, the two steepest rises at least 0.1 mm apart are the retina's surface and the photoreceptors' bright
    line; the steepest fall within 0.1 mm below that line is Bruch's membrane. A polynomial of degree 4, refitted
    without columns further off than 0.03 mm, makes it smooth.
    """
    per_mm = (1 / spacing[0], 1 / spacing[1])
    smooth = gaussian_filter(image, (0.008 * per_mm[0], 0.05 * per_mm[1]), mode="nearest")
    slope = np.gradient(smooth, axis=0)
    row = np.arange(len(image))[:, None]
    steepest = slope.argmax(axis=0)
    apart = np.abs(row - steepest) >= 0.1 * per_mm[0]
    second = np.where(apart, slope, -np.inf).argmax(axis=0)
    top, line = np.minimum(steepest, second), np.maximum(steepest, second)
    line = median_filter(line, size=max(3, int(0.1 * per_mm[1])), mode="nearest")
    under = (row >= line) & (row <= line + 0.1 * per_mm[0])
    bottom = np.where(under, slope, np.inf).argmin(axis=0)
    return median_filter(top.astype(np.float64), size=5, mode="nearest"), _smooth_curve(bottom, 0.03 * per_mm[0])


def _smooth_curve(rows: NDArray[np.int64], tolerance: float) -> Floats:
    column = np.arange(len(rows))
    kept = np.ones(len(rows), dtype=bool)
    curve = rows.astype(np.float64)
    for _ in range(5):
        degree = min(4, int(kept.sum()) - 1)
        curve = np.polynomial.Polynomial.fit(column[kept], rows[kept], degree, domain=[0, len(rows)])(column)
        off = np.abs(rows - curve)
        kept = off <= max(tolerance, float(np.median(off)))
    return np.asarray(curve)


def flatten_and_crop(
    image: Floats, boundaries: Floats, spacing: tuple[float, float]
) -> tuple[Floats, Floats, tuple[float, float]]:
    """Shifts every column until Bruch's membrane is level, then keeps 128 rows, more where the retina is thicker.

    The crop ends 0.06 mm below the membrane. Columns move by whole rows, image and boundaries alike; rows from outside
    the image are 0.
    """
    top, bottom = find_retina(image, spacing)
    level = round(float(np.median(bottom)))
    shift = np.rint(bottom).astype(np.int64) - level
    last = level + round(_BELOW / spacing[0])
    surface = np.percentile(top - shift, 2) - _ABOVE / spacing[0]
    first = min(last - SIZE[0] + 1, int(surface))
    source = np.arange(first, last + 1)[:, None] + shift  # (rows kept, columns) of the image
    inside = (source >= 0) & (source < len(image))
    cropped = np.where(inside, np.take_along_axis(image, source.clip(0, len(image) - 1), axis=0), 0.0)
    return cropped, boundaries - shift - first, spacing


def resize(
    image: Floats, boundaries: Floats, spacing: tuple[float, float], size: tuple[int, int]
) -> tuple[Floats, Floats, tuple[float, float]]:
    """Image (linear, smoothed when it shrinks), boundaries and spacing on a grid of another size."""
    rows, columns = image.shape
    if (rows, columns) == size:
        return image, boundaries, spacing
    resized = interpolate(torch.from_numpy(image)[None, None], size=size, mode="bilinear", antialias=True)[0, 0].numpy()
    at = (np.arange(size[1]) + 0.5) * columns / size[1] - 0.5  # the old columns under the new ones
    moved = np.array([np.interp(at, np.arange(columns), boundary) for boundary in boundaries])
    moved = (moved - 0.5) * size[0] / rows + 0.5  # centers of rows counted from 1
    return resized, moved, (spacing[0] * rows / size[0], spacing[1] * columns / size[1])


def _volume_entries(folder: Path, path: Path) -> list[SliceEntry]:
    label = folder / "delineation" / f"{path.stem}.mat"
    slices = read_vol_header(path).slices
    return [SliceEntry(f"{path.stem}_{n + 1}", subject(path.stem), path, label, n) for n in range(slices)]


def _label_of(folder: Path, stem: str) -> Path:
    alternative = folder / "label" / f"{stem}.json"
    return alternative if alternative.is_file() else folder / "label" / f"{stem}.txt"


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts slice 2 before slice 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
