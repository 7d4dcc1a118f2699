"""The paper's figures, drawn from finished experiments."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from statistics import fmean, pstdev

import numpy as np
from torch import Tensor, nn

from dltta.config import make_adapter
from dltta.core.objectives import Objective, Tent
from dltta.evaluation.bench import prepare
from dltta.evaluation.examples import Array, Example
from dltta.evaluation.experiment import Experiment, Job
from dltta.evaluation.outputs import gather_shown
from dltta.evaluation.paper import needs
from dltta.evaluation.paper.figures import (
    Curve,
    Track,
    loss_figure,
    rates_figure,
    retrieval_figure,
    segmentation_figure,
)
from dltta.evaluation.paper.needs import SIZES, Runs, alpha_run, written
from dltta.evaluation.paper.published import (
    NOT_PRINTED,
    Comparison,
    ComparisonCell,
    ComparisonRow,
    Number,
    Published,
    compare,
    ours_only,
)
from dltta.evaluation.results import Results
from dltta.evaluation.run import CaseRecord
from dltta.evaluation.stream_jobs import open_stream
from dltta.evaluation.tables import NAMES as METHOD_NAMES
from dltta.evaluation.tables import method_label
from dltta.models.predictions import entropy

Files = dict[str, bytes | str]  # by name


@dataclass
class Spread:
    """Tent's objective, remembering the mean and sd of the entropy over the positions of each image."""

    inner: Objective
    means: list[float] = field(default_factory=list)
    sds: list[float] = field(default_factory=list)

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        return self.inner.prepare(model)

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        values = entropy(logits.detach())
        self.means.append(values.mean().item())
        self.sds.append(values.std(unbiased=False).item())
        return self.inner(model, x, logits)


def loss_curve(experiment: Experiment, rate: str, device: str) -> Curve:
    """The loss of Tent for each image of the first stream, before its update: mean and sd over positions."""
    job = Job(experiment.targets[0], "tent", rate, 0, 0)
    checkpoint, dataset, order = open_stream(experiment, job, device)
    adapter = make_adapter(checkpoint, experiment.recipe(job))
    watched = Spread(Tent())
    adapter.objective = watched
    for index in order:
        case = dataset[index]
        adapter.step(case.image[None], case=case.name)
    return Curve(tuple(watched.means), tuple(watched.sds))


def draw_rates(drawing: "Drawing") -> tuple[Files, Comparison]:
    """Along the first stream: discrepancy, rate and Dice; above, images from the least discrepancy to the largest."""
    experiment, results = drawing.runs.experiments["tent"], drawing.results["tent"]
    rows = {rate: _tent_stream(results, rate) for rate in ("fixed", "dynamic")}
    tracks = {method_label("tent", rate): _track(found) for rate, found in rows.items()}
    compared = sorted((row for row in rows["dynamic"] if row.discrepancy is not None), key=_discrepancy)
    shown = [compared[i] for i in sorted({round(i) for i in np.linspace(0, len(compared) - 1, min(4, len(compared)))})]
    _, dataset, _ = open_stream(experiment, Job(experiment.targets[0], "tent", "dynamic", 0, 0), drawing.device)
    cases = {case.name: case for case in (dataset[i] for i in range(len(dataset)))}
    images = {
        f"discrepancy {_discrepancy(row):.3f}\nrate {row.rate:.1e}": Example(
            row.case, np.array(cases[row.case].image), None, {}
        )
        for row in shown
    }
    table_rows = [
        ComparisonRow(
            label,
            "tent",
            rate,
            tuple(ComparisonCell(number, instead=NOT_PRINTED) for number in _summary(tracks[label])),
        )
        for rate, label in zip(rows, tracks, strict=True)
    ]
    columns = ("Dice, points", "Mean rate x 1000", "Least", "Largest", "Mean discrepancy")
    table = ours_only(drawing.published, columns, table_rows, drawing.about, digits=3)
    values = json.dumps({label: asdict(track) for label, track in tracks.items()}, indent=1, ensure_ascii=False) + "\n"
    return {"figure.png": rates_figure(images, tracks, drawing.about), "curves.json": values}, table


def _discrepancy(row: CaseRecord) -> float:
    return row.discrepancy or 0.0


def _track(rows: Sequence[CaseRecord]) -> Track:
    return Track(
        rates=tuple(row.rate for row in rows),
        discrepancies=tuple(row.discrepancy for row in rows),
        dice=tuple(100 * row.metrics["dice"] for row in rows),
    )


def _summary(track: Track) -> tuple[Number | None, ...]:
    """Mean Dice, then of the images with a discrepancy (all, with a fixed rate) mean, least and largest rate."""
    known = [value for value in track.discrepancies if value is not None]
    rates = [
        1000 * rate
        for rate, found in zip(track.rates, track.discrepancies, strict=True)
        if rate is not None and (found is not None or not known)
    ]
    spread = [Number(value) for value in (fmean(rates), min(rates), max(rates))] if rates else [None] * 3
    return Number(fmean(track.dice)), *spread, Number(fmean(known)) if known else None


