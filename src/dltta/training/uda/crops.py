"""Source and target together. Several views of an image: parts of it, mirrored, in other colors, blurred.

The augmentation of Caron et al. 2020, for whole batches (B, C, H, W) at once. Parameters are drawn first, one for each
image, from a generator on the CPU; then they are applied wherever the images are. Colors change by factors, so
intensities should begin near zero; nothing is cut off at a largest value, since images need not end at 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

RATIO = (3 / 4, 4 / 3)  # of a part's sides
JITTER = 0.8  # brightness, contrast and saturation change by up to this share
HUE = 0.2  # of a full turn
BLUR = (0.1 / 224, 2 / 224)  # standard deviation as a share of the view's size
OFTEN = {"flip": 0.5, "jitter": 0.8, "grey": 0.2, "blur": 0.5}  # probabilities
LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Crops:
    """Views of one kind: how many, their size in pixels, the share of the image's area that they show.

    `strength` multiplies the changes of brightness, contrast, saturation and hue.
    """

    count: int
    size: tuple[int, int]
    scale: tuple[float, float]
    strength: float = 1.0


def views(images: Tensor, kind: Crops, generator: torch.Generator) -> Tensor:
    """`count` views of every image: all of the first, then all of the second, … (count · B, C, *size)."""
    return torch.cat([_view(images, kind, generator) for _ in range(kind.count)])


def _view(images: Tensor, kind: Crops, generator: torch.Generator) -> Tensor:
    view = random_part(images, kind.size, kind.scale, generator)
    view = torch.where(_chance("jitter", view, generator), jitter(view, kind.strength, generator), view)
    if view.shape[1] == 3:
        view = torch.where(_chance("grey", view, generator), grey(view).expand_as(view), view)
    blurred = blur(view, _uniform(BLUR, view, generator) * max(kind.size))
    return torch.where(_chance("blur", view, generator), blurred, view)


def random_part(
    images: Tensor, size: tuple[int, int], scale: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """A part of each image, anywhere in it, half of the time mirrored, resized to `size`."""
    area = _uniform(scale, images, generator).flatten()
    ratio = _uniform([math.log(side) for side in RATIO], images, generator).exp().flatten()
    extent = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], dim=1).clamp(max=1)  # (B, 2) width, height
    place = (2 * torch.rand(len(images), 2, generator=generator).to(images) - 1) * (1 - extent)  # x, y of its center
    mirrored = torch.where(_chance("flip", images, generator).flatten(), -1.0, 1.0).to(images)
    extent = extent * torch.stack([mirrored, torch.ones_like(mirrored)], dim=1)
    theta = torch.cat([torch.diag_embed(extent), place[:, :, None]], dim=2)  # (B, 2, 3)
    grid = F.affine_grid(theta, [len(images), images.shape[1], *size], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def jitter(images: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Other brightness and contrast and, where there are three channels, other saturation and hue."""
    factors = (1 - strength * JITTER, 1 + strength * JITTER)
    images = images * _uniform(factors, images, generator)
    mean = grey(images).mean(dim=(1, 2, 3), keepdim=True)
    images = mean + (images - mean) * _uniform(factors, images, generator)
    if images.shape[1] != 3:
        return images
    light = grey(images)
    images = light + (images - light) * _uniform(factors, images, generator)
    return turn_hue(images, 2 * math.pi * strength * _uniform((-HUE, HUE), images, generator))


def grey(images: Tensor) -> Tensor:
    """The light of each pixel, (B, 1, H, W)."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    return (images * images.new_tensor(LUMA).view(3, 1, 1)).sum(dim=1, keepdim=True)


def turn_hue(images: Tensor, angle: Tensor) -> Tensor:
    """Colors (B, 3, H, W) turned about the axis of greys by angles (B, 1, 1, 1), Rodrigues' formula; greys stay."""
    axis = images.new_full((1, 3, 1, 1), 3**-0.5)
    along = (images * axis).sum(dim=1, keepdim=True) * axis
    across = (images.roll(-1, 1) - images.roll(1, 1)) * -(3**-0.5)  # axis × color
    return along + (images - along) * angle.cos() + across * angle.sin()


def blur(images: Tensor, sd: Tensor) -> Tensor:
    """Each image blurred by its own Gaussian, `sd` (B, 1, 1, 1) in pixels."""
    reach = max(1, math.ceil(3 * float(sd.max())))
    steps = torch.arange(-reach, reach + 1).to(images)
    kernel = torch.softmax(-(steps**2) / (2 * sd.flatten()[:, None] ** 2), dim=1)  # (B, 2 · reach + 1)
    kernel = kernel.repeat_interleave(images.shape[1], dim=0)[:, None]  # (B · C, 1, …)
    flat = F.pad(images, [reach] * 4, mode="replicate").flatten(0, 1)[None]  # (1, B · C, H, W)
    flat = F.conv2d(flat, kernel[:, :, None], groups=flat.shape[1])
    flat = F.conv2d(flat, kernel[..., None], groups=flat.shape[1])
    return flat.view_as(images)


def _uniform(between: Sequence[float], images: Tensor, generator: torch.Generator) -> Tensor:
    """A number for each image, (B, 1, 1, 1)."""
    drawn = torch.rand(len(images), 1, 1, 1, generator=generator).to(images)
    return between[0] + (between[1] - between[0]) * drawn


def _chance(what: str, images: Tensor, generator: torch.Generator) -> Tensor:
    return _uniform((0.0, 1.0), images, generator) < OFTEN[what]
