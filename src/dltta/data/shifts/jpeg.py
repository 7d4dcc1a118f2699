"""1 images. Lossy compression of 2-D images in an archive."""

from dataclasses import dataclass
from io import BytesIO
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from dltta.data.shifts.scale import in_unit
from dltta.errors import InputError


@dataclass(frozen=True)
class Jpeg:
    """JPEG at `quality` (1..100), colors together when there are three channels, else each channel for itself."""

    name: ClassVar[str] = "JPEG"
    quality: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Jpeg":
        return cls(100 - 90 * level)

    def scaled(self, factor: float) -> "Jpeg":
        return Jpeg(100 - (100 - self.quality) * factor)

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        if image.ndim != 3:
            raise InputError(f"JPEG is for 2-D images, got {image.ndim - 1} dimensions; choose another change")
        return in_unit(image, self._compressed)

    def _compressed(self, unit: Tensor) -> Tensor:
        levels = (unit * 255).round().to(torch.uint8).cpu()
        if len(levels) == 3:
            pixels = self._through_file(levels.permute(1, 2, 0).numpy()).transpose(2, 0, 1)
        else:
            pixels = np.stack([self._through_file(channel.numpy()) for channel in levels])
        return torch.from_numpy(pixels.astype(np.float32)).to(unit) / 255

    def _through_file(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        file = BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=min(100, max(1, round(self.quality))))
        return np.asarray(Image.open(file))

    def __str__(self) -> str:
        return f"JPEG {self.quality:.0f}"
