"""1 images. What no network should learn from: noise, negatives, other modalities, shuffled or empty images."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dltta.data.shifts.change import normal
from dltta.data.shifts.scale import in_unit


@dataclass(frozen=True)
class OnlyNoise:
    """Noise with each channel's mean and standard deviation, and nothing of the image."""

    name: ClassVar[str] = "only noise"

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "OnlyNoise":
        return cls()

    def scaled(self, factor: float) -> "OnlyNoise":
        return self

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        dims = tuple(range(1, image.ndim))
        return image.mean(dims, keepdim=True) + image.std(dims, keepdim=True) * normal(rng, image)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Negative:
    """Dark and bright exchanged, within each channel's range."""

    name: ClassVar[str] = "negative"

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Negative":
        return cls()

    def scaled(self, factor: float) -> "Negative":
        return self

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return in_unit(image, lambda unit: 1 - unit)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Remapped:
    """Another modality: the negative, folded at `fold`, so that dark and bright tissues become alike."""

    name: ClassVar[str] = "remapped"
    fold: float

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Remapped":
        return cls(float(rng.uniform(0.3, 0.7)))

    def scaled(self, factor: float) -> "Remapped":
        return self

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return in_unit(image, self._folded)

    def _folded(self, unit: Tensor) -> Tensor:
        """1 at both extremes, 0 at `fold`, and a bent line between."""
        distance = torch.where(unit < self.fold, 1 - unit / self.fold, (unit - self.fold) / (1 - self.fold))
        return distance.sqrt()

    def __str__(self) -> str:
        return f"remapped at {self.fold:.2g}"


@dataclass(frozen=True)
class Shuffled:
    """The image cut into `pieces` along every axis, the blocks in random order: its values without its anatomy."""

    name: ClassVar[str] = "shuffled"
    pieces: int

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Shuffled":
        return cls(8)

    def scaled(self, factor: float) -> "Shuffled":
        return self

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        for axis in range(1, image.ndim):
            image = self._along(image, axis, rng)
        return image

    def _along(self, image: Tensor, axis: int, rng: np.random.Generator) -> Tensor:
        blocks = image.tensor_split(min(self.pieces, image.shape[axis]), dim=axis)
        return torch.cat([blocks[block] for block in rng.permutation(len(blocks))], dim=axis)

    def __str__(self) -> str:
        return f"shuffled in {self.pieces}"


@dataclass(frozen=True)
class Constant:
    """Each channel's mean everywhere."""

    name: ClassVar[str] = "constant"

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> "Constant":
        return cls()

    def scaled(self, factor: float) -> "Constant":
        return self

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        return image.mean(tuple(range(1, image.ndim)), keepdim=True).expand_as(image).clone()

    def __str__(self) -> str:
        return self.name
