"""6 update, 7 prediction. From a case, whole, in windows or in slices, to its prediction: one way for every command.

A volume goes through a network for 2-D images slice by slice, an image larger than the network's window goes through it
window by window, and images to classify go through it in batches. Every part is one step of the stream.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dltta.core.adapter import Adapter
from dltta.core.step import Step, Update
from dltta.data.formats.images import Geometry, Image
from dltta.data.slices import from_slices, slice_axis
from dltta.errors import InputError, NonFiniteError
from dltta.fitting import Extent, Fitting
from dltta.models.io.opened import OpenedModel, Prepared, Window
from dltta.models.predictions import probabilities
from dltta.quality.decision import Decision, combine
from dltta.quality.guarded import GuardedStep, decision_of

PartTick: TypeAlias = Callable[[int, int], None]  # parts of a case that are done, and how many there are


class Stepping(Protocol):
    """What adapts to one batch after another, such as `Adapter`."""

    def step(self, x: Tensor, *, case: str | None = None) -> Step: ...


@dataclass(frozen=True)
class Windowed:
    """Adapts to an image whole, or window by window in the order of its axes where the network has a window.

    The prediction of an image in windows is the blend of their logits, each as its own step gave them: the network goes
    on from window to window. A window that raises leaves the adapter as the windows before it made it.
    """

    adapter: Stepping
    window: Window | None = None
    tick: PartTick = lambda done, total: None

    def step(self, x: Tensor, *, case: str | None = None) -> Step:
        """One image x (1, C, *spatial), or several one after the other.

        Loss, discrepancy and rate are means over the windows' first updates; the discrepancy over those that have one.
        """
        spatial = tuple(x.shape[2:])
        if self.window is None:
            return self.adapter.step(x, case=case)
        if len(spatial) != len(self.window.patch):
            raise InputError(f"{case or 'image'}: windows of {self.window.patch} do not fit images of {spatial}")
        if spatial == self.window.size(spatial):
            return self.adapter.step(x, case=case)
        steps: list[Step] = []
        total = self.window.count(spatial) * len(x)

        def adapt(part: Tensor) -> Tensor:
            self.tick(len(steps), total)
            steps.append(self.adapter.step(part, case=f"{case or 'image'}, window {len(steps) + 1}"))
            return steps[-1].logits.to(part.device)

        blended = self.window.slide(x, adapt)
        self.tick(total, total)
        return joined(steps, blended)


def joined(steps: Sequence[Step], logits: Tensor) -> Step:
    """Several steps on parts of one image as one: the means of their numbers, and the most severe decision."""
    updates = _mean_update([step.updates[0] for step in steps if step.updates])
    decisions = [decision for step in steps if (decision := decision_of(step)) is not None]
    if not decisions:
        return Step(logits, updates)
    return GuardedStep(logits, updates, combine(decisions, "parts"))


def _mean_update(updates: Sequence[Update]) -> tuple[Update, ...]:
    if not updates:
        return ()
    known = [update.discrepancy for update in updates if update.discrepancy is not None]
    return (
        Update(
            loss=fmean(update.loss for update in updates),
            discrepancy=fmean(known) if known else None,
            rate=fmean(update.rate for update in updates),
        ),
    )


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

    @property
    def extent(self) -> Extent:
        """How large it is, for what memory it needs."""
        channels, *spatial = self.shape
        return Extent(tuple(spatial), len(self.parts), math.prod(self.geometry.shape), channels)


@dataclass(frozen=True)
class Prediction:
    """What was predicted for one case, on the grid of its file, and how that came about."""

    probabilities: Tensor  # (classes, *spatial) or (classes,)
    step: Step
    decision: Decision | None = None  # the guard's about this case; None without one
    change: float | None = None  # shadow: share of positions that the adapted model predicts otherwise
    window: Window | None = None  # that was chosen because the whole did not fit into memory


def load(opened: OpenedModel, image: Image, digest: str) -> Loaded:
    """An image as the network takes it; a volume in slices where the network takes 2-D images."""
    sliced = opened.task == "segmentation" and opened.spatial_dims == 2 and image.array.ndim == 4
    if not sliced:
        return Loaded(digest, image.geometry, (opened.prepare(image),))
    axis = slice_axis(image.geometry)
    return Loaded(digest, image.geometry, tuple(map(opened.prepare, _slices(image, axis))), axis)


class Predictor:
    """Predicts cases with an adapter; with a `shadow` (a source model) the adapter only learns, the shadow predicts."""

    def __init__(
        self,
        opened: OpenedModel,
        adapter: Adapter,
        shadow: Adapter | None = None,
        fitting: Fitting | None = None,
        tick: PartTick = lambda done, total: None,
    ) -> None:
        self.opened, self.adapter, self._source, self._fitting, self._tick = opened, adapter, shadow, fitting, tick
        self._window = opened.window if opened.task == "segmentation" else None
        self._use(self._window)

    def _use(self, window: Window | None, tick: PartTick = lambda done, total: None) -> None:
        """Cut images into these windows from now on."""
        self._adapting = Windowed(self.adapter, window, tick)
        self._shadow = None if self._source is None else Windowed(self._source, window)

    def step(self, x: Tensor, *, case: str | None = None) -> Step:
        """Adapt to a batch x (B, C, *spatial) as the network takes it, and predict it."""
        return self._adapting.step(x, case=case)

    def segment(self, name: str, loaded: Loaded) -> Prediction:
        """A whole image, or a volume slice by slice; in windows of the model, or smaller ones where memory is short."""
        window = self._window if self._fitting is None else self._fitting.window(loaded.extent)
        self._use(window, *[self._tick] * (len(loaded.parts) == 1))
        with enough_memory(name):
            return replace(self._segment(name, loaded), window=window if window != self._window else None)

    def _segment(self, name: str, loaded: Loaded) -> Prediction:
        predictions = []
        for number, part in enumerate(loaded.parts):
            self._tick(number, len(loaded.parts))
            predictions.append(self._part(name, part))
        self._tick(len(predictions), len(predictions))
        if loaded.axis is None:
            return predictions[0]
        volume = from_slices(torch.stack([part.probabilities for part in predictions]), loaded.axis)
        changes = [part.change for part in predictions if part.change is not None]
        step = joined([part.step for part in predictions], predictions[-1].step.logits)
        return Prediction(volume, step, decision_of(step), fmean(changes) if changes else None)

    def classify(self, names: Sequence[str], loaded: Sequence[Loaded]) -> list[Prediction]:
        """Images of one shape, together."""
        if self._fitting is not None:
            self._fitting.require(replace(loaded[0].extent, inputs=len(loaded)))
        with enough_memory(names[0]):
            return self._classify(names, loaded)

    def _classify(self, names: Sequence[str], loaded: Sequence[Loaded]) -> list[Prediction]:
        x = torch.stack([item.parts[0].image for item in loaded])
        case = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        step, given, adapted = self._ask(x, case)
        decision = decision_of(step)
        return [
            Prediction(
                row,
                step,
                None if decision is None else decision.of(position),
                None
                if self._shadow is None
                else float(self.opened.labels(row) != self.opened.labels(adapted[position])),
            )
            for position, row in enumerate(given)
        ]

    def culprits(self, loaded: Sequence[Loaded]) -> dict[int, InputError | NonFiniteError]:
        """Which images of a batch that failed cannot be predicted alone either, and why."""
        found: dict[int, InputError | NonFiniteError] = {}
        for index, item in enumerate(loaded):
            try:
                self.adapter.predict(item.parts[0].image[None])
            except (InputError, NonFiniteError) as error:
                found[index] = error
        return found

    def _part(self, name: str, part: Prepared) -> Prediction:
        step, (given,), (adapted,) = self._ask(part.image[None], name)
        change = None
        if self._shadow is not None:
            change = (self.opened.labels(given) != self.opened.labels(adapted)).float().mean().item()
        return Prediction(part.restore(given), step, decision_of(step), change)

    def _ask(self, x: Tensor, case: str) -> tuple[Step, Tensor, Tensor]:
        """Adapt; the probabilities to predict with, and those of the adapted network (B, classes, *positions)."""
        step = self.step(x, case=case)
        adapted = _finite(step, case)
        if self._shadow is None:
            return step, adapted, adapted
        return step, _finite(self._shadow.step(x, case=case), case), adapted


@contextmanager
def enough_memory(case: str) -> Iterator[None]:
    """Turns what allocators raise when there is no more memory into one sentence about the case."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_of_memory(error):
            raise
        raise InputError(
            f"{case}: not enough memory; give a smaller --max-memory or --patch, or end other programs"
        ) from error
    except InputError as error:
        if error.__cause__ is None or not _is_of_memory(error.__cause__):
            raise
        raise InputError(
            f"{case}: not enough memory; give a smaller --max-memory or --patch, or end other programs"
        ) from error


def _is_of_memory(error: BaseException) -> bool:
    said = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in said or "alloc_cpu" in said


def _finite(step: Step, case: str) -> Tensor:
    if not step.logits.isfinite().all():
        raise NonFiniteError(f"{case}: the prediction has NaN or infinite values")
    return probabilities(step.logits).cpu()


def _slices(image: Image, axis: int) -> list[Image]:
    """The 2-D images of a volume (C, *spatial), cut across a spatial axis."""
    geometry = image.geometry
    shape = tuple(n for i, n in enumerate(geometry.shape) if i != axis)
    spacing = None if geometry.spacing is None else tuple(s for i, s in enumerate(geometry.spacing) if i != axis)
    flat = Geometry(geometry.kind, shape, geometry.channels, geometry.limit, spacing)
    planes = np.moveaxis(image.array, 1 + axis, 0)  # (slices, C, *plane)
    return [Image(np.ascontiguousarray(plane), flat) for plane in planes]
