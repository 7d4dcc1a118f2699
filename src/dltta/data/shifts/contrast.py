"""1 images. A wider or narrower window: how far tissues lie apart."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dltta.data.shifts.change import direction
from dltta.data.shifts.scale import extremes


@dataclass(frozen=True)
class Contrast:
    """Distances to each channel's mean times `factor`; what leaves the channel's range saturates."""

    name: ClassVar[str] = "contrast"
    factor: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Contrast":
        return cls(2.0 ** (1.3 * level * direction(rng)))

    def scaled(self, factor: float) -> "Contrast":
        return Contrast(self.factor**factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        low, high = extremes(image)
        mean = image.mean(tuple(range(1, image.ndim)), keepdim=True)
        return torch.clamp(mean + self.factor * (image - mean), low, high)

    def __str__(self) -> str:
        return f"contrast {self.factor:.2g}"
