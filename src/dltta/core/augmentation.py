"""3 objectives. Random views of a batch: color, place, sharpness and noise changed a little (those of CoTTA).

CoTTA's authors change images between 0 and 1. Here each image's own range stands for it, whatever its normalization.
One draw counts for the whole batch, as in their program. Numbers are drawn on the CPU, the same for every device.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from dltta.errors import InputError

BRIGHTNESS, CONTRAST, SATURATION, GAMMA = (0.6, 1.4), (0.7, 1.3), (0.5, 1.5), (0.7, 1.3)
HUE = (-0.06, 0.06)  # of a full turn
ANGLE = (-15.0, 15.0)  # degrees
SHIFT = (-1 / 16, 1 / 16)  # of a side
SCALE = (0.9, 1.1)
BLUR, KERNEL = (0.001, 0.5), 5  # standard deviation and width in pixels
NOISE = 0.005
GRAY = (0.299, 0.587, 0.114)  # shares of red, green and blue in brightness


def random_view(x: Tensor, generator: Generator, *, in_place: bool = False) -> Tensor:
    """Another view of images or volumes x (B, C, *spatial), of the same shape and range.

    `in_place` leaves everything where it is, so that a dense prediction of the plain image fits the view.
    """
    if x.ndim not in (4, 5):
        raise InputError(f"views are made of 2-D images and volumes, got images of shape {tuple(x.shape[1:])}")
    flat = x.flatten(1)
    shape = (-1, *[1] * (x.ndim - 1))
    low = flat.amin(1).view(shape)
    width = flat.amax(1).view(shape) - low
    width = torch.where(width > 0, width, 1.0)
    view = jittered((x - low) / width, generator)
    if not in_place:
        angle, shift = _drawn(ANGLE, generator), [_drawn(SHIFT, generator) for _ in "xy"]
        view = turned(view, angle, shift, _drawn(SCALE, generator))
    view = blurred(view, _drawn(BLUR, generator))
    if not in_place and torch.rand((), generator=generator) < 0.5:
        view = view.flip(-1)
    noise = NOISE * torch.randn(view.shape, generator=generator)
    return (view + noise.to(view)).clamp(0, 1) * width + low


def contrast_view(x: Tensor, generator: Generator) -> Tensor:
    """Each image x (B, C, *spatial) cropped to 0.2 to 1 of its size and enlarged again, mirrored, jittered, or gray.

    As TTT++ and SimCLR do, in each image's own range; jitter with probability 0.8, gray (of three channels) with 0.2.
    """
    return torch.cat([_contrast_view(image[None], generator) for image in x])


def _contrast_view(x: Tensor, generator: Generator) -> Tensor:
    size, axes = x.shape[2:], x.ndim - 2
    side = _drawn((0.2, 1.0), generator) ** (1 / axes)
    for axis in range(2, x.ndim):
        length = max(1, round(side * x.shape[axis]))
        x = x.narrow(axis, int(torch.randint(x.shape[axis] - length + 1, (), generator=generator)), length)
    x = F.interpolate(x, size=size, mode={1: "linear", 2: "bilinear", 3: "trilinear"}[axes], align_corners=False)
    if torch.rand((), generator=generator) < 0.5:
        x = x.flip(-1)
    low, width = x.min(), (x.max() - x.min()).clamp_min(1e-6)
    view = (x - low) / width
    if torch.rand((), generator=generator) < 0.8:
        for change, limits in ((brightness, (0.6, 1.4)), (contrast, (0.6, 1.4))):
            view = change(view, _drawn(limits, generator)).clamp(0, 1)
        if x.shape[1] == 3:
            view = saturation(view, _drawn((0.6, 1.4), generator)).clamp(0, 1)
            view = hue(view, _drawn((-0.1, 0.1), generator)).clamp(0, 1)
    if x.shape[1] == 3 and torch.rand((), generator=generator) < 0.2:
        view = _gray(view).expand_as(view)
    return view * width + low


def jittered(x: Tensor, generator: Generator) -> Tensor:
    """Brightness, contrast and gamma of x in [0, 1], with three channels saturation and hue too, in random order."""
    changes: list[tuple[Callable[[Tensor, float], Tensor], tuple[float, float]]]
    changes = [(brightness, BRIGHTNESS), (contrast, CONTRAST), (gamma, GAMMA)]
    if x.shape[1] == 3:
        changes += [(saturation, SATURATION), (hue, HUE)]
    for index in torch.randperm(len(changes), generator=generator).tolist():
        change, limits = changes[index]
        x = change(x, _drawn(limits, generator)).clamp(0, 1)
    return x


def brightness(x: Tensor, factor: float) -> Tensor:
    return x * factor


def contrast(x: Tensor, factor: float) -> Tensor:
    """Away from the mean brightness of each image."""
    mean = _gray(x).flatten(1).mean(1).view(-1, *[1] * (x.ndim - 1))
    return mean + factor * (x - mean)


def saturation(x: Tensor, factor: float) -> Tensor:
    """Of red, green and blue, away from gray."""
    gray = _gray(x)
    return gray + factor * (x - gray)


def gamma(x: Tensor, exponent: float) -> Tensor:
    return x.clamp_min(0) ** exponent


def hue(x: Tensor, turn: float) -> Tensor:
    """Of red, green and blue (B, 3, *spatial), by this part of the color circle; value and saturation stay."""
    value, most = x.max(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    red, green, blue = x.split(1, dim=1)
    among = torch.cat([green - blue, blue - red, red - green], 1).gather(1, most)
    angle = 6 * turn + 2 * most + among / torch.where(chroma > 0, chroma, 1.0)  # in sixths of the circle
    places = torch.tensor([5.0, 3.0, 1.0]).to(x).view(1, 3, *[1] * (x.ndim - 2))
    k = (places + angle) % 6
    return value - chroma * torch.minimum(k, 4 - k).clamp(0, 1)


def turned(x: Tensor, angle: float, shift: Sequence[float], scale: float) -> Tensor:
    """Turned by degrees in the plane of the last two axes, shifted by these parts of them and enlarged within it.

    Beyond the edge is what lies at the edge.
    """
    height, width = x.shape[-2:]
    cosine, sine = math.cos(math.radians(angle)) / scale, math.sin(math.radians(angle)) / scale
    (right, down) = shift
    plane = [[cosine, sine * height / width], [-sine * width / height, cosine]]
    rows = [[*plane[0], -2 * (plane[0][0] * right + plane[0][1] * down)]]
    rows += [[*plane[1], -2 * (plane[1][0] * right + plane[1][1] * down)]]
    if x.ndim == 5:
        rows = [[row[0], row[1], 0.0, row[2]] for row in rows] + [[0.0, 0.0, 1.0, 0.0]]
    where = torch.tensor(rows).to(x).expand(len(x), -1, -1)
    grid = F.affine_grid(where, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def blurred(x: Tensor, sigma: float) -> Tensor:
    """By a Gaussian of this standard deviation along every axis."""
    offsets = torch.arange(KERNEL) - KERNEL // 2
    kernel = torch.exp(-offsets.square() / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).to(x)
    axes = x.ndim - 2
    convolve = F.conv2d if axes == 2 else F.conv3d
    padded = F.pad(x, [KERNEL // 2] * 2 * axes, mode="replicate")
    for axis in range(axes):
        shape = [KERNEL if axis == each else 1 for each in range(axes)]
        weight = kernel.view(1, 1, *shape).repeat(x.shape[1], *[1] * (axes + 1))
        padded = convolve(padded, weight, groups=x.shape[1])
    return padded


def _gray(x: Tensor) -> Tensor:
    """Brightness (B, 1, *spatial)."""
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    shares = torch.tensor(GRAY).to(x).view(1, 3, *[1] * (x.ndim - 2))
    return (shares * x).sum(1, keepdim=True)


def _drawn(limits: tuple[float, float], generator: Generator) -> float:
    low, high = limits
    return low + (high - low) * torch.rand((), generator=generator).item()
