"""2 networks. From which site does this come? Fully convolutional networks that judge every patch."""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn

from dltta.errors import DataError


class OutputDiscriminator(nn.Module):
    """Takes probabilities (B, classes, *spatial), gives a map of logits (Tsai et al. 2018), in 2-D or 3-D.

    Five convolutions of 4 positions and stride 2 with `width` × (1, 2, 4, 8) and 1 channels, leaky ReLU. An axis that
    has come down to one position is not halved further, so that small or flat images still give a logit; `size`
    is the smallest image that will come.
    """

    def __init__(self, spatial_dims: int, classes: int, size: Sequence[int], *, width: int = 64) -> None:
        super().__init__()
        channels = (classes, width, 2 * width, 4 * width, 8 * width, 1)
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            halved = [extent > 1 for extent in size]
            layers += [_convolution(spatial_dims, before, after, halved), nn.LeakyReLU(0.2)]
            size = [extent // 2 if half else extent for extent, half in zip(size, halved, strict=True)]
        self.layers = nn.Sequential(*layers[:-1])  # the last convolution gives the logits

    def forward(self, probabilities: Tensor) -> Tensor:
        logits: Tensor = self.layers(probabilities)
        return logits


def _convolution(spatial_dims: int, before: int, after: int, halved: Sequence[bool]) -> nn.Module:
    kernel = tuple(4 if half else 3 for half in halved)
    stride = tuple(2 if half else 1 for half in halved)
    kind: type[nn.Module] = {2: nn.Conv2d, 3: nn.Conv3d}[spatial_dims]
    return kind(before, after, kernel, stride, padding=1)


class PatchDiscriminator(nn.Module):
    """Takes images (B, C, H, W), gives a map of scores (Zhu et al. 2017).

    Convolutions of 4 × 4 with `width` × (1, 2, 4, 8) and 1 channels, instance norm, leaky ReLU. With three halvings
    each score is of 70 × 70 pixels; smaller images are halved less often. `size` is the smallest image that will come.
    """

    def __init__(self, channels: int, size: Sequence[int], *, width: int = 64) -> None:
        super().__init__()
        halvings = min(3, min(size).bit_length() - 3)  # at least 4 pixels are left
        if halvings < 1:
            raise DataError(f"images of {tuple(size)} are too small to be told apart by patches; give at least 8 x 8")
        widths = [width * 2**level for level in range(halvings + 1)]
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 4, stride=2, padding=1), nn.LeakyReLU(0.2)]
        for level, (before, after) in enumerate(pairwise(widths), start=1):
            stride = 2 if level < halvings else 1
            layers += [nn.Conv2d(before, after, 4, stride=stride, padding=1), nn.InstanceNorm2d(after)]
            layers += [nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.Conv2d(widths[-1], 1, 4, padding=1))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.layers(images)
        return scores
