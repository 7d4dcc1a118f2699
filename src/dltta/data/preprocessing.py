"""1 images. From a file's intensities to what a network was trained on."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dltta.data.case import Case
from dltta.errors import InputError, SettingError

Intensity = Literal["none", "scale", "zscore", "imagenet"]
LONGEST = 1 << 20  # pixels along an axis
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_SD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Preprocessing:
    """Resize to `size` (None keeps the image's), then bring intensities to the network's range.

    `scale` divides by `maximum`; `zscore` gives every channel of every image zero mean and unit variance (a constant
    channel becomes zero); `imagenet` divides by `maximum` and then normalizes with ImageNet's statistics.

    A `maximum` of 255, 4095, 65535, ... is the depth of the images that the network was trained on. An image of another
    depth is divided by its own instead, if its values show that it uses it, and refused otherwise: 12 bits in a 16-bit
    file would be too dark for the network, and nobody would notice.
    """

    intensity: Intensity = "none"
    maximum: float = 1.0
    size: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.intensity not in ("none", "scale", "zscore", "imagenet"):
            raise SettingError(f"intensity must be none, scale, zscore or imagenet, got {self.intensity!r}")
        if not 0 < self.maximum < math.inf:
            raise SettingError(f"maximum must be positive, got {self.maximum}")
        if self.size is not None and not all(isinstance(length, int) and 0 < length < LONGEST for length in self.size):
            raise SettingError(f"size must be a length along each axis, got {self.size}")

    @classmethod
    def from_json(cls, description: dict[str, Any]) -> "Preprocessing":
        size = description.get("size")
        return cls(description["intensity"], description["maximum"], None if size is None else tuple(size))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def image(self, image: Tensor, limit: int | None = None) -> Tensor:
        """(C, *spatial) as read to (C, *size) as the network takes it.

        `limit` is the largest value that the file's pixels can hold, as `Geometry` and `Case` have it.
        """
        maximum = self._divisor(image, limit)
        image = resize(image, self.size) if self.size is not None else image
        if self.intensity == "zscore":
            flat = image.flatten(1)
            mean, sd = flat.mean(1), flat.std(1, unbiased=False)
            return (image - _per_channel(mean, image)) / _per_channel(sd, image).clamp_min(1e-8)
        if self.intensity == "imagenet":
            mean, sd = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_SD)
            if len(image) != len(mean):
                raise SettingError(f"ImageNet statistics are for 3 channels, the image has {len(image)}")
            return (image / maximum - _per_channel(mean, image)) / _per_channel(sd, image)
        return image / maximum if self.intensity == "scale" else image

    def _divisor(self, image: Tensor, limit: int | None) -> float:
        """What the values are divided by: the trained maximum, or the image's own where its depth is another one."""
        if self.intensity not in ("scale", "imagenet") or limit == self.maximum or not _is_depth(self.maximum):
            return self.maximum
        brightest = float(image.max())
        if limit is None and (brightest > self.maximum or 0 < brightest <= 1):
            raise InputError(
                f"values up to {brightest:.6g}, the network was trained on 0..{self.maximum:g}; "
                "save the image with whole numbers of that range"
            )
        if limit is not None and 0 < brightest < limit / 8:
            raise InputError(
                f"values up to {brightest:g} of {limit}, the network was trained on 0..{self.maximum:g}; "
                f"stretch the image to the full range or save it with values of 0..{self.maximum:g}"
            )
        return self.maximum if limit is None else float(limit)

    def label(self, label: Tensor) -> Tensor:
        """A dense label (*spatial) to (*size); a class label stays."""
        if self.size is None or label.ndim == 0:
            return label
        return resize_label(label, self.size)

    def case(self, case: Case) -> Case:
        """Image and label as the network takes them, and the spacing between their positions."""
        image = self.image(case.image, case.limit)
        label = None if case.label is None else self.label(case.label)
        spacing = case.spacing
        if spacing is not None and self.size is not None:
            shrink = zip(spacing, case.image.shape[1:], image.shape[1:], strict=True)
            spacing = tuple(mm * before / after for mm, before, after in shrink)
        return replace(case, image=image, label=label, spacing=spacing, limit=None)


def _is_depth(maximum: float) -> bool:
    """Whether it is the largest number of 8 bits or more."""
    return maximum >= 255 and maximum.is_integer() and int(maximum) & (int(maximum) + 1) == 0


def resize(image: Tensor, size: Sequence[int]) -> Tensor:
    """(C, *spatial) to (C, *size), linearly."""
    mode = {2: "bilinear", 3: "trilinear"}[image.ndim - 1]
    return F.interpolate(image[None], size=tuple(size), mode=mode, align_corners=False, antialias=mode == "bilinear")[0]


def resize_label(label: Tensor, size: Sequence[int]) -> Tensor:
    """(*spatial) class numbers to (*size) by the nearest."""
    return F.interpolate(label[None, None].float(), size=tuple(size), mode="nearest-exact")[0, 0].to(label.dtype)


def _per_channel(values: Tensor, image: Tensor) -> Tensor:
    return values.to(image).view(-1, *[1] * (image.ndim - 1))
