"""Rehearsal: labeled source images go through simulated sites, and what is best there is what a new site gets.

All candidates predict streams of every simulated site; their scores, which labels give, and their signals, which need
no label, are recorded. From them follow: which arms are worth their passes, what quality to expect of a candidate, and
by what margins to choose. Everything that is reported was predicted for a site that the fit had not seen.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dltta.data.case import Task
from dltta.data.shifts import HARMFUL, SOURCE_SITE, SimulatedSite, draw_sites
from dltta.data.shifts.draw import related_sites
from dltta.errors import DataError, StateError
from dltta.evaluation.conclusions import FLAGGED_SOURCE, best_way, signal_errors, smooth_along, tuned
from dltta.evaluation.recorded import (
    CROP,
    Framing,
    Recorded,
    Scored,
    Stream,
    in_batches,
    packed,
    plan_name,
    predict,
    scores_of,
    sizes_of,
    slice_weight,
    unpacked,
)
from dltta.files import write_atomically
from dltta.models.calibration import Calibration
from dltta.models.io.opened import OpenedModel
from dltta.models.quantiles import SourceValues
from dltta.quality.candidates import BATCH, EFFORTS, SOURCE, Arms, Plan, possible_arms, possible_plans
from dltta.quality.choosing import Recollection, Rehearsed, Yardstick, assemble, look
from dltta.quality.measures import Table, Usual
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

SMOOTHING = 0.05  # of the usual size of a class

FLIP_TOLERANCE = 0.002  # so much may a flip cost source images on average

FRAMINGS: tuple["Framing", ...] = ("whole", "whole", "whole", "close")  # of the simulated sites in turn

Progress = Callable[[int, int], None]

Elsewhere = Callable[[Sequence[tuple[int, str]]], None]  # runs streams by batch size and name, into the folder of parts


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
            predictions = [predict(model, image) for image in images]
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
            write_atomically(path, packed(self._record(stream, batch_size)))
        return unpacked(path)

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
        rows: dict[str, list[tuple[Table, Table]]] = {plan_name(plan): [] for plan in plans}
        plain: dict[str, list[Table]] = {SOURCE: [], BATCH: []}
        device = next(self.opened.model.parameters()).device
        for batch in in_batches(pairs, batch_size):
            x = torch.stack([image for image, _ in batch]).to(device)
            labels = [label for _, label in batch]
            counted += [slice_weight(label, sizes) if self.sliced else 1.0 for label in labels]
            views = look(arms, self.arms, self.flip, x, self.yardstick, recollection, turned=turned)
            arms.commit()
            recollection.add(views)
            scored = Scored(views, labels, smooth)
            for plan in plans:
                made = assemble(plan, views, self.usual)
                rows[plan_name(plan)].append((made.signals, scored.candidates(plan, made.mixtures)))
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
    name = plan_name(rehearsed.plan)
    signals: dict[str, Table] = {}
    expected: dict[str, Table] = {}
    for site, record in records.items():
        found = rehearsed.quality.expected(record.signals[name])
        smoothed = smooth_along(found, batch_size)
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
                flipped = predict(model, image.flip(1 + axis))
            back = flipped.flip(1 + axis) if flipped.ndim > 1 else flipped
            scores.append(scores_of(((prediction + back) / 2)[None, None], [label], smooth)[0, 0])
        found[axis] = float(np.mean(scores))
    best = max(found, key=lambda axis: found[axis])
    return best if found[best] >= plain - FLIP_TOLERANCE else None


def _spread(cases: Sequence[Pair], count: int) -> list[Pair]:
    """So many of the cases, evenly over their order."""
    return [cases[place] for place in spread(len(cases), count)]


def spread(total: int, count: int) -> list[int]:
    """So many positions of a list of this length, or all, evenly over it."""
    return sorted({round(place) for place in np.linspace(0, total - 1, min(count, total))})
