import math

import pytest

from dltta import Exponential, Fixed, Proportional
from dltta.errors import SettingError


def test_fixed_ignores_the_discrepancy():
    assert [Fixed(2e-3)(value) for value in (None, 0.0, 5.0)] == [2e-3, 2e-3, 2e-3]


def test_proportional_is_alpha_times_discrepancy_by_hand():
    rate = Proportional(1e-3, initial=5e-3)
    assert rate(0.25) == pytest.approx(0.25e-3)
    assert rate(4.5) == pytest.approx(4.5e-3)
    assert rate(0.0) == 0.0


def test_exponential_is_the_released_form_by_hand():
    assert Exponential(1e-3)(0.5) == pytest.approx(1e-3 * math.e)  # KL + KL = 2 · 0.5
    assert Exponential(1e-3)(0.0) == 1e-3


@pytest.mark.parametrize("kind", [Proportional, Exponential])
def test_initial_rate_holds_until_the_memory_is_ready(kind):
    assert kind(1e-3, initial=5e-3)(None) == 5e-3
    assert kind(1e-3)(None) == 1e-3


def test_exponential_of_a_huge_discrepancy_is_infinite_not_an_overflow():
    assert Exponential(1e-3)(1e6) == math.inf


@pytest.mark.parametrize("bad", [-1e-3, math.nan, math.inf])
def test_impossible_rates_are_refused(bad):
    for make in (Fixed, Proportional, Exponential, lambda value: Proportional(1e-3, initial=value)):
        with pytest.raises(SettingError, match="finite number"):
            make(bad)
