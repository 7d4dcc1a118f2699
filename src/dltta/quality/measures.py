"""6 update. What can be said about several predictions of one image without a label? The signals of the quality model.

Predictions are probabilities (N, C, *positions) of N candidates; a classification has no positions.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dltta.core.discrepancy import symmetric_kl
from dltta.core.memory import average_pool
from dltta.models.predictions import most_likely

# of a candidate
OWN = ("entropy", "foreground_entropy", "share_excess", "share_deviation", "roughness", "flip", "discrepancy")
AGREEMENTS = ("agreement", "agreement_with_source")
CANDIDATE_SIGNALS = (*OWN, *AGREEMENTS)
# of an image, the same for all candidates
IMAGE_SIGNALS = ("ood_first", "ood", "values")
SIGNALS = (*CANDIDATE_SIGNALS, *IMAGE_SIGNALS)
COARSE = 16  # positions along each axis of predictions that are kept to compare with
PIECE = 4096  # products that are summed in single precision, before their sums are in double
Table = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Usual:
    """What is usual at the source site: log odds of each class's share, and the outline of the foreground."""

    share_mean: tuple[float, ...]
    share_spread: tuple[float, ...]
    share_low: tuple[float, ...]
    share_high: tuple[float, ...]
    roughness_mean: float = 0.0
    roughness_spread: float = 1.0

    @classmethod
    def of(cls, predictions: Sequence[Tensor]) -> "Usual":
        """Of predictions (C, *positions) of source images."""
        odds = np.stack([log_odds(p[None])[0] for p in predictions])
        rough = np.array([roughness(p[None])[0] for p in predictions])
        several = len(predictions) > 1
        spread = np.maximum(odds.std(0, ddof=1) if several else np.ones(odds.shape[1]), 0.1)
        return cls(
            tuple(odds.mean(0).tolist()), tuple(spread.tolist()), tuple(odds.min(0).tolist()),
            tuple(odds.max(0).tolist()), float(rough.mean()),
            max(float(rough.std(ddof=1)), 0.05) if several else 1.0,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Usual":
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in saved.items()}
        return cls(**values)


def entropies(predictions: Tensor) -> Tensor:
    """In nats at each position, (N, positions)."""
    logarithms = predictions.clamp_min(torch.finfo(predictions.dtype).tiny).log_()
    return logarithms.mul_(predictions).sum(1).neg_().reshape(len(predictions), -1)


