"""2 networks. The paper's U-Net, 2-D and 3-D, on MONAI."""

from torch import nn

from dltta.errors import require

NORMS = {"batch": "batch", "instance": ("instance", {"affine": True})}  # as MONAI names them; instance is nnU-Net's


def unet(spatial_dims: int, in_channels: int, classes: int, *, width: int = 16, norm: str = "batch") -> nn.Module:
    """Four levels of `width` × (1, 2, 4, 8) channels, a bottleneck of 16 × `width`, transposed convolutions.

    The paper: width 16, that is 16-32-64-128 and 256, batch normalization; `norm` may also be instance, with scale and
    shift. Encoder and bottleneck (`conv_0` to `down_4`) are the feature extractor h, the decoder is the head g.
    """
    require("norm", norm, NORMS)
    from monai.networks.nets import BasicUNet  # here: importing any part of MONAI imports all of it, seconds

    features = (width, 2 * width, 4 * width, 8 * width, 16 * width, width)
    network: nn.Module = BasicUNet(
        spatial_dims,
        in_channels,
        classes,
        features,
        act=("relu", {"inplace": True}),  # nothing else reads what a normalization layer gives
        norm=NORMS[norm],
        upsample="deconv",
    )
    return network
