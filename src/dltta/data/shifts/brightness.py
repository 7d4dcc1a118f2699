"""1 images. A brighter or darker exposure."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dltta.data.shifts.change import direction
from dltta.data.shifts.scale import extremes, span


@dataclass(frozen=True)
class Brightness:
    """Each channel shifted by `shift` of its span; what leaves the channel's range saturates."""

    name: ClassVar[str] = "brightness"
    shift: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Brightness":
        return cls(0.3 * level * direction(rng))

    def scaled(self, factor: float) -> "Brightness":
        return Brightness(self.shift * factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return torch.clamp(image + self.shift * span(image), *extremes(image))

    def __str__(self) -> str:
        return f"brightness {self.shift:+.2g}"
