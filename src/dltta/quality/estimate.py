"""6 update. How good is a prediction probably? Signals to expected score, fitted where labels exist.

A ridge regression, small enough to be looked at. An image's mean signals and each candidate's deviations from them have
slopes of their own: what tells a hard image from an easy one need not tell a better candidate from a worse one. Every
candidate has an intercept, and slopes of its own for what is the same for all candidates of an image. Signals are
clipped to the range that was rehearsed, so nothing is extrapolated.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dltta.quality.measures import CANDIDATE_SIGNALS, SIGNALS, Table

PENALTIES = (3.0, 30.0, 300.0)
COVERAGE = 0.9
KEPT = (0.01, 0.99)  # quantiles of the rehearsed signals that the clipped ones end at
CROSSED = tuple(SIGNALS.index(name) for name in ("entropy", "agreement", "ood_first", "ood", "values"))


@dataclass(frozen=True)
class Expected:
    """The expected score of a prediction, from 0 to 1, and the interval that held it in 90 % of rehearsed cases."""

    score: float
    low: float
    high: float
    review: bool  # somebody should look at it


@dataclass(frozen=True)
class QualityModel:
    """Expected scores of K candidates from their signals (N, K, S)."""

    center: Table  # (S,)
    scale: Table  # (S,)
    low: Table  # (S,)
    high: Table  # (S,)
    weights: Table  # (D,)
    penalty: float

    def expected(self, signals: Table) -> Table:
        """(N, K), each from 0 to 1."""
        found: Table = np.clip(design(self.standardized(signals)) @ self.weights, 0, 1)
        return found

    def standardized(self, signals: Table) -> Table:
        """In standard deviations of what was rehearsed; a signal that is missing (NaN) counts as the usual one."""
        kept: Table = np.clip(signals, self.low, self.high)
        return np.nan_to_num((kept - self.center) / self.scale, nan=0.0)

    def as_json(self) -> dict[str, Any]:
        arrays = {name: getattr(self, name).tolist() for name in ("center", "scale", "low", "high", "weights")}
        return {**arrays, "penalty": self.penalty}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "QualityModel":
        arrays = {name: np.array(saved[name]) for name in ("center", "scale", "low", "high", "weights")}
        return cls(**arrays, penalty=saved["penalty"])


def design(standardized: Table) -> Table:
    """One row of regressors for each image and candidate: (N, K, S) to (N, K, D)."""
    count, candidates, _ = standardized.shape
    own = len(CANDIDATE_SIGNALS)
    mean = np.broadcast_to(standardized.mean(1, keepdims=True), standardized.shape)
    deviation = (standardized - mean)[..., :own]
    which = np.broadcast_to(np.eye(candidates), (count, candidates, candidates))
    crossed = (which[..., None] * mean[:, :, None, list(CROSSED)]).reshape(count, candidates, -1)
    return np.concatenate([np.ones((count, candidates, 1)), mean, deviation, which, crossed], axis=2)


@dataclass(frozen=True)
class _Sums:
    """Normal equations of one site."""

    products: Table  # (D, D)
    scores: Table  # (D,)

    def __add__(self, other: "_Sums") -> "_Sums":
        return _Sums(self.products + other.products, self.scores + other.scores)

    def solved(self, penalty: float) -> Table:
        """The intercept is not penalized."""
        ridge = np.full(len(self.scores), penalty)
        ridge[0] = 1e-8
        return np.linalg.solve(self.products + np.diag(ridge), self.scores).astype(np.float64)


@dataclass(frozen=True)
class Fitted:
    """A quality model, and what it expects of each site when fitted without that site: (N, K) each."""

    model: QualityModel
    left_out: Mapping[str, Table]


def fit(
    signals: Mapping[str, Table],
    scores: Mapping[str, Table],
    weights: Mapping[str, Table] | None = None,
    related: Mapping[str, Collection[str]] | None = None,
) -> Fitted:
    """From signals (N, K, S) and scores (N, K) by site; the penalty is the one that predicts left-out sites best.

    `weights` (N,) say how much each image counts; all alike unless given. `related` names for each site those that are
    left out with it.
    """
    related = related or {}
    weights = weights or {site: np.ones(len(table)) for site, table in scores.items()}
    pooled = np.concatenate([table.reshape(-1, table.shape[-1]) for table in signals.values()])
    pooled[:, np.isnan(pooled).all(0)] = 0.0  # never known
    low, high = np.nanquantile(pooled, KEPT, axis=0)
    kept = np.clip(pooled, low, high)
    spread = np.nanstd(kept, axis=0)
    scale = np.where(spread > 1e-9, spread, 1.0)
    blank = QualityModel(np.nanmean(kept, axis=0), scale, low, high, np.zeros(0), 0.0)
    rows = {site: design(blank.standardized(table)) for site, table in signals.items()}
    sums = {site: _sums(rows[site], scores[site], weights[site]) for site in rows}
    total = _total(list(sums.values()))
    best: tuple[float, float, dict[str, Table]] | None = None
    for penalty in PENALTIES:
        left_out = {
            site: np.clip(rows[site] @ _without(total, sums, {site, *related.get(site, ())}).solved(penalty), 0, 1)
            for site in rows
        }
        squares = {site: np.square(left_out[site] - scores[site]).mean(1) for site in rows}
        error = float(np.mean([np.average(squares[site], weights=weights[site]) for site in rows]))
        if best is None or error < best[0]:
            best = error, penalty, left_out
    if best is None:
        raise ValueError("no penalty to try")
    model = QualityModel(blank.center, blank.scale, low, high, total.solved(best[1]), best[1])
    return Fitted(model, best[2])


def _sums(rows: Table, scores: Table, weights: Table) -> _Sums:
    flat, wanted = rows.reshape(-1, rows.shape[-1]), scores.reshape(-1)
    weighted = flat * np.repeat(weights, rows.shape[1])[:, None]
    return _Sums(weighted.T @ flat, weighted.T @ wanted)


def _without(total: _Sums, sums: Mapping[str, _Sums], sites: Collection[str]) -> _Sums:
    """Of all other sites; where these are all, of all."""
    if not set(sums) - set(sites):
        return total
    return _total([part for site, part in sums.items() if site not in sites])


def _total(parts: Sequence[_Sums]) -> _Sums:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def conformal_radius(residuals: Sequence[Table], coverage: float = COVERAGE) -> float:
    """Half the width of an interval that holds this share of the scores of a new site, at most 1.

    `residuals` has those of each rehearsed site. A new site is one more of them, of which nothing is known: of G + 1
    equal shares its own counts as beyond every bound (conformal prediction for groups, Lee, Barber and Willett 2023).
    """
    sizes = np.concatenate([np.abs(site) for site in residuals]) if residuals else np.zeros(0)
    shares = [np.full(len(site), 1 / (len(site) * (len(residuals) + 1))) for site in residuals]
    order = np.argsort(sizes)
    held = np.cumsum(np.concatenate(shares)[order]) if residuals else np.zeros(0)
    enough = np.flatnonzero(held >= coverage - 1e-9)
    return min(float(sizes[order][enough[0]]), 1.0) if len(enough) else 1.0
