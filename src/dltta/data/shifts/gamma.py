"""1 images. A display or detector curve: dark parts brighter than bright ones, or darker."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from monai.transforms import AdjustContrast
from torch import Tensor

from dltta.data.shifts.change import direction, plain


@dataclass(frozen=True)
class Gamma:
    """Each channel to the power of `exponent` between its extremes; below 1 brightens."""

    name: ClassVar[str] = "gamma"
    exponent: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Gamma":
        return cls(2.0 ** (1.6 * level * direction(rng)))

    def scaled(self, factor: float) -> "Gamma":
        return Gamma(self.exponent**factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        curve = AdjustContrast(self.exponent)
        return torch.cat([plain(curve(channel[None])) for channel in image]).to(image)

    def __str__(self) -> str:
        return f"gamma {self.exponent:.2g}"
