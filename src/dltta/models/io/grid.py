"""2 networks. Where does each position of a network's image lie in the file? Learned from the way back alone."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dltta.errors import InputError

SAMPLES = 4096  # positions of the file that the map is fitted to
TOLERANCE = 1.0  # positions of the network by which the fit may miss one: taking the nearest costs half of one


def label_on_grid(label: Tensor, size: tuple[int, ...], classes: int, restore: Callable[[Tensor], Tensor]) -> Tensor:
    """A label (*size of the file) on the network's grid of this size: the nearest position, else background.

    Cropping, padding, turning and resampling are linear in the positions. So the coordinates of the network's grid go
    the way back, `restore`, that predictions go, and the map that they show is fitted and turned round.
    """
    seen = _back(torch.ones(size), classes, restore)
    there = (seen > 1 - 1e-3).nonzero()
    there = there[:: max(1, len(there) // SAMPLES)]
    if len(there) <= label.ndim:
        raise InputError("no label can be brought to the network's grid: its preprocessing keeps nothing of the image")
    found = [_back(_ramp(size, axis), classes, restore)[tuple(there.T)] for axis in range(len(size))]
    places = torch.stack(found, 1).double().numpy() * np.array(size) - 0.5  # (N, axes) of the network
    inner = ((places > 0.5) & (places < np.array(size) - 1.5)).all(1)  # interpolation stops at the border
    inner = inner if inner.sum() > 2 * label.ndim else np.ones_like(inner)
    own = np.column_stack([there.double().numpy(), np.ones(len(there))])
    fitted, *_ = np.linalg.lstsq(own[inner], places[inner], rcond=None)
    if np.abs(own[inner] @ fitted - places[inner]).max() > TOLERANCE:
        raise InputError("no label can be brought to the network's grid: its preprocessing bends the image")
    grid = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), -1).reshape(-1, len(size))
    nearest = np.rint((grid - fitted[-1]) @ np.linalg.pinv(fitted[:-1])).astype(np.int64)
    inside = ((nearest >= 0) & (nearest < np.array(label.shape))).all(1)
    moved = torch.zeros(len(grid), dtype=torch.long)
    moved[torch.from_numpy(inside)] = label.long()[tuple(torch.from_numpy(nearest[inside]).T)]
    return moved.reshape(size)


def _back(values: Tensor, classes: int, restore: Callable[[Tensor], Tensor]) -> Tensor:
    """Values between 0 and 1 on the network's grid, brought to the file's as the probability of a class."""
    chances = torch.zeros(classes, *values.shape)
    chances[0], chances[1] = 1 - values, values
    return restore(chances)[1]


def _ramp(size: tuple[int, ...], axis: int) -> Tensor:
    """From 0 to 1 along an axis, at the middle of each position."""
    ramp = (torch.arange(size[axis]) + 0.5) / size[axis]
    return ramp.reshape([-1 if each == axis else 1 for each in range(len(size))]).expand(size).contiguous()
