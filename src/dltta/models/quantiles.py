"""2 networks. What values do source images have, and how do those of another image become like them?

For networks whose normalization stores no statistics, and for scanners that differ by a curve of grey values: the
values of every channel are mapped, in order, to the values that source images have in the mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

KNOTS = 33  # quantiles per channel
MOST = 16384  # positions of a channel that are looked at, evenly spread


@dataclass(frozen=True)
class SourceValues:
    """Quantile function of each channel of source images: its mean over the images and its spread between them."""

    mean: tuple[tuple[float, ...], ...]  # (C, KNOTS)
    spread: tuple[float, ...]  # (C,) standard deviation between images, root mean square over the quantiles

    @classmethod
    def of(cls, images: Sequence[Tensor]) -> "SourceValues":
        """Of source images (C, *spatial) as the network takes them."""
        found = np.stack([quantiles(image) for image in images])  # (N, C, KNOTS)
        spread = np.sqrt(found.var(0).mean(1)) if len(images) > 1 else np.zeros(found.shape[1])
        width = found.mean(0)[:, -1] - found.mean(0)[:, 0]
        floor = np.maximum(0.01 * width, 1e-6)
        return cls(tuple(map(tuple, found.mean(0).tolist())), tuple(np.maximum(spread, floor).tolist()))

    def distance(self, image: Tensor) -> float:
        """How far the values of an image (C, *spatial) are from the source's, in the spread between source images."""
        gap = (quantiles(image) - np.asarray(self.mean)) / np.asarray(self.spread)[:, None]
        return float(np.sqrt(np.square(gap).mean()))

    def match(self, image: Tensor) -> Tensor:
        """The image (C, *spatial) with the source's values: each channel keeps its order, constant ones stay."""
        matched = [
            channel if own[0] == own[-1] else _interpolated(channel, own, np.asarray(wanted))
            for channel, own, wanted in zip(image, quantiles(image), self.mean, strict=True)
        ]
        return torch.stack(matched)


def quantiles(image: Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.float64]]":
    """(C, KNOTS) of an image (C, *spatial), from its least value to its greatest."""
    flat = image.detach().float().flatten(1).cpu()
    some = flat[:, :: max(1, flat.shape[1] // MOST)]
    found: np.ndarray[tuple[int, ...], np.dtype[np.float64]] = np.quantile(
        some.double().numpy(), np.linspace(0, 1, KNOTS), axis=1
    ).T
    return found


def _interpolated(channel: Tensor, own: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", wanted: object) -> Tensor:
    """Along the line through the pairs of quantiles; where several own ones are equal, from their middle."""
    values, places = np.unique(own, return_inverse=True)
    targets = np.bincount(places, weights=np.asarray(wanted)) / np.bincount(places)
    mapped = np.interp(channel.detach().double().cpu().numpy(), values, targets)
    return torch.from_numpy(mapped).to(channel)
