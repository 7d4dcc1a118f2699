"""1 images. Several sites in one stream: one after another, taking turns, or one giving way to another."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Literal, cast, get_args

import numpy as np

from dltta.data.case import Case, Dataset, Task
from dltta.data.sites import Slices
from dltta.errors import DataError, SettingError

Turns = Literal["sequence", "interleave", "drift"]
SIGNS: dict[Turns, str] = {"sequence": "+", "interleave": "/", "drift": ">"}  # in the name of a stream


@dataclass(frozen=True)
class SiteStream:
    """The images of several sites in one stream.

    `sequence`: all of the first, then all of the second; a site may come back. `interleave`: one of each in turn, the
    rest of the longer ones at the end. `drift`: the share of the second of two sites rises evenly from none to all.
    Cases keep their own site; the number of the part goes in front of their name.
    """

    parts: tuple[Dataset, ...]
    turns: Turns = "sequence"

    def __post_init__(self) -> None:
        if self.turns == "drift" and len(self.parts) != 2:
            raise SettingError(
                f"a stream drifts from one site to another, found {len(self.parts)}; write drift:SITE,SITE"
            )
        first = self.parts[0]
        for part in self.parts[1:]:
            if (part.task, part.classes) != (first.task, first.classes):
                raise DataError(
                    f"{part.site} has {part.task} of {', '.join(part.classes)}, {first.site} {first.task} of "
                    f"{', '.join(first.classes)}; sites of one stream must agree"
                )

    @property
    def site(self) -> str:
        return SIGNS[self.turns].join(part.site for part in self.parts)

    @property
    def task(self) -> Task:
        return self.parts[0].task

    @property
    def classes(self) -> tuple[str, ...]:
        return self.parts[0].classes

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Case:
        part, position = self.places[index]
        case = self.parts[part][position]
        place = case.place and replace(case.place, volume=f"{part + 1}_{case.place.volume}")
        return replace(case, name=f"{part + 1}_{case.name}", place=place)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For each image of the stream which part it is from, and its position there."""
        columns = [[(part, position) for position in range(len(site))] for part, site in enumerate(self.parts)]
        rows = [[place for column in columns for place in column]]
        if self.turns == "drift":
            rows = [sorted(rows[0], key=self._moment)]
        if self.turns == "interleave":
            rows = [[place for place in row if place is not None] for row in zip_longest(*columns)]
        return tuple(place for row in rows for place in row)

    def _moment(self, place: tuple[int, int]) -> float:
        """When an image comes, from 0 to 1: images of the first site ever less often, of the second ever more often."""
        part, position = place
        share = (position + 0.5) / len(self.parts[part])
        return math.sqrt(share) if part else 1 - math.sqrt(1 - share)


def split_stream(spec: str) -> tuple[Turns, tuple[str, ...]] | None:
    """The sites that `sequence:A,B`, `interleave:A,B` or `drift:A,B` names; None for the name of one site."""
    turns, colon, sites = spec.partition(":")
    if not colon or turns not in get_args(Turns):
        return None
    named = tuple(site.strip() for site in sites.split(","))
    if len(named) < 2 or not all(named):
        raise SettingError(f"{spec!r} does not name several sites; write {turns}:SITE,SITE")
    return cast(Turns, turns), named


def stream_order(dataset: Dataset, generator: np.random.Generator) -> list[int]:
    """A random order of the images; in a stream of several sites each site's images change places among themselves.

    Volumes taken slice by slice change places as a whole: the slices of one volume come in a row, as from a scanner.
    """
    if isinstance(dataset, Slices):
        volume_of = np.array(dataset.volume_of)
        volumes = generator.permutation(len(dataset.volumes))
        return [int(index) for volume in volumes for index in np.flatnonzero(volume_of == volume)]
    if not isinstance(dataset, SiteStream):
        return cast(list[int], generator.permutation(len(dataset)).tolist())
    order = np.arange(len(dataset))
    owners = np.array([part for part, _ in dataset.places])
    for number, part in enumerate(dataset.parts):
        own = np.flatnonzero(owners == number)
        order[own] = own[stream_order(part, generator)]
    return order.tolist()
