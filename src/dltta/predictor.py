"""6 update, 7 prediction. From a case, whole, in windows or in slices, to its prediction: one way for every command.

A volume goes through a network for 2-D images slice by slice, an image larger than the network's window goes through it
window by window, and images to classify go through it in batches. Every part is one step of the stream.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from dltta.core.adapter import Adapter
from dltta.core.ensemble import AnyAdapter, Ensemble
from dltta.core.step import Step, Update
from dltta.data.formats.images import Geometry, Image
from dltta.data.slices import from_slices, slice_axis
from dltta.errors import InputError, NonFiniteError
from dltta.fitting import Extent, Fitting
from dltta.models.io.opened import OpenedModel, Prepared, Sliding, Window
from dltta.models.predictions import probabilities
from dltta.quality.decision import Decision, combine
from dltta.quality.guarded import GuardedStep, decision_of

PartTick: TypeAlias = Callable[[int, int], None]  # parts of a case that are done, and how many there are


class Stepping(Protocol):
    """What adapts to one batch after another, such as `Adapter`."""

    def step(self, x: Tensor, *, case: str | None = None) -> Step: ...

    def again(self, x: Tensor, step: Step) -> Tensor: ...


@dataclass
class _Views:
    """An adapter as windows ask it: every window is a step, other views of it are predicted as that step predicted."""

    adapter: Stepping
    case: str
    total: int  # windows; 0 where nobody knows
    tick: PartTick
    steps: list[Step] = field(default_factory=list)

    def __call__(self, x: Tensor) -> Tensor:
        if self.total:
            self.tick(len(self.steps), self.total)
        self.steps.append(self.adapter.step(x, case=f"{self.case}, window {len(self.steps) + 1}"))
        return self.steps[-1].logits.to(x.device)

    def again(self, x: Tensor) -> Tensor:
        return self.adapter.again(x, self.steps[-1]).to(x.device)


@dataclass(frozen=True)
class Windowed:
    """Adapts to an image whole, or window by window in the order of its axes where the network has a window.

    The prediction of an image in windows is the blend of their logits, each as its own step gave them: the network goes
    on from window to window. A window that raises leaves the adapter as the windows before it made it.
    """

    adapter: Stepping
    window: Sliding | None = None
    tick: PartTick = lambda done, total: None

    def step(self, x: Tensor, *, case: str | None = None) -> Step:
        """One image x (1, C, *spatial), or several one after the other.

        Loss, discrepancy and rate are means over the windows' first updates; the discrepancy over those that have one.
        """
        if self.window is None:
            return self.adapter.step(x, case=case)
        try:
            whole = self.window.whole(tuple(x.shape[2:]))
        except InputError as error:
            raise InputError(f"{case or 'image'}: {error}") from error
        if whole:
            return self.adapter.step(x, case=case)
        spatial = tuple(x.shape[2:])
        total = self.window.count(spatial) * len(x) if isinstance(self.window, Window) else 0
        network = _Views(self.adapter, case or "image", total, self.tick)
        blended = self.window.slide(x, network)
        if total:
            self.tick(total, total)
        return joined(network.steps, blended)


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
    segmented: Tensor | None = None  # (*spatial) the mask, where the model has a way of its own from logits to it
    window: Sliding | None = None  # that was chosen because the whole did not fit into memory

    def labels(self, opened: OpenedModel) -> Tensor:
        """Class values (*spatial), or the class."""
        return opened.labels(self.probabilities) if self.segmented is None else self.segmented


def load(opened: OpenedModel, image: Image, digest: str) -> Loaded:
    """An image as the network takes it; a volume in slices where the network takes 2-D images."""
    sliced = opened.task == "segmentation" and opened.spatial_dims == 2 and image.array.ndim == 4
    if not sliced or opened.takes_volumes:
        return Loaded(digest, image.geometry, (opened.prepare(image),))
    axis = slice_axis(image.geometry)
    return Loaded(digest, image.geometry, tuple(map(opened.prepare, _slices(image, axis))), axis)


@dataclass(frozen=True)
class Still:
    """An adapter that predicts as it now is, and learns nothing."""

    adapter: Adapter

    def step(self, x: Tensor, *, case: str | None = None) -> Step:
        return Step(self.adapter.predict(x), ())

    def again(self, x: Tensor, step: Step) -> Tensor:
        return self.adapter.predict(x)


class Predictor:
    """Predicts cases with an adapter; with a `shadow` (a source model) the adapter only learns, the shadow predicts.

    Without `learning` the adapter predicts as it now is. `fitting` chooses windows for what does not fit into memory;
    `tick` is told of the parts of a case that are done.
    """

    def __init__(
        self,
        opened: OpenedModel,
        adapter: AnyAdapter,
        shadow: AnyAdapter | None = None,
        fitting: Fitting | None = None,
        tick: PartTick = lambda done, total: None,
        *,
        learning: bool = True,
    ) -> None:
        self.opened, self.adapter, self._fitting, self._tick = opened, adapter, fitting, tick
        self._members: list[Stepping] = [each if learning else Still(each) for each in members(adapter)]
        self._sources = None if shadow is None else members(shadow)
        self._window = opened.window if opened.task == "segmentation" else None
        self._use(self._window)

    def _use(self, window: Sliding | None, tick: PartTick = lambda done, total: None) -> None:
        """Cut images into these windows from now on."""
        self._adapting = [Windowed(each, window, tick) for each in self._members]
        self._shadow = None if self._sources is None else [Windowed(each, window) for each in self._sources]

    def step(self, x: Tensor, *, case: str | None = None) -> Step:
        """Adapt to a batch x (B, C, *spatial) as the network takes it, and predict it."""
        return _together(self._adapting, x, case)

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
        step, shown = self._ask(x, case)
        given, adapted = _finite(shown, case), _finite(step, case)
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
        step, shown = self._ask(part.image[None], name)
        (given,), change = _finite(shown, name), None
        if self._shadow is not None:
            (adapted,) = _finite(step, name)
            change = (self.opened.labels(given) != self.opened.labels(adapted)).float().mean().item()
        if part.segment is None:
            return Prediction(part.restore(given), step, decision_of(step), change)
        found = part.segment(shown.logits[0].cpu())
        return Prediction(found.probabilities, step, decision_of(step), change, found.labels)

    def _ask(self, x: Tensor, case: str) -> tuple[Step, Step]:
        """Adapt; the adapted network's step, and the step to predict with."""
        step = self.step(x, case=case)
        return step, step if self._shadow is None else _together(self._shadow, x, case)


def members(adapter: AnyAdapter) -> list[Adapter]:
    """The adapters of an ensemble, each of which goes over the windows of an image alone, or the one there is."""
    return adapter.members if isinstance(adapter, Ensemble) else [adapter]


def _together(members: Sequence[Windowed], x: Tensor, case: str | None) -> Step:
    """The mean of what the members' logits are, summed up one after the other."""
    if len(members) == 1:
        return members[0].step(x, case=case)
    steps = [member.step(x, case=case) for member in members]
    logits = steps[0].logits.clone()
    for step in steps[1:]:
        logits += step.logits
    logits /= len(steps)
    return joined(steps, logits)


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
