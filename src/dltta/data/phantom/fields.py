"""1 images. Smooth random fields, the stuff of tissue texture and uneven illumination."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import fft

Array = NDArray[np.float32]


def smooth_field(rng: np.random.Generator, shape: Sequence[int], scale: float | Sequence[float]) -> Array:
    """White noise blurred by a Gaussian of standard deviation `scale` (positions, per axis); mean 0, variance 1."""
    scales = np.broadcast_to(np.asarray(scale, dtype=np.float64), len(shape))
    spectrum = fft.rfftn(rng.standard_normal(shape, dtype=np.float32))
    for axis, (length, sigma) in enumerate(zip(shape, scales, strict=True)):
        frequency = fft.rfftfreq(length) if axis == len(shape) - 1 else fft.fftfreq(length)
        transfer = np.exp(-2 * (np.pi * frequency * sigma) ** 2).astype(np.float32)
        spectrum *= transfer.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    field: Array = fft.irfftn(spectrum, shape)
    field -= field.mean()
    return field / max(float(field.std()), 1e-6)


def positions(size: Sequence[int], spacing: Sequence[float]) -> list[Array]:
    """Coordinates in the unit of `spacing`, 0 in the middle; one open grid per axis, ready to broadcast."""
    axes = [(np.arange(n, dtype=np.float32) - (n - 1) / 2) * step for n, step in zip(size, spacing, strict=True)]
    return [np.asarray(grid, dtype=np.float32) for grid in np.meshgrid(*axes, indexing="ij", sparse=True)]
