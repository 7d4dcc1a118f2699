"""Source training and every stream of an experiment, resumable: what `dltta bench` and `dltta demo` run.

With a model that is there already nothing is trained, and every image is prepared and scored as that model does it.

OUT/
  models/seed_0/…         one source model per seed; METHOD_TARGET_seed_0 for methods that learn with target images
  streams/KEY.json        one finished stream each; never run twice
  examples/KEY.npz        predictions for the cases that the report shows
  results.json            everything, from which tables and report are made
  table.md table.tex table.csv report.html
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Literal

from dltta.config import (
    make_adapter,
)
from dltta.errors import NonFiniteError
from dltta.evaluation.experiment import NETWORK, VALIDATION, Bench, Experiment, check_sites, images_of
from dltta.evaluation.files import require_site
from dltta.evaluation.listener import Listener
from dltta.evaluation.outputs import collect_results, gather_shown, write_outputs
from dltta.evaluation.provenance import checksum
from dltta.evaluation.results import Results
from dltta.evaluation.runners import Local, Runner, Task, threads_each
from dltta.evaluation.source_models import open_given, rehearse_all, source_trainings, train_all, uda_trainings
from dltta.evaluation.stream_jobs import ensure_stream
from dltta.evaluation.tracking import NoTracker, Tracker
from dltta.methods import Method
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.io.fingerprint import fingerprint
from dltta.models.io.opened import OpenedModel
from dltta.models.io.opening import ModelSource
from dltta.recipes import (
    ALL,
    MATCHED,
    RECOMMENDED,
    Recipe,
)


def run_experiment(
    experiment: Experiment,
    *,
    device: str = "cpu",
    runner: Runner | None = None,
    listener: Listener | None = None,
    tracker: Tracker | None = None,
    notes: Sequence[str] = (),
    changing: Results | None = None,
) -> Results:
    """Train what is not trained, run what is not run, and write results, tables and report (see `write_report`)."""
    alone = {"": experiment.adaptation}
    found = run_sweep(
        experiment, alone, device=device, runner=runner, listener=listener, tracker=tracker, notes=notes,
        changing=changing,
    )  # fmt: skip
    return found[""]


def run_sweep(
    experiment: Experiment,
    points: Mapping[str, Recipe],
    *,
    device: str = "cpu",
    runner: Runner | None = None,
    listener: Listener | None = None,
    tracker: Tracker | None = None,
    notes: Sequence[str] = (),
    changing: Results | None = None,
    diverging: Literal["raise", "note"] = "raise",
) -> dict[str, Results]:
    """An experiment at several points, by name: the same models, one grid of streams, results in a folder for each.

    Streams that come to numbers that are not finite are an error, once all others have run, or are noted in the
    results in the place of a number.
    """
    runner, listener = runner or Local(), listener or Listener()
    bench, models = prepare(experiment, device, listener, runner)
    benches = {point: bench.at(point, adaptation) for point, adaptation in points.items()}
    for each in benches.values():
        _require_adapters(each.experiment)
    run_streams(list(benches.values()), device, runner, listener, tracker or NoTracker())
    found, trained = {}, models.get(experiment.first_seed)
    for point, each in benches.items():
        jobs = each.experiment.jobs()
        for job, why in each.diverged(jobs).items():
            if diverging == "raise" or job.method == Method.SOURCE:
                raise NonFiniteError(why)
        found[point] = collect_results(each, jobs)
        write_outputs(each.experiment, found[point], gather_shown(each, jobs, trained), trained, notes, changing)
    return found


def run_streams(benches: Sequence[Bench], device: str, runner: Runner, listener: Listener, tracker: Tracker) -> None:
    """Every stream once, whoever shares it; those that need another one's mean rate after the others."""
    streams = {bench.key(job): (bench, job) for bench in benches for job in bench.experiment.jobs()}
    tick = listener.streams(len(streams))

    def done(task: Task) -> None:
        bench, job = streams[task.name]
        if bench.stream_file(job).is_file():
            tracker.stream(task.name, bench.experiment.recipe(job), Results.load(bench.stream_file(job)).streams[0])
        tick(job)

    tasks = {key: Task(key, partial(ensure_stream, bench, job, device)) for key, (bench, job) in streams.items()}
    waiting = []
    for key, (bench, job) in streams.items():
        if bench.ended(job):
            done(tasks[key])
        else:
            waiting.append(key)
    for matched in (False, True):
        wave = [tasks[key] for key in waiting if (streams[key][1].rate == MATCHED) is matched]
        if wave:
            threads = threads_each(runner, runner.jobs)
            runner.run(wave, threads=threads, done=done, lost=lambda task: listener.lost(task.name))


