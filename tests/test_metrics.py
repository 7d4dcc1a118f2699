import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, tensor

from dltta.errors import DataError
from dltta.metrics import higher_is_better, mean_defined, score_classification, score_segmentation

CLASSES = ("background", "inner", "outer")


def scores(prediction: list[list[int]], label: list[list[int]], **options: object) -> dict[str, float]:
    return score_segmentation(tensor(prediction), tensor(label), CLASSES, **options).metrics  # type: ignore[arg-type]


# ---- segmentation by hand


def test_dice_of_each_class_and_their_mean():
    got = scores([[1, 1, 0, 2]], [[1, 0, 0, 2]])
    assert got["dice_inner"] == pytest.approx(2 / 3, abs=1e-12)
    assert got["dice_outer"] == 1
    assert got["dice"] == pytest.approx(5 / 6, abs=1e-12)


@pytest.mark.parametrize(("prediction", "invented"), [([[1, 1, 0, 0]], 0), ([[1, 1, 2, 0]], 1)])
def test_class_that_the_label_lacks_is_left_out_of_every_mean_whatever_is_predicted(prediction, invented):
    got = score_segmentation(tensor(prediction), tensor([[1, 0, 0, 0]]), CLASSES)
    assert math.isnan(got.metrics["dice_outer"])
    assert got.metrics["dice"] == pytest.approx(2 / 3, abs=1e-12)
    assert got.metrics["hd95"] == pytest.approx(0.95)  # of the inner class: 0 and 1 there, 0 back
    assert (got.missed, got.invented) == (0, invented)


def test_missed_class_scores_zero_and_is_as_far_away_as_the_image_is_wide():
    label = tensor([[1, 0], [0, 0], [0, 2]])
    got = score_segmentation(label * (label == 1), label, CLASSES, spacing=(2, 3))
    assert got.metrics["dice_outer"] == 0
    assert got.metrics["dice"] == 0.5
    assert got.metrics["hd95"] == got.metrics["asd"] == 5 / 2  # 0 of the inner class; two rows and a column: 4 and 3 mm
    assert (got.missed, got.invented) == (1, 0)


def test_what_defines_a_score_is_the_label_alone():
    label = tensor([[1, 0, 0, 0]])
    for prediction in ([[0, 0, 0, 0]], [[2, 2, 2, 2]], [[1, 2, 0, 0]]):
        got = score_segmentation(tensor(prediction), label, CLASSES).metrics
        assert {name for name, value in got.items() if math.isnan(value)} == {"dice_outer"}


def test_disjoint_class_scores_zero_but_has_a_distance():
    got = score_segmentation(tensor([[1, 0, 0, 0]]), tensor([[0, 0, 0, 1]]), CLASSES)
    assert got.metrics["dice"] == 0
    assert got.metrics["hd95"] == got.metrics["asd"] == 3
    assert (got.missed, got.invented) == (0, 0)


@pytest.mark.parametrize("prediction", [torch.zeros(2, 2), torch.ones(2, 2)])
def test_empty_label_defines_nothing(prediction):
    got = score_segmentation(prediction, torch.zeros(2, 2), CLASSES)
    assert all(math.isnan(value) for value in got.metrics.values())
    assert (got.missed, got.invented) == (0, int(prediction.any()))


def test_perfect_prediction_of_a_volume():
    label = torch.zeros(4, 4, 4, dtype=torch.long)
    label[1:3, 1:3, 1:3] = 1
    got = score_segmentation(label, label, ("background", "gland")).metrics
    assert got == {"dice": 1, "dice_gland": 1, "hd95": 0, "asd": 0}


def test_distances_are_in_millimeters_when_the_spacing_is_known():
    prediction, label = tensor([[1], [0], [0]]), tensor([[0], [0], [1]])
    pixels = score_segmentation(prediction, label, ("background", "spot"))
    millimeters = score_segmentation(prediction, label, ("background", "spot"), spacing=(0.5, 3.0))
    assert (pixels.metrics["hd95"], pixels.unit) == (2, "px")
    assert (millimeters.metrics["hd95"], millimeters.unit) == (1, "mm")


