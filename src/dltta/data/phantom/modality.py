"""1 images. How a synthetic image comes about: anatomy from a patient, settings from a site, an image from both."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from dltta.data.case import Case, Task
from dltta.data.phantom.fields import Array

Size = tuple[int, ...]


class Anatomy(Protocol):
    """What lies in the field of view, known exactly: the truth and the tissue that the scanner will see."""

    @property
    def label(self) -> NDArray[np.int64]: ...


A_contra = TypeVar("A_contra", bound=Anatomy, contravariant=True)


class Scanner(Protocol[A_contra]):
    """Settings of one acquisition: a frozen dataclass whose fields are floats or tuples of floats."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def spacing(self, size: Size) -> tuple[float, ...]:
        """Millimeters per position of an image of this size."""
        ...

    def acquire(self, anatomy: A_contra, rng: np.random.Generator) -> Array:
        """The image (C, *spatial) of an anatomy; `rng` draws the noise."""
        ...


A = TypeVar("A", bound=Anatomy)
S = TypeVar("S", bound=Scanner[Any])


def between(first: S, second: S, weight: float | NDArray[np.float64]) -> S:
    """Settings on the way from `first` (weight 0) to `second` (1); an array gives each setting its own weight."""
    names = [field.name for field in fields(first)]
    mixed: dict[str, Any] = {}
    for name, w in zip(names, np.broadcast_to(weight, len(names)), strict=True):
        start, end = np.asarray(getattr(first, name)), np.asarray(getattr(second, name))
        value = ((1 - w) * start + w * end).tolist()
        mixed[name] = tuple(value) if isinstance(value, list) else value
    return replace(first, **mixed)


@dataclass(frozen=True)
class Site(Generic[S]):
    """A hospital: each patient is scanned with settings somewhere between two extremes."""

    low: S
    high: S

    def draw(self, rng: np.random.Generator) -> S:
        """The settings that one patient gets; each lies anywhere between its extremes, independently."""
        return between(self.low, self.high, rng.random(len(fields(self.low))))

    def toward(self, other: "Site[S]", weight: float) -> "Site[S]":
        """A hospital on the way to another, as when equipment is replaced step by step."""
        return Site(between(self.low, other.low, weight), between(self.high, other.high, weight))


@dataclass(frozen=True)
class Modality(Generic[A, S]):
    """One kind of image with its task, its anatomy and its sites (the first is the source)."""

    task: Task
    classes: tuple[str, ...]
    size: Size  # default
    smallest: Size  # below this the anatomy is no longer resolved
    anatomy: Callable[[np.random.Generator, Size, tuple[float, ...]], A]  # (rng, size, spacing)
    sites: Mapping[str, Site[S]]
    patient_cases: int = 1  # consecutive cases of one patient share their scanner settings

    def case(self, name: str, site: Site[S], index: int, *, seed: int, size: Size) -> Case:
        """Case `index` of the site called `name`, with the settings of `site`; the same bits whenever it is asked."""
        patient = index // self.patient_cases
        key = [seed, crc32(name.encode())]  # the name, not its position: a new site leaves the others as they are
        scanner = site.draw(np.random.default_rng([*key, 0, patient]))
        rng = np.random.default_rng([*key, 1, index])
        spacing = scanner.spacing(size)
        anatomy = self.anatomy(rng, size, spacing)
        return Case(
            name=f"{name}_{index:04d}",
            site=name,
            group=f"{name}_patient_{patient:04d}",
            image=torch.from_numpy(np.ascontiguousarray(scanner.acquire(anatomy, rng), dtype=np.float32)),
            label=torch.as_tensor(anatomy.label, dtype=torch.int64),
            spacing=spacing,
        )
