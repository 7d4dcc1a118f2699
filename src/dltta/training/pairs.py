"""Source side. What a memory holds before the first image of a new site: source images' features and predictions."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dltta.errors import SettingError
from dltta.models.features import forward_with_features
from dltta.models.io.checkpoint import SourcePairs
from dltta.models.predictions import probabilities

COUNT = 20  # the paper's memory in segmentation


@torch.no_grad()
def source_pairs(model: nn.Module, images: Sequence[Tensor], layer: str | None = None) -> SourcePairs:
    """Of up to 20 images (C, *spatial) of one size, as the network takes them; kept in half precision."""
    features, predictions = [], []
    device = next(model.parameters()).device
    for image in list(images)[:COUNT]:
        seen = forward_with_features(model, layer, image[None].to(device))
        layer = seen.layer
        if seen.features is not None:
            features.append(seen.features.half().cpu())
            predictions.append(probabilities(seen.logits).half().cpu())
    if not features or layer is None:
        raise SettingError("the network has no features to remember; leave memory out of --with")
    return SourcePairs(layer, torch.cat(features), torch.cat(predictions))