def test_hd95_takes_the_worse_direction_and_asd_both_together():
    # There: the one predicted position lies on the label. Back: label positions are 0, 1, 2, 3 away from it.
    got = scores([[1, 0, 0, 0]], [[1, 1, 1, 1]])
    assert got["hd95"] == pytest.approx(2.85)  # 95th percentile of 0, 1, 2, 3, interpolated
    assert got["asd"] == pytest.approx(6 / 5)  # (0 + 0 + 1 + 2 + 3) / 5


def test_image_border_counts_as_surface():
    label = torch.ones(3, 3, dtype=torch.long)
    prediction = torch.zeros(3, 3, dtype=torch.long)
    prediction[1, 1] = 1
    # The center of the label is inside; its eight other positions are the surface: 4 at 1, 4 at √2.
    got = score_segmentation(prediction, label, ("background", "spot")).metrics
    assert got["asd"] == pytest.approx((1 + 4 * 1 + 4 * math.sqrt(2)) / 9)


@pytest.mark.parametrize(
    ("prediction", "label", "spacing", "message"),
    [
        ([[0, 1]], [[0], [1]], None, r"label has shape \(2, 1\), the prediction \(1, 2\)"),
        ([[0, 1]], [[0, 3]], None, "label holds values from 0 to 3; with 3 classes"),
        ([[0, 1]], [[-1, 0]], None, "label holds values from -1 to 0"),
        ([[0, 4]], [[0, 1]], None, "prediction holds values from 0 to 4"),
        ([[0, 1]], [[0, 1]], (1.0, 1.0, 1.0), "3 values for an image with 2 axes"),
    ],
)
def test_what_cannot_be_scored_says_why(prediction, label, spacing, message):
    with pytest.raises(DataError, match=message):
        score_segmentation(tensor(prediction), tensor(label), CLASSES, spacing=spacing)


# ---- segmentation against a slow reference


def slow_surface(mask: np.ndarray) -> np.ndarray:
    """Positions of the mask with a neighbor along an axis that is outside it or outside the image."""
    found = []
    for place in np.argwhere(mask):
        for axis in range(mask.ndim):
            for step in (-1, 1):
                other = place.copy()
                other[axis] += step
                if not 0 <= other[axis] < mask.shape[axis] or not mask[tuple(other)]:
                    found.append(tuple(place))
    return np.array(sorted(set(found)), dtype=float)


def slow_metrics(prediction: np.ndarray, label: np.ndarray, spacing: tuple[float, ...]) -> tuple[float, float, float]:
    """Dice, HD95 and ASD of two masks, by loops over all pairs of surface positions."""
    both, total = int((prediction & label).sum()), int(prediction.sum() + label.sum())
    if not label.any():
        return math.nan, math.nan, math.nan
    dice = 2 * both / total
    if not prediction.any():
        corner = [(size - 1) * step for size, step in zip(label.shape, spacing, strict=True)]
        return dice, math.dist(corner, [0] * label.ndim), math.dist(corner, [0] * label.ndim)
    a, b = slow_surface(prediction) * spacing, slow_surface(label) * spacing
    there = [min(math.dist(p, q) for q in b) for p in a]
    back = [min(math.dist(p, q) for p in a) for q in b]
    hd95 = max(float(np.percentile(there, 95)), float(np.percentile(back, 95)))
    return dice, hd95, sum(there + back) / len(there + back)


masks = st.tuples(st.integers(2, 5), st.integers(2, 6)).flatmap(
    lambda shape: st.tuples(arrays(bool, shape), arrays(bool, shape))
)
volumes = st.tuples(arrays(bool, (3, 4, 2)), arrays(bool, (3, 4, 2)))


