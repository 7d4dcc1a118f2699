"""What an experiment leaves: finished streams as one results.json, tables in three formats, the report."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dltta.data.sites import evenly
from dltta.evaluation.examples import Example, gather_examples
from dltta.evaluation.experiment import (
    Bench,
    Experiment,
    Job,
    images_of,
)
from dltta.evaluation.formats import csv_text, latex, markdown
from dltta.evaluation.report import write_report
from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.stream_jobs import load_predictions
from dltta.evaluation.tables import by_target, method_label
from dltta.files import write_atomically
from dltta.models.io.checkpoint import Checkpoint

CURVES = {  # of the report, by stage of training: what is drawn, and its key in the history
    "task": ("task loss", "task"),
    "ttt": ("rotation loss", "rotation"),
    "ttt++": ("contrast loss", "contrast"),
    "dtta": ("task loss behind the normalizer", "task"),
    "denoiser": ("denoising error", "validation"),
    "atta": ("reconstruction error", "validation"),
}


def collect_results(bench: Bench, jobs: Sequence[Job]) -> Results:
    """All finished streams in one, without their timings: stopping and continuing leaves no trace.

    A method that diverged at a target with one seed or order has no number there, whatever the others gave.
    """
    diverged = {(job.target, job.method, job.rate): why for job, why in bench.diverged(jobs).items()}
    kept = [job for job in jobs if (job.target, job.method, job.rate) not in diverged]
    single = [Results.load(bench.stream_file(job)) for job in kept]
    data = {site: value for result in single for site, value in result.provenance.data.items()}
    seeds = tuple(bench.experiment.training.seed + seed for seed in bench.experiment.every_seed)
    provenance = replace(single[0].provenance, seeds=seeds, data=data)
    streams = tuple(_untimed(stream) for result in single for stream in result.streams)
    config = {**bench.experiment.describe(), "trained_with": bench.trained_with}
    if diverged:
        config["diverged"] = [
            {"target": bench.experiment.open_target(target).site, "method": method, "rate": rate, "why": why}
            for (target, method, rate), why in diverged.items()
        ]
    return Results(config, provenance, streams)


def _untimed(stream: StreamResult) -> StreamResult:
    return replace(stream, cases=tuple(replace(case, seconds=None) for case in stream.cases))


def write_outputs(
    experiment: Experiment,
    results: Results,
    examples: Sequence[Example],
    checkpoint: Checkpoint | None,
    notes: Sequence[str],
    changing: Results | None = None,
) -> None:
    """Results, tables in three formats, and the report."""
    folder = experiment.folder
    results.write(folder / "results.json")
    write_tables(folder, results)
    curves = {} if checkpoint is None else training_curves(checkpoint)
    page = folder / "report.html"
    write_report(page, results, examples=examples, training=curves, notes=notes, changing=changing)


def write_tables(folder: Path, results: Results) -> None:
    """The table of methods by target in three formats; the same results give the same bytes."""
    table = by_target(results)
    for name, text in (("md", markdown(table)), ("tex", latex(table)), ("csv", csv_text(table))):
        write_atomically(folder / f"table.{name}", text)


def training_curves(checkpoint: Checkpoint) -> dict[str, list[float]]:
    """What the report draws of source training: each loss by epoch."""
    curves: dict[str, list[float]] = {}
    for row in checkpoint.record.get("history", []):
        name, key = CURVES[row["stage"]]
        curves.setdefault(name, []).append(row[key])
        if row["stage"] == "task" and row["score"] is not None:
            curves.setdefault(f"validation {checkpoint.record['metric']}", []).append(row["score"])
    return curves


def gather_shown(bench: Bench, jobs: Sequence[Job], checkpoint: Checkpoint | None) -> list[Example]:
    """The examples of the first target, seed and order, with every method's prediction."""
    target = bench.experiment.targets[0]
    ran = [job for job in jobs if bench.stream_file(job).is_file()]
    first = [job for job in ran if (job.target, job.seed, job.order) == (target, bench.experiment.first_seed, 0)]
    dataset = images_of(bench.experiment, target, bench.experiment.first_seed, checkpoint)
    cases = {dataset[i].name: dataset[i] for i in evenly(len(dataset), bench.experiment.examples)}
    kept = {method_label(job.method, job.rate): load_predictions(bench, job, cases) for job in first}
    return gather_examples(kept, dataset.classes)
