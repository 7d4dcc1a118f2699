"""1 images. What is dark and what is bright for an image whose range nobody told us?"""

from collections.abc import Callable

import torch
from torch import Tensor

SAMPLES = 1_000_000  # values per channel that quantiles are taken from
TAILS = (0.005, 0.995)


def extremes(image: Tensor) -> tuple[Tensor, Tensor]:
    """Darkest and brightest value of each channel, ready to broadcast over (C, *spatial)."""
    dims = tuple(range(1, image.ndim))
    return image.amin(dims, keepdim=True), image.amax(dims, keepdim=True)


def span(image: Tensor) -> Tensor:
    """The range of each channel without its rare extremes, ready to broadcast; a few hot pixels do not stretch it."""
    flat = image.flatten(1)
    flat = flat[:, :: max(1, flat.shape[1] // SAMPLES)]
    low, high = torch.quantile(flat, torch.tensor(TAILS, dtype=flat.dtype, device=flat.device), dim=1)
    full = flat.amax(1) - flat.amin(1)
    usual = torch.where(high > low, high - low, full)  # a small object on a constant background is all tail
    return usual.view(-1, *[1] * (image.ndim - 1))


def in_unit(image: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """`change` applied to the image with each channel's extremes at 0 and 1; constant channels stay."""
    low, high = extremes(image)
    width = high - low
    unit = (image - low) / torch.where(width > 0, width, torch.ones_like(width))
    return low + change(unit) * width
