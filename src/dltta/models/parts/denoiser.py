"""2 networks. What do segmentations look like? A denoising auto-encoder of label maps (Karani et al. 2021)."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHARE = 0.5  # of a label map that squares or cubes may overwrite at most


class Denoiser(nn.Module):
    """A U-Net from class probabilities (B, classes, *spatial) to logits of plausible ones, batch normalization.

    One level for each of `widths`. The finest level has no skip connection: its details cannot simply pass. Inputs are
    padded to what the levels divide and cut back.
    """

    def __init__(self, spatial_dims: int, classes: int, widths: Sequence[int] = (16, 32, 64, 128)) -> None:
        super().__init__()
        self.spatial_dims, self.classes, self.widths = spatial_dims, classes, tuple(widths)
        self.pool = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[spatial_dims](2)
        inputs = [classes, *widths[:-1]]
        self.down = nn.ModuleList(_block(spatial_dims, i, o) for i, o in zip(inputs, widths, strict=True))
        self.up = nn.ModuleList(
            _block(spatial_dims, widths[level + 1] + (widths[level] if level else 0), widths[level])
            for level in range(len(widths) - 1)
        )
        self.head = {2: nn.Conv2d, 3: nn.Conv3d}[spatial_dims](widths[0], classes, 1)

    def forward(self, probability: Tensor) -> Tensor:
        spatial = probability.shape[2:]
        multiple = 2 ** (len(self.widths) - 1)
        padding = [(0, -size % multiple) for size in reversed(spatial)]
        x = F.pad(probability, [amount for pair in padding for amount in pair], mode="replicate")
        seen = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            seen.append(x)
        for level in reversed(range(len(self.up))):
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = self.up[level](torch.cat([x, seen[level]], dim=1) if level else x)
        logits: Tensor = self.head(x)[(..., *(slice(size) for size in spatial))]
        return logits


def soft_dice(one: Tensor, other: Tensor) -> Tensor:
    """Of two maps of class probabilities (B, C, *spatial): for each image and class, mean over both; 1 is equal."""
    axes = tuple(range(2, one.ndim))
    overlap = (one * other).sum(axes)
    return ((2 * overlap + 1e-10) / (one.sum(axes) + other.sum(axes) + 1e-10)).mean()


def corrupted(labels: Tensor, generator: torch.Generator, *, cubes: int = 200, half_side: int = 10) -> Tensor:
    """Label maps (B, …, *spatial of 2 or 3 axes) in which squares or cubes are overwritten by others of the same map.

    Of each map up to `cubes`, of half a side up to `half_side`, as published for volumes of 256 × 256 × 64; on smaller
    maps half a side is at most a quarter of the smallest axis, and no more than half of the positions are overwritten.
    """
    noisy = labels.clone()
    for clean, map_ in zip(labels, noisy, strict=True):
        spatial = clean.shape
        most = max(1, min(half_side, min(spatial) // 4))
        budget = SHARE * math.prod(spatial)
        for _ in range(_draw(1, cubes, generator)):
            half = _draw(1, most, generator)
            sides = [min(2 * half, size) for size in spatial]
            budget -= math.prod(sides)
            if budget < 0:
                break
            there, here = (_place(spatial, sides, generator) for _ in range(2))
            map_[here] = clean[there]
    return noisy


def _draw(low: int, high: int, generator: torch.Generator) -> int:
    """A whole number, both ends included."""
    return int(torch.randint(low, high + 1, (), generator=generator).item())


def _place(spatial: Sequence[int], sides: Sequence[int], generator: torch.Generator) -> tuple[slice, ...]:
    starts = [_draw(0, size - side, generator) for size, side in zip(spatial, sides, strict=True)]
    return tuple(slice(start, start + side) for start, side in zip(starts, sides, strict=True))


def _block(spatial_dims: int, inputs: int, outputs: int) -> nn.Sequential:
    convolution = {2: nn.Conv2d, 3: nn.Conv3d}[spatial_dims]
    norm = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[spatial_dims]
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [convolution(channels, outputs, 3, padding=1), norm(outputs), nn.ReLU()]
    return nn.Sequential(*layers)
