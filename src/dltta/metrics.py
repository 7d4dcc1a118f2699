"""8 metrics. How good is one prediction, and how good is a stream of them?

Every number is a fraction in [0, 1] or a distance; tables multiply by 100, this module never does. A metric that has no
meaning for a case is `nan`, never 0 or 1, and means leave it out. Whether a segmentation has a score follows from its
label alone, never from the prediction: means of two methods are over the same cases. `docs/metrics.md` is this page for
readers.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.ndimage import binary_erosion, distance_transform_edt
from torch import Tensor
from torch.nn.functional import one_hot

from dltta.errors import DataError

SEGMENTATION_METRICS = ("dice", "hd95", "asd")
CLASSIFICATION_METRICS = ("accuracy", "sensitivity", "specificity", "auc", "f1")
DISTANCES = frozenset({"hd95", "asd"})
SCORING = 2  # of the rules below; streams that were scored by others are run again

Unit = Literal["mm", "px"]


def higher_is_better(metric: str) -> bool:
    """True for overlaps and rates, False for distances."""
    return metric not in DISTANCES


def mean_defined(values: Iterable[float]) -> float:
    """Mean of the values that are not `nan`; `nan` when there are none."""
    defined = [value for value in values if not math.isnan(value)]
    return math.fsum(defined) / len(defined) if defined else math.nan


@dataclass(frozen=True)
class SegmentationScores:
    """What one segmented image scored."""

    metrics: dict[str, float]  # dice, dice_<class> of each foreground class, hd95, asd
    missed: int  # foreground classes in the label only
    invented: int  # foreground classes in the prediction only; no score says so
    unit: Unit  # of hd95 and asd


def score_segmentation(
    prediction: Tensor, label: Tensor, classes: Sequence[str], *, spacing: Sequence[float] | None = None
) -> SegmentationScores:
    """Scores of one image; class 0 is background and never scored.

    `prediction` and `label` are (*spatial) class values, `spacing` is mm per position along each axis; without it
    distances are in pixels. `dice`, `hd95` and `asd` are means over the foreground classes that are in the label:

    - class in the label only: Dice 0, its distances are the diagonal of the image, counted in `missed`
    - class not in the label: left out of every mean, its `dice_<class>` is `nan`; counted in `invented` if predicted
    - no foreground class in the label: `dice`, `hd95` and `asd` are `nan`
    """
    _check_segmentation(prediction, label, classes, spacing)
    labeled, found = ([bool((mask == c).any()) for c in range(1, len(classes))] for mask in (label, prediction))
    either = dice_per_class(prediction, label, len(classes))
    dice = [value if there else math.nan for value, there in zip(either, labeled, strict=True)]
    farthest = _diagonal(label.shape, spacing)
    distances = [
        (farthest, farthest) if there and not seen else surface_metrics(prediction == c, label == c, spacing=spacing)
        for c, (there, seen) in enumerate(zip(labeled, found, strict=True), start=1)
    ]
    metrics = {
        "dice": mean_defined(dice),
        **{f"dice_{name}": value for name, value in zip(classes[1:], dice, strict=True)},
        "hd95": mean_defined(hd95 for hd95, _ in distances),
        "asd": mean_defined(asd for _, asd in distances),
    }
    missed = sum(there and not seen for there, seen in zip(labeled, found, strict=True))
    invented = sum(seen and not there for there, seen in zip(labeled, found, strict=True))
    return SegmentationScores(metrics, missed, invented, "px" if spacing is None else "mm")


def _diagonal(size: Sequence[int], spacing: Sequence[float] | None) -> float:
    """The largest distance that two positions of an image can have."""
    return math.dist(
        [0.0] * len(size), [(n - 1) * mm for n, mm in zip(size, spacing or [1.0] * len(size), strict=True)]
    )


def dice_per_class(prediction: Tensor, label: Tensor, classes: int) -> list[float]:
    """Dice 2|A∩B| / (|A|+|B|) of each foreground class; `nan` where both masks are empty."""
    from monai.metrics import compute_dice  # here, as below: importing any part of MONAI imports all of it

    predicted = one_hot(prediction.long(), classes).movedim(-1, 0)  # (classes, *spatial)
    labeled = one_hot(label.long(), classes).movedim(-1, 0)
    dice = compute_dice(predicted[None].bool(), labeled[None].double(), include_background=False, ignore_empty=False)
    present = (predicted + labeled)[1:].flatten(1).any(dim=1)
    return [float(value) if there else math.nan for value, there in zip(dice[0], present, strict=True)]


def surface_metrics(
    prediction: Tensor, label: Tensor, *, spacing: Sequence[float] | None = None
) -> tuple[float, float]:
    """HD95 and ASD of two masks (*spatial) bool; `nan` when either mask is empty.

    The surface is every position of the mask that touches the outside along an axis; the border of the image counts as
    outside. HD95 is the larger of the two directed 95th percentiles (interpolated), ASD the mean over the distances of
    both directions together.
    """
    if not (prediction.any() and label.any()):
        return math.nan, math.nan
    masks = np.stack([prediction.numpy(force=True), label.numpy(force=True)])
    around = tuple(slice(places.min(), places.max() + 1) for places in np.nonzero(masks.any(0)))
    predicted, labeled = (mask & ~binary_erosion(mask) for mask in masks[:, *around])
    there = distance_transform_edt(~labeled, sampling=spacing)[predicted]
    back = distance_transform_edt(~predicted, sampling=spacing)[labeled]
    hd95 = max(np.quantile(there, 0.95), np.quantile(back, 0.95))
    return float(hd95), float(np.concatenate([there, back]).mean())


def score_classification(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    """Metrics of a whole stream, from (N, classes) probabilities and (N,) class values; the prediction is the argmax.

    Two classes: the last one is positive. More: each class against the rest, then the plain mean over the classes for
    which the metric is defined; accuracy is the share of right predictions in both. One-class streams:

    - no positive label: `sensitivity` is `nan`; no negative label: `specificity` is `nan`; either: `auc` is `nan`
    - no positive label and no positive prediction: `f1` is `nan`; only one of the two: 0
    """
    from monai.metrics import compute_confusion_matrix_metric, get_confusion_matrix

    _check_classification(probabilities, labels)
    classes = probabilities.shape[1]
    predictions = probabilities.argmax(dim=1)
    counts = get_confusion_matrix(one_hot(predictions, classes), one_hot(labels.long(), classes)).sum(dim=0)
    chosen = [1] if classes == 2 else list(range(classes))
    per_class = {
        "sensitivity": compute_confusion_matrix_metric("sensitivity", counts.double()),  # (classes,)
        "specificity": compute_confusion_matrix_metric("specificity", counts.double()),
        "auc": [_auc(probabilities[:, c], labels == c) for c in range(classes)],
        "f1": compute_confusion_matrix_metric("f1 score", counts.double()),
    }
    metrics = {name: mean_defined(float(values[c]) for c in chosen) for name, values in per_class.items()}
    return {"accuracy": float((predictions == labels).double().mean()), **metrics}


def _auc(scores: Tensor, positive: Tensor) -> float:
    from monai.metrics import compute_roc_auc

    if positive.all() or not positive.any():
        return math.nan
    return float(compute_roc_auc(scores, positive.long()))


def _check_segmentation(
    prediction: Tensor, label: Tensor, classes: Sequence[str], spacing: Sequence[float] | None
) -> None:
    if prediction.shape != label.shape:
        raise DataError(
            f"the label has shape {tuple(label.shape)}, the prediction {tuple(prediction.shape)}; they must be equal"
        )
    if spacing is not None and len(spacing) != label.ndim:
        raise DataError(f"spacing {tuple(spacing)} has {len(spacing)} values for an image with {label.ndim} axes")
    for what, values in (("label", label), ("prediction", prediction)):
        _check_range(what, values, len(classes))


def _check_classification(probabilities: Tensor, labels: Tensor) -> None:
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or len(labels) == 0:
        raise DataError(
            f"a stream is scored from (N, classes) probabilities and (N,) labels with N > 0; "
            f"found {tuple(probabilities.shape)} and {tuple(labels.shape)}"
        )
    if probabilities.shape[1] < 2:
        raise DataError("classification needs at least two classes; found one column of probabilities")
    _check_range("label", labels, probabilities.shape[1])


def _check_range(what: str, values: Tensor, classes: int) -> None:
    if values.numel() and not (int(values.min()) >= 0 and int(values.max()) < classes):
        raise DataError(
            f"the {what} holds values from {int(values.min())} to {int(values.max())}; "
            f"with {classes} classes they must lie between 0 and {classes - 1}"
        )
