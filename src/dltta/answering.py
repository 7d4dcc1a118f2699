"""6 update, 7 prediction. How does a case, whole or part by part, become an answer on the grid of its file?

A volume goes through a network for pictures slice by slice, an image larger than the network's window goes through it
window by window, and pictures to classify go through it in batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from dltta.adapter import Adapter, Step
from dltta.data.images import Geometry, Image
from dltta.data.slices import from_slices, slice_axis
from dltta.errors import InputError, NonFiniteError
from dltta.models.opened import OpenedModel, Prepared
from dltta.predictions import probabilities
from dltta.windows import SlidingWindows, joined


@dataclass(frozen=True)
class Loaded:
    """A case that was read: its image, ready for the network."""

    digest: str  # of the content
    geometry: Geometry
    parts: tuple[Prepared, ...]  # one, or one per slice
    axis: int | None = None  # across which it was sliced

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first part, as the network takes it."""
        return tuple(self.parts[0].image.shape)


@dataclass(frozen=True)
class Answered:
    """What the network said about one case, on the grid of its file, and how that came about."""

    probabilities: Tensor  # (classes, *spatial) or (classes,)
    step: Step
    changed: float | None = None  # shadow: share of positions that the adapted network answers otherwise


def load(opened: OpenedModel, image: Image, digest: str) -> Loaded:
    """An image as the network takes it; a volume in slices where the network takes pictures."""
    sliced = opened.task == "segmentation" and opened.spatial_dims == 2 and image.array.ndim == 4
    if not sliced:
        return Loaded(digest, image.geometry, (opened.prepare(image),))
    axis = slice_axis(image.geometry)
    return Loaded(digest, image.geometry, tuple(map(opened.prepare, _slices(image, axis))), axis)


class Answering:
    """An adapter that answers cases; with `trained`, in its shadow: that one answers, the adapter only learns.

    `whole`: an image in windows is answered by a second walk over it, with the network as the last window left it.
    """

    def __init__(
        self, opened: OpenedModel, adapter: Adapter, trained: Adapter | None = None, *, whole: bool = True
    ) -> None:
        self.opened, self.adapter, self.trained, self.whole = opened, adapter, trained, whole

    def segment(self, name: str, loaded: Loaded) -> Answered:
        answered = [self._part(name, part) for part in loaded.parts]
        if loaded.axis is None:
            return answered[0]
        volume = from_slices(torch.stack([part.probabilities for part in answered]), loaded.axis)
        changed = [part.changed for part in answered if part.changed is not None]
        return Answered(volume, joined([part.step for part in answered]), fmean(changed) if changed else None)

    def classify(self, names: Sequence[str], loaded: Sequence[Loaded]) -> list[Answered]:
        """Images of one shape, together."""
        x = torch.stack([item.parts[0].image for item in loaded])
        case = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        step, rows, others = self._ask(x, case)
        given = [(self.opened.labels(row), self.opened.labels(other)) for row, other in zip(rows, others, strict=True)]
        changed = [None if self.trained is None else float(one != other) for one, other in given]
        return [Answered(row, step, moved) for row, moved in zip(rows, changed, strict=True)]

    def culprits(self, loaded: Sequence[Loaded]) -> dict[int, InputError | NonFiniteError]:
        """Which images of a batch that failed cannot be answered alone either, and why."""
        found: dict[int, InputError | NonFiniteError] = {}
        for index, item in enumerate(loaded):
            try:
                self.adapter.answer(item.parts[0].image[None])
            except (InputError, NonFiniteError) as error:
                found[index] = error
        return found

    def _part(self, name: str, part: Prepared) -> Answered:
        step, (given,), (other,) = self._ask(part.image[None], name)
        changed = None
        if self.trained is not None:
            changed = (self.opened.labels(given) != self.opened.labels(other)).float().mean().item()
        return Answered(part.restore(given), step, changed)

    def _ask(self, x: Tensor, case: str) -> tuple[Step, Tensor, Tensor]:
        """Adapt; the probabilities to answer with, and those of the adapted network (B, classes, *positions)."""
        step = self._through(self.adapter, x).step(x, case=case)
        adapted = _finite(step, case)
        if self.trained is None:
            return step, adapted, adapted
        return step, _finite(self._through(self.trained, x).step(x, case=case), case), adapted

    def _through(self, adapter: Adapter, x: Tensor) -> Adapter | SlidingWindows:
        """Whole, or window by window where the network has a window and the image has another size."""
        window = self.opened.window
        if window is None or self.opened.task == "classification" or x.shape[2:] == window.size(tuple(x.shape[2:])):
            return adapter
        return SlidingWindows(
            adapter,
            window.size(tuple(x.shape[2:])),
            window.overlap,
            window.mode,
            sigma_scale=window.sigma_scale,
            padding_mode=window.padding_mode,
            cval=window.cval,
            whole=self.whole,
        )


def _finite(step: Step, case: str) -> Tensor:
    if not step.logits.isfinite().all():
        raise NonFiniteError(f"{case}: the prediction has NaN or infinite values")
    return probabilities(step.logits).cpu()


def _slices(image: Image, axis: int) -> list[Image]:
    """The pictures of a volume (C, *spatial), cut across a spatial axis."""
    geometry = image.geometry
    shape = tuple(n for i, n in enumerate(geometry.shape) if i != axis)
    spacing = None if geometry.spacing is None else tuple(s for i, s in enumerate(geometry.spacing) if i != axis)
    flat = Geometry(geometry.kind, shape, geometry.channels, geometry.limit, spacing)
    pictures = np.moveaxis(image.array, 1 + axis, 0)  # (slices, C, *plane)
    return [Image(np.ascontiguousarray(picture), flat) for picture in pictures]
