"""From a case, whole, in windows or in slices, to its prediction on the grid of its file; one way for every command.

A volume goes through a network for 2-D images slice by slice, an image larger than the network's window goes through it
window by window, and images to classify go through it in batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, Protocol

import numpy as np
import torch
from monai.inferers import sliding_window_inference
from torch import Tensor

from dltta.core.adapter import Adapter, Step, Update
from dltta.data.formats.images import Geometry, Image
from dltta.data.slices import from_slices, slice_axis
from dltta.errors import InputError, NonFiniteError, SettingError
from dltta.models.io.opened import OpenedModel, Prepared
from dltta.models.predictions import probabilities
from dltta.quality.guard import GRAVITY, Ruling, Verdict

BY_SOURCE: tuple[Verdict, ...] = ("at home", "source")


class Stepping(Protocol):
    """What adapts to one batch after another, such as `Adapter`."""

    def step(self, x: Tensor, *, case: str | None = None) -> Step: ...

    def answer(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class SlidingWindows:
    """Adapts to an image window by window, in the order of its axes, and answers with the blended logits.

    `patch` is the size of a window along each spatial axis; a smaller image is padded with zeros to it. Neighboring
    windows share `overlap` (a fraction) of their size, and where they do, the answer is the mean of their logits. The
    network goes on from window to window, so a window that raises leaves the adapter as the windows before it made it.
    `mode` weighs overlapping windows alike or by a gaussian; padding and its value are MONAI's. With `whole` the answer
    is a second walk over the image with the network as the last window left it: no seams between early and late
    windows, for one more pass each. There is none where nothing was learned, nor where the guard answered a window with
    the source network.
    """

    adapter: Stepping
    patch: tuple[int, ...]
    overlap: float = 0.25
    mode: Literal["constant", "gaussian"] = "constant"
    sigma_scale: float = 0.125
    padding_mode: str = "constant"
    cval: float = 0.0
    whole: bool = False

    def __post_init__(self) -> None:
        if not self.patch or min(self.patch) < 1:
            raise SettingError(f"patch must have a positive size along each axis, got {self.patch}")
        if not 0 <= self.overlap < 1:
            raise SettingError(f"overlap must be a fraction from 0 to below 1, got {self.overlap}")

    def step(self, x: Tensor, *, case: str | None = None) -> Step:
        """One image x (1, C, *spatial), or several one after the other.

        Loss, discrepancy and rate are means over the windows' first updates; the discrepancy over those that have one.
        """
        if x.ndim - 2 != len(self.patch):
            raise InputError(f"{case or 'image'}: windows of {self.patch} do not fit images of {tuple(x.shape[2:])}")
        taken: list[Step] = []

        def adapt(window: Tensor) -> Tensor:
            taken.append(self.adapter.step(window, case=f"{case or 'image'}, window {len(taken) + 1}"))
            return taken[-1].logits.to(window.device)

        blended = self._over(x, adapt)
        together = joined(taken)
        by_source = any(step.ruling is not None and step.ruling.verdict in BY_SOURCE for step in taken)
        if self.whole and len(taken) > 1 and together.updates and not by_source:
            blended = self._over(x, lambda window: self.adapter.answer(window).to(window.device))
        return Step(blended, together.updates, together.ruling)

    def _over(self, x: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
        blended: Tensor = sliding_window_inference(
            x,
            self.patch,
            1,
            answer,
            overlap=self.overlap,
            mode=self.mode,
            sigma_scale=self.sigma_scale,
            padding_mode=self.padding_mode,
            cval=self.cval,
        )
        return blended


def joined(steps: Sequence[Step]) -> Step:
    """Several steps on parts of one image as one: the means of their numbers, and the guard's gravest ruling.

    The logits are those of the last part.
    """
    return Step(steps[-1].logits, _mean_update([step.updates[0] for step in steps if step.updates]), _gravest(steps))


def _gravest(steps: Sequence[Step]) -> Ruling | None:
    """The first of the gravest rulings; its reason says for how many parts there was one like it."""
    rulings = [step.ruling for step in steps if step.ruling is not None]
    if not rulings:
        return None
    gravest = max(rulings, key=lambda ruling: GRAVITY.index(ruling.verdict))
    if len(rulings) == 1 or gravest.reason is None:
        return gravest
    alike = sum(ruling.verdict == gravest.verdict for ruling in rulings)
    return replace(gravest, reason=f"{gravest.reason} ({alike} of {len(rulings)} parts {gravest.verdict})")


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
