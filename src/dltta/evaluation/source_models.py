"""The networks that streams start from: trained, rehearsed, or given.

Trainings and rehearsals run where the runner runs them, and are found again by the folder of the model.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Protocol

import torch

from dltta.config import (
    default_architecture,
    default_preprocessing,
    make_adapter,
    make_uda,
)
from dltta.data.case import Dataset
from dltta.errors import DlttaError, StateError
from dltta.evaluation.experiment import Experiment, Job, model_folder
from dltta.evaluation.home import checkpoint_setup, rehearse_checkpoint, streams_on
from dltta.evaluation.listener import Listener, silent
from dltta.evaluation.rehearsal import Elsewhere, Progress, Setup
from dltta.evaluation.runners import Runner, Task, threads_each, using_threads
from dltta.methods import Method
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint
from dltta.models.io.opened import OpenedModel
from dltta.models.io.opening import ModelSource
from dltta.recipes import (
    RECOMMENDED,
    UDA,
    Recipe,
)
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.fit import Report
from dltta.training.uda import UDATraining


class Training(Protocol):
    """A training that leaves a model in a folder; stopped, it continues when it is run again."""

    def found(self) -> Checkpoint | None:
        """The model, if it is there already."""
        ...

    def run(self) -> Checkpoint: ...


class MakeTraining(Protocol):
    """A training that is still to be given its device and somebody to report to; it can be pickled."""

    def __call__(self, device: str, report: Report) -> Training: ...


def source_trainings(experiment: Experiment) -> dict[str, MakeTraining]:
    """One for each seed, by name of the model."""
    return {f"seed_{seed}": partial(source_training, experiment, seed) for seed in experiment.every_seed}


def uda_trainings(experiment: Experiment) -> dict[str, MakeTraining]:
    """One for each method that learns with target images, target and seed, by name of the model."""
    jobs = {job.model: job for job in experiment.jobs() if job.method in UDA}
    return {name: partial(uda_training, experiment, job) for name, job in jobs.items()}


def train_all(
    trainings: Mapping[str, MakeTraining], device: str, listener: Listener, runner: Runner
) -> dict[str, Checkpoint]:
    """The models by name, trained or continued or found; in this process their progress is told batch by batch."""
    threads = threads_each(runner, len(trainings))
    if runner.here(len(trainings)):
        with using_threads(threads):
            return {name: make(device, listener.training(_seed(name))).run() for name, make in trainings.items()}
    waiting = [name for name, make in trainings.items() if make("cpu", silent).found() is None]
    if waiting:
        tick = listener.trainings(len(waiting))
        runner.run(
            [Task(name, partial(_train, trainings[name], device)) for name in waiting],
            threads=threads,
            done=lambda task: tick(task.name),
            lost=lambda task: listener.lost(task.name),
        )
    return {name: _trained(name, make) for name, make in trainings.items()}


def _train(make: MakeTraining, device: str) -> None:
    make(device, silent).run()


def _trained(name: str, make: MakeTraining) -> Checkpoint:
    if (model := make("cpu", silent).found()) is None:
        raise StateError(f"{name} was trained, but is not here; give -o or --work a folder that all machines share")
    return model


def _seed(model: str) -> int:
    """Of a model's name."""
    return int(model.rpartition("_")[2])


def source_training(experiment: Experiment, seed: int, device: str, report: Report) -> SourceTraining:
    """Of the source model of one seed."""
    sites = [experiment.open(spec) for spec in experiment.source]
    return SourceTraining(
        sites,
        default_architecture(sites[0], experiment.network, experiment.network_options),
        default_preprocessing(sites[0], experiment.size),
        replace(experiment.training, seed=experiment.training.seed + seed),
        model_folder(experiment, f"seed_{seed}"),
        torch.device(device),
        resume=True,
        report=report,
    )


def uda_training(experiment: Experiment, job: Job, device: str, report: Report) -> UDATraining:
    """Of the model that learns with all unlabeled images of the job's target; the source model is there."""
    sites = [experiment.open(spec) for spec in experiment.source]
    source = load_checkpoint(model_folder(experiment, f"seed_{job.seed}"))
    return UDATraining(
        make_uda(job.method, experiment.uda.get(job.method, {})),
        sites,
        [experiment.open_target(job.target)],
        default_architecture(sites[0], experiment.network, experiment.network_options),
        source.preprocessing,
        replace(experiment.training, seed=experiment.training.seed + job.seed),
        model_folder(experiment, job.model),
        torch.device(device),
        resume=True,
        report=report,
        source_model=source,
    )


def rehearse_all(
    experiment: Experiment, models: Mapping[int, Checkpoint], device: str, listener: Listener, runner: Runner
) -> dict[int, Checkpoint]:
    """The source models with what each learned at simulated sites; one that has rehearsed is only read."""
    waiting = [seed for seed, model in models.items() if model.rehearsal is None]
    if not waiting:
        return dict(models)
    if runner.here(len(waiting)):
        with using_threads(threads_each(runner, runner.jobs)):  # as workers have, so that all come to the same
            for seed in waiting:
                progress = listener.rehearsal(seed)
                elsewhere = _elsewhere(experiment, seed, device, runner, progress, listener.lost)
                _rehearse(experiment, seed, device, progress, elsewhere)
    else:
        tick = listener.rehearsals(len(waiting))
        runner.run(
            [Task(f"rehearsal of seed_{seed}", partial(_rehearse, experiment, seed, device)) for seed in waiting],
            threads=threads_each(runner, len(waiting)),
            done=lambda task: tick(task.name),
            lost=lambda task: listener.lost(task.name),
        )
    return {seed: load_checkpoint(model_folder(experiment, f"seed_{seed}")) for seed in models}


def _rehearse(
    experiment: Experiment,
    seed: int,
    device: str,
    progress: Progress | None = None,
    elsewhere: Elsewhere | None = None,
) -> None:
    place = torch.device(device)
    rehearse_checkpoint(*_rehearsing(experiment, seed), device=place, progress=progress, elsewhere=elsewhere)


def _elsewhere(
    experiment: Experiment, seed: int, device: str, runner: Runner, done: Progress, lost: Callable[[str], None]
) -> Elsewhere | None:
    """What runs the streams of one rehearsal at the same time, if the runner does such things."""
    if runner.here(runner.jobs):
        return None
    folder, prepare = model_folder(experiment, f"seed_{seed}"), partial(_setup, experiment, seed, device)
    return streams_on(runner, prepare, folder, done=done, lost=lambda task: lost(task.name))


def _setup(experiment: Experiment, seed: int, device: str) -> Setup:
    return checkpoint_setup(*_rehearsing(experiment, seed), device)


def _rehearsing(experiment: Experiment, seed: int) -> tuple[Path, list[Dataset], TrainingSettings]:
    """The model, the sites it was trained on, and how."""
    settings = replace(experiment.training, seed=experiment.training.seed + seed)
    return model_folder(experiment, f"seed_{seed}"), [experiment.open(spec) for spec in experiment.source], settings


@lru_cache(maxsize=1)
def open_given(source: ModelSource) -> OpenedModel:
    """The model that streams run on; opened once in a process."""
    return source.open()


def working_methods(opened: OpenedModel) -> tuple[str, ...]:
    """The methods that this model has all parts for."""
    found = []
    for method in Method:
        try:
            make_adapter(opened, Recipe(method))
        except DlttaError:
            continue
        found.append(str(method))
    return (*found, RECOMMENDED)
