"""Source training and every stream of an experiment, resumable: what `dltta bench` and `dltta demo` run.

With a model that is there already nothing is trained, and every image is prepared and scored as that model does it.

OUT/
  models/seed_0/…         one source model per seed; METHOD_TARGET_seed_0 for methods that learn with target images
  streams/KEY.json        one finished stream each; never run twice
  examples/KEY.npz        predictions for the cases that the report shows
  results.json            everything, from which tables and report are made
  table.md table.tex table.csv report.html
"""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from dltta.config import (
    build,
    default_architecture,
    default_preprocessing,
    make_adapter,
    make_uda,
    open_dataset,
)
from dltta.core.rates import Fixed
from dltta.core.step import Step
from dltta.data.case import Case, Cases, Dataset, Mapped
from dltta.data.sites import SiteFolder, Slices, evenly
from dltta.data.streams import SiteStream, split_stream, stream_order
from dltta.errors import DataError, DlttaError, NonFiniteError, SettingError, StateError
from dltta.evaluation.examples import Example, Keep, gather_examples
from dltta.evaluation.files import require_site, run_files
from dltta.evaluation.formats import csv_text, latex, markdown
from dltta.evaluation.home import checkpoint_setup, rehearse_checkpoint, streams_on
from dltta.evaluation.overview import check_method
from dltta.evaluation.provenance import Provenance, checksum
from dltta.evaluation.rehearsal import Elsewhere, Progress, Setup
from dltta.evaluation.report import write_report
from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.run import Steps, StreamRecord, run_stream
from dltta.evaluation.runners import Local, Runner, Task, threads_each, using_threads
from dltta.evaluation.tables import by_target, method_label
from dltta.evaluation.tracking import NoTracker, Tracker
from dltta.files import write_atomically
from dltta.methods import METHODS, PAPER_METHODS, Method, Optimizer
from dltta.metrics import SCORING
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint
from dltta.models.io.fingerprint import fingerprint
from dltta.models.io.opened import OpenedModel
from dltta.models.io.opening import ModelSource, open_checkpoint
from dltta.predictor import Predictor
from dltta.recipes import (
    ADAM,
    ALL,
    CONTROLS,
    MATCHED,
    NO_RATE,
    RECOMMENDED,
    SHUFFLED,
    UDA,
    WITHOUT_RATE,
    Recipe,
    Rule,
    check_name,
    recommended,
    split_rate,
    usual_rate,
)
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.examples import gather, split_by_group
from dltta.training.fit import Report
from dltta.training.settings import AUXILIARIES
from dltta.training.uda import UDATraining
from dltta.version import __version__

CURVES = {  # of the report, by stage of training: what is drawn, and its key in the history
    "task": ("task loss", "task"),
    "ttt": ("rotation loss", "rotation"),
    "ttt++": ("contrast loss", "contrast"),
    "dtta": ("task loss behind the normalizer", "task"),
    "denoiser": ("denoising error", "validation"),
    "atta": ("reconstruction error", "validation"),
}
NETWORK = ""  # what most methods start from
LONGEST = 160  # letters of a target in the name of a file
VALIDATION = "validation"  # as a target: the source cases that training did not see


