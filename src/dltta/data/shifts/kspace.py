"""1 images. Errors in the frequency space of MRI: ghosts of moving anatomy, stripes of a spike."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dltta.data.shifts.scale import extremes, span


@dataclass(frozen=True)
class Ghosting:
    """`copies` faint copies of the image, evenly shifted along one axis, together `amount` as bright as it.

    That is what a modulation of every (copies + 1)-th line of frequency space gives.
    """

    name: ClassVar[str] = "ghosting"
    amount: float
    copies: int
    turn: int

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Ghosting":
        return cls(0.3 * level, int(rng.integers(1, 4)), int(rng.integers(6)))

    def scaled(self, factor: float) -> "Ghosting":
        return Ghosting(self.amount * factor, self.copies, self.turn)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        axis = 1 + self.turn % (image.ndim - 1)
        low, _ = extremes(image)
        signal = image - low
        for copy in range(1, self.copies + 1):
            shift = round(copy * image.shape[axis] / (self.copies + 1))
            image = image + self.amount / self.copies * signal.roll(shift, axis)
        return image

    def __str__(self) -> str:
        return f"ghosting {self.amount:.2g}"


@dataclass(frozen=True)
class Spikes:
    """Stripes over the whole image: a plane wave per case, of `amount` of the channel's span.

    MONAI's `KSpaceSpikeNoise` takes its phase from the image, which is rounding noise where the image has no signal.
    """

    name: ClassVar[str] = "spikes"
    amount: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Spikes":
        return cls(0.2 * level)

    def scaled(self, factor: float) -> "Spikes":
        return Spikes(self.amount * factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        phase = torch.tensor(rng.uniform(0, 2 * np.pi), dtype=torch.float64)
        for axis, size in enumerate(image.shape[1:]):
            waves = rng.uniform(-0.25, 0.25) * size  # at least four positions long
            shape = [-1 if a == axis else 1 for a in range(image.ndim - 1)]
            phase = phase + (2 * np.pi * waves / size * torch.arange(size, dtype=torch.float64)).view(shape)
        return image + self.amount * span(image) * torch.cos(phase).to(image)

    def __str__(self) -> str:
        return f"spikes {self.amount:.2g}"
