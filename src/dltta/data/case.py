"""1 images. What one image of a data set is, and what every data set answers."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

Task = Literal["segmentation", "classification"]


@dataclass(frozen=True)
class Case:
    """One image and what is known about it. Training and evaluation read the label; nothing that adapts does."""

    name: str  # unique within its site
    site: str
    group: str  # patient or volume; cases of one group are never split between training and validation
    image: Tensor  # (C, *spatial) float32
    label: Tensor | None = None  # (*spatial) int64 in segmentation, () int64 in classification
    spacing: tuple[float, ...] | None = None  # mm per position along each spatial axis, None when unknown


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
