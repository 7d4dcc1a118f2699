"""6 update, 7 prediction. Volumes larger than the network's patch: every window is one step of the stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from monai.inferers import sliding_window_inference
from torch import Tensor

from dltta.adapter import Step, Update
from dltta.errors import InputError, SettingError


class Stepping(Protocol):
    """What adapts to one batch after another, such as `Adapter`."""

    def step(self, x: Tensor, *, case: str | None = None) -> Step: ...


@dataclass(frozen=True)
class SlidingWindows:
    """Adapts to an image window by window, in the order of its axes, and answers with the blended logits.

    `patch` is the size of a window along each spatial axis; a smaller image is padded with zeros to it. Neighboring
    windows share `overlap` (a fraction) of their size, and where they do, the answer is the mean of their logits. The
    network goes on from window to window, so a window that raises leaves the adapter as the windows before it made it.
    """

    adapter: Stepping
    patch: tuple[int, ...]
    overlap: float = 0.25

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

        blended = sliding_window_inference(x, self.patch, 1, adapt, overlap=self.overlap)
        return Step(blended, _mean_update([step.updates[0] for step in taken if step.updates]))


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