@dataclass(frozen=True)
class Experiment:
    """Source × targets × methods × rates × seeds × orders.

    Sites are folders, below `root` if that is given, or names such as `phantom:…` (see `open_dataset`). `in_domain` is
    where the source model is scored at the source site: a site, "none", or the source cases kept for validation.
    Models, streams and examples are kept in `work`, which several experiments may share, or else in `output`.
    """

    source: tuple[str, ...]
    targets: tuple[str, ...]
    output: str
    model: ModelSource | None = None  # compared on, instead of networks trained on `source`
    work: str | None = None
    root: str | None = None  # where it is does not decide what comes out: not part of the description
    in_domain: str = VALIDATION
    methods: tuple[str, ...] = tuple(map(str, PAPER_METHODS))  # "all" stands for those that the model supports
    rates: tuple[str, ...] = ("fixed", "dynamic")
    seeds: int = 1
    first_seed: int = 0  # seeds are counted from here: others of the same comparison may have been run elsewhere
    orders: int = 1
    cases: int | None = None  # at most so many of each target folder, evenly spread; volumes where slices are taken
    network: str | None = None
    network_options: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, ...] | None = None
    examples: int = 3
    training: TrainingSettings = field(default_factory=TrainingSettings)
    adaptation: Recipe = field(default_factory=Recipe)  # what all methods but `recommended` share
    uda: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings of methods that learn with targets
    recipes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by test-time method: what it has alone
    left_out: Mapping[str, str] = field(default_factory=dict)  # methods of "all" that the model does not support: why

    def __post_init__(self) -> None:
        for method in self.methods:
            check_name("method", method, (*Method, *UDA, RECOMMENDED, ALL))
        for method, values in self.recipes.items():
            check_name("method", method, Method)
            build(Recipe, values, f"[recipes.{method}]")
        for method, settings in self.uda.items():
            make_uda(method, settings)
        for rate in self.rates:
            split_rate(rate)
        if not (self.source or self.model) or not self.targets:
            raise SettingError("an experiment needs at least one source site, or a model, and one target site")
        if self.model is not None:
            self._check_given()
        if self.seeds < 1 or self.orders < 1:
            raise SettingError(f"seeds and orders must be at least 1, got {self.seeds} and {self.orders}")
        if self.first_seed < 0:
            raise SettingError(f"the first seed must be 0 or more, got {self.first_seed}")
        if self.cases is not None and self.cases < 1:
            raise SettingError(f"cases must be at least 1, got {self.cases}")

    def _check_given(self) -> None:
        """What has no meaning for a model that is not trained here."""
        if self.source:
            raise SettingError("an experiment has source sites to train on or a model, not both; leave one out")
        learned = [method for method in self.methods if method in UDA]
        if learned:
            raise SettingError(f"{learned[0]} learns with source images; give --source, not a model")
        if SHUFFLED in self.rates:
            raise SettingError("shuffled rates are a control of models that are trained here; leave them out")
        if self.seeds != 1:
            raise SettingError(f"a given model is one network, got {self.seeds} seeds; use --orders to repeat streams")
        if self.first_seed:
            raise SettingError("a given model has no seeds; leave the first seed out")

    @property
    def every_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @property
    def work_folder(self) -> Path:
        return Path(self.work or self.output)

    def describe(self) -> dict[str, Any]:
        """The whole configuration as JSON; what two runs must share to share their streams."""
        description: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        del description["output"], description["work"], description["root"]
        return description

    def open(self, spec: str) -> Dataset:
        """A site by its name in this experiment."""
        if (several := split_stream(spec)) is not None:
            return SiteStream(tuple(map(self.open, several[1])), several[0])
        form, colon, folder = spec.rpartition(":")
        below_root = self.root is not None and form in ("", "slices")
        return open_dataset(f"{form}{colon}{Path(self.root or '', folder)}" if below_root else spec)

    def open_target(self, spec: str) -> Dataset:
        """A target as it is run: with at most `cases` cases of each site."""
        if self.cases is None:
            return self.open(spec)
        if (several := split_stream(spec)) is not None:
            return SiteStream(tuple(map(self.open_target, several[1])), several[0])
        site = self.open(spec)
        if not isinstance(site, SiteFolder | Slices):
            raise SettingError(f"cases limits site folders, and {spec} is none; leave it out")
        return site.some(self.cases)

    def jobs(self) -> list["Job"]:
        """Every stream, unadapted ones first; methods without a loss run once whatever the rates."""
        absent = ("none",) if self.model is None else ("none", VALIDATION)  # a given model kept no cases here
        home = [] if self.in_domain in absent else [self.in_domain]
        jobs = [Job(target, "source", "none", seed, 0) for target in home for seed in self.every_seed]
        for seed in self.every_seed:
            for target in self.targets:
                for order in range(self.orders):
                    for method in self.methods:
                        rates = self._rates(method)
                        jobs += [Job(target, method, rate, seed, order) for rate in rates]
        return jobs

    def _rates(self, method: str) -> tuple[str, ...]:
        """Those of a method; `recommended` brings its own, and a method whose authors have a rule of their own runs
        with that too. Dynamic comes before its controls.
        """
        if method in (*WITHOUT_RATE, RECOMMENDED):
            return (NO_RATE,)
        own = usual_rate(method)
        extra = () if own in (Rule.FIXED, Rule.DYNAMIC, *self.rates) else (own,)
        return (*extra, *sorted(self.rates, key=lambda rate: rate in CONTROLS))

    def recipe(self, job: "Job") -> Recipe:
        """What a stream is run with; a matched one's α is known once its dynamic stream has run."""
        if job.method == RECOMMENDED:
            return replace(recommended(), batch_size=self.adaptation.batch_size)
        shared = replace(self.adaptation, method=job.method, **self.recipes.get(job.method, {}))
        if job.rate == NO_RATE:
            return shared
        rule, alpha = split_rate(job.rate)
        optimizer = Optimizer.ADAM if rule == ADAM else shared.optimizer
        rule = Rule.FIXED if rule in (ADAM, *CONTROLS) else rule
        return replace(shared, rate=rule, alpha=shared.alpha if alpha is None else alpha, optimizer=optimizer)

    def with_all_parts(self) -> "Experiment":
        """With all that any method of the task needs trained beside the source model."""
        task = self.open(self.source[0]).task
        parts = [str(each.facts.part) for each in Method if each.facts.part and task in each.facts.tasks]
        with_ = tuple(name for name in AUXILIARIES if name in (*parts, *self.training.with_))
        return replace(self, training=replace(self.training, with_=with_))

    def for_model(self, model: Checkpoint) -> "Experiment":
        """With the methods that this model supports in the place of "all"; the others are left out with the reason."""
        if ALL not in self.methods:
            return self
        sample = _sample(self, model)
        checks = [check_method(open_checkpoint(model, "the source model"), method, sample) for method in Method]
        works = tuple(check.method for check in checks if check.works)
        named = tuple(method for method in self.methods if method not in (ALL, *works, RECOMMENDED))
        reasons = {check.method: check.reason or "" for check in checks if not check.works}
        return replace(self, methods=(*works, RECOMMENDED, *named), left_out=reasons)


