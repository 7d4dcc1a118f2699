"""8 metrics. Did adaptation help, whom did it harm, could the difference be chance, and how large may it be?"""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from scipy import stats

from dltta.errors import DataError, SettingError
from dltta.metrics import higher_is_better, mean_defined

Key = TypeVar("Key", bound=Hashable)
Unit = TypeVar("Unit", bound=Hashable)


def case_gains(adapted: Mapping[Key, float], source: Mapping[Key, float], metric: str) -> dict[Key, float]:
    """How much better than the source each case became: positive is better, for distances too.

    Cases for which either side is missing or `nan` have no gain and are left out.
    """
    sign = 1.0 if higher_is_better(metric) else -1.0
    gains = {case: sign * (value - source[case]) for case, value in adapted.items() if case in source}
    return {case: gain for case, gain in gains.items() if not math.isnan(gain)}


def unit_means(values: Mapping[Key, float], units: Mapping[Key, Unit]) -> dict[Unit, float]:
    """The mean over the cases of each unit, such as a patient: cases of one patient are not independent."""
    listed: dict[Unit, list[float]] = {}
    for case, value in values.items():
        listed.setdefault(units[case], []).append(value)
    return {unit: mean_defined(found) for unit, found in listed.items()}


def negative_transfer(gains: Iterable[float], *, tolerance: float = 0.0) -> float:
    """Share of the cases that lost more than `tolerance`; `nan` when no case has a gain."""
    if tolerance < 0:
        raise SettingError(f"tolerance must be at least 0, found {tolerance}")
    lost = [gain < -tolerance for gain in gains if not math.isnan(gain)]
    return sum(lost) / len(lost) if lost else math.nan


def worst_site(values: Mapping[str, float], metric: str) -> tuple[str, float]:
    """The site with the worst value, and that value; sites with `nan` are passed over, the first of equals is taken."""
    defined = {site: value for site, value in values.items() if not math.isnan(value)}
    if not defined:
        raise DataError(f"no site has a defined {metric}; there is no worst one")
    choose = min if higher_is_better(metric) else max
    site = choose(defined, key=lambda name: defined[name])
    return site, defined[site]


def bootstrap_interval(
    gains: Sequence[Mapping[Key, float]], patients: Mapping[Key, Unit], *, level: float = 0.95, draws: int = 2000
) -> tuple[float, float]:
    """Interval of the mean gain: what other patients and other source trainings might have given.

    `gains` holds the gains of the cases, one mapping for each training. Trainings and patients are drawn with
    replacement, a patient with all of its cases; percentiles of the means. Two patients at least, else `nan`. The same
    gains give the same interval.
    """
    units = list(dict.fromkeys(patients[case] for training in gains for case in training))
    if len(units) < 2:
        return math.nan, math.nan
    totals, counts = np.zeros((len(gains), len(units))), np.zeros((len(gains), len(units)))
    place = {unit: index for index, unit in enumerate(units)}
    for row, training in enumerate(gains):
        for case, gain in training.items():
            totals[row, place[patients[case]]] += gain
            counts[row, place[patients[case]]] += 1
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(len(units), np.full(len(units), 1 / len(units)), size=draws)  # (draws, patients)
    with np.errstate(invalid="ignore"):  # a training none of whose cases was drawn has no mean
        means = (drawn @ totals.T) / (drawn @ counts.T)  # (draws, trainings)
    chosen = rng.integers(len(gains), size=means.shape)
    values = np.nanmean(np.take_along_axis(means, chosen, axis=1), axis=1)
    low, high = np.nanquantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class PairedTest:
    """Two-sided test of two methods on the same cases."""

    test: Literal["wilcoxon", "mcnemar"]
    p: float  # nan: not one pair; 1: pairs, but no difference among them
    pairs: int  # cases that both methods define
    higher: int  # pairs in which the first value is the higher one
    lower: int


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Is `first` different from `second`, pair by pair?

    Values that are all 0 or 1 (right and wrong predictions) take McNemar's exact test, others Wilcoxon's signed-rank
    test. Pairs with a `nan` are left out. No pair at all: p is `nan`. All pairs equal: p is 1. Few pairs are tested as
    they are: below six different pairs neither test can reach p < 0.05.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if not math.isnan(a - b)]
    differences = [a - b for a, b in pairs if a != b]
    higher = sum(difference > 0 for difference in differences)
    right_or_wrong = bool(pairs) and all(value in (0.0, 1.0) for pair in pairs for value in pair)
    if not pairs:
        p = math.nan
    elif not differences:
        p = 1.0
    elif right_or_wrong:
        p = float(stats.binomtest(higher, len(differences), 0.5).pvalue)
    else:
        p = float(stats.wilcoxon(differences).pvalue)
    return PairedTest("mcnemar" if right_or_wrong else "wilcoxon", p, len(pairs), higher, len(differences) - higher)
