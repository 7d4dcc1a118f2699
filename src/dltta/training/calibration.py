"""Source side. How does the trained network behave at home? Measured without labels, on held-out images first."""

import copy
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from dltta.discrepancy import batch_discrepancy, symmetric_kl
from dltta.memory import MemoryBank
from dltta.models.calibration import Calibration, LayerSamples
from dltta.models.features import forward_with_features
from dltta.models.normalization import use_test_statistics
from dltta.models.statistics import Shrunken
from dltta.predictions import probabilities

MOST = 64  # images; more change the spread of a mean by less than a tenth


@torch.no_grad()
def calibrate(model: nn.Module, images: Sequence[Tensor], *, layer: str | None = None) -> Calibration:
    """Look at up to 64 source images (C, *spatial) of one size, as the network takes them.

    `answers` holds, all without labels:
    - `images`: how many
    - `shares`: per class the least and the greatest share of an image that was answered with it
    - `marginal_entropy`: the least entropy of an image's mean prediction
    - `jitter`: the greatest divergence (symmetric, as Eq. (4)) between the answer with stored and with the image's own,
      shrunken statistics: how far a harmless change of normalization moves an answer; 0 without batch normalization
    - `discrepancy`: the median discrepancy of the images to their 8 nearest among the 20 before them; None if too few
    """
    chosen = list(images)[:MOST]
    device = next(model.parameters()).device
    samples = LayerSamples()
    predictions, discrepancies = [], []
    memory = MemoryBank(layer, capacity=20, neighbors=8, ready="neighbors")
    with samples.watching(model):
        for image in chosen:
            seen = forward_with_features(model, memory.layer, image[None].to(device))
            prediction = probabilities(seen.logits)
            predictions.append(prediction.cpu())
            if seen.features is None:
                continue
            reference = memory.recall(seen.features, prediction.shape[1:])
            if reference is not None:
                discrepancies.append(batch_discrepancy(prediction, reference))
            memory.layer = seen.layer
            memory.push(seen.features, prediction)
    calibration = Calibration(samples.stacked(), samples.eps)
    answers = {
        **answer_ranges(predictions),
        "jitter": _jitter(model, chosen, predictions, calibration),
        "discrepancy": median(discrepancies) if discrepancies else None,
    }
    return Calibration(calibration.layers, calibration.eps, answers)


def answer_ranges(predictions: Sequence[Tensor]) -> dict[str, Any]:
    """Ranges over the predictions (1, C, *positions) of single images."""
    marginals = torch.cat([prediction.flatten(2).mean(2) for prediction in map(_dense, predictions)])  # (N, C)
    entropies = -(marginals * marginals.clamp_min(torch.finfo(marginals.dtype).tiny).log()).sum(1)
    return {
        "images": len(predictions),
        "shares": [[column.min().item(), column.max().item()] for column in marginals.T],
        "marginal_entropy": entropies.min().item(),
    }


def _dense(prediction: Tensor) -> Tensor:
    return prediction if prediction.ndim > 2 else prediction[..., None]


def _jitter(model: nn.Module, images: Sequence[Tensor], answers: Sequence[Tensor], calibration: Calibration) -> float:
    if not calibration.layers:
        return 0.0
    own = copy.deepcopy(model)
    use_test_statistics(own, Shrunken(calibration.moments()))
    device = next(model.parameters()).device
    moved = [probabilities(own(image[None].to(device))).cpu() for image in images]
    return max(symmetric_kl(a, b).max().item() for a, b in zip(moved, answers, strict=True))