@dataclass(frozen=True)
class Job:
    """One stream: the unit of work."""

    target: str
    method: str
    rate: str
    seed: int
    order: int

    @property
    def model(self) -> str:
        """The name of the model that is run; methods that learn with target images have one for each target."""
        seed = f"seed_{self.seed}"
        return f"{self.method}_{_file_name(self.target)}_{seed}" if self.method in UDA else seed


@dataclass(frozen=True)
class Bench:
    """An experiment with its models trained and its data read once: what decides the outcome of every stream."""

    experiment: Experiment
    models: Mapping[str, Mapping[str, str]]  # by name: checksums of the weights; by part what one method needs
    data: Mapping[tuple[str, int], str]  # target and seed: checksum of the images as the network takes them
    calibrations: Mapping[str, str]  # by name of the model: checksums of its networks' calibrations
    trained_with: Mapping[str, Sequence[str]]  # losses of the source model and, if there is one, of TTT's network

    def key(self, job: Job) -> str:
        """A file name that changes when anything that decides the stream's outcome changes."""
        recipe = self.experiment.recipe(job)
        decisive = [
            asdict(job),
            recipe.deciding(),
            self.experiment.training.seed,
            self._weights(job),
            self.data[job.target, job.seed],
            __version__,
            SCORING,
        ]
        if recipe.calibration_matters:
            decisive.append(self.calibrations.get(job.model))
        if job.rate in CONTROLS:  # its rates are those of a stream with a memory
            decisive.append(self.experiment.recipe(replace(job, rate=Rule.DYNAMIC)).deciding())
        digest = sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]
        return f"{_file_name(job.target)}_{job.method}_{job.rate}_seed{job.seed}_order{job.order}_{digest}"

    def _weights(self, job: Job) -> str:
        """Checksum of what the stream starts from: parts of other methods may be trained later."""
        weights = self.models[job.model]
        part = METHODS[job.method].facts.part if job.method in METHODS else None
        return weights.get(part or NETWORK, weights[NETWORK])

    def stream_file(self, job: Job) -> Path:
        return self.experiment.work_folder / "streams" / f"{self.key(job)}.json"

    def diverged_file(self, job: Job) -> Path:
        """In the place of a stream: at which numbers it could not go on."""
        return self.experiment.work_folder / "streams" / f"{self.key(job)}.diverged.json"

    def ended(self, job: Job) -> bool:
        return self.stream_file(job).is_file() or self.diverged_file(job).is_file()

    def diverged(self, jobs: Sequence[Job]) -> dict[Job, str]:
        """Those of the jobs that came to numbers that are not finite, and where."""
        ended = [job for job in jobs if self.diverged_file(job).is_file() and not self.stream_file(job).is_file()]
        return {job: json.loads(self.diverged_file(job).read_text("utf-8"))["why"] for job in ended}

    def example_file(self, job: Job) -> Path:
        return self.experiment.work_folder / "examples" / f"{self.key(job)}.npz"

    def at(self, point: str, adaptation: Recipe) -> "Bench":
        """The same models and images at one point of a sweep, whose results are in a folder of that name."""
        experiment = self.experiment
        folder = str(experiment.folder / point) if point else experiment.output
        work = str(experiment.work_folder) if point else experiment.work
        return replace(self, experiment=replace(experiment, adaptation=adaptation, output=folder, work=work))


