"""1 images. An arbitrary rising contrast curve, as another detector, sequence or display has it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from dltta.data.shifts.scale import in_unit

PIECES = 5


@dataclass(frozen=True)
class Curve:
    """A rising line of five pieces between each channel's extremes.

    `bend` is the standard deviation of the logarithm of their slopes; `seed` fixes which piece is steep.
    """

    name: ClassVar[str] = "curve"
    bend: float
    seed: int

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Curve":
        return cls(1.2 * level, int(rng.integers(2**31)))

    def scaled(self, factor: float) -> "Curve":
        return Curve(self.bend * factor, self.seed)

    @property
    def slopes(self) -> list[float]:
        """Of the pieces; their mean is 1."""
        steepness = np.exp(self.bend * np.random.default_rng(self.seed).standard_normal(PIECES))
        return [float(slope) for slope in steepness / steepness.mean()]

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return in_unit(image, lambda unit: piecewise(unit, self.slopes))

    def __str__(self) -> str:
        return f"curve {self.bend:.2g}"


def piecewise(unit: Tensor, slopes: list[float]) -> Tensor:
    """A continuous line through (0, 0) whose pieces of equal width have these slopes; `unit` lies in [0, 1]."""
    width = 1 / len(slopes)
    result = unit * 0
    for piece, slope in enumerate(slopes):
        result = result + slope * (unit - piece * width).clamp(0, width)
    return result
