"""2 networks. The same image seen another way: flips and turns that can be undone, and another appearance."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dltta.models.predictions import probabilities


@dataclass(frozen=True)
class View:
    """Images (B, C, *spatial) flipped along a spatial axis or turned by quarter turns in the plane of the first two."""

    flip: int | None = None
    turns: int = 0

    def of(self, x: Tensor) -> Tensor:
        x = x if self.flip is None else x.flip(2 + self.flip)
        return torch.rot90(x, self.turns, dims=(2, 3)) if self.turns else x

    def undone(self, x: Tensor) -> Tensor:
        x = torch.rot90(x, -self.turns, dims=(2, 3)) if self.turns else x
        return x if self.flip is None else x.flip(2 + self.flip)


def flips(x: Tensor) -> list[View]:
    """The image as it is, and flipped along each of its first two axes."""
    return [View(), *(View(flip=axis) for axis in range(min(x.ndim - 2, 2)))]


def flips_and_turns(x: Tensor) -> list[View]:
    """Flips, half a turn and, where the plane is square, quarter turns."""
    turns = () if x.ndim < 4 else (1, 2, 3) if x.shape[2] == x.shape[3] else (2,)
    return [*flips(x), *(View(turns=number) for number in turns)]


@torch.no_grad()
def mean_prediction(network: Callable[[Tensor], Tensor], x: Tensor, views: Sequence[View]) -> Tensor:
    """Class probabilities (B, C, *positions), the mean over views of x, each brought back; one pass for each.

    The prediction for a whole image needs no bringing back.
    """
    total: Tensor | None = None
    for view in views:
        prediction = probabilities(network(view.of(x)))
        prediction = view.undone(prediction) if prediction.ndim == x.ndim else prediction
        total = prediction if total is None else total + prediction
    if total is None:
        raise ValueError("a mean needs at least one view")
    return total / len(views)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Of logits (B, C, *positions) against class probabilities, mean over batch and positions.

    A single channel is a sigmoid; its target has two classes, so this is the binary cross-entropy.
    """
    logits = logits.to(target.dtype)
    binary = logits.shape[1] == 1
    logs = F.logsigmoid(torch.cat([-logits, logits], dim=1)) if binary else logits.log_softmax(dim=1)
    return -(target * logs).sum(dim=1).mean()


@dataclass(frozen=True)
class Appearance:
    """How one image is to look: factors for each channel, None leaves it as it is.

    In the order in which they are applied: brightness (a factor), contrast (a factor around the channel's mean), gamma
    (of the inverted intensities), noise (its standard deviation, in units of the image's range), blur (standard
    deviations in pixels, None for a channel that stays sharp). Then the image gets its old range back.
    """

    brightness: tuple[float, ...] | None
    contrast: tuple[float, ...] | None
    gamma: tuple[float, ...] | None
    noise: float | None
    blur: tuple[float | None, ...] | None


def draw_appearance(channels: int, generator: torch.Generator) -> Appearance:
    """As GraTa's strong view: each change with its probability, its size for each channel."""

    def happens(probability: float) -> bool:
        return torch.rand((), generator=generator).item() < probability

    def between(low: float, high: float) -> float:
        return low + (high - low) * torch.rand((), generator=generator).item()

    def each(low: float, high: float) -> tuple[float, ...]:
        return tuple(between(low, high) for _ in range(channels))

    return Appearance(
        brightness=each(0.5, 1.5) if happens(0.75) else None,
        contrast=each(0.5, 1.5) if happens(0.75) else None,
        gamma=each(0.5, 2.0) if happens(0.75) else None,
        noise=math.sqrt(between(0.0, 0.05)) if happens(0.5) else None,
        blur=tuple(between(0.5, 1.5) if happens(0.5) else None for _ in range(channels)) if happens(0.5) else None,
    )


def strong_view(x: Tensor, generator: torch.Generator) -> Tensor:
    """Images (B, C, *spatial) of another appearance, each its own; nothing moves. The generator is the CPU's."""
    changed = []
    for image in x:
        appearance = draw_appearance(len(image), generator)
        noise = None if appearance.noise is None else torch.randn(image.shape, generator=generator).to(image)
        changed.append(with_appearance(image, appearance, noise))
    return torch.stack(changed)


def with_appearance(image: Tensor, appearance: Appearance, noise: Tensor | None) -> Tensor:
    """An image (C, *spatial) changed as said; `noise` is standard normal. A constant image stays as it is."""
    low, high = image.min(), image.max()
    if not high > low:
        return image.clone()
    channels = list((image - low) / (high - low))
    if appearance.brightness is not None:
        channels = [c * factor for c, factor in zip(channels, appearance.brightness, strict=True)]
    if appearance.contrast is not None:
        channels = [c.mean() + (c - c.mean()) * f for c, f in zip(channels, appearance.contrast, strict=True)]
    if appearance.gamma is not None:
        channels = [_inverted_gamma(c, power) for c, power in zip(channels, appearance.gamma, strict=True)]
    if appearance.noise is not None and noise is not None:
        channels = [c + appearance.noise * n for c, n in zip(channels, noise, strict=True)]
    if appearance.blur is not None:
        channels = [c if s is None else blurred(c, s) for c, s in zip(channels, appearance.blur, strict=True)]
    return low + _unit(torch.stack(channels)) * (high - low)


def blurred(channel: Tensor, deviation: float) -> Tensor:
    """A channel (*spatial) under a Gaussian filter cut at four standard deviations, edge values repeated."""
    radius = math.ceil(4 * deviation)
    distance = torch.arange(-radius, radius + 1, device=channel.device, dtype=channel.dtype)
    kernel = (-0.5 * (distance / deviation).square()).exp()
    kernel = (kernel / kernel.sum())[None, None]
    for axis in range(channel.ndim):
        lines = channel.movedim(axis, -1)
        padded = F.pad(lines.reshape(-1, 1, lines.shape[-1]), (radius, radius), mode="replicate")
        channel = F.conv1d(padded, kernel).reshape(lines.shape).movedim(-1, axis)
    return channel


def _unit(image: Tensor) -> Tensor:
    """From 0 to 1; zeros if constant."""
    low, high = image.min(), image.max()
    return (image - low) / (high - low) if high > low else torch.zeros_like(image)


def _inverted_gamma(channel: Tensor, power: float) -> Tensor:
    low, high = channel.min(), channel.max()
    if not high > low:
        return channel
    return high - ((high - channel) / (high - low)).pow(power) * (high - low)
