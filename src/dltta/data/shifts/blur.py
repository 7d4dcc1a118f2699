"""1 images. A wider point spread: defocus, motion, smoothing in reconstruction."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from monai.networks.layers import GaussianFilter
from torch import Tensor


@dataclass(frozen=True)
class Blur:
    """Gaussian of `sigma` positions along every axis; the border is continued outward."""

    name: ClassVar[str] = "blur"
    sigma: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Blur":
        return cls(1.8 * level)

    def scaled(self, factor: float) -> "Blur":
        return Blur(self.sigma * factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        margin = int(np.ceil(4 * self.sigma)) + 1
        dims = image.ndim - 1
        mean = image.mean(tuple(range(1, image.ndim)), keepdim=True)  # MONAI's kernel sums to a little less than 1
        padded = F.pad((image - mean)[None], [margin] * 2 * dims, mode="replicate")
        smooth: Tensor = GaussianFilter(dims, self.sigma)(padded)[0]
        return mean + smooth[(slice(None), *[slice(margin, -margin)] * dims)]

    def __str__(self) -> str:
        return f"blur {self.sigma:.2g} px"