def measure(
    predictions: Tensor,
    usual: Usual,
    flips: Sequence[float],
    marginals: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Table:
    """The signals `OWN` of each candidate, (N, 7).

    `flips` says how much of each prediction a flip of the image changes; `marginals` (N, C) the mean predictions of the
    batch where a single image has no shares (classification). `reference` (C, *coarse) is what similar images before
    were predicted as, without which the discrepancy is not a number; `entropy` is that of `entropies`, if it is known.
    """
    dense = predictions.ndim > 2
    entropy = entropies(predictions) if entropy is None else entropy
    table = np.zeros((len(predictions), len(OWN)))
    table[:, 0] = np.log(entropy.mean(1).double().numpy() + 1e-4)
    table[:, 5] = flips
    table[:, 6] = np.nan if reference is None else discrepancies(predictions, reference)
    shares = predictions if dense else marginals
    if shares is not None:
        odds = log_odds(shares)
        deviation = (odds - np.array(usual.share_mean)) / np.array(usual.share_spread)
        outside = np.maximum(np.array(usual.share_low) - odds, odds - np.array(usual.share_high))
        table[:, 2] = np.log1p(np.maximum(outside.max(1), 0))
        table[:, 3] = np.log1p(np.sqrt(np.square(deviation).mean(1)))
    if dense:
        foreground = 1 - predictions[:, 0].flatten(1)
        weighted = (foreground * entropy).sum(1) / (foreground.sum(1) + 1e-3 * entropy.shape[1])
        table[:, 1] = weighted.double().numpy()
        table[:, 4] = np.log1p(np.abs(roughness(predictions) - usual.roughness_mean) / usual.roughness_spread)
    return table


def discrepancies(predictions: Tensor, reference: Tensor) -> Table:
    """How far predictions are from what similar images before were predicted as, (N,): logarithms."""
    found: Table = symmetric_kl(coarse(predictions), reference[None].expand(len(predictions), *reference.shape)).numpy()
    return np.log(found.astype(np.float64) + 1e-4)


def coarse(predictions: Tensor) -> Tensor:
    """Predictions (N, C, *positions) averaged to a few positions, so that any two images can be compared."""
    return predictions if predictions.ndim == 2 else average_pool(predictions, COARSE)


def products_of(predictions: Tensor) -> Table:
    """(N, N): Σ p·q of each two candidates, over foreground if dense; as exact as in double, in a tenth of the time."""
    parts = (predictions[:, 1:] if predictions.ndim > 2 else predictions).flatten(1)
    whole = parts.shape[1] // PIECE * PIECE
    pieces = parts[:, :whole].unflatten(1, (-1, PIECE)).transpose(0, 1) if whole else parts.new_zeros(0, len(parts), 1)
    rest = parts[:, whole:].double()
    found: Table = (torch.bmm(pieces, pieces.mT).double().sum(0) + rest @ rest.T).numpy()
    return found


def agreements(products: Table) -> Table:
    """How much each two candidates agree, (N, N) from 0 to 1: 2 Σ p·q / (Σ p² + Σ q²), from these sums."""
    squares = products.diagonal()
    found: Table = (2 * products + 1e-6) / (squares[:, None] + squares[None] + 1e-6)
    return found


def agreement_lost(first: Tensor, second: Tensor) -> float:
    """What two predictions (C, *positions) lack to full agreement."""
    return 1 - float(agreements(products_of(torch.stack([first, second])))[0, 1])


def candidate_signals(own: Table, agreed: Table, arms: int, image: Sequence[float]) -> Table:
    """All `SIGNALS` of each candidate, (N, 12): the first `arms` of them are arms, the first the source model.

    A candidate's agreement is that with the arms other than itself.
    """
    count = len(own)
    table = np.zeros((count, len(SIGNALS)))
    table[:, : len(OWN)] = own
    with_arms = agreed[:, :arms]
    self_agreed = np.array([agreed[k, k] if k < arms else 0.0 for k in range(count)])
    others = np.array([arms - 1 if k < arms else arms for k in range(count)])
    table[:, len(OWN)] = np.where(others > 0, (with_arms.sum(1) - self_agreed) / np.maximum(others, 1), 1.0)
    table[:, len(OWN) + 1] = agreed[:, 0]
    table[:, len(CANDIDATE_SIGNALS) :] = image
    return table


def log_odds(predictions: Tensor) -> Table:
    """Of the mean probability of each class, (N, C)."""
    share = predictions.flatten(2).mean(2) if predictions.ndim > 2 else predictions
    share = share.double().clamp(1e-4, 1 - 1e-4)
    odds: Table = (share / (1 - share)).log().numpy()
    return odds


def roughness(predictions: Tensor) -> Table:
    """Length of the borders between classes against the size of the foreground, as a logarithm, (N,)."""
    if predictions.ndim == 2:
        return np.zeros(len(predictions))
    hard = most_likely(predictions)  # (N, *positions)
    dims = hard.ndim - 1
    borders = sum(
        (hard.narrow(axis, 1, hard.shape[axis] - 1) != hard.narrow(axis, 0, hard.shape[axis] - 1)).flatten(1).sum(1)
        for axis in range(1, hard.ndim)
    )
    foreground = (hard > 0).flatten(1).sum(1)
    found: Table = (torch.as_tensor(borders) + 1).double().log().numpy() - (dims - 1) / dims * (
        (foreground + 1).double().log().numpy()
    )
    return found


def log_score(score: float) -> float:
    """OOD scores reach from 1 to thousands."""
    return math.log(max(score, 1e-3))
