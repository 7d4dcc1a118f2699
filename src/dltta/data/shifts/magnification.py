"""1 images. Another field of view or objective: everything appears larger or smaller, and the label with it."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dltta.data.shifts.change import direction


@dataclass(frozen=True)
class Magnification:
    """Objects `factor` times as large around the middle of the image; what lies outside is mirrored at the border."""

    name: ClassVar[str] = "magnification"
    factor: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Magnification":
        return cls(2.0 ** (0.6 * level * direction(rng)))

    def scaled(self, factor: float) -> "Magnification":
        return Magnification(self.factor**factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return self._sampled(image, "bilinear")

    def label(self, label: Tensor) -> Tensor:
        """(*spatial) class numbers, moved as the image, by the nearest."""
        return self._sampled(label[None].double(), "nearest")[0].to(label.dtype)

    def _sampled(self, image: Tensor, mode: str) -> Tensor:
        """One map for image and label. MONAI's `Zoom` rounds sizes, and differently for each interpolation."""
        dims = image.ndim - 1
        inverse = torch.eye(dims, dims + 1, dtype=image.dtype, device=image.device) / self.factor
        grid = F.affine_grid(inverse[None], [1, len(image), *image.shape[1:]], align_corners=False)
        return F.grid_sample(image[None], grid, mode=mode, padding_mode="reflection", align_corners=False)[0]

    def __str__(self) -> str:
        return f"magnification {self.factor:.2g}"
