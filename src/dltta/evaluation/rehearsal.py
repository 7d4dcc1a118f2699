"""Rehearsal: labeled source images go through simulated sites, and what is best there is what a new site gets.

All candidates predict streams of every simulated site; their scores, which labels give, and their signals, which need
no label, are recorded. From them follow: which arms are worth their passes, what quality to expect of a candidate, and
by what margins to choose. Everything that is reported was predicted for a site that the fit had not seen.
"""

import hashlib
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.data.case import Task
from dltta.data.shifts import HARMFUL, SOURCE_SITE, SimulatedSite, draw_sites
from dltta.data.shifts.draw import related_sites
from dltta.errors import DataError, StateError
from dltta.files import write_atomically
from dltta.models.calibration import Calibration
from dltta.models.io.opened import OpenedModel
from dltta.models.predictions import most_likely, probabilities
from dltta.models.quantiles import SourceValues
from dltta.quality.candidates import BATCH, EFFORTS, SOURCE, Arms, Plan, possible_arms, possible_plans
from dltta.quality.choosing import Policy, Recollection, Rehearsed, StreamMean, Views, Yardstick, assemble, look
from dltta.quality.estimate import Fitted, conformal_radius, fit
from dltta.quality.measures import SIGNALS, Table, Usual
from dltta.quality.refusal import fit_refusal
from dltta.training.calibration import calibrate
from dltta.training.examples import Pair

FORMAT = 2
SCORED = 6  # how streams are recorded; another number records them again
# batch size: cases; right or wrong says less than a Dice, so a classification takes more
CASES: dict[Task, dict[int, int]] = {"segmentation": {1: 20}, "classification": {1: 16, 32: 64}}
FEWEST_CASES: dict[Task, int] = {"segmentation": 8, "classification": 32}
FEWEST_ONE_BY_ONE = 8
MOST_SITES, FEWEST_SITES = 24, 8  # sites are what is generalized over: rather more of them than more cases
PASSES, FURTHER = 15, 5  # arms with their flips, steps; streams beside the simulated sites, about
REFUSED = ("noise", "negative", "other modality")  # harmful sites that are rehearsed
WORK = 3.5e12  # multiplications that a rehearsal may take: minutes on two cores
OVERHEAD = 2e6  # multiplications that the call of a layer takes as long as
CROP = 32  # crops are multiples of this
WEIGHTS = (0.0, 0.25, 0.5, 1.0)
ALWAYS = 2.0  # the margin by which the default is given whatever is expected: more than scores can differ by
DEFAULT_MARGINS = (0.1, 0.05, 0.02, 0.01, 0.0)
ALIKE = 5e-4  # difference in worth that does not count
MUST_EXCEED = 2.0  # standard errors by which choosing must beat the one best candidate, or that one is always given
SOURCE_MARGINS = (0.0, 0.01, 0.02, 0.05)
SMOOTHING = 0.05  # of the usual size of a class
EMPTY_SLICE = 0.15  # weight of a slice that shows nothing, beside 1 for one of usual size: volumes are scored whole
FLIP_TOLERANCE = 0.002  # so much may a flip cost source images on average
FLAGGED_SOURCE, FLAGGED_REFUSED = 0.05, 0.9  # of source images at most, of harmful ones at least
FRAMINGS: tuple["Framing", ...] = ("whole", "whole", "whole", "close")  # of the simulated sites in turn
Framing = Literal["whole", "close", "anywhere"]
Progress = Callable[[int, int], None]
Elsewhere = Callable[[Sequence[tuple[int, str]]], None]  # runs streams by batch size and name, into the folder of parts


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
        return dict(zip(plan.full_names, self.mean(self.scores[_name(plan)]).tolist(), strict=True))