class Listener:
    """What an experiment tells while it runs; every method may be left as it is."""

    def training(self, seed: int) -> Report:
        """Of a training in this process, batch by batch."""
        return _silent

    def trainings(self, total: int) -> Callable[[str], None]:
        """Of trainings in other processes: the name of each model that is trained."""
        return lambda name: None

    def rehearsal(self, seed: int) -> Progress:
        """Of a rehearsal in this process, stream by stream."""
        return lambda done, total: None

    def rehearsals(self, total: int) -> Callable[[str], None]:
        """Of rehearsals in other processes: the name of each that is done."""
        return lambda name: None

    def streams(self, total: int) -> Callable[[Job], None]:
        return lambda job: None

    def lost(self, name: str) -> None:
        """A worker is gone; what it did is given to another one."""


def _silent(*at: object) -> None:
    """A report to nobody."""


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
    _check_sites(experiment)
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
    waiting = [name for name, make in trainings.items() if make("cpu", _silent).found() is None]
    if waiting:
        tick = listener.trainings(len(waiting))
        runner.run(
            [Task(name, partial(_train, trainings[name], device)) for name in waiting],
            threads=threads,
            done=lambda task: tick(task.name),
            lost=lambda task: listener.lost(task.name),
        )
    return {name: _trained(name, make) for name, make in trainings.items()}


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
    return {seed: load_checkpoint(_model_folder(experiment, f"seed_{seed}")) for seed in models}


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
    folder, prepare = _model_folder(experiment, f"seed_{seed}"), partial(_setup, experiment, seed, device)
    return streams_on(runner, prepare, folder, done=done, lost=lambda task: lost(task.name))


def _setup(experiment: Experiment, seed: int, device: str) -> Setup:
    return checkpoint_setup(*_rehearsing(experiment, seed), device)


def _rehearsing(experiment: Experiment, seed: int) -> tuple[Path, list[Dataset], TrainingSettings]:
    """The model, the sites it was trained on, and how."""
    settings = replace(experiment.training, seed=experiment.training.seed + seed)
    return _model_folder(experiment, f"seed_{seed}"), [experiment.open(spec) for spec in experiment.source], settings


def _train(make: MakeTraining, device: str) -> None:
    make(device, _silent).run()


def _trained(name: str, make: MakeTraining) -> Checkpoint:
    if (model := make("cpu", _silent).found()) is None:
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
        _model_folder(experiment, f"seed_{seed}"),
        torch.device(device),
        resume=True,
        report=report,
    )


