"""6 update. Does an image look like one that nobody should predict? Noise, negatives, another modality.

What quality to expect is fitted to scores, and a network may score well on a negative. So a second fit tells harmful
images that were rehearsed from all others, by the same signals: a ridge regression to 1 and 0 from signals and their
squares, in which both kinds count alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dltta.quality.measures import Table

PENALTY = 10.0
HALFWAY = 0.5  # between usual and harmful images
FARTHEST = 4.0  # standard deviations; what is stranger counts as this strange


@dataclass(frozen=True)
class Refusal:
    """How much signals (…, S) look like those of harmful images, and from where on somebody should look at them."""

    center: Table  # (S,)
    scale: Table  # (S,)
    weights: Table  # (1 + 2 S,)
    above: float = HALFWAY

    def likeness(self, signals: Table) -> Table:
        """About 0 for usual images, about 1 for harmful ones."""
        found: Table = _regressors((signals - self.center) / self.scale) @ self.weights
        return found

    def applies(self, signals: Table) -> np.ndarray[Any, np.dtype[np.bool_]]:
        found: np.ndarray[Any, np.dtype[np.bool_]] = self.likeness(signals) > self.above
        return found

    def sparing(self, signals: Table, count: int) -> "Refusal":
        """The same, with the bound raised until it refuses no more than this many of these images (N, S)."""
        ordered = np.sort(self.likeness(signals))[::-1]
        return replace(self, above=max(self.above, float(ordered[count]))) if count < len(ordered) else self

    def as_json(self) -> dict[str, Any]:
        return {"above": self.above, **{name: getattr(self, name).tolist() for name in ("center", "scale", "weights")}}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Refusal":
        center, scale, weights = (np.array(saved[name]) for name in ("center", "scale", "weights"))
        return cls(center, scale, weights, saved["above"])


def fit_refusal(usual: Sequence[Table], harmful: Sequence[Table]) -> Refusal:
    """From the signals (N, S) of streams of both kinds; `sparing` raises the bound."""
    good, bad = np.concatenate(usual), np.concatenate(harmful)
    both = np.concatenate([good, bad])
    known = ~np.isnan(both).all(0)
    center, spread = np.zeros(both.shape[1]), np.zeros(both.shape[1])
    center[known], spread[known] = np.nanmean(both[:, known], 0), np.nanstd(both[:, known], 0)
    scale = np.where(spread > 1e-9, spread, 1.0)
    rows = _regressors((both - center) / scale)
    wanted = np.r_[np.zeros(len(good)), np.ones(len(bad))]
    counts = np.r_[np.full(len(good), 1 / len(good)), np.full(len(bad), 1 / len(bad))] * len(both) / 2
    ridge = np.full(rows.shape[1], PENALTY)
    ridge[0] = 1e-8  # the intercept is not penalized
    weighted = rows * counts[:, None]
    return Refusal(center, scale, np.linalg.solve(weighted.T @ rows + np.diag(ridge), weighted.T @ wanted))


def _regressors(standardized: Table) -> Table:
    """1, the signals and their squares; a signal that is missing (NaN) counts as the usual one."""
    kept = np.nan_to_num(np.clip(standardized, -FARTHEST, FARTHEST), nan=0.0)
    found: Table = np.concatenate([np.ones((*kept.shape[:-1], 1)), kept, np.square(kept)], -1)
    return found
