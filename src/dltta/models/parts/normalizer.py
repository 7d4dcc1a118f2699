"""2 networks. Layers in front of the network that undo what a scanner does to intensities (Karani et al. 2021)."""

import torch
from torch import Tensor, nn

NAME = "image_normalizer"  # of the normalizer in a network that has one in front


class ImageNormalizer(nn.Module):
    """x + three convolutions of x, C → width → width → C, with exp(−z²/s²) between them; s is learned per channel."""

    def __init__(self, spatial_dims: int, channels: int, *, width: int = 16, kernel: int = 3) -> None:
        super().__init__()
        self.spatial_dims, self.channels, self.width, self.kernel = spatial_dims, channels, width, kernel
        convolution = {2: nn.Conv2d, 3: nn.Conv3d}[spatial_dims]
        padding = kernel // 2
        self.layers = nn.Sequential(
            convolution(channels, width, kernel, padding=padding),
            Bell(width),
            convolution(width, width, kernel, padding=padding),
            Bell(width),
            convolution(width, channels, kernel, padding=padding),
        )

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = x + self.layers(x)
        return changed


class Bell(nn.Module):
    """exp(−z²/s²) with one s per channel, drawn around 0.2 with standard deviation 0.05."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(channels).normal_(0.2, 0.05))

    def forward(self, z: Tensor) -> Tensor:
        scale = self.scale.view(-1, *[1] * (z.ndim - 2))
        return (-(z.square() / scale.square().clamp_min(1e-8))).exp()
