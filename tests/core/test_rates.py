import math

import pytest

from dltta import Exponential, Fixed, Proportional, Relative
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


def test_relative_compares_with_the_images_before_by_hand():
    rate = Relative(1e-3, level=0.2, window=4)
    assert rate(None) == 1e-3
    assert rate(0.4) == pytest.approx(2e-3)  # twice the level
    assert rate.level == pytest.approx(0.25)  # 0.2 + (0.4 - 0.2) / 4
    assert rate(0.25) == pytest.approx(1e-3)
    assert rate(0.125) == pytest.approx(0.5e-3)


def test_relative_without_a_level_begins_with_the_first_discrepancy():
    rate = Relative(1e-3)
    assert rate(0.7) == 1e-3
    assert rate(1.4) == pytest.approx(2e-3)


def test_relative_stays_within_its_bound():
    assert Relative(1e-3, level=0.1)(10.0) == pytest.approx(4e-3)
    assert Relative(1e-3, level=0.1)(1e-9) == pytest.approx(0.25e-3)
    assert Relative(1e-3)(0.0) == 1e-3


def test_relative_does_not_depend_on_the_scale_of_the_discrepancy():
    small, large = Relative(1e-3), Relative(1e-3)
    seen = [0.02, 0.05, 0.01, 0.03]
    assert [small(d) for d in seen] == pytest.approx([large(40 * d) for d in seen])


def test_relative_goes_on_from_a_saved_state():
    first, second = Relative(1e-3), Relative(1e-3)
    for value in (0.1, 0.3):
        first(value)
    second.load_state_dict(first.state_dict())
    assert second(0.2) == first(0.2)


@pytest.mark.parametrize("options", [{"level": 0.0}, {"level": math.nan}, {"window": 0}, {"bound": 0.5}])
def test_impossible_levels_are_refused(options):
    with pytest.raises(SettingError):
        Relative(1e-3, **options)
