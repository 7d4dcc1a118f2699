"""1 images. A weaker signal: Gaussian noise, Rician noise of magnitude MRI, speckle of OCT and ultrasound."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dltta.data.shifts.change import normal
from dltta.data.shifts.scale import extremes, span


@dataclass(frozen=True)
class GaussianNoise:
    """Independent noise whose standard deviation is `sd` of each channel's span."""

    name: ClassVar[str] = "noise"
    sd: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "GaussianNoise":
        return cls(0.12 * level)

    def scaled(self, factor: float) -> "GaussianNoise":
        return GaussianNoise(self.sd * factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return image + self.sd * span(image) * normal(rng, image)

    def __str__(self) -> str:
        return f"noise {self.sd:.2g}"


@dataclass(frozen=True)
class RicianNoise:
    """Magnitude of a complex signal with noise of `sd` of the span in both parts; zero is the darkest value."""

    name: ClassVar[str] = "Rician noise"
    sd: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "RicianNoise":
        return cls(0.15 * level)

    def scaled(self, factor: float) -> "RicianNoise":
        return RicianNoise(self.sd * factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        low, _ = extremes(image)
        sd = self.sd * span(image)
        return low + torch.hypot(image - low + sd * normal(rng, image), sd * normal(rng, image))

    def __str__(self) -> str:
        return f"Rician noise {self.sd:.2g}"


@dataclass(frozen=True)
class Speckle:
    """The signal above the darkest value times 1 + `sd` of independent noise."""

    name: ClassVar[str] = "speckle"
    sd: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Speckle":
        return cls(0.5 * level)

    def scaled(self, factor: float) -> "Speckle":
        return Speckle(self.sd * factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        low, _ = extremes(image)
        return low + (image - low) * (1 + self.sd * normal(rng, image)).clamp_min(0)

    def __str__(self) -> str:
        return f"speckle {self.sd:.2g}"
