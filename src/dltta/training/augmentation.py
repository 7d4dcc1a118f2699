"""Source side. What is changed at random in a training image, and in which order: space, crop, intensity, color."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from monai.transforms import Compose

Kind = Literal["none", "light", "field"]
GRAY = torch.tensor([0.299, 0.587, 0.114])  # luminance, ITU-R BT.601


@dataclass(frozen=True)
class Augmentation:
    """How training images are changed; `compose` makes MONAI transforms on {"image", "label"} of it.

    - `light`: mirroring, small changes of brightness, contrast and noise
    - `field`: nnU-Net's list, that is rotation, scaling, elastic deformation (2-D), mirroring, noise, blur, brightness,
      contrast, low resolution and gamma, also of the inverted image; for RGB images hue, saturation and white balance

    `crop` is the size of random crops, `foreground` the share of them around a labeled position. `mirror` are the axes
    along which an image may be mirrored; None is the last one of 2-D images and the first one of volumes.
    """

    kind: Kind = "light"
    crop: tuple[int, ...] | None = None
    foreground: float = 0.0
    mirror: tuple[int, ...] | None = None
    rotation: float = 15.0  # degrees at most, of `field`; volumes turn in the plane of their first two axes

    def upright(self) -> "Augmentation":
        """Without what hides a quarter turn, which the rotation head is to see: rotation, mirroring along two axes."""
        return replace(self, mirror=None if self.mirror is None else self.mirror[:1], rotation=0.0)

    def compose(self, spatial_dims: int, channels: int, *, dense: bool, spread: float = 1.0) -> "Compose | None":
        """For images (channels, *spatial); `spread` is the standard deviation that their values usually have."""
        from monai import transforms as mt  # here: importing any part of MONAI imports all of it

        both = ["image", "label"] if dense else ["image"]
        crops = [] if self.crop is None else [mt.SpatialPadd(both, self.crop), self._crop(both)]
        mirror = ((spatial_dims - 1 if spatial_dims == 2 else 0),) if self.mirror is None else self.mirror
        flips = [mt.RandFlipd(both, prob=0.5, spatial_axis=axis) for axis in mirror]
        steps: list[Any] = crops
        if self.kind == "light":
            steps = crops + flips + _light()
        elif self.kind == "field":
            color = [color_jitter()(keys=["image"], prob=0.5)] if channels == 3 else []
            steps = self._space(both, spatial_dims) + crops + flips + _intensity(spatial_dims, spread) + color
        return mt.Compose(steps) if steps else None

    def _crop(self, both: list[str]) -> Any:
        from monai import transforms as mt

        if self.foreground == 0 or "label" not in both:
            return mt.RandSpatialCropd(both, self.crop, random_size=False)
        return foreground_crop()(both, self.crop or (), self.foreground)

    def _space(self, both: list[str], dims: int) -> list[Any]:
        from monai import transforms as mt

        modes = ["bilinear", "nearest"][: len(both)]
        angle = math.radians(self.rotation)
        turn, scale = ((angle,), (0.25, 0.25)) if dims == 2 else ((0.0, 0.0, angle), (0.25, 0.25, 0.0))
        placed = {"mode": modes, "padding_mode": "reflection"}
        affine = mt.RandAffined(both, prob=0.4, rotate_range=turn, scale_range=scale, **placed)
        elastic = mt.Rand2DElasticd(both, spacing=(32, 32), magnitude_range=(0, 3), prob=0.2, **placed)
        return [affine, elastic] if dims == 2 else [affine]


def _light() -> list[Any]:
    from monai import transforms as mt

    return [
        mt.RandScaleIntensityd("image", factors=0.1, prob=0.3),
        mt.RandShiftIntensityd("image", offsets=0.05, prob=0.3),
        mt.RandGaussianNoised("image", prob=0.2, std=0.03),
    ]


def _intensity(dims: int, spread: float) -> list[Any]:
    """nnU-Net's, with its probabilities and ranges; the noise of images of standard deviation 1 is scaled to others."""
    from monai import transforms as mt

    smooth = dict.fromkeys(("sigma_x", "sigma_y", "sigma_z"), (0.5, 1.0))
    coarse = {"downsample_mode": "nearest", "upsample_mode": {2: "bilinear", 3: "trilinear"}[dims]}
    gamma = {"gamma": (0.7, 1.5), "retain_stats": True}
    return [
        mt.RandGaussianNoised("image", prob=0.1, std=0.3 * spread, sample_std=True),
        mt.RandGaussianSmoothd("image", prob=0.2, **smooth),
        mt.RandScaleIntensityd("image", factors=0.25, prob=0.15),
        mt.RandScaleIntensityFixedMeand("image", factors=0.25, prob=0.15, preserve_range=True),
        mt.RandSimulateLowResolutiond("image", prob=0.25, zoom_range=(0.5, 1.0), **coarse),
        mt.RandAdjustContrastd("image", prob=0.1, invert_image=True, **gamma),
        mt.RandAdjustContrastd("image", prob=0.3, **gamma),
    ]