def rehearse(
    opened: OpenedModel,
    cases: Sequence[Pair],
    *,
    sliced: bool = False,
    seed: int = 0,
    parts: Path | None = None,
    progress: Progress | None = None,
    elsewhere: Elsewhere | None = None,
) -> dict[str, Any]:
    """What `ChoosingAdapter` needs to know about a model, as JSON, from labeled cases as the network takes them.

    `sliced` says that they are slices of volumes, which are scored whole. `parts` is a folder where finished streams
    are kept, so that an interrupted rehearsal continues; `elsewhere` runs those that are not there in other processes.
    """
    if not cases:
        raise DataError("there is no labeled case to rehearse with")
    setup = Setup.of(opened, cases, seed, sliced=sliced)
    streams = setup.streams()
    rows: dict[int, dict[str, Recorded]] = {size: {} for size in setup.extent.counts}
    total = len(streams) * len(rows)
    if elsewhere is not None and parts is not None:
        every = list(product(rows, streams))
        elsewhere([(size, each.name) for size, each in every if not setup.part(each, size, parts).is_file()])
        missing = [each.name for size, each in every if not setup.part(each, size, parts).is_file()]
        if missing:
            raise StateError(
                f"{missing[0]} was rehearsed by a worker, but is not here; use a folder that all machines share, and "
                "machines of one type"
            )
    for done, (size, stream) in enumerate(product(rows, streams)):
        if progress is not None:
            progress(done, total)
        rows[size][stream.name] = setup.recorded(stream, size, parts)
    if progress is not None:
        progress(total, total)
    found = {str(size): setup.concluded(records, size) for size, records in rows.items()}
    means = {str(size): setup.candidate_means(records) for size, records in rows.items()}
    return {
        "format": FORMAT,
        "network": opened.rehearser,
        "cases": {str(size): count for size, count in setup.extent.counts.items()},
        "sites": [{"name": stream.name, "changes": [site.describe() for site in stream.sites]} for stream in streams],
        "usual": setup.usual.as_json(),
        "values": {"mean": setup.values.mean, "spread": setup.values.spread},
        "batch_sizes": found,
        "candidates": means,
    }


@dataclass(frozen=True)
class Extent:
    """How much is rehearsed: cases for each batch size, and simulated sites."""

    counts: Mapping[int, int]
    sites: int