def uda_training(experiment: Experiment, job: Job, device: str, report: Report) -> UDATraining:
    """Of the model that learns with all unlabeled images of the job's target; the source model is there."""
    sites = [experiment.open(spec) for spec in experiment.source]
    source = load_checkpoint(_model_folder(experiment, f"seed_{job.seed}"))
    return UDATraining(
        make_uda(job.method, experiment.uda.get(job.method, {})),
        sites,
        [experiment.open_target(job.target)],
        default_architecture(sites[0], experiment.network, experiment.network_options),
        source.preprocessing,
        replace(experiment.training, seed=experiment.training.seed + job.seed),
        _model_folder(experiment, job.model),
        torch.device(device),
        resume=True,
        report=report,
        source_model=source,
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
    checkpoint = load_checkpoint(_model_folder(experiment, job.model)).for_method(job.method)
    checkpoint.model.to(device)
    dataset = _dataset(experiment, job.target, job.seed, checkpoint)
    site = dataset if job.target == VALIDATION else experiment.open_target(job.target)
    return checkpoint, dataset, stream_order(site, np.random.default_rng([experiment.training.seed, job.order]))


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
    dataset = _dataset(bench.experiment, target, bench.experiment.first_seed, checkpoint)
    cases = {dataset[i].name: dataset[i] for i in evenly(len(dataset), bench.experiment.examples)}
    kept = {method_label(job.method, job.rate): _load_predictions(bench, job, cases) for job in first}
    return gather_examples(kept, dataset.classes)


def _dataset(experiment: Experiment, target: str, seed: int, checkpoint: Checkpoint | None) -> Dataset:
    if checkpoint is None:
        return experiment.open_target(target)
    if target != VALIDATION:
        return Mapped(experiment.open_target(target), checkpoint.preprocessing.case)
    sites = [experiment.open(spec) for spec in experiment.source]
    cases = gather(sites)
    _, chosen = split_by_group(cases, experiment.training.validation, experiment.training.seed + seed)
    if not chosen:
        raise DataError("training kept no cases for validation, so there is no in-domain score; give in_domain a site")
    name = "+".join(site.site for site in sites)
    held_out = Cases(tuple(cases[i] for i in chosen), name, sites[0].task, sites[0].classes)
    return Mapped(held_out, checkpoint.preprocessing.case)


def _sample(experiment: Experiment, checkpoint: Checkpoint) -> Tensor:
    """What the network would get first: one image of the first target, or two where it takes batches."""
    dataset = _dataset(experiment, experiment.targets[0], experiment.first_seed, checkpoint)
    images = [dataset[i].image for i in range(1 if checkpoint.task == "segmentation" else min(2, len(dataset)))]
    if (patch := experiment.training.patch) is not None:
        for axis, size in enumerate(patch, start=1):
            images = [image.narrow(axis, 0, min(size, image.shape[axis])) for image in images]
    return torch.stack(images).float()


def _data(experiment: Experiment, models: Mapping[int, Checkpoint]) -> dict[tuple[str, int], str]:
    """Checksums of every data set; only the validation cases differ from seed to seed."""
    sums: dict[tuple[str, int], str] = {}
    for target in {job.target for job in experiment.jobs()}:
        for seed, model in models.items():
            if seed != experiment.first_seed and target != VALIDATION:
                sums[target, seed] = sums[target, experiment.first_seed]
            else:
                sums[target, seed] = checksum(_dataset(experiment, target, seed, model))
    return sums


def _weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Checksums of the network, and by part of what else methods start from."""
    found = {name: fingerprint(*other.modules()) for name, other in checkpoint.others().items()}
    if checkpoint.reconstructions is not None:
        found["atta"] = fingerprint(checkpoint.model, checkpoint.reconstructions.autoencoders)
    return {NETWORK: fingerprint(checkpoint.model), **found}


def _check_sites(experiment: Experiment) -> None:
    """Before anything is trained: every site opens, and all have the same task and classes."""
    specs = (*experiment.source, *(job.target for job in experiment.jobs() if job.target != VALIDATION))
    sites = [experiment.open(spec) for spec in dict.fromkeys(specs)]
    for site in sites[1:]:
        if (site.task, site.classes) != (sites[0].task, sites[0].classes):
            raise DataError(
                f"{site.site} has {site.task} of {', '.join(site.classes)}, "
                f"{sites[0].site} {sites[0].task} of {', '.join(sites[0].classes)}"
            )


def _model_folder(experiment: Experiment, model: str) -> Path:
    return experiment.work_folder / "models" / model


def _file_name(target: str) -> str:
    """Its sites, or the first of them and a checksum: file systems take 255 bytes."""
    name = "-".join(Path(site).name for site in target.split(",")).replace(":", "-")
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{sha256(target.encode()).hexdigest()[:8]}"


def _save_predictions(path: Path, kept: Keep) -> None:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **kept.predictions)
    write_atomically(path, buffer.getvalue())


def _load_predictions(bench: Bench, job: Job, cases: Mapping[str, Case]) -> Keep:
    kept = Keep(cases)
    rows = {row.case: row for row in Results.load(bench.stream_file(job)).streams[0].cases}
    with np.load(bench.example_file(job)) as saved:
        for name, case in cases.items():
            kept.cases[name], kept.rows[name], kept.predictions[name] = case, rows[name], saved[name]
    return kept
