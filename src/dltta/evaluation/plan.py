"""What would an experiment run, and how long would it take? Nothing is trained, run or written.

The estimate comes from the seconds of finished streams in the same work folder: those of the same method where there
are any, else by passes of the network. Without finished streams there are passes only.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dltta.data.case import Task
from dltta.evaluation.bench import prepare
from dltta.evaluation.experiment import VALIDATION, Bench, Experiment, Job
from dltta.evaluation.results import Results
from dltta.evaluation.source_models import MakeTraining, source_trainings, uda_trainings
from dltta.methods import METHODS
from dltta.models.io.checkpoint import Checkpoint
from dltta.recipes import ALL, UDA, Recipe, usual_step

BACKWARD = 2  # forward passes that a backward pass costs


@dataclass(frozen=True)
class Planned:
    """One training or stream."""

    name: str
    done: bool
    passes: int | None  # over one image, forward ones; None where nobody knows before the model is trained
    seconds: float | None = None  # of one worker


@dataclass(frozen=True)
class Plan:
    """All tasks of an experiment."""

    trainings: tuple[Planned, ...]
    streams: tuple[Planned, ...]

    @property
    def waiting(self) -> tuple[Planned, ...]:
        return tuple(task for task in (*self.trainings, *self.streams) if not task.done)

    @property
    def passes(self) -> int:
        """Of all that waits and whose passes are known."""
        return sum(task.passes or 0 for task in self.waiting)

    def seconds(self, jobs: int) -> float | None:
        """Of all that waits, with so many at the same time; None where there is nothing to go by."""
        total = 0.0
        for tasks in (self.trainings, self.streams):  # streams begin when all models are trained
            waiting = [task.seconds for task in tasks if not task.done]
            known = [seconds for seconds in waiting if seconds is not None]
            if len(known) < len(waiting):
                return None
            total += max(sum(known) / jobs, max(known, default=0.0))
        return total


def make_plan(experiment: Experiment, points: Mapping[str, Recipe]) -> Plan:
    """The tasks of an experiment at these points; which streams are done is known once all models are trained."""
    trainings = () if experiment.model is not None else _trainings(experiment)
    timings = Timings.read(experiment.work_folder / "streams")
    if all(task.done for task in trainings):
        bench, _ = prepare(experiment)
        return Plan(trainings, _streams(bench, points, timings))
    streams: dict[tuple[Job, str], Planned] = {}
    for point, adaptation in points.items():
        at = Bench(experiment, {}, {}, {}, {}).at(point, adaptation).experiment
        for job in at.jobs():
            decisive = (job, repr(at.recipe(job).deciding()) if job.method != ALL else point)
            streams.setdefault(decisive, _planned(at, job, point, timings, done=False))
    return Plan(trainings, tuple(streams.values()))


def _streams(bench: Bench, points: Mapping[str, Recipe], timings: "Timings") -> tuple[Planned, ...]:
    """Points share the streams whose outcome does not depend on what is swept."""
    streams: dict[str, Planned] = {}
    for point, adaptation in points.items():
        at = bench.at(point, adaptation)
        for job in at.experiment.jobs():
            done = at.ended(job)
            streams.setdefault(at.key(job), _planned(at.experiment, job, point, timings, done=done))
    return tuple(streams.values())


def _planned(experiment: Experiment, job: Job, point: str, timings: "Timings", *, done: bool) -> Planned:
    name = " ".join(filter(None, (f"{job.target} {job.method} {job.rate} seed {job.seed} order {job.order}", point)))
    if job.method == ALL:
        return Planned(f"{name} (every method that the model supports)", done, None)
    cases = _count(experiment, job.target)
    each = passes_each(experiment.recipe(job), _task(experiment))
    seconds = timings.of(job.method, each)
    return Planned(name, done, cases * each, None if seconds is None else cases * seconds)


def _task(experiment: Experiment) -> Task:
    return experiment.open(experiment.targets[0]).task


def _count(experiment: Experiment, target: str) -> int:
    """Images of a target; of the source cases kept for validation about so many."""
    if target != VALIDATION:
        return len(experiment.open_target(target))
    return max(1, _held_out(experiment))


def _held_out(experiment: Experiment) -> int:
    """About so many source images are kept for validation: a share of them, or one of each patient that is named."""
    share = experiment.training.validation
    return len(share) if isinstance(share, tuple) else round(share * _source_images(experiment))


def _source_images(experiment: Experiment) -> int:
    return sum(len(experiment.open(spec)) for spec in experiment.source)


def passes_each(recipe: Recipe, task: Task) -> int:
    """Forward passes that one image of a stream costs at least, a backward pass counted as two."""
    if recipe.method in UDA:
        return 1
    known = METHODS.get(recipe.method)
    forward, backward = _forward_and_backward("2 + 1" if known is None else known.facts.passes)
    usual = usual_step(recipe.method, task).updates
    more = ((recipe.steps or usual) - usual) * backward // usual  # each update beyond takes one of both
    return forward + more + BACKWARD * (backward + more)


def _forward_and_backward(passes: str) -> tuple[int, int]:
    """As the table of methods has it: `2 + 1, and the auto-encoders`."""
    found = re.match(r"(\d+) \+ (\d+)", passes)
    return (int(found[1]), int(found[2])) if found else (2, 1)


def _trainings(experiment: Experiment) -> tuple[Planned, ...]:
    """Source models, then models that learn with target images; as long as other seeds took."""
    sources = {name: _found(make) for name, make in source_trainings(experiment).items()}
    complete = all(model is not None for model in sources.values())
    learned = {name: _found(make) if complete else None for name, make in uda_trainings(experiment).items()}
    settings = experiment.training
    images = (_source_images(experiment) - _held_out(experiment)) * settings.repeats
    passes = settings.epochs * images * (1 + BACKWARD)
    took = [_seconds(model) for model in sources.values() if model is not None]
    return (
        *(Planned(f"train {name}", model is not None, passes, _mean(took)) for name, model in sources.items()),
        *(Planned(f"train {name}", model is not None, None) for name, model in learned.items()),
    )


def _found(make: MakeTraining) -> Checkpoint | None:
    return make("cpu", lambda *at: None).found()


def _seconds(model: Checkpoint) -> float:
    """Of all epochs of a finished training."""
    return float(sum(row.get("seconds", 0.0) for row in model.record.get("history", [])))


@dataclass(frozen=True)
class Timings:
    """What finished streams took for an image."""

    by_method: Mapping[str, float]
    by_pass: float | None  # over all of them

    @classmethod
    def read(cls, folder: Path) -> "Timings":
        """Those of a work folder; none if it is not there."""
        methods: dict[str, list[float]] = {}
        passes: list[float] = []
        for file in sorted(folder.glob("*.json")):
            for stream in Results.load(file).streams:
                seconds = [case.seconds for case in stream.cases if case.seconds is not None]
                if seconds:
                    methods.setdefault(stream.method, []).append(fmean(seconds))
                    passes.append(fmean(seconds) / passes_each(Recipe(stream.method), stream.task))
        return cls({method: fmean(seconds) for method, seconds in methods.items()}, _mean(passes))

    def of(self, method: str, passes: int) -> float | None:
        """Seconds for an image."""
        if method in self.by_method:
            return self.by_method[method]
        return None if self.by_pass is None else self.by_pass * passes


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None
