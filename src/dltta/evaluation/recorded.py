"""Rehearsal: what candidates score along one stream of a simulated site, and their signals, image by image."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.data.shifts import SimulatedSite
from dltta.models.predictions import most_likely, probabilities
from dltta.quality.candidates import Plan
from dltta.quality.choosing import Views
from dltta.quality.measures import Table
from dltta.training.examples import Pair

CROP = 32  # crops are multiples of this

EMPTY_SLICE = 0.15  # weight of a slice that shows nothing, beside 1 for one of usual size: volumes are scored whole

Framing = Literal["whole", "close", "anywhere"]


@dataclass(frozen=True)
class Stream:
    """Cases in order, each through a simulated site."""

    name: str
    sites: tuple[SimulatedSite, ...]  # one after the other, in equal parts
    harmful: bool = False
    framing: Framing = "whole"
    refused_only: bool = False  # no quality is fitted to it

    def pairs(self, cases: Sequence[Pair], seed: int) -> list[Pair]:
        order = np.random.default_rng([seed, *self.name.encode()]).permutation(len(cases))
        parts = np.array_split(order, len(self.sites))
        changed = [
            site.pair(*framed(cases[i], self.framing, [seed, int(i)]), int(i))
            for site, part in zip(self.sites, parts, strict=True)
            for i in part
        ]
        return changed


def framed(pair: Pair, framing: Framing, seed: Sequence[int]) -> Pair:
    """About three quarters of a dense image along each axis: around something, or anywhere. Small axes stay whole.

    Other sites show other amounts of what is looked for, which changes the statistics of an image as a scanner does.
    """
    image, label = pair
    if framing == "whole" or label.ndim == 0:
        return pair
    rng = np.random.default_rng(seed)
    there = (label > 0).nonzero()
    middle = there[int(rng.integers(len(there)))].tolist() if framing == "close" and len(there) else None
    for axis, length in enumerate(label.shape):
        if length < 3 * CROP:
            continue
        kept = max(round(0.75 * length / CROP), 1) * CROP
        begin = int(rng.integers(length - kept + 1)) if middle is None else middle[axis] - kept // 2
        begin = min(max(begin, 0), length - kept)
        image, label = image.narrow(1 + axis, begin, kept), label.narrow(axis, begin, kept)
    return image.contiguous(), label.contiguous()


def cut(pair: Pair, size: Sequence[int], seed: Sequence[int]) -> Pair:
    """A crop of this size (0: the whole axis): around something, or every third time anywhere; padded if too small."""
    image, label = pair
    rng = np.random.default_rng(seed)
    there = (label > 0).nonzero()
    close = len(there) > 0 and rng.random() < 2 / 3
    middle = there[int(rng.integers(len(there)))].tolist() if close else None
    for axis, (length, wanted) in enumerate(zip(label.shape, size, strict=True)):
        kept = min(wanted or length, length)
        begin = int(rng.integers(length - kept + 1)) if middle is None else middle[axis] - kept // 2
        begin = min(max(begin, 0), length - kept)
        image, label = image.narrow(1 + axis, begin, kept), label.narrow(axis, begin, kept)
    missing = [max((wanted or length) - length, 0) for length, wanted in zip(label.shape, size, strict=True)]
    padding = [side for each in reversed(missing) for side in (0, each)]
    return F.pad(image, padding).contiguous(), F.pad(label, padding).contiguous()


@dataclass(frozen=True)
class Recorded:
    """One stream: for each plan the signals (N, K, S) and scores (N, K) of its candidates, and both baselines (N,).

    `weights` (N,) say how much each image counts.
    """

    signals: Mapping[str, Table]
    scores: Mapping[str, Table]
    source: Table
    batch: Table
    weights: Table

    def mean(self, scores: Table) -> Any:
        """Over the images, of (N,) or (N, K)."""
        return np.average(scores, axis=0, weights=self.weights)

    def means(self, plan: Plan) -> dict[str, float]:
        """Of the candidates of a plan, by their full names."""
        return dict(zip(plan.full_names, self.mean(self.scores[plan_name(plan)]).tolist(), strict=True))


def sizes_of(labels: Sequence[Tensor], classes: int) -> Table:
    """The mean number of positions of each foreground class where it occurs; 1 for a class that never does."""
    found = np.ones(max(classes - 1, 0))
    for value in range(1, classes):
        counts = [int((label == value).sum()) for label in labels if label.ndim]
        there = [count for count in counts if count]
        found[value - 1] = np.mean(there) if there else 1.0
    return found


def slice_weight(label: Tensor, sizes: Table) -> float:
    """How much a slice counts: as its foreground against the usual one, and a little if it has none."""
    shares = [float((label == value).sum()) / usual for value, usual in enumerate(sizes, 1)]
    return EMPTY_SLICE + min(float(np.mean(shares)), 2.0)


class Scored:
    """Scores of one batch: an arm that many plans have is scored once."""

    def __init__(self, views: Views, labels: Sequence[Tensor], smooth: Table) -> None:
        self._views, self._labels, self._smooth = views, labels, smooth
        self._arms: dict[tuple[str, bool], Table] = {}

    def arm(self, name: str, *, flip: bool) -> Table:
        """(B,)"""
        if (name, flip) not in self._arms:
            given = self._views.given(name, flip)[:, None]
            self._arms[name, flip] = scores_of(given, self._labels, self._smooth)[:, 0]
        return self._arms[name, flip]

    def candidates(self, plan: Plan, mixtures: Tensor) -> Table:
        """(B, K), of the arms of a plan and of its mixtures (B, M, C, *positions)."""
        arms = np.stack([self.arm(name, flip=plan.flip is not None) for name in plan.arms], 1)
        if len(plan.candidates) == len(plan.arms):
            return arms
        mixed = scores_of(mixtures, self._labels, self._smooth)
        return np.concatenate([arms, mixed], 1)


def scores_of(predictions: Tensor, labels: Sequence[Tensor], smooth: Table) -> Table:
    """Mean foreground Dice or accuracy of predictions (B, K, C, *positions), (B, K).

    Dice is (2 |A∩B| + s) / (|A| + |B| + s) with s in `smooth` for each class, a part of its usual size: nothing where
    nothing is scores 1, and a few positions too many there cost less than many.
    """
    return np.stack([_of_image(each, label, smooth) for each, label in zip(predictions, labels, strict=True)])


def _of_image(predictions: Tensor, label: Tensor, smooth: Table) -> Table:
    hard = most_likely(predictions)  # (K, *positions)
    if label.ndim == 0:
        right: Table = (hard == label).double().numpy()
        return right
    dice = []
    for value, s in enumerate(smooth, 1):
        ours, theirs = (hard == value).flatten(1), (label == value).flatten()
        size = (ours.sum(1) + theirs.sum()).double().numpy()
        both = (ours & theirs).sum(1).double().numpy()
        dice.append((2 * both + s) / (size + s))
    found: Table = sum(dice[1:], dice[0]) / len(dice)  # np.mean rounds one candidate otherwise than several
    return found


def predict(model: nn.Module, image: Tensor) -> Tensor:
    return probabilities(model(image[None].to(next(model.parameters()).device)))[0].cpu()


def in_batches(pairs: Sequence[Pair], size: int) -> Iterator[Sequence[Pair]]:
    """Images of one batch have one shape, as in `dltta adapt`."""
    batch: list[Pair] = []
    for pair in pairs:
        if batch and (len(batch) == size or pair[0].shape != batch[0][0].shape):
            yield batch
            batch = []
        batch.append(pair)
    yield batch


def plan_name(plan: Plan) -> str:
    return "+".join(plan.arms) + ("" if plan.flip is None else f" flip {plan.flip}")


def packed(recorded: Recorded) -> bytes:
    arrays = {f"signals/{name}": table for name, table in recorded.signals.items()}
    arrays |= {f"scores/{name}": table for name, table in recorded.scores.items()}
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, allow_pickle=False, source=recorded.source, batch=recorded.batch, weights=recorded.weights, **arrays
    )
    return buffer.getvalue()


def unpacked(path: Path) -> Recorded:
    with np.load(path) as saved:
        signals = {name.partition("/")[2]: saved[name] for name in saved.files if name.startswith("signals/")}
        scores = {name.partition("/")[2]: saved[name] for name in saved.files if name.startswith("scores/")}
        return Recorded(signals, scores, saved["source"], saved["batch"], saved["weights"])
