"""1 images. Larger pixels or thicker slices, brought back to the grid that the network takes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Resolution:
    """Positions `factor` times as wide, along every axis."""

    name: ClassVar[str] = "resolution"
    factor: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Resolution":
        return cls(1 + 2 * level)

    def scaled(self, factor: float) -> "Resolution":
        return Resolution(1 + (self.factor - 1) * factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return coarsened(image, [self.factor] * (image.ndim - 1))

    def __str__(self) -> str:
        return f"resolution /{self.factor:.2g}"


@dataclass(frozen=True)
class Anisotropy:
    """Positions `factor` times as wide along one axis: thick slices. `turn` chooses the axis, 0 is the first."""

    name: ClassVar[str] = "anisotropy"
    factor: float
    turn: int

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Anisotropy":
        return cls(1 + 3 * level, int(rng.integers(6)))

    def scaled(self, factor: float) -> "Anisotropy":
        return Anisotropy(1 + (self.factor - 1) * factor, self.turn)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        dims = image.ndim - 1
        return coarsened(image, [self.factor if axis == self.turn % dims else 1.0 for axis in range(dims)])

    def __str__(self) -> str:
        return f"anisotropy /{self.factor:.2g}"


def coarsened(image: Tensor, factors: list[float]) -> Tensor:
    """The image averaged onto a grid that is coarser by these factors, and interpolated back."""
    size = tuple(image.shape[1:])
    coarse = tuple(max(1, round(n / factor)) for n, factor in zip(size, factors, strict=True))
    if coarse == size:
        return image
    small = F.interpolate(image[None], coarse, mode="area")
    return F.interpolate(small, size, mode="bilinear" if len(size) == 2 else "trilinear", align_corners=False)[0]