def draw_loss(drawing: "Drawing") -> tuple[Files, Comparison]:
    experiment = drawing.runs.experiments["tent"]
    curves = {rate: loss_curve(experiment, rate, drawing.device) for rate in ("fixed", "dynamic")}
    rows = [
        ComparisonRow(
            method_label("tent", rate), "tent", rate, tuple(ComparisonCell(Number(value)) for value in _moves(curve))
        )
        for rate, curve in curves.items()
    ]
    columns = ("Mean loss", "Sd from image to image", "Mean change from image to image", "Mean sd over pixels")
    table = ours_only(drawing.published, columns, rows, drawing.about, digits=4)
    labels = {method_label("tent", rate): curve for rate, curve in curves.items()}
    values = json.dumps({label: asdict(curve) for label, curve in labels.items()}, indent=1, ensure_ascii=False) + "\n"
    return {"figure.png": loss_figure(labels, drawing.about), "curves.json": values}, table


def _moves(curve: Curve) -> tuple[float, ...]:
    """How high the curve is and how much it moves."""
    changes = [abs(after - before) for before, after in pairwise(curve.means)]
    return fmean(curve.means), pstdev(curve.means), fmean(changes) if changes else 0.0, fmean(curve.sds)


def draw_retrieval(drawing: "Drawing") -> tuple[Files, Comparison]:
    table = compare(drawing.published, drawing.runs.places, drawing.results, drawing.about)
    values = {row.method: [cell.ours.mean for cell in row.cells if cell.ours] for row in table.rows}
    lines = {METHOD_NAMES[method]: (found[0], found[1:]) for method, found in values.items() if found}
    return {"figure.png": retrieval_figure(SIZES, lines, drawing.about)}, table


def draw_segmentation(drawing: "Drawing") -> tuple[Files, Comparison]:
    """The first two kept images for which the memory was ready; when it never was, simply the first two."""
    shown = {run: _shown(experiment, drawing.device) for run, experiment in drawing.runs.experiments.items()}
    rows = {run: _tent_rows(results) for run, results in drawing.results.items()}
    labels = {alpha_run(alpha): written(alpha) for alpha in needs.RATES} | {"dynamic": "dynamic"}
    names = sorted(shown["dynamic"], key=lambda name: rows["dynamic"][name].discrepancy is None)[:2]
    examples = [
        replace(
            shown["dynamic"][name], predictions={said: _prediction(shown[run][name]) for run, said in labels.items()}
        )
        for name in names
    ]
    captions = [{said: _caption(said, rows[run][name]) for run, said in labels.items()} for name in names]
    table_rows = [
        ComparisonRow(
            f"Tent, {said}",
            "tent",
            "dynamic" if run == "dynamic" else "fixed",
            tuple(cell for name in names for cell in _dice_and_rate(rows[run][name])),
        )
        for run, said in labels.items()
    ]
    columns = [f"{name} {what}" for name in names for what in ("Dice, points", "rate x 1000")]
    table = ours_only(drawing.published, columns, table_rows, drawing.about, digits=2)
    return {"figure.png": segmentation_figure(examples, captions, drawing.about)}, table


def _shown(experiment: Experiment, device: str) -> dict[str, Example]:
    """Tent's predictions for the kept images of the first stream, by image."""
    bench, models = prepare(replace(experiment, in_domain=experiment.targets[0]), device)
    jobs = [job for job in experiment.jobs() if job.method == "tent"]
    return {example.name: example for example in gather_shown(bench, jobs, models[0])}


def _tent_stream(results: Results, rate: str) -> tuple[CaseRecord, ...]:
    """Tent's first stream with this rate."""
    wanted = ("tent", rate, 0, 0)
    return next(s.cases for s in results.streams if (s.method, s.rate, s.seed, s.order) == wanted)


def _tent_rows(results: Results) -> dict[str, CaseRecord]:
    """Each image in Tent's first stream."""
    first = next(stream for stream in results.streams if (stream.method, stream.seed, stream.order) == ("tent", 0, 0))
    return {row.case: row for row in first.cases}


def _prediction(example: Example) -> Array:
    return next(iter(example.predictions.values()))


def _dice_and_rate(row: CaseRecord) -> tuple[ComparisonCell, ComparisonCell]:
    return ComparisonCell(Number(100 * row.metrics["dice"])), ComparisonCell(Number(1000 * (row.rate or 0.0)))


def _caption(label: str, row: CaseRecord) -> str:
    chosen = f" {row.rate:.1e}" if label == "dynamic" else ""
    return f"{label}{chosen}\nDice {100 * row.metrics['dice']:.2f}"


@dataclass(frozen=True)
class Drawing:
    """What a figure is drawn from."""

    published: Published
    runs: Runs
    results: Mapping[str, Results]
    about: str
    device: str
