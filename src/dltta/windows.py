"""6 update, 7 prediction. Volumes larger than the network's patch: every window is one step of the stream."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, Protocol

from monai.inferers import sliding_window_inference
from torch import Tensor

from dltta.adapter import Step, Update
from dltta.errors import InputError, SettingError
from dltta.guard import GRAVITY, Ruling, Verdict

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
