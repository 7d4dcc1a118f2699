"""2 networks. DenseNet-121 and smaller ones of its family, on MONAI; ImageNet weights from a local file."""

import re
from pathlib import Path

from torch import nn

from dltta.errors import StateError
from dltta.models.io.weights import read_weights

DENSENET_121 = (6, 12, 24, 16)


def densenet(
    spatial_dims: int,
    in_channels: int,
    classes: int,
    *,
    blocks: tuple[int, ...] = DENSENET_121,
    growth: int = 32,
    width: int = 64,
    weights: str | None = None,
) -> nn.Module:
    """Densely connected blocks, global pooling, one linear layer; by default DenseNet-121, the paper's classifier.

    `weights` is a file that torchvision's `densenet121` state dict was saved to; the classification layer stays new.
    """
    from monai.networks.nets import DenseNet  # here: importing any part of MONAI imports all of it

    network: nn.Module = DenseNet(
        spatial_dims, in_channels, classes, init_features=width, growth_rate=growth, block_config=tuple(blocks)
    )
    if weights is not None:
        load_torchvision_weights(network, Path(weights))
    return network


def load_torchvision_weights(network: nn.Module, path: Path) -> None:
    """Fill the feature extractor from a torchvision DenseNet state dict, old or new spelling, without torchvision."""
    saved = read_weights(path)
    own = network.state_dict()
    renamed = {_monai_name(name): value for name, value in saved.items() if not name.startswith("classifier")}
    wanted = {name for name in own if name.startswith("features.") and not name.endswith("num_batches_tracked")}
    missing = sorted(wanted - renamed.keys())
    misfit = sorted(name for name in wanted & renamed.keys() if renamed[name].shape != own[name].shape)
    if missing or misfit:
        raise StateError(
            f"{path.name} is not a state dict of this network: {len(missing)} tensors missing, {len(misfit)} of "
            f"another shape, the first {(missing + misfit)[0]!r}; "
            "torchvision's densenet121 gives one (2-D, 3 channels)"
        )
    network.load_state_dict({name: renamed[name] for name in wanted}, strict=False)


def _monai_name(name: str) -> str:
    """From `denselayer1.norm1.weight`, formerly `denselayer1.norm.1.weight`, to `denselayer1.layers.norm1.weight`."""
    return re.sub(r"(denselayer\d+)\.(norm|conv)\.?([12])\.", r"\1.layers.\2\3.", name)
