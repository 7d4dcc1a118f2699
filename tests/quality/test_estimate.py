"""The quality model: ridge by the normal equations, clipping, conformal intervals, all against slow references."""

import json

import numpy as np
import pytest

from dltta.quality.estimate import CROSSED, QualityModel, conformal_radius, design, fit
from dltta.quality.measures import CANDIDATE_SIGNALS, SIGNALS

S, OWN = len(SIGNALS), len(CANDIDATE_SIGNALS)


def sites(count=4, images=12, candidates=3, seed=0):
    """Signals and scores that follow from them, with noise."""
    rng = np.random.default_rng(seed)
    signals, scores = {}, {}
    for index in range(count):
        table = rng.normal(size=(images, candidates, S)) + 0.3 * index
        table[:, :, OWN:] = table[:, :1, OWN:]  # of the image
        signals[f"site {index}"] = table
        truth = 0.5 - 0.1 * table[..., 0] + 0.05 * table[..., 6] + 0.05 * np.arange(candidates)
        scores[f"site {index}"] = np.clip(truth + 0.01 * rng.normal(size=truth.shape), 0, 1)
    return signals, scores


def slow_design(standardized):
    """Row by row: 1, means, deviations, which candidate, its own slopes."""
    rows = []
    for image in standardized:
        mean = image.mean(0)
        for k, candidate in enumerate(image):
            which = [float(k == other) for other in range(len(image))]
            slopes = [each * mean[name] for each in which for name in CROSSED]
            rows.append([1.0, *mean, *(candidate - mean)[:OWN], *which, *slopes])
    return np.array(rows)


def slow_ridge(rows, scores, penalty):
    penalties = np.eye(rows.shape[1]) * penalty
    penalties[0, 0] = 1e-8
    return np.linalg.inv(rows.T @ rows + penalties) @ rows.T @ scores


def slow_standardized(signals, model):
    out = np.empty_like(signals)
    for place in np.ndindex(signals.shape):
        s = place[-1]
        out[place] = (min(max(signals[place], model.low[s]), model.high[s]) - model.center[s]) / model.scale[s]
    return out


def test_regressors_are_means_deviations_intercepts_and_own_slopes():
    table = np.random.default_rng(1).normal(size=(3, 4, S))
    np.testing.assert_allclose(design(table).reshape(12, -1), slow_design(table), atol=1e-12)


def test_the_weights_solve_the_normal_equations():
    signals, scores = sites()
    model = fit(signals, scores).model
    rows = np.concatenate([slow_design(slow_standardized(table, model)) for table in signals.values()])
    wanted = np.concatenate([table.ravel() for table in scores.values()])
    np.testing.assert_allclose(model.weights, slow_ridge(rows, wanted, model.penalty), atol=1e-6)


def test_an_image_of_weight_two_counts_as_two_images():
    signals, scores = sites()
    twice = {site: np.concatenate([table, table[:1]]) for site, table in signals.items()}
    again = {site: np.concatenate([table, table[:1]]) for site, table in scores.items()}
    weights = {site: np.array([2.0, *[1.0] * (len(table) - 1)]) for site, table in scores.items()}
    model = fit(signals, scores, weights).model
    rows = np.concatenate([slow_design(slow_standardized(table, model)) for table in twice.values()])
    wanted = np.concatenate([table.ravel() for table in again.values()])
    np.testing.assert_allclose(model.weights, slow_ridge(rows, wanted, model.penalty), atol=1e-6)


def test_what_is_expected_of_a_left_out_site_comes_from_the_others_alone():
    signals, scores = sites()
    fitted = fit(signals, scores)
    others = [site for site in signals if site != "site 2"]
    rows = np.concatenate([slow_design(slow_standardized(signals[site], fitted.model)) for site in others])
    weights = slow_ridge(rows, np.concatenate([scores[site].ravel() for site in others]), fitted.model.penalty)
    expected = slow_design(slow_standardized(signals["site 2"], fitted.model)) @ weights
    np.testing.assert_allclose(fitted.left_out["site 2"].ravel(), np.clip(expected, 0, 1), atol=1e-6)


def test_related_sites_are_left_out_together():
    signals, scores = sites()
    fitted = fit(signals, scores, related={"site 2": ["site 0"]})
    others = ["site 1", "site 3"]
    rows = np.concatenate([slow_design(slow_standardized(signals[site], fitted.model)) for site in others])
    weights = slow_ridge(rows, np.concatenate([scores[site].ravel() for site in others]), fitted.model.penalty)
    expected = slow_design(slow_standardized(signals["site 2"], fitted.model)) @ weights
    np.testing.assert_allclose(fitted.left_out["site 2"].ravel(), np.clip(expected, 0, 1), atol=1e-6)


def test_a_signal_that_is_missing_counts_as_the_usual_one():
    signals, scores = sites()
    for table in signals.values():
        table[:3, :, 6] = np.nan  # not known yet at the beginning of a stream
        table[:, :, S - 1] = np.nan  # never known
    model = fit(signals, scores).model
    assert np.isfinite(model.weights).all()
    known = signals["site 0"][:1].copy()
    known[..., 6], known[..., S - 1] = model.center[6], 0.0
    np.testing.assert_allclose(model.expected(signals["site 0"][:1]), model.expected(known), atol=1e-12)


def test_the_model_predicts_scores_it_has_not_seen():
    signals, scores = sites()
    fitted = fit(signals, scores)
    errors = np.concatenate([(fitted.left_out[site] - scores[site]).ravel() for site in scores])
    spread = np.concatenate([table.ravel() for table in scores.values()]).std()
    assert np.sqrt(np.square(errors).mean()) < 0.5 * spread


def test_nothing_is_extrapolated_beyond_what_was_rehearsed():
    signals, scores = sites()
    model = fit(signals, scores).model
    far = np.full((1, 3, S), 1e6)
    np.testing.assert_array_equal(model.expected(far), model.expected(np.broadcast_to(model.high, far.shape)))
    np.testing.assert_array_equal(model.expected(-far), model.expected(np.broadcast_to(model.low, far.shape)))


def test_a_signal_that_never_changes_does_no_harm():
    signals, scores = sites()
    for table in signals.values():
        table[..., 5] = 0.0
    model = fit(signals, scores).model
    assert np.isfinite(model.weights).all()
    other = signals["site 0"].copy()
    other[..., 5] = 7.0
    np.testing.assert_array_equal(model.expected(other), model.expected(signals["site 0"]))


def test_a_quality_model_survives_json():
    signals, scores = sites()
    model = fit(signals, scores).model
    again = QualityModel.from_json(json.loads(json.dumps(model.as_json())))
    np.testing.assert_array_equal(again.expected(signals["site 1"]), model.expected(signals["site 1"]))


def test_the_radius_holds_its_share_of_a_new_site_by_hand():
    nine = [np.array([size, -size]) for size in (0.05, 0.01, 0.02, 0.30, 0.04, 0.03, 0.06, 0.07, 0.08)]
    assert conformal_radius(nine) == 0.30  # nine of ten shares: all that there are
    assert conformal_radius(nine[:8]) == 1.0  # eight of nine are less than 90 %
    more = [*nine, *[np.array([0.01])] * 10]  # nineteen: 18 of 20 shares
    assert conformal_radius(more) == 0.08
    assert conformal_radius(nine, coverage=0.5) == pytest.approx(0.05)  # five of ten
    uneven = [*[np.array([0.1])] * 9, np.linspace(0.2, 0.9, 1000)]  # a large site counts as much as a small one
    assert conformal_radius(uneven, coverage=0.8) == pytest.approx(0.1)
    assert conformal_radius([]) == 1.0
