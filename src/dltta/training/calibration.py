"""Source side. How does the source model behave on source images? Measured without labels, on held-out images first."""

import copy
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from dltta.core.discrepancy import batch_discrepancy
from dltta.core.memory import MemoryBank
from dltta.models.calibration import Calibration, LayerSamples, OODScore, log_variances
from dltta.models.features import forward_with_features
from dltta.models.fisher import fisher
from dltta.models.normalization import use_test_statistics
from dltta.models.predictions import entropy, probabilities
from dltta.models.statistics import InstanceStatistics

MOST = 64  # images; more change the spread of a mean by less than a tenth
BATCH = 16  # images whose gradients are averaged before they are squared; EATA's authors have 64 of 2000
FEWEST = 8  # images that say something about the rare ones among them
PASSES = 5  # through the network for each image: as it is, two for the OOD score, two for the entropy
USUAL = 0.95  # the quantile that ends what is usual at the source site


@torch.no_grad()
def calibrate(
    model: nn.Module,
    images: Sequence[Tensor],
    *,
    layer: str | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """Measured on up to 64 source images (C, *spatial) of one size, as the network takes them.

    `predictions` holds, all without labels:
    - `images`: how many
    - `shares`: per class the least and the greatest share of an image that was predicted to be it
    - `marginal_entropy`: the least entropy of an image's mean prediction
    - `discrepancy`: the median discrepancy of the images to their 8 nearest among the 20 before them; None if too few
    - `ood_score`, see there; None without batch normalization or with fewer than 8 images
    - `entropy`, see there; None unless the prediction is dense, or with fewer than 8 images

    `fisher` says how much each scale and shift of the normalization layers matters: of single images where predictions
    are dense, else of batches of 16.
    """
    chosen = list(images)[:MOST]
    passed = _Passes(PASSES * len(chosen), progress)
    device = next(model.parameters()).device
    samples = LayerSamples()
    predictions, discrepancies = [], []
    memory = MemoryBank(layer, capacity=20, neighbors=8, ready="neighbors")
    with samples.watching(model):
        for image in chosen:
            seen = forward_with_features(model, memory.layer, image[None].to(device))
            prediction = probabilities(seen.logits)
            predictions.append(prediction.cpu())
            passed()
            if seen.features is None:
                continue
            reference = memory.recall(seen.features, prediction.shape[1:])
            if reference is not None:
                discrepancies.append(batch_discrepancy(prediction, reference))
            memory.layer = seen.layer
            memory.push(seen.features, prediction)
    calibration = Calibration(samples.stacked(), samples.eps)
    enough, dense = len(chosen) >= FEWEST, predictions[0].ndim > 2
    found = {
        **prediction_ranges(predictions),
        "discrepancy": median(discrepancies) if discrepancies else None,
        "ood_score": ood_levels(model, chosen, calibration, passed) if enough and calibration.layers else None,
        "entropy": entropy_levels(model, chosen, passed) if enough and dense else None,
    }
    passed.end()
    return Calibration(calibration.layers, calibration.eps, found, importance(model, chosen, dense=dense))


def importance(model: nn.Module, images: Sequence[Tensor], *, dense: bool) -> dict[str, Tensor]:
    """The Fisher information for EATA; of single images, a layer with one position uses its stored statistics."""
    if dense or len(images) == 1:
        return fisher(model, images, batch_size=1, statistics=InstanceStatistics())
    lone = len(images) % BATCH == 1  # one image left over has no batch to be normalized by
    return fisher(model, images[:-1] if lone else images, batch_size=BATCH)


def prediction_ranges(predictions: Sequence[Tensor]) -> dict[str, Any]:
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


class _Passes:
    """Tells how many passes through the network are done."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def __call__(self) -> None:
        self.done += 1
        self.progress(self.done, self.total)

    def end(self) -> None:
        """Some networks need fewer passes."""
        self.progress(self.total, self.total)


def ood_levels(
    model: nn.Module, images: Sequence[Tensor], calibration: Calibration, passed: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """OOD scores of source images, each measured against the others, and of useless images.

    - `first`: what 95 % of the images stay below at the first layer, which sees the scanner before the content
    - `usual`: the same for the median over all layers
    - `negative`, `noise`: the medians, over all layers, of the images' negatives and of noise of the same range
    """
    left_out = _left_out(calibration)
    device = next(model.parameters()).device
    measure = OODScore(calibration)

    def typical(change: Callable[[Tensor], Tensor]) -> float:
        samples = LayerSamples()
        with samples.watching(model):
            for image in images:
                model(change(image)[None].to(device))
                passed()
        return measure(samples.stacked()).median(0).values.median().item()

    return {
        "first": left_out[0].quantile(USUAL).item(),
        "usual": left_out.median(0).values.quantile(USUAL).item(),
        "negative": typical(negative),
        "noise": typical(noise),
    }


def entropy_levels(
    model: nn.Module, images: Sequence[Tensor], passed: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """The mean entropy of predictions under instance statistics, which remove what the scanner does to all of an image.

    - `median` of the images
    - `usual`: what 95 % of them stay below
    - `shuffled`: the median of the images with their pixels in random order: as bright, and nothing to be seen
    """
    normalized = copy.deepcopy(model)
    use_test_statistics(normalized, InstanceStatistics())
    device = next(model.parameters()).device

    def over(change: Callable[[Tensor], Tensor]) -> Tensor:
        found = []
        for image in images:
            found.append(entropy(normalized(change(image)[None].to(device))).mean().item())
            passed()
        return torch.tensor(found)

    intact, mixed = over(lambda image: image), over(shuffled)
    return {"median": intact.median().item(), "usual": intact.quantile(USUAL).item(), "shuffled": mixed.median().item()}


def negative(image: Tensor) -> Tensor:
    """What is bright becomes dark, within the range that each channel (C, *spatial) has."""
    flat = image.flatten(1)
    return (flat.amax(1, keepdim=True) + flat.amin(1, keepdim=True) - flat).view_as(image)


def noise(image: Tensor) -> Tensor:
    """Each value drawn evenly from the range that its channel (C, *spatial) has, the same every time."""
    flat = image.flatten(1)
    low, high = flat.amin(1, keepdim=True), flat.amax(1, keepdim=True)
    drawn = torch.rand(flat.shape, generator=torch.Generator().manual_seed(0)).to(flat)
    return (low + (high - low) * drawn).view_as(image)


def shuffled(image: Tensor) -> Tensor:
    """The positions of (C, *spatial) in random order, the same every time and for all channels."""
    flat = image.flatten(1)
    order = torch.randperm(flat.shape[1], generator=torch.Generator().manual_seed(0))
    return flat[:, order].view_as(image)


def _left_out(calibration: Calibration) -> Tensor:
    """The OOD score of each image to a calibration with the others: (layers, N)."""
    rows = []
    for name, (means, variances) in calibration.layers.items():
        parts = means.double(), log_variances(variances.double(), calibration.eps[name])
        rows.append(torch.cat([_deviations_from_others(part) for part in parts], 1).square().mean(1).float())
    return torch.stack(rows)


def _deviations_from_others(values: Tensor) -> Tensor:
    """(N, C): each row's deviation from the mean of the others, in standard deviations of the others."""
    others = len(values) - 1
    mean = (values.sum(0) - values) / others
    square = (values.square().sum(0) - values.square()) / others
    spread = ((square - mean.square()).clamp_min(0) * others / (others - 1)).sqrt()
    return (values - mean) / spread.clamp_min(torch.finfo(torch.float32).tiny)
