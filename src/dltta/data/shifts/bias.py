"""1 images. Uneven sensitivity: coils in MRI, shading of a lamp, attenuation with depth."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from monai.transforms import RandBiasField
from torch import Tensor

from dltta.data.shifts.change import plain
from dltta.data.shifts.scale import in_unit

DEGREE = 3


@dataclass(frozen=True)
class BiasField:
    """The signal above each channel's darkest value times a smooth field from exp(-strength) to exp(strength).

    `seed` fixes the field: it belongs to the site.
    """

    name: ClassVar[str] = "bias field"
    strength: float
    seed: int

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "BiasField":
        return cls(0.9 * level, int(rng.integers(2**31)))

    def scaled(self, factor: float) -> "BiasField":
        return BiasField(self.strength * factor, self.seed)

    def field(self, size: tuple[int, ...]) -> Tensor:
        """(*size), largest absolute logarithm `strength`."""
        polynomial = RandBiasField(degree=DEGREE, coeff_range=(-1.0, 1.0), prob=1.0)
        polynomial.set_random_state(self.seed)
        shape = torch.log(plain(polynomial(torch.ones(1, *size)))[0])
        middle = (shape.max() + shape.min()) / 2
        half = (shape.max() - shape.min()).clamp_min(1e-6) / 2
        return torch.exp(self.strength * (shape - middle) / half)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        field = self.field(tuple(image.shape[1:])).to(image)
        return in_unit(image, lambda unit: unit * field)

    def __str__(self) -> str:
        return f"bias field {self.strength:.2g}"
