"""2 networks. Images of one site as they would look at another, and a network behind such a translation."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Generator(nn.Module):
    """Images (B, C, H, W) from -1 to 1 to images of the same size and anatomy at another site, from -1 to 1.

    The residual network of Zhu et al. 2017: 7 × 7 convolution, two halvings, `blocks` residual blocks, two doublings,
    7 × 7 convolution, tanh; instance norm, reflection padding. It gives the image, not what is to be added to it: a
    generator that begins as the identity stays there, because there cycle and identity losses are zero.
    """

    def __init__(self, channels: int, *, width: int = 64, blocks: int = 9) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.ReflectionPad2d(3), nn.Conv2d(channels, width, 7), *_active(width)]
        for before in (width, 2 * width):
            layers += [nn.Conv2d(before, 2 * before, 3, stride=2, padding=1), *_active(2 * before)]
        layers += [Block(4 * width) for _ in range(blocks)]
        for before in (4 * width, 2 * width):
            up = nn.ConvTranspose2d(before, before // 2, 3, stride=2, padding=1, output_padding=1)
            layers += [up, *_active(before // 2)]
        self.layers = nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, channels, 7), nn.Tanh())

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[2:]
        padded = F.pad(images, (0, -width % 4, 0, -height % 4), mode="replicate")
        translated: Tensor = self.layers(padded)
        return translated[..., :height, :width]


class Block(nn.Module):
    """Two 3 × 3 convolutions beside the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3),
            *_active(channels),
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3),
            nn.InstanceNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layers(x)
        return x + changed


class Translated(nn.Module):
    """A generator in front of a network: the network sees target images as source images. Volumes go slice by slice.

    `center` and `scale` (per channel, from the extremes of both sites) bring intensities to the generator's range and
    back, whether they are z-scores, from 0 to 1 or anything else. Both sites share them: what the sites differ in is
    left for the generator to learn.
    """

    def __init__(self, generator: nn.Module, network: nn.Module, center: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.generator, self.network = generator, network
        self.register_buffer("center", center)
        self.register_buffer("scale", scale)
        self.center: Tensor
        self.scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(self.translate(x))
        return logits

    def translate(self, x: Tensor) -> Tensor:
        """The images (B, C, *spatial) as the network gets to see them."""
        center, scale = (value.view(-1, *[1] * (x.ndim - 2)) for value in (self.center, self.scale))
        slices = as_slices((x - center) / scale)
        return from_slices(self.generator(slices), x.shape) * scale + center


def as_slices(x: Tensor) -> Tensor:
    """(B, C, H, W) as it is; (B, C, H, W, D) as (B · D, C, H, W), the slices of a volume one after another."""
    return x if x.ndim == 4 else x.movedim(-1, 1).flatten(0, 1)


def from_slices(slices: Tensor, shape: torch.Size) -> Tensor:
    """Counterpart of `as_slices` for batches of this shape."""
    return slices if len(shape) == 4 else slices.unflatten(0, (shape[0], shape[-1])).movedim(1, -1)


def _active(channels: int) -> list[nn.Module]:
    return [nn.InstanceNorm2d(channels), nn.ReLU()]
