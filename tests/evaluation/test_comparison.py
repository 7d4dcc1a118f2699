import math

import numpy as np
import pytest

from dltta.errors import DataError, SettingError
from dltta.evaluation.comparison import (
    bootstrap_interval,
    case_gains,
    negative_transfer,
    paired_test,
    unit_means,
    worst_site,
)

NAN = math.nan


def test_gain_is_positive_when_better():
    assert case_gains({"a": 0.8, "b": 0.5}, {"a": 0.7, "b": 0.6}, "dice") == pytest.approx({"a": 0.1, "b": -0.1})
    assert case_gains({"a": 3.0}, {"a": 5.0}, "hd95") == {"a": 2.0}


def test_case_without_a_partner_or_a_value_has_no_gain():
    assert case_gains({"a": 0.8, "b": NAN, "c": 0.5}, {"b": 0.6, "c": 0.5}, "dice") == {"c": 0.0}


def test_negative_transfer_is_the_share_of_losers():
    assert negative_transfer([0.1, -0.1, 0.0, NAN, -0.001]) == 0.5
    assert negative_transfer([0.1, -0.1, 0.0, -0.001], tolerance=0.01) == 0.25
    assert math.isnan(negative_transfer([]))


def test_negative_tolerance_is_refused():
    with pytest.raises(SettingError, match="at least 0, found -1"):
        negative_transfer([0.1], tolerance=-1)


def test_worst_site_follows_the_direction_of_the_metric():
    sites = {"A": 0.9, "B": 0.7, "C": NAN, "D": 0.7}
    assert worst_site(sites, "dice") == ("B", 0.7)
    assert worst_site(sites, "hd95") == ("A", 0.9)


def test_worst_of_nothing_is_an_error():
    with pytest.raises(DataError, match="no site has a defined dice"):
        worst_site({"A": NAN}, "dice")


def test_wilcoxon_by_hand():
    # Six differences, all positive: of the 2^6 signs, only all plus and all minus are as extreme.
    got = paired_test([0.51, 0.62, 0.73, 0.84, 0.95, 0.66], [0.5, 0.6, 0.7, 0.8, 0.9, 0.6])
    assert got.test == "wilcoxon"
    assert got.p == pytest.approx(2 / 64)
    assert (got.pairs, got.higher, got.lower) == (6, 6, 0)


def test_five_pairs_are_too_few_to_be_significant():
    assert paired_test([0.51, 0.62, 0.73, 0.84, 0.95], [0.5, 0.6, 0.7, 0.8, 0.9]).p == pytest.approx(2 / 32)


def test_mcnemar_by_hand():
    # Twenty predictions changed, fifteen for the better: 2 * (1 + 20 + 190 + 1140 + 4845 + 15504) / 2^20.
    first, second = [1.0] * 15 + [0.0] * 5 + [1.0] * 7, [0.0] * 15 + [1.0] * 5 + [1.0] * 7
    got = paired_test(first, second)
    assert got.test == "mcnemar"
    assert got.p == pytest.approx(43400 / 2**20, abs=1e-12)
    assert (got.pairs, got.higher, got.lower) == (27, 15, 5)


def test_undefined_pairs_are_left_out():
    got = paired_test([0.51, 0.62, NAN, 0.73, 0.84, 0.95, 0.66, 0.1], [0.5, 0.6, 0.1, 0.7, 0.8, 0.9, 0.6, NAN])
    assert (got.p, got.pairs) == (pytest.approx(2 / 64), 6)


def test_equal_pairs_have_p_one():
    assert paired_test([0.3, 0.4], [0.3, 0.4]).p == 1
    assert paired_test([1.0, 0.0], [1.0, 0.0]).p == 1


def test_no_pair_has_no_p():
    assert math.isnan(paired_test([], []).p)
    assert math.isnan(paired_test([NAN, 0.3], [0.2, NAN]).p)


def test_single_pair_has_p_one():
    assert paired_test([0.4], [0.3]).p == pytest.approx(1)


def slow_interval(gains, patients, draws):
    """Trainings and patients drawn one by one."""
    rng = np.random.default_rng(1)
    units = sorted(set(patients.values()))
    means = []
    for _ in range(draws):
        chosen = [units[i] for i in rng.integers(len(units), size=len(units))]
        per_training = []
        for training in (gains[i] for i in rng.integers(len(gains), size=len(gains))):
            values = [training[case] for unit in chosen for case in training if patients[case] == unit]
            per_training.append(sum(values) / len(values))
        means.append(sum(per_training) / len(per_training))
    return np.quantile(means, [0.025, 0.975])


def test_the_interval_is_that_of_drawing_patients_and_trainings():
    rng = np.random.default_rng(0)
    patients = {f"c{i}": f"p{i // 3}" for i in range(18)}
    effects = dict(zip(sorted(set(patients.values())), rng.normal(0.1, 0.1, 6), strict=True))
    gains = [{case: effects[p] + rng.normal(offset, 0.02) for case, p in patients.items()} for offset in (-0.03, 0.03)]
    low, high = bootstrap_interval(gains, patients)
    assert (low, high) == pytest.approx(tuple(slow_interval(gains, patients, 3000)), abs=0.01)
    assert bootstrap_interval(gains, patients) == (low, high)


def test_slices_taken_for_patients_would_promise_too_much():
    patients = {f"c{i}": f"p{i // 9}" for i in range(54)}
    gains = [{case: 0.1 * int(patient[1]) for case, patient in patients.items()}]  # alike within a patient
    low, high = bootstrap_interval(gains, patients)
    by_case = bootstrap_interval(gains, {case: case for case in patients})
    assert by_case[1] - by_case[0] == pytest.approx((high - low) / 3, rel=0.2)  # nine times as many: 1 / sqrt(9)


def test_the_interval_of_equal_gains_is_a_point_and_one_patient_has_none():
    same = [{"a": 0.25, "b": 0.25}]
    assert bootstrap_interval(same, {"a": "a", "b": "b"}) == (0.25, 0.25)
    assert all(math.isnan(end) for end in bootstrap_interval(same, {"a": "p", "b": "p"}))
    assert all(math.isnan(end) for end in bootstrap_interval([], {}))


def test_the_mean_over_the_cases_of_each_patient():
    assert unit_means({"a": 1.0, "b": 2.0, "c": 5.0}, {"a": "p", "b": "p", "c": "q"}) == {"p": 1.5, "q": 5.0}
