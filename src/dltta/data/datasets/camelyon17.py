"""1 images. Which patches belong to which hospital of Camelyon17, in WILDS' layout on disk?

`metadata.csv` names patient, node, position, tumor, center and split of every patch; patches are 96 x 96 RGB PNG files.
The split is WILDS' official one: centers 0, 3 and 4 are the source (the split column tells training from validation at
the same hospitals), center 1 is "val", center 2 is "test". Each patch is normalized with ImageNet's statistics. The
paper's hospitals A and B are centers 1 and 2 by their numbers of patches; `data/cards.toml` says why not for certain.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from dltta.data.case import Case, Task
from dltta.data.formats.images import read_image
from dltta.errors import DataError

CENTERS = tuple(f"center_{center}" for center in range(5))
SPLITS = ("train", "id_val", "val", "test")
PUBLISHED_SIZES = {"train": 302_436, "id_val": 33_560, "val": 34_904, "test": 85_054}
PATCH = (3, 96, 96)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

_COLUMNS = ("patient", "node", "x_coord", "y_coord", "tumor", "center", "split")
_HELD_OUT = {1: "val", 2: "test"}


@dataclass(frozen=True)
class Patch:
    """One row of `metadata.csv`."""

    patient: str  # three digits
    node: int
    x: int
    y: int
    tumor: int
    center: int
    split: str

    @property
    def name(self) -> str:
        return f"patch_patient_{self.patient}_node_{self.node}_x_{self.x}_y_{self.y}"

    @property
    def file(self) -> str:
        return f"patches/patient_{self.patient}_node_{self.node}/{self.name}.png"


class Camelyon17:
    """The patches of one center ("center_0" ... "center_4") or official split ("train", "id_val", "val", "test").

    `folder` is `camelyon17_v1.0` or the folder that holds it. The case's site is its center, its group the patient.
    """

    task: Task = "classification"
    classes = ("normal", "tumor")

    def __init__(self, folder: Path | str, site: str) -> None:
        if site not in (*CENTERS, *SPLITS):
            raise DataError(f"no part {site!r} in Camelyon17; use one of {', '.join((*CENTERS, *SPLITS))}")
        self.folder = find_folder(Path(folder))
        self.site = site
        rows = list(read_metadata(self.folder / "metadata.csv"))
        self.patches = tuple(p for p in rows if site in (p.split, CENTERS[p.center]))
        if not self.patches:
            raise DataError(
                f"{self.folder / 'metadata.csv'}: no patches of {site}; the file is cut short, load it again"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(patch.name for patch in self.patches)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(patch.patient for patch in self.patches)

    def __len__(self) -> int:
        return len(self.patches)

    def __getitem__(self, index: int) -> Case:
        patch = self.patches[index]
        path = self.folder / patch.file
        image = torch.from_numpy(read_image(path).array)
        if tuple(image.shape) != PATCH:
            raise DataError(f"{path}: a patch is RGB of 96 x 96, found {tuple(image.shape)}; load the data set again")
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
        return Case(
            name=patch.name,
            site=CENTERS[patch.center],
            group=patch.patient,
            image=(image / 255 - mean) / std,
            label=torch.tensor(patch.tumor),
        )


def find_folder(folder: Path) -> Path:
    """`camelyon17_v1.0`, given itself or its parent."""
    for candidate in (folder, folder / "camelyon17_v1.0"):
        if (candidate / "metadata.csv").is_file():
            return candidate
    raise DataError(f"{folder}: no camelyon17_v1.0/metadata.csv; unpack WILDS' archive there (docs/data.md)")


def read_metadata(path: Path) -> Iterator[Patch]:
    """The patches in the file's order."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = set(_COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise DataError(f"{path}: columns {', '.join(sorted(missing))} missing; use WILDS' file as published")
            for row in reader:
                yield _patch(path, reader.line_num, row)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read ({error}); load the data set again") from error


def _patch(path: Path, line: int, row: dict[str, str]) -> Patch:
    try:
        center, tumor, split = int(row["center"]), int(row["tumor"]), int(row["split"])
        name = _HELD_OUT.get(center) or SPLITS[:2][split]
        numbers = [int(row[key]) for key in ("patient", "node", "x_coord", "y_coord")]
    except (TypeError, ValueError, IndexError) as error:
        raise DataError(f"{path}: line {line} is malformed ({error}); use WILDS' file as published") from error
    if not 0 <= center < len(CENTERS) or tumor not in (0, 1) or min(*numbers, split) < 0:
        raise DataError(f"{path}: line {line} has center {center}, tumor {tumor}; use WILDS' file as published")
    patient, node, x, y = numbers
    return Patch(f"{patient:03d}", node, x, y, tumor, center, name)
