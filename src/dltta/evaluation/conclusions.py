"""Rehearsal: what follows from recorded streams: the quality model, the margins, whether choosing is worth it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from dltta.evaluation.recorded import Recorded, plan_name
from dltta.quality.candidates import Plan
from dltta.quality.choosing import Policy, Rehearsed, StreamMean
from dltta.quality.estimate import Fitted, conformal_radius, fit
from dltta.quality.measures import SIGNALS, Table

WEIGHTS = (0.0, 0.25, 0.5, 1.0)

ALWAYS = 2.0  # the margin by which the default is given whatever is expected: more than scores can differ by

DEFAULT_MARGINS = (0.1, 0.05, 0.02, 0.01, 0.0)

ALIKE = 5e-4  # difference in worth that does not count

MUST_EXCEED = 2.0  # standard errors by which choosing must beat the one best candidate, or that one is always given

SOURCE_MARGINS = (0.0, 0.01, 0.02, 0.05)

FLAGGED_SOURCE, FLAGGED_REFUSED = 0.05, 0.9  # of source images at most, of harmful ones at least


@dataclass(frozen=True)
class Tuned:
    """A plan with the policy that does best on left-out sites."""

    rehearsed: Rehearsed
    worth: float  # its mean score less what it loses against the better of source model and batch statistics
    given: Mapping[str, Table]  # scores (N,) of what was chosen, by site

    def table(self, records: Mapping[str, Recorded], harmful: Sequence[str]) -> list[dict[str, Any]]:
        """One row per site: means of both baselines, of every candidate, and of what was chosen."""
        name, names = plan_name(self.rehearsed.plan), self.rehearsed.plan.candidates
        return [
            {
                "site": site,
                "source": float(record.mean(record.source)),
                "batch": float(record.mean(record.batch)),
                "candidates": dict(zip(names, record.mean(record.scores[name]).tolist(), strict=True)),
                "chosen": float(record.mean(self.given[site])),
                "harmful": site in harmful,
            }
            for site, record in records.items()
        ]


def fitted_to(
    plan: Plan, records: Mapping[str, Recorded], related: Mapping[str, Collection[str]], without: str | None = None
) -> Fitted:
    """The quality model of a plan; `without` is a signal that it does not get."""
    name = plan_name(plan)
    signals = {site: record.signals[name] for site, record in records.items()}
    if without is not None:
        column = SIGNALS.index(without)
        signals = {site: np.where(np.arange(len(SIGNALS)) == column, np.nan, each) for site, each in signals.items()}
    scores = {site: record.scores[name] for site, record in records.items()}
    return fit(signals, scores, {site: record.weights for site, record in records.items()}, related)


def signal_errors(
    plan: Plan, records: Mapping[str, Recorded], related: Mapping[str, Collection[str]]
) -> dict[str, float]:
    """Root mean squared error of what is expected of left-out sites: with all signals, and without each of them."""
    name = plan_name(plan)

    def error(without: str | None) -> float:
        left_out = fitted_to(plan, records, related, without).left_out
        squares = [float(np.square(left_out[site] - record.scores[name]).mean()) for site, record in records.items()]
        return float(np.sqrt(np.mean(squares)))

    return {"all": error(None), **{signal: error(signal) for signal in SIGNALS}}


def tuned(
    plan: Plan,
    records: Mapping[str, Recorded],
    harmful: Sequence[str],
    batch_size: int = 1,
    related: Mapping[str, Collection[str]] | None = None,
) -> tuple[Tuned, Tuned]:
    """The best of a plan that gives one candidate everywhere, and the best that chooses for each image.

    The quality model, weight and margins are judged at sites that the fit saw neither themselves nor related ones of.
    """
    name, names = plan_name(plan), plan.candidates
    related = related or {site: {site} for site in records}
    fitted = fitted_to(plan, records, related)
    smoothed = {site: smooth_along(expected, batch_size) for site, expected in fitted.left_out.items()}
    sites = [site for site in records if site not in harmful]
    means = {site: records[site].mean(records[site].scores[name]) for site in sites}  # (K,) each
    best_elsewhere = {site: names[_best_of(means, related[site])] for site in sites}

    def given_by(policy: Policy, site: str) -> Table:
        """What a policy gives at a left-out site, where a default is the best of the other sites."""
        if policy.default_margin < ALWAYS:
            policy = replace(policy, default=best_elsewhere.get(site, policy.default))
        chosen = policy.values(fitted.left_out[site], smoothed[site], names).argmax(1)
        found: Table = records[site].scores[name][np.arange(len(chosen)), chosen]
        return found

    def best_of(policies: Sequence[Policy]) -> Tuned:
        """The first of those that are worth alike."""
        worths = [worth_of({site: given_by(policy, site) for site in sites}, records) for policy in policies]
        policy, worth = next(each for each in zip(policies, worths, strict=True) if each[1] >= max(worths) - ALIKE)
        given = {site: given_by(policy, site) for site in records}
        return Tuned(_judged(plan, policy, fitted, smoothed, records, harmful), worth, given)

    default = names[_best_of(means)]
    margins = product(DEFAULT_MARGINS, WEIGHTS, SOURCE_MARGINS)
    return (
        best_of([Policy(each, default_margin=ALWAYS) for each in names]),
        best_of([Policy(default, weight, margin, source) for margin, weight, source in margins]),
    )


@dataclass(frozen=True)
class Gain:
    """By how much one way of predicting scores better than another, and the standard error of that over sites."""

    mean: float
    error: float

    @property
    def clear(self) -> bool:
        return self.mean > MUST_EXCEED * self.error


def best_way(
    tried: Sequence[tuple[Tuned, Tuned]], records: Mapping[str, Recorded], sites: Sequence[str]
) -> tuple[Tuned, Gain]:
    """Of plans that give one candidate everywhere and of those that choose, and what choosing gains.

    Many policies were tried at few sites, and a real site is unlike all of them: choosing has to gain clearly.
    """
    settled, choosing = (max(every, key=lambda each: each.worth) for every in zip(*tried, strict=True))
    gain = gain_of(choosing.given, settled.given, records, sites)
    return (choosing if gain.clear else settled), gain


def gain_of(
    one: Mapping[str, Table], other: Mapping[str, Table], records: Mapping[str, Recorded], sites: Sequence[str]
) -> Gain:
    """Of scores (N,) by site over those of another way; one site says nothing about others."""
    gains = np.array([records[site].mean(one[site] - other[site]) for site in sites])
    error = float(gains.std(ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else 1.0
    return Gain(float(gains.mean()), error)


def _best_of(means: Mapping[str, Table], without: Collection[str] = ()) -> int:
    """The candidate of the highest mean over sites; over all of them where none would be left."""
    kept = [each for site, each in means.items() if site not in without] or list(means.values())
    return int(np.mean(kept, axis=0).argmax())


def _judged(
    plan: Plan,
    policy: Policy,
    fitted: Fitted,
    smoothed: Mapping[str, Table],
    records: Mapping[str, Recorded],
    harmful: Sequence[str],
) -> Rehearsed:
    """With the interval and the review threshold, from what was expected of left-out sites."""
    name, names = plan_name(plan), plan.candidates
    residuals: list[Table] = []  # by site
    expected: dict[str, Table] = {}
    for site, found in fitted.left_out.items():
        chosen = policy.values(found, smoothed[site], names).argmax(1)
        rows = np.arange(len(chosen))
        expected[site] = found[rows, chosen]
        if site not in harmful:
            residuals.append(records[site].scores[name][rows, chosen] - expected[site])
    refused = np.concatenate([expected[site] for site in harmful]) if harmful else np.zeros(1)
    usual = float(np.quantile(expected["source"], FLAGGED_SOURCE, method="lower"))
    useless = float(np.quantile(refused, FLAGGED_REFUSED, method="higher")) + 1e-6
    return Rehearsed(plan, policy, fitted.model, conformal_radius(residuals), min(usual, useless))


def worth_of(given: Mapping[str, Table], records: Mapping[str, Recorded]) -> float:
    """The mean score over sites, less what is lost against the better of source model and batch statistics.

    That is the mean loss, a quarter of the greatest one, and half of that at the source site, where none is needed.
    """
    scores = np.array([records[site].mean(table) for site, table in given.items()])
    plain = [(records[site].mean(records[site].source), records[site].mean(records[site].batch)) for site in given]
    baselines = np.array([max(pair) for pair in plain])
    losses = np.maximum(baselines - scores, 0)
    home = losses[list(given).index("source")] if "source" in given else 0.0
    return float(scores.mean() - losses.mean() - 0.25 * losses.max() - 0.5 * home)


def smooth_along(expected: Table, batch_size: int) -> Table:
    """(N, K): along the stream, as `StreamMean` gives it batch by batch."""
    mean = StreamMean(expected.shape[1])
    batches = [expected[begin : begin + batch_size] for begin in range(0, len(expected), batch_size)]
    return np.concatenate([np.tile(mean.add(batch), (len(batch), 1)) for batch in batches])