def prepare(
    experiment: Experiment, device: str = "cpu", listener: Listener | None = None, runner: Runner | None = None
) -> tuple[Bench, dict[int, Checkpoint]]:
    """Look at the sites, train what is not trained, read the data once; the models by seed."""
    listener, runner = listener or Listener(), runner or Local()
    check_sites(experiment)
    if experiment.model is not None:
        return _prepare_given(experiment, experiment.model), {}
    sources = train_all(source_trainings(experiment), device, listener, runner)
    models = dict(zip(experiment.every_seed, sources.values(), strict=True))
    if RECOMMENDED in experiment.methods or ALL in experiment.methods:
        models = rehearse_all(experiment, models, device, listener, runner)
    first = models[experiment.first_seed]
    experiment = experiment.for_model(first)
    learned = train_all(uda_trainings(experiment), device, listener, runner)
    weights = {name: _weights(model) for name, model in {**sources, **learned}.items()}
    measured = {
        f"seed_{seed}": "".join(
            each.calibration.checksum() for each in (model, *model.others().values()) if each.calibration
        )
        + _rehearsed(model)
        for seed, model in models.items()
    }
    networks = {"source": first, **first.others()}
    losses = {name: network.record["losses"] for name, network in networks.items() if network is not None}
    return Bench(experiment, weights, _data(experiment, models), measured, losses), models


def _prepare_given(experiment: Experiment, source: ModelSource) -> Bench:
    """A model that is there: every site must fit it, and every method must work, before the first stream."""
    opened = open_given(source)
    for target in dict.fromkeys(job.target for job in experiment.jobs()):
        require_site(opened, experiment.open_target(target))
    _require_adapters(experiment)
    data = {(job.target, 0): checksum(experiment.open_target(job.target)) for job in experiment.jobs()}
    measured = "" if opened.calibration is None else opened.calibration.checksum()
    known = {"seed_0": measured + _rehearsed(opened)}
    return Bench(experiment, {"seed_0": {NETWORK: opened.fingerprint}}, data, known, {})


def _rehearsed(model: Checkpoint | OpenedModel) -> str:
    """A checksum of what the model learned in rehearsal."""
    return "" if model.rehearsal is None else sha256(json.dumps(model.rehearsal).encode()).hexdigest()


def _require_adapters(experiment: Experiment) -> None:
    """Every method must work on a given model."""
    if experiment.model is not None:
        for job in {job.method: job for job in experiment.jobs()}.values():
            make_adapter(open_given(experiment.model), experiment.recipe(job))


def _data(experiment: Experiment, models: Mapping[int, Checkpoint]) -> dict[tuple[str, int], str]:
    """Checksums of every data set; only the validation cases differ from seed to seed."""
    sums: dict[tuple[str, int], str] = {}
    for target in {job.target for job in experiment.jobs()}:
        for seed, model in models.items():
            if seed != experiment.first_seed and target != VALIDATION:
                sums[target, seed] = sums[target, experiment.first_seed]
            else:
                sums[target, seed] = checksum(images_of(experiment, target, seed, model))
    return sums


def _weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Checksums of the network, and by part of what else methods start from."""
    found = {name: fingerprint(*other.modules()) for name, other in checkpoint.others().items()}
    if checkpoint.reconstructions is not None:
        found["atta"] = fingerprint(checkpoint.model, checkpoint.reconstructions.autoencoders)
    return {NETWORK: fingerprint(checkpoint.model), **found}
