"""1 images. Another camera or lamp: the primaries of color images mix, and one of them weakens."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dltta.data.shifts.scale import in_unit


@dataclass(frozen=True)
class ColorMixing:
    """Each channel takes up to `amount` from the others, by a matrix that `seed` fixes; grey stays grey."""

    name: ClassVar[str] = "color mixing"
    amount: float
    seed: int

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "ColorMixing":
        return cls(0.5 * level, int(rng.integers(2**31)))

    def scaled(self, factor: float) -> "ColorMixing":
        return ColorMixing(self.amount * factor, self.seed)

    def matrix(self, channels: int) -> Tensor:
        """(C, C), the new channels from the old; rows sum to 1."""
        drawn = np.random.default_rng(self.seed).uniform(-1, 1, (channels, channels)) * self.amount
        np.fill_diagonal(drawn, 0)
        np.fill_diagonal(drawn, 1 - drawn.sum(axis=1))
        return torch.from_numpy(drawn)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        matrix = self.matrix(len(image)).to(image)
        return in_unit(image, lambda unit: torch.einsum("ij,j...->i...", matrix, unit).clamp(0, 1))

    def __str__(self) -> str:
        return f"color mixing {self.amount:.2g}"


@dataclass(frozen=True)
class Tint:
    """The light of each channel, from its darkest value up, times a gain; `seed` fixes which channel loses `amount`."""

    name: ClassVar[str] = "tint"
    amount: float
    seed: int

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Tint":
        return cls(0.5 * level, int(rng.integers(2**31)))

    def scaled(self, factor: float) -> "Tint":
        return Tint(min(self.amount * factor, 0.95), self.seed)

    def gains(self, channels: int) -> Tensor:
        """(C,) between 1 and 1 - amount; both occur when there are several channels."""
        drawn = np.random.default_rng(self.seed).random(channels)
        loss = (drawn - drawn.min()) / max(float(np.ptp(drawn)), 1e-12) if channels > 1 else np.ones(1)
        return torch.from_numpy(1 - self.amount * loss)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        gains = self.gains(len(image)).to(image).view(-1, *[1] * (image.ndim - 1))
        return in_unit(image, lambda unit: unit * gains)

    def __str__(self) -> str:
        return f"tint {self.amount:.2g}"