@dataclass(frozen=True)
class Setup:
    """A model, the cases it rehearses with, and what is usual at its source site."""

    opened: OpenedModel
    cases: Sequence[Pair]
    calibration: Calibration | None
    usual: Usual
    values: SourceValues
    flip: int | None
    extent: Extent
    seed: int
    sliced: bool

    @classmethod
    def of(cls, opened: OpenedModel, cases: Sequence[Pair], seed: int, *, sliced: bool = False) -> "Setup":
        model = opened.model.eval()
        chosen = _spread(cases, max(CASES[opened.task].values()))
        extent, chosen = affordable(model, chosen, opened.task)
        chosen = _spread(chosen, max(extent.counts.values()))
        images = [image for image, _ in chosen]
        calibration = opened.calibration or calibrate(model, images)
        with torch.no_grad():
            predictions = [_predict(model, image) for image in images]
        mirrored = getattr(opened.window, "mirroring", None)  # nnU-Net's windows average flips anyway
        flip = None if mirrored else best_flip(model, chosen, predictions)
        usual, values = Usual.of(predictions), SourceValues.of(images)
        return cls(opened, chosen, calibration, usual, values, flip, extent, seed, sliced)

    @property
    def yardstick(self) -> Yardstick:
        return Yardstick(self.usual, self.values, self.calibration)

    @property
    def arms(self) -> tuple[str, ...]:
        return possible_arms(self.opened.model, self.calibration)

    def plans(self, effort: str) -> list[Plan]:
        return possible_plans(self.arms, self.flip, EFFORTS[effort])

    def every_plan(self) -> list[Plan]:
        return list(dict.fromkeys(plan for effort in EFFORTS for plan in self.plans(effort)))

    def streams(self) -> list[Stream]:
        """The source itself, simulated sites, one that changes half-way, and harmful ones, at home and away."""
        channels, *spatial = self.cases[0][0].shape
        drawn = strong_and_mild(
            draw_sites(self.extent.sites, seed=self.seed, spatial_dims=len(spatial), channels=channels)
        )
        changing = Stream("half-way", (SOURCE_SITE, max(drawn, key=lambda site: site.severity)))
        harmful = [site for site in HARMFUL if site.name in REFUSED]
        refused = [Stream(site.name, (site,), harmful=True) for site in harmful]
        away = [harmful_at(*pair) for pair in zip(harmful, drawn, strict=False)]
        refused += [Stream(site.name, (site,), harmful=True, refused_only=True) for site in away]
        sites = [Stream(site.name, (site,), framing=FRAMINGS[i % len(FRAMINGS)]) for i, site in enumerate(drawn)]
        return [Stream("source", (SOURCE_SITE,)), *sites, changing, *refused]

    def recorded(self, stream: Stream, batch_size: int, parts: Path | None) -> Recorded:
        """Run, or as an interrupted rehearsal left it."""
        if parts is None:
            return self._record(stream, batch_size)
        path = self.part(stream, batch_size, parts)
        if not path.is_file():
            parts.mkdir(parents=True, exist_ok=True)
            write_atomically(path, _packed(self._record(stream, batch_size)))
        return _unpacked(path)

    def part(self, stream: Stream, batch_size: int, parts: Path) -> Path:
        """Where a finished stream is kept."""
        return parts / f"{self._key(stream, batch_size)}.npz"

    def _key(self, stream: Stream, batch_size: int) -> str:
        cases = hashlib.sha256()
        for image, label in self.cases:
            cases.update(image.numpy().tobytes() + label.numpy().tobytes())
        sites = [site.as_json() for site in stream.sites]
        decisive = [
            self.opened.rehearser, cases.hexdigest(), sites, stream.framing, batch_size, SCORED, self.flip, self.seed,
            self.sliced,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def _record(self, stream: Stream, batch_size: int) -> Recorded:
        cases = _spread(self.cases, self.extent.counts[batch_size])
        return self.record(stream.pairs(cases, self.seed), batch_size, self.every_plan())

    @torch.no_grad()
    def record(self, pairs: Sequence[Pair], batch_size: int, plans: Sequence[Plan]) -> Recorded:
        """Run every arm on labeled images that come in this order, of whatever site; plans have this setup's flip."""
        arms = Arms(
            self.opened.model, self.arms, calibration=self.calibration,
            batch_size=batch_size,
        )  # fmt: skip
        recollection = Recollection(batch_size)
        turned = {arm for plan in plans if plan.flip is not None for arm in plan.arms}
        sizes = sizes_of([label for _, label in self.cases], len(self.opened.classes))
        smooth, counted = SMOOTHING * sizes, []
        rows: dict[str, list[tuple[Table, Table]]] = {_name(plan): [] for plan in plans}
        plain: dict[str, list[Table]] = {SOURCE: [], BATCH: []}
        device = next(self.opened.model.parameters()).device
        for batch in _batches(pairs, batch_size):
            x = torch.stack([image for image, _ in batch]).to(device)
            labels = [label for _, label in batch]
            counted += [slice_weight(label, sizes) if self.sliced else 1.0 for label in labels]
            views = look(arms, self.arms, self.flip, x, self.yardstick, recollection, turned=turned)
            arms.commit()
            recollection.add(views)
            scored = Scored(views, labels, smooth)
            for plan in plans:
                made = assemble(plan, views, self.usual)
                rows[_name(plan)].append((made.signals, scored.candidates(plan, made.mixtures)))
            for name, column in plain.items():
                column.append(scored.arm(name if name in views.plain else SOURCE, flip=False))
        return Recorded(
            {name: np.concatenate([signals for signals, _ in each]) for name, each in rows.items()},
            {name: np.concatenate([scores for _, scores in each]) for name, each in rows.items()},
            np.concatenate(plain[SOURCE]),
            np.concatenate(plain[BATCH]),
            np.array(counted),
        )

    def candidate_means(self, records: Mapping[str, Recorded]) -> dict[str, float]:
        """The mean score of every arm alone and of every plan's mixtures, over all sites but harmful ones."""
        harmful = {stream.name for stream in self.streams() if stream.harmful}
        kept = [record for site, record in records.items() if site not in harmful]
        found: dict[str, float] = {}
        for plan in self.every_plan():
            means = [record.means(plan) for record in kept]
            found |= {name: float(np.mean([each[name] for each in means])) for name in plan.full_names}
        return found

    def concluded(self, records: Mapping[str, Recorded], batch_size: int) -> dict[str, Any]:
        """For each effort what is run, and how it did on sites that its fit had not seen."""
        all_streams, all_records = self.streams(), records
        streams = [stream for stream in all_streams if not stream.refused_only]
        records = {stream.name: all_records[stream.name] for stream in streams}
        harmful = [stream.name for stream in streams if stream.harmful]
        refused = [stream.name for stream in all_streams if stream.harmful]
        related = related_sites({stream.name: stream.sites for stream in streams})
        found: dict[str, Any] = {}
        for effort in EFFORTS:
            tried = [tuned(plan, records, harmful, batch_size, related) for plan in self.plans(effort)]
            best, gain = best_way(tried, records, [site for site in records if site not in harmful])
            rehearsed = refusing(best.rehearsed, all_records, refused, batch_size)
            found[effort] = {
                **rehearsed.as_json(), "scores": best.table(records, harmful), "worth": best.worth,
                "choosing": {"gain": gain.mean, "error": gain.error, "clear": gain.clear},
                "signals": signal_errors(best.rehearsed.plan, records, related),
                "tried": [
                    {"plan": one.rehearsed.plan.as_json(), "worth": one.worth, "choosing": many.worth}
                    for one, many in tried
                ],
            }  # fmt: skip
        return found


def harmful_at(harmful: SimulatedSite, site: SimulatedSite) -> SimulatedSite:
    """Harm to images as a simulated site has them."""
    return replace(harmful, name=f"{harmful.name} at {site.name}", changes=site.changes + harmful.changes)


def refusing(
    rehearsed: Rehearsed, records: Mapping[str, Recorded], harmful: Collection[str], batch_size: int
) -> Rehearsed:
    """With what tells harmful images from all others; of source images no more are reviewed than may be.

    The source site itself is left out of the fit, so that its images are judged as those of a site like it.
    """
    name = _name(rehearsed.plan)
    signals: dict[str, Table] = {}
    expected: dict[str, Table] = {}
    for site, record in records.items():
        found = rehearsed.quality.expected(record.signals[name])
        smoothed = _smoothed(found, batch_size)
        chosen = rehearsed.policy.values(found, smoothed, rehearsed.plan.candidates).argmax(1)
        rows = np.arange(len(chosen))
        signals[site], expected[site] = record.signals[name][rows, chosen], found[rows, chosen]
    usual = [each for site, each in signals.items() if site not in harmful and site != SOURCE_SITE.name]
    if not harmful or not usual:
        return rehearsed
    spared = expected[SOURCE_SITE.name] >= rehearsed.review_below
    allowed = int(FLAGGED_SOURCE * len(spared)) - int((~spared).sum())
    refusal = fit_refusal(usual, [signals[site] for site in harmful])
    return replace(rehearsed, refusal=refusal.sparing(signals[SOURCE_SITE.name][spared], max(allowed, 0)))


def strong_and_mild(drawn: Sequence[SimulatedSite]) -> list[SimulatedSite]:
    """Sites as drawn, two of five with the changes of the next one on top: real sites differ in many ways at once."""
    return [
        replace(
            site, changes=site.changes + drawn[(i + 1) % len(drawn)].changes,
            severity=site.severity + drawn[(i + 1) % len(drawn)].severity,
        )
        if i % 5 in (1, 3)
        else site
        for i, site in enumerate(drawn)
    ]  # fmt: skip


def affordable(model: nn.Module, cases: Sequence[Pair], task: Task) -> tuple[Extent, list[Pair]]:
    """What a rehearsal takes, and its cases, cropped where even the fewest would take too long.

    It follows from the network and the images alone. Rehearsal one by one is left out of a classification where it
    would take too long: batches are what is usual there.
    """
    pairs, (main, most), fewest = list(cases), list(CASES[task].items())[-1], FEWEST_CASES[task]
    each, called = operations(model, pairs[0][0])
    while task == "segmentation" and max(pairs[0][0].shape[1:]) >= 4 * CROP:
        if (each + called) * fewest * PASSES * (FEWEST_SITES + FURTHER) <= WORK:
            break
        pairs = [_halved(pair) for pair in pairs]
        each, called = operations(model, pairs[0][0])

    def possible(size: int, sites: int) -> int:
        return int(WORK / ((each + called / size) * PASSES * (sites + FURTHER)))

    sites = MOST_SITES if possible(main, MOST_SITES) >= fewest else FEWEST_SITES
    counts = {main: min(max(possible(main, sites), fewest), most, len(pairs))}
    for size in list(CASES[task])[:-1]:
        if (count := min(possible(size, sites), CASES[task][size], len(pairs))) >= min(FEWEST_ONE_BY_ONE, len(pairs)):
            counts[size] = count
    return Extent(counts, sites), pairs


def operations(model: nn.Module, image: Tensor) -> tuple[float, float]:
    """Multiplications in one pass of an image (C, *spatial), and those that take as long as calling the layers."""
    counted: list[float] = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = layer.weight
        transposed = getattr(layer, "transposed", False)
        values = inputs[0] if transposed else output
        counted.append(float(values[0].numel()) * float(weight[0].numel() if isinstance(weight, Tensor) else 1))

    layers = [layer for layer in model.modules() if isinstance(layer, nn.modules.conv._ConvNd | nn.Linear)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.no_grad():
            model(image[None].to(next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return sum(counted), OVERHEAD * sum(not list(layer.children()) for layer in model.modules())


def _halved(pair: Pair) -> Pair:
    """Half of the longest axis, around the middle of the foreground."""
    image, label = pair
    axis = int(np.argmax(image.shape[1:]))
    length = image.shape[1 + axis]
    kept = max(length // 2 // CROP * CROP, CROP)
    there = (label > 0).nonzero()
    middle = int(there[:, axis].float().mean()) if len(there) else length // 2
    begin = min(max(middle - kept // 2, 0), length - kept)
    return image.narrow(1 + axis, begin, kept).contiguous(), label.narrow(axis, begin, kept).contiguous()


def best_flip(model: nn.Module, cases: Sequence[Pair], predictions: Sequence[Tensor]) -> int | None:
    """The spatial axis whose flip, averaged in, scores best on source images; None if every one of them costs."""
    labels = [label for _, label in cases]
    smooth = SMOOTHING * sizes_of(labels, len(predictions[0]))
    whole = zip(predictions, labels, strict=True)
    plain = float(np.mean([scores_of(p[None, None], [label], smooth)[0, 0] for p, label in whole]))
    found: dict[int, float] = {}
    for axis in range(cases[0][0].ndim - 1):
        scores = []
        for (image, label), prediction in zip(cases, predictions, strict=True):
            with torch.no_grad():
                flipped = _predict(model, image.flip(1 + axis))
            back = flipped.flip(1 + axis) if flipped.ndim > 1 else flipped
            scores.append(scores_of(((prediction + back) / 2)[None, None], [label], smooth)[0, 0])
        found[axis] = float(np.mean(scores))
    best = max(found, key=lambda axis: found[axis])
    return best if found[best] >= plain - FLIP_TOLERANCE else None


@dataclass(frozen=True)
class Tuned:
    """A plan with the policy that does best on left-out sites."""

    rehearsed: Rehearsed
    worth: float  # its mean score less what it loses against the better of source model and batch statistics
    given: Mapping[str, Table]  # scores (N,) of what was chosen, by site

    def table(self, records: Mapping[str, Recorded], harmful: Sequence[str]) -> list[dict[str, Any]]:
        """One row per site: means of both baselines, of every candidate, and of what was chosen."""
        name, names = _name(self.rehearsed.plan), self.rehearsed.plan.candidates
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
    name = _name(plan)
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
    name = _name(plan)

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
    name, names = _name(plan), plan.candidates
    related = related or {site: {site} for site in records}
    fitted = fitted_to(plan, records, related)
    smoothed = {site: _smoothed(expected, batch_size) for site, expected in fitted.left_out.items()}
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
    name, names = _name(plan), plan.candidates
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


def _smoothed(expected: Table, batch_size: int) -> Table:
    """(N, K): along the stream, as `StreamMean` gives it batch by batch."""
    mean = StreamMean(expected.shape[1])
    batches = [expected[begin : begin + batch_size] for begin in range(0, len(expected), batch_size)]
    return np.concatenate([np.tile(mean.add(batch), (len(batch), 1)) for batch in batches])


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


def _predict(model: nn.Module, image: Tensor) -> Tensor:
    return probabilities(model(image[None].to(next(model.parameters()).device)))[0].cpu()


def _batches(pairs: Sequence[Pair], size: int) -> Iterator[Sequence[Pair]]:
    """Images of one batch have one shape, as in `dltta adapt`."""
    batch: list[Pair] = []
    for pair in pairs:
        if batch and (len(batch) == size or pair[0].shape != batch[0][0].shape):
            yield batch
            batch = []
        batch.append(pair)
    yield batch


def _spread(cases: Sequence[Pair], count: int) -> list[Pair]:
    """So many of the cases, evenly over their order."""
    return [cases[place] for place in spread(len(cases), count)]


def spread(total: int, count: int) -> list[int]:
    """So many positions of a list of this length, or all, evenly over it."""
    return sorted({round(place) for place in np.linspace(0, total - 1, min(count, total))})


def _name(plan: Plan) -> str:
    return "+".join(plan.arms) + ("" if plan.flip is None else f" flip {plan.flip}")


def _packed(recorded: Recorded) -> bytes:
    arrays = {f"signals/{name}": table for name, table in recorded.signals.items()}
    arrays |= {f"scores/{name}": table for name, table in recorded.scores.items()}
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, allow_pickle=False, source=recorded.source, batch=recorded.batch, weights=recorded.weights, **arrays
    )
    return buffer.getvalue()


def _unpacked(path: Path) -> Recorded:
    with np.load(path) as saved:
        signals = {name.partition("/")[2]: saved[name] for name in saved.files if name.startswith("signals/")}
        scores = {name.partition("/")[2]: saved[name] for name in saved.files if name.startswith("scores/")}
        return Recorded(signals, scores, saved["source"], saved["batch"], saved["weights"])
