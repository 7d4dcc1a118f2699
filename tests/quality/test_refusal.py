"""What tells harmful images from usual ones: against a slow fit, and by images whose kind is plain."""

import json

import numpy as np
import pytest

from dltta.quality.refusal import Refusal, fit_refusal


def streams(shift, count=3, images=10, signals=4, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 1, (images, signals)) + shift for _ in range(count)]


def test_the_fit_is_a_ridge_regression_in_which_both_kinds_count_alike():
    usual, harmful = streams(0.0), streams(1.0, count=1, images=5, seed=1)
    found = fit_refusal(usual, harmful)
    good, bad = np.concatenate(usual), np.concatenate(harmful)
    both = np.concatenate([good, bad])
    standardized = (both - both.mean(0)) / both.std(0)
    rows = [[1.0, *values, *(value**2 for value in values)] for values in standardized.clip(-4, 4).tolist()]
    left, right = np.diag([1e-8] + [10.0] * 8), np.zeros(9)
    for row, kind in zip(rows, [0.0] * 30 + [1.0] * 5, strict=True):
        share = 35 / 2 / (5 if kind else 30)
        for i in range(9):
            right[i] += share * row[i] * kind
            for j in range(9):
                left[i, j] += share * row[i] * row[j]
    np.testing.assert_allclose(found.weights, np.linalg.solve(left, right), rtol=1e-8)
    np.testing.assert_allclose(found.likeness(both), np.array(rows) @ found.weights, rtol=1e-8)


def test_harmful_images_are_told_also_when_they_lie_on_both_sides_of_the_usual_ones():
    usual = streams(0.0, images=40)
    harmful = [*streams(3.0, count=1, images=40, seed=1), *streams(-3.0, count=1, images=40, seed=2)]
    found = fit_refusal(usual, harmful)
    assert found.applies(np.concatenate(streams(3.0, seed=3))).mean() > 0.9
    assert found.applies(np.concatenate(streams(-3.0, seed=4))).mean() > 0.9
    assert found.applies(np.concatenate(streams(0.0, seed=5))).mean() < 0.1


def test_the_bound_is_raised_for_source_images_and_never_lowered():
    found = fit_refusal(streams(0.0), streams(2.0))
    source = np.concatenate(streams(2.0, count=1, images=20, seed=3))
    raised = found.sparing(source, 1)
    assert raised.applies(source).sum() == 1
    assert raised.above > found.above == 0.5
    assert found.sparing(np.concatenate(streams(-2.0)), 0).above == 0.5
    assert found.sparing(source[:0], 0) == found


def test_a_missing_signal_counts_as_the_usual_one_and_one_that_is_never_known_as_nothing():
    usual, harmful = streams(0.0), streams(2.0, seed=1)
    for each in (*usual, *harmful):
        each[:, 3] = np.nan
    usual[0][0, 1] = np.nan
    found = fit_refusal(usual, harmful)
    assert np.isfinite(found.weights).all()
    signals = np.array([[0.5, np.nan, 0.5, np.nan]])
    middle = np.array([[0.5, found.center[1], 0.5, 7.0]])
    assert found.likeness(signals) == pytest.approx(found.likeness(np.array([[0.5, found.center[1], 0.5, np.nan]])))
    assert found.weights[4] == found.weights[8] == pytest.approx(0)
    assert found.likeness(signals) == pytest.approx(found.likeness(middle))


def test_it_survives_json():
    found = fit_refusal(streams(0.0), streams(1.0)).sparing(np.concatenate(streams(1.0)), 2)
    again = Refusal.from_json(json.loads(json.dumps(found.as_json())))
    signals = np.concatenate(streams(0.5))
    assert again.above == found.above
    np.testing.assert_array_equal(again.likeness(signals), found.likeness(signals))
