"""8 run over a stream. Predicted slices put together again: a volume is scored as a whole, as the field does."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dltta.data.case import Case, Place
from dltta.data.slices import from_slices
from dltta.errors import DataError


@dataclass(frozen=True)
class Volume:
    """A volume that came slice by slice: its label and what was predicted, both (*spatial) class values."""

    name: str
    site: str
    group: str
    prediction: Tensor
    label: Tensor
    spacing: tuple[float, ...] | None


class Stacks:
    """The labeled slices of a stream by volume, in whatever order they come."""

    def __init__(self) -> None:
        self._slices: dict[tuple[str, str], dict[int, tuple[Case, Tensor]]] = {}

    def add(self, case: Case, prediction: Tensor) -> None:
        """Keep one slice, without its image; one without a label is left out."""
        place = _place(case)
        if case.label is None:
            return
        stack = self._slices.setdefault((case.site, place.volume), {})
        if place.position in stack:
            raise DataError(f"slice {case.name} came twice; volumes are scored from each of their slices once")
        label = case.label.to(torch.int16)  # long enough for any class, a quarter of what labels take
        kept = Case(case.name, case.site, case.group, torch.empty(0), label, case.spacing, place=place)
        stack[place.position] = kept, prediction.to(torch.int16)

    def volumes(self) -> Iterator[Volume]:
        """Every volume, as its first slice came; each must be whole."""
        for (site, name), stack in self._slices.items():
            slices = [stack[position] for position in sorted(stack)]
            first = slices[0][0]
            place = _place(first)
            if len(slices) != place.count:
                raise DataError(
                    f"{len(slices)} of the {place.count} labeled slices of {name} came; volumes are scored whole, "
                    "give all of their slices"
                )
            labels = [case.label for case, _ in slices if case.label is not None]
            prediction, label = (_stacked(each, place.axis) for each in ([p for _, p in slices], labels))
            yield Volume(name, site, first.group, prediction, label, _spacing(first.spacing, place))


def _stacked(slices: list[Tensor], axis: int) -> Tensor:
    return from_slices(torch.stack(slices)[:, None], axis)[0].long()  # (*spatial)


def _spacing(plane: tuple[float, ...] | None, place: Place) -> tuple[float, ...] | None:
    """Of the volume, from that of its slices as they were predicted."""
    if plane is None or place.thickness is None:
        return None
    return (*plane[: place.axis], place.thickness, *plane[place.axis :])


def _place(case: Case) -> Place:
    if case.place is None:
        raise DataError(f"{case.name} is no slice of a volume; open the site with slices:")
    return case.place