def typical_spread(images: Sequence[Tensor]) -> float:
    """The median over images of the standard deviation of their values."""
    return float(torch.stack([image.float().std() for image in images]).median())


def turned_colors(angle: float, saturation: float, gains: Sequence[float]) -> Tensor:
    """(3, 3): RGB turned around the gray axis by an angle in radians, mixed with its luminance, each channel scaled.

    With gains of 1 gray stays gray: every row sums to 1.
    """
    cosine, sine = math.cos(angle), math.sin(angle)
    third, cross = (1 - cosine) / 3, sine / math.sqrt(3)
    hue = torch.tensor(
        [
            [cosine + third, third - cross, third + cross],
            [third + cross, cosine + third, third - cross],
            [third - cross, third + cross, cosine + third],
        ]
    )  # Rodrigues' rotation around (1, 1, 1) / √3
    mix = saturation * torch.eye(3) + (1 - saturation) * GRAY.expand(3, 3)
    return torch.tensor(gains, dtype=torch.float32)[:, None] * (mix @ hue)


@cache
def color_jitter() -> Any:
    """The class of a MONAI transform: hue by up to 15 degrees, saturation and each channel's gain."""
    from monai import transforms as mt

    class ColorJitterd(mt.RandomizableTransform, mt.MapTransform):  # type: ignore[misc]  # MONAI is untyped
        """Image (3, *spatial) in new colors."""

        def __init__(self, keys: Sequence[str], prob: float) -> None:
            mt.MapTransform.__init__(self, keys)
            mt.RandomizableTransform.__init__(self, prob)

        def randomize(self, data: object) -> None:
            super().randomize(None)
            angle = self.R.uniform(-math.pi / 12, math.pi / 12)
            self.colors = turned_colors(angle, self.R.uniform(0.7, 1.3), self.R.uniform(0.9, 1.1, 3).tolist())

        def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
            changed = dict(data)
            self.randomize(None)
            if self._do_transform:
                for key in self.key_iterator(changed):
                    changed[key] = torch.einsum("ij,j...->i...", self.colors, changed[key])
            return changed

    return ColorJitterd


@cache
def foreground_crop() -> Any:
    """The class of a MONAI transform: random crops, a share of them around a labeled position where there is one."""
    from monai import transforms as mt

    class ForegroundCropd(mt.Randomizable, mt.MapTransform):  # type: ignore[misc]  # MONAI is untyped
        """Image and label (C, *spatial), at least as large as `size`, to (C, *size)."""

        def __init__(self, keys: Sequence[str], size: Sequence[int], share: float) -> None:
            mt.MapTransform.__init__(self, keys)
            self.size, self.share = np.array(size), share

        def randomize(self, label: Tensor) -> None:
            room = np.array(label.shape[1:]) - self.size  # where a crop may begin
            begin = np.array([self.R.randint(0, most + 1) for most in room])
            wanted, which = self.R.random_sample() < self.share, self.R.random_sample()
            labeled = torch.as_tensor(label)[0].nonzero() if wanted else torch.empty(0)
            if len(labeled):
                center = labeled[int(which * len(labeled))].numpy()
                begin = np.clip(center - self.size // 2, 0, room)
            self.begin = begin

        def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
            cropped = dict(data)
            self.randomize(cropped["label"])
            box = (slice(None), *(slice(a, a + n) for a, n in zip(self.begin, self.size, strict=True)))
            for key in self.key_iterator(cropped):
                cropped[key] = cropped[key][box]
            return cropped

    return ForegroundCropd
