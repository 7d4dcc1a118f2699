"""2 networks. A prompt in front of a network: factors on an image's lowest frequencies (VPTTA, Chen et al. 2024)."""

from typing import Any

import torch
from torch import Tensor, nn

from dltta.errors import InputError


class FrequencyPrompt(nn.Module):
    """Multiplies the amplitude of the frequencies around zero, phase kept; the real part of what comes back.

    `fraction` of each side of an image is that many frequencies of that axis, at least one (zero, the mean) and at most
    `largest`. The factors are one parameter (C, largest, …), zero frequency in the middle, so that a frequency has the
    same factor at every image size. Ones are the identity, exactly.
    """

    def __init__(self, spatial_dims: int, channels: int, *, fraction: float, largest: int) -> None:
        super().__init__()
        self.fraction, self.largest = fraction, largest
        self.factors = nn.Parameter(torch.ones(channels, *[largest] * spatial_dims))

    def forward(self, x: Tensor) -> Tensor:
        axes = tuple(range(2, x.ndim))
        sides, low = self._lowest(x)
        change = torch.zeros(x.shape, dtype=low.dtype, device=x.device)
        change[_middle(x, sides)] = low * (self.used(sides).to(low.real.dtype) - 1)
        moved: Tensor = torch.fft.ifftn(torch.fft.ifftshift(change, dim=axes), dim=axes).real
        return x + moved.to(x.dtype)

    def amplitude(self, x: Tensor) -> Tensor:
        """Of the prompted frequencies, (B, C, *sides)."""
        return self._lowest(x)[1].abs()

    def used(self, sides: tuple[int, ...]) -> Tensor:
        """The factors of so many frequencies per axis, (C, *sides)."""
        starts = [self.largest // 2 - side // 2 for side in sides]
        middle: tuple[Any, ...] = tuple(slice(start, start + side) for start, side in zip(starts, sides, strict=True))
        return self.factors[(..., *middle)]

    def _lowest(self, x: Tensor) -> tuple[tuple[int, ...], Tensor]:
        """How many frequencies per axis, and their coefficients with zero in the middle."""
        channels, *largest = self.factors.shape
        if (x.shape[1], x.ndim - 2) != (channels, len(largest)):
            raise InputError(
                f"the prompt is for {len(largest)}-D images of {channels} channels, these have shape "
                f"{tuple(x.shape[1:])}; give channels and spatial_dims to VPTTA"
            )
        sides = tuple(min(self.largest, max(1, int(self.fraction * n))) for n in x.shape[2:])
        axes = tuple(range(2, x.ndim))
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        transform = torch.fft.fftshift(torch.fft.fftn(precise, dim=axes), dim=axes)
        return sides, transform[_middle(x, sides)]


def _middle(x: Tensor, sides: tuple[int, ...]) -> tuple[Any, ...]:
    """Where so many frequencies per axis lie when zero is in the middle, at n // 2."""
    starts = [n // 2 - side // 2 for n, side in zip(x.shape[2:], sides, strict=True)]
    return (..., *(slice(start, start + side) for start, side in zip(starts, sides, strict=True)))
