"""1 images. What one image of a data set is, and what every data set offers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from torch import Tensor

Task = Literal["segmentation", "classification"]


@dataclass(frozen=True)
class Place:
    """Where a slice lies in its volume."""

    volume: str  # its name, unique within the site
    position: int  # from 0
    count: int  # slices of the volume
    axis: int  # spatial axis across which the volume was cut
    thickness: float | None  # mm from slice to slice, None when unknown


@dataclass(frozen=True)
class Case:
    """One image and what is known about it. Training and evaluation read the label; nothing that adapts does."""

    name: str  # unique within its site
    site: str
    group: str  # patient or volume; cases of one group are never split between training and validation
    image: Tensor  # (C, *spatial) float32
    label: Tensor | None = None  # (*spatial) int64 in segmentation, () int64 in classification
    spacing: tuple[float, ...] | None = None  # mm per position along each spatial axis, None when unknown
    limit: int | None = None  # largest value that the file's pixels can hold, 255 or 65535; None when unknown
    place: Place | None = None  # of a slice; its volume is scored, not the slice


class Dataset(Protocol):
    """The images of one site, by position. `classes[i]` names label value i; in segmentation value 0 is background."""

    @property
    def site(self) -> str: ...

    @property
    def task(self) -> Task: ...

    @property
    def classes(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Case: ...


@dataclass(frozen=True)
class Cases:
    """Cases in memory, of one or several sites, as a data set."""

    cases: tuple[Case, ...]
    site: str
    task: Task
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> Case:
        return self.cases[index]


@dataclass(frozen=True)
class Mapped:
    """A data set whose cases are changed when they are asked for: preprocessed, without their labels, ..."""

    dataset: Dataset
    change: Callable[[Case], Case]

    @property
    def site(self) -> str:
        return self.dataset.site

    @property
    def task(self) -> Task:
        return self.dataset.task

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Case:
        return self.change(self.dataset[index])


def without_label(case: Case) -> Case:
    """The case as nobody can learn its label from it."""
    return replace(case, label=None)
