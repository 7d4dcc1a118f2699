"""Signals of candidates, by hand."""

import math

import numpy as np
import pytest
import torch
from torch import tensor

from dltta.quality.measures import (
    CANDIDATE_SIGNALS,
    OWN,
    SIGNALS,
    Usual,
    agreement_lost,
    agreements,
    candidate_signals,
    discrepancies,
    entropies,
    measure,
    products_of,
    roughness,
)

SURE = tensor([[[1.0, 1.0, 0.0, 0.0]], [[0.0, 0.0, 1.0, 1.0]]])  # (2, 1, 4): the right half is foreground
EVEN = torch.full((2, 1, 4), 0.5)
USUAL = Usual((0.0, 0.0), (1.0, 1.0), (-1.0, -1.0), (1.0, 1.0), math.log(2) - 0.5 * math.log(3), 1.0)


def test_entropy_and_that_of_the_foreground_by_hand():
    found = entropies(torch.stack([SURE, EVEN]))
    assert found.shape == (2, 4)
    assert found.mean(1).tolist() == pytest.approx([0.0, math.log(2)], abs=1e-6)
    table = measure(torch.stack([SURE, EVEN]), USUAL, [0.0, 0.25])
    assert table[:, OWN.index("entropy")] == pytest.approx([math.log(1e-4), math.log(math.log(2) + 1e-4)])
    assert table[:, OWN.index("foreground_entropy")] == pytest.approx([0.0, 2 * math.log(2) / (2 + 4e-3)], abs=1e-6)
    assert table[:, OWN.index("flip")].tolist() == [0.0, 0.25]


def test_shares_are_compared_with_those_of_the_source_as_log_odds():
    three = tensor([[[0.25, 0.25, 0.25, 0.25]], [[0.75, 0.75, 0.75, 0.75]]])  # odds 1/3 and 3
    table = measure(torch.stack([EVEN, three]), USUAL, [0.0, 0.0])
    odds = math.log(3)
    assert table[:, OWN.index("share_deviation")] == pytest.approx([0.0, math.log1p(odds)], abs=1e-6)
    assert table[:, OWN.index("share_excess")] == pytest.approx([0.0, math.log1p(odds - 1)], abs=1e-6)


def test_roughness_is_the_length_of_borders_against_the_size_of_the_foreground():
    half = torch.stack([SURE])
    assert roughness(half) == pytest.approx([math.log(2) - 0.5 * math.log(3)])  # one border, two positions
    striped = torch.stack([SURE[:, :, [0, 2, 1, 3]]])
    assert roughness(striped) == pytest.approx([math.log(4) - 0.5 * math.log(3)])  # three borders
    table = measure(torch.cat([half, striped]), USUAL, [0.0, 0.0])
    assert table[:, OWN.index("roughness")] == pytest.approx([0.0, math.log1p(math.log(2))])


def test_products_are_those_in_double_for_any_number_of_positions():
    torch.manual_seed(0)
    for positions in ((50, 50), (64, 64), (3, 70, 61)):  # 2500, 4096 and 12810 of each class
        predictions = torch.rand(3, 4, *positions).softmax(1)
        flat = predictions[:, 1:].flatten(1).double().numpy()
        slow = [[float(sum(p * q)) for q in flat] for p in flat]
        np.testing.assert_allclose(products_of(predictions), slow, rtol=1e-7)


def test_agreement_is_that_of_the_foreground_alone():
    other = SURE[:, :, [0, 2, 1, 3]]  # one of two foreground positions shared: 2·1 / (2 + 2)
    assert agreement_lost(SURE, other) == pytest.approx(0.5, abs=1e-6)
    assert agreement_lost(SURE, SURE) == pytest.approx(0)
    nothing = torch.stack([torch.ones(1, 4), torch.zeros(1, 4)])
    assert agreement_lost(nothing, nothing) == pytest.approx(0)
    assert agreements(products_of(torch.stack([SURE, nothing])))[0, 1] == pytest.approx(0, abs=1e-5)
    classes = tensor([[1.0, 0.0], [0.5, 0.5]])  # a classification: all classes count, 2·0.5 / (1 + 0.5)
    assert agreements(products_of(classes))[0, 1] == pytest.approx(2 / 3, abs=1e-5)


def test_discrepancy_is_that_of_the_paper_between_coarse_predictions():
    prediction = torch.stack([torch.full((32, 32), 0.25), torch.full((32, 32), 0.75)])
    reference = torch.full((2, 16, 16), 0.5)
    by_hand = 0.5 * ((0.25 - 0.5) * math.log(0.25 / 0.5) + (0.75 - 0.5) * math.log(0.75 / 0.5))  # at every position
    assert discrepancies(prediction[None], reference) == pytest.approx([math.log(by_hand + 1e-4)], abs=1e-6)
    known = measure(prediction[None], USUAL, [0.0], None, reference)
    assert known[0, OWN.index("discrepancy")] == pytest.approx(math.log(by_hand + 1e-4), abs=1e-6)
    assert math.isnan(measure(prediction[None], USUAL, [0.0])[0, OWN.index("discrepancy")])


def test_agreement_of_a_candidate_is_with_the_other_arms_not_with_itself_or_mixtures():
    agreed = np.array([[1, 0.2, 0.9], [0.2, 1, 0.8], [0.9, 0.8, 1]])
    table = candidate_signals(np.zeros((3, len(OWN))), agreed, 2, [1.0, 2.0, 3.0])
    assert table[:, CANDIDATE_SIGNALS.index("agreement")] == pytest.approx([0.2, 0.2, 0.85])
    assert table[:, CANDIDATE_SIGNALS.index("agreement_with_source")] == pytest.approx([1, 0.2, 0.9])
    assert table[:, len(CANDIDATE_SIGNALS) :].tolist() == [[1, 2, 3]] * 3
    assert table.shape == (3, len(SIGNALS))


def test_what_is_usual_is_measured_on_source_predictions_and_survives_json():
    first, second = EVEN, tensor([[[0.25] * 4], [[0.75] * 4]])
    usual = Usual.of([first, second])
    odds = math.log(3)
    assert usual.share_mean == pytest.approx((-odds / 2, odds / 2), abs=1e-6)
    assert usual.share_high == pytest.approx((0.0, odds), abs=1e-6)
    assert usual.share_spread == pytest.approx((odds / math.sqrt(2),) * 2, abs=1e-6)
    assert Usual.from_json(usual.as_json()) == usual
    assert Usual.from_json({**usual.as_json(), "share_mean": list(usual.share_mean)}) == usual