@settings(max_examples=60, deadline=None)
@given(pair=st.one_of(masks, volumes), spacing=st.sampled_from([1.0, 0.4, 2.5]))
def test_agrees_with_the_slow_reference(pair, spacing):
    prediction, label = pair
    axes = (spacing, 1.0, 3.0)[: label.ndim]
    got = score_segmentation(
        torch.from_numpy(prediction).long(), torch.from_numpy(label).long(), ("background", "thing"), spacing=axes
    ).metrics
    wanted = slow_metrics(prediction, label, axes)
    assert (got["dice"], got["hd95"], got["asd"]) == pytest.approx(wanted, abs=1e-6, nan_ok=True)


# ---- classification by hand


def binary(positive: list[float]) -> Tensor:
    return tensor([[1 - p, p] for p in positive], dtype=torch.float64)


def test_binary_metrics_take_the_last_class_as_positive():
    # labels 1 1 1 0 0, predictions 1 1 0 1 0: TP 2, FN 1, FP 1, TN 1
    got = score_classification(binary([0.9, 0.8, 0.4, 0.6, 0.1]), tensor([1, 1, 1, 0, 0]))
    assert got == pytest.approx(
        {"accuracy": 3 / 5, "sensitivity": 2 / 3, "specificity": 1 / 2, "auc": 5 / 6, "f1": 2 / 3}
    )


def test_auc_counts_a_tie_as_one_half():
    assert score_classification(binary([0.5, 0.5]), tensor([1, 0]))["auc"] == 0.5
    assert score_classification(binary([0.7, 0.7, 0.2]), tensor([1, 0, 0]))["auc"] == 0.75


def test_stream_without_positives():
    got = score_classification(binary([0.9, 0.2]), tensor([0, 0]))
    assert math.isnan(got["sensitivity"])
    assert math.isnan(got["auc"])
    assert got["specificity"] == 0.5
    assert got["f1"] == 0  # a prediction was positive, no label is


def test_stream_without_positives_in_labels_and_predictions_has_no_f1():
    got = score_classification(binary([0.1, 0.2]), tensor([0, 0]))
    assert math.isnan(got["f1"])
    assert got["accuracy"] == got["specificity"] == 1


def test_stream_without_negatives():
    got = score_classification(binary([0.9, 0.2]), tensor([1, 1]))
    assert got["sensitivity"] == 0.5
    assert math.isnan(got["specificity"])
    assert math.isnan(got["auc"])


def test_many_classes_are_macro_one_against_the_rest():
    # predictions 0 1 1 2, labels 0 0 1 2
    probabilities = tensor([[0.8, 0.1, 0.1], [0.3, 0.6, 0.1], [0.2, 0.7, 0.1], [0.1, 0.2, 0.7]])
    got = score_classification(probabilities, tensor([0, 0, 1, 2]))
    assert got["accuracy"] == pytest.approx(3 / 4)
    assert got["sensitivity"] == pytest.approx((1 / 2 + 1 + 1) / 3)
    assert got["specificity"] == pytest.approx((1 + 2 / 3 + 1) / 3)
    assert got["f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    assert got["auc"] == pytest.approx(1.0)


def test_class_that_no_label_has_is_left_out_of_the_macro_mean():
    probabilities = tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]])
    got = score_classification(probabilities, tensor([0, 1]))
    assert got == pytest.approx({"accuracy": 1, "sensitivity": 1, "specificity": 1, "auc": 1, "f1": 1})


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (torch.zeros(0, 2), torch.zeros(0), "N > 0"),
        (torch.zeros(3, 2), torch.zeros(2), r"found \(3, 2\) and \(2,\)"),
        (torch.zeros(3, 1), torch.zeros(3), "at least two classes"),
        (torch.zeros(1, 2), tensor([2]), "label holds values from 2 to 2"),
    ],
)
def test_stream_that_cannot_be_scored_says_why(probabilities, labels, message):
    with pytest.raises(DataError, match=message):
        score_classification(probabilities, labels)


def test_mean_skips_what_is_undefined():
    assert mean_defined([1.0, math.nan, 2.0]) == 1.5
    assert math.isnan(mean_defined([math.nan]))
    assert math.isnan(mean_defined([]))


def test_direction_of_metrics():
    assert higher_is_better("dice_RNFL")
    assert not higher_is_better("hd95")
    assert not higher_is_better("asd")
