"""One stream of an experiment: opened, run, and written down whole or not at all."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from torch import Tensor

from dltta.config import (
    make_adapter,
)
from dltta.core.rates import Fixed
from dltta.core.step import Step
from dltta.data.case import Case, Dataset
from dltta.data.sites import evenly
from dltta.data.streams import stream_order
from dltta.errors import NonFiniteError
from dltta.evaluation.examples import Keep
from dltta.evaluation.experiment import (
    VALIDATION,
    Bench,
    Experiment,
    Job,
    images_of,
    model_folder,
)
from dltta.evaluation.files import run_files
from dltta.evaluation.provenance import Provenance
from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.run import Steps, StreamRecord, run_stream
from dltta.evaluation.source_models import open_given
from dltta.files import write_atomically
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint
from dltta.models.io.opened import OpenedModel
from dltta.models.io.opening import open_checkpoint
from dltta.predictor import Predictor
from dltta.recipes import (
    MATCHED,
    SHUFFLED,
)


def ensure_stream(bench: Bench, job: Job, device: str) -> None:
    """Run a stream unless it is there: a worker that was lost may have come to the end.

    One that comes to numbers that are not finite does so again: that it did is what is written down.
    """
    if bench.ended(job):
        return
    try:
        run_job(bench, job, device)
    except NonFiniteError as error:
        why = {**asdict(job), "why": str(error)}
        write_atomically(bench.diverged_file(job), json.dumps(why, ensure_ascii=False) + "\n")


def run_job(bench: Bench, job: Job, device: str) -> None:
    """Run one stream and write it down; both files appear whole or not at all, the stream last."""
    experiment = bench.experiment
    opened, dataset, order = _opened_stream(experiment, job, device)
    shown = Keep(dataset[i].name for i in evenly(len(dataset), experiment.examples))  # not by how they turned out
    recipe = experiment.recipe(job).resolved(opened.task, calibrated=opened.calibration is not None)
    if job.rate == MATCHED:
        recipe = replace(recipe, alpha=_mean(_dynamic_rates(bench, job, device)))
    steps: Steps = (predictor := Predictor(opened, make_adapter(opened, recipe)))
    if job.rate == SHUFFLED:
        rates = _dynamic_rates(bench, job, device)[:: recipe.batch_size or 1]  # the cases of a batch share one
        order_of_rates = np.random.default_rng([experiment.training.seed, job.seed, job.order]).permutation(len(rates))
        steps = Replaying(predictor, [rates[i] for i in order_of_rates])
    run: Callable[..., StreamRecord] = run_stream if experiment.model is None else run_files
    record = run(steps, dataset, order, batch_size=recipe.batch_size or 1, collect=shown)
    source = opened.name if experiment.model is not None else "+".join(_trained_on(opened))
    stream = StreamResult.of(record, source=source, method=job.method, rate=job.rate, seed=job.seed, order=job.order)
    provenance = Provenance.collect(seeds=[job.seed], data={dataset.site: bench.data[job.target, job.seed]})
    _save_predictions(bench.example_file(job), shown)
    Results(asdict(job), provenance, (stream,)).write(bench.stream_file(job))


def _opened_stream(experiment: Experiment, job: Job, device: str) -> tuple[OpenedModel, Dataset, list[int]]:
    """The model ready to run, the images it gets, and their order."""
    if experiment.model is None:
        checkpoint, dataset, order = open_stream(experiment, job, device)
        return open_checkpoint(checkpoint, job.model), dataset, order
    opened = open_given(experiment.model)
    opened.model.to(device)
    site = experiment.open_target(job.target)
    return opened, site, stream_order(site, np.random.default_rng([experiment.training.seed, job.order]))


def _trained_on(opened: OpenedModel) -> Sequence[str]:
    sites: Sequence[str] = () if opened.checkpoint is None else opened.checkpoint.record["sites"]
    return sites


def _mean(rates: Sequence[float]) -> float:
    return fmean(rates) if rates else 0.0  # nothing was updated: no rate matters


def _dynamic_rates(bench: Bench, job: Job, device: str) -> list[float]:
    """The rates of the dynamic stream that this one is a control of, case by case; it is run if it was not."""
    dynamic = replace(job, rate="dynamic")
    if (why := bench.diverged([dynamic]).get(dynamic)) is not None:
        raise NonFiniteError(why)
    if not bench.stream_file(dynamic).is_file():
        run_job(bench, dynamic, device)
    (stream,) = Results.load(bench.stream_file(dynamic)).streams
    return [case.rate for case in stream.cases if case.rate is not None]


class Replaying:
    """A predictor whose rates are given in advance, one for each batch."""

    def __init__(self, predictor: Predictor, rates: Sequence[float]) -> None:
        self._predictor, self._rates = predictor, iter(rates)

    def step(self, x: Tensor, *, case: str) -> Step:
        self._predictor.adapter.rate = Fixed(next(self._rates))
        return self._predictor.step(x, case=case)


def open_stream(experiment: Experiment, job: Job, device: str) -> tuple[Checkpoint, Dataset, list[int]]:
    """The trained model, the images as it takes them, and the order in which they come."""
    checkpoint = load_checkpoint(model_folder(experiment, job.model)).for_method(job.method)
    checkpoint.model.to(device)
    dataset = images_of(experiment, job.target, job.seed, checkpoint)
    site = dataset if job.target == VALIDATION else experiment.open_target(job.target)
    return checkpoint, dataset, stream_order(site, np.random.default_rng([experiment.training.seed, job.order]))


def _save_predictions(path: Path, kept: Keep) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **kept.predictions)
    write_atomically(path, buffer.getvalue())


def load_predictions(bench: Bench, job: Job, cases: Mapping[str, Case]) -> Keep:
    kept = Keep(cases)
    rows = {row.case: row for row in Results.load(bench.stream_file(job)).streams[0].cases}
    with np.load(bench.example_file(job)) as saved:
        for name, case in cases.items():
            kept.cases[name], kept.rows[name], kept.predictions[name] = case, rows[name], saved[name]
    return kept
