"""1 images. What one change between two sites is: a curve, a blur, a noise, with its strength in natural units."""

from typing import Any, ClassVar, Protocol, Self

import numpy as np
import torch
from monai.data import MetaTensor
from torch import Tensor


class Change(Protocol):
    """A frozen dataclass of numbers. Images are (C, *spatial) float tensors of any range and on any device.

    Strengths are relative to each channel's own range, so `a * image + b` with `a > 0` gets the same change: its result
    is `a * result + b`. A constant channel stays as it is.
    """

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @classmethod
    def draw(cls, rng: np.random.Generator, level: float) -> Self:
        """One such change of a site; `level` from 0 (nothing) to 1 (as strong as sites differ)."""
        ...

    def scaled(self, factor: float) -> Self:
        """The same change, weaker (below 1) or stronger."""
        ...

    def image(self, image: Tensor, rng: np.random.Generator) -> Tensor:
        """The image with the change; `rng` draws what differs from case to case, such as noise."""
        ...

    def __str__(self) -> str:
        """Name and strength, as in `gamma 1.4`."""
        ...


def plain(image: Any) -> Tensor:
    """What a MONAI transform gave, without its metadata, which the next transform would believe."""
    return image.as_tensor() if isinstance(image, MetaTensor) else torch.as_tensor(image)


def direction(rng: np.random.Generator) -> float:
    """1 or -1."""
    return 1.0 if rng.random() < 0.5 else -1.0


def normal(rng: np.random.Generator, image: Tensor) -> Tensor:
    """Standard normal numbers of the image's shape; drawn on the processor, so alike on every device."""
    return torch.from_numpy(rng.standard_normal(tuple(image.shape), dtype=np.float32)).to(image)
