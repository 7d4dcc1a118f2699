"""1 images. Another dye batch or thickness of the section: more or less hematoxylin and eosin."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dltta.data.shifts.change import direction
from dltta.data.shifts.scale import in_unit

# optical density of red, green, blue per unit of hematoxylin, eosin and the rest (Ruifrok and Johnston, 2001)
DENSITY = ((0.65, 0.70, 0.29), (0.07, 0.99, 0.11), (0.27, 0.57, 0.78))
BLACK = 0.1  # no light at all lies this share of a channel's range below its darkest value


@dataclass(frozen=True)
class Stain:
    """Amounts of the two dyes times these factors, in optical density (Beer-Lambert). Three channels only.

    White is each channel's brightest value.
    """

    name: ClassVar[str] = "stain"
    hematoxylin: float
    eosin: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Stain":
        strengths = rng.uniform(0.3, 1, 2)
        factors = [float(2.0 ** (1.2 * level * strength * direction(rng))) for strength in strengths]
        return cls(*factors)

    def scaled(self, factor: float) -> "Stain":
        return Stain(self.hematoxylin**factor, self.eosin**factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return in_unit(image, self._restain)

    def _restain(self, unit: Tensor) -> Tensor:
        dyes = torch.tensor(DENSITY).to(unit)
        density = -torch.log((unit + BLACK) / (1 + BLACK))
        amounts = torch.einsum("cd,c...->d...", torch.linalg.inv(dyes.cpu()).to(unit), density)
        factors = torch.tensor([self.hematoxylin, self.eosin, 1.0]).to(unit).view(-1, *[1] * (unit.ndim - 1))
        density = torch.einsum("dc,d...->c...", dyes, amounts * factors).clamp_min(0)
        return torch.exp(-density) * (1 + BLACK) - BLACK

    def __str__(self) -> str:
        return f"stain {self.hematoxylin:.2g} H {self.eosin:.2g} E"
