"""What is compared: source × targets × methods × rates × seeds × orders, as jobs, and what decides each one's outcome.

`Experiment` is the configuration, `Job` one stream, `Bench` the experiment once its models are trained and its images
read. `bench.py` runs it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dltta.config import (
    build,
    make_uda,
    open_dataset,
)
from dltta.data.case import Cases, Dataset, Mapped
from dltta.data.sites import SiteFolder, Slices
from dltta.data.streams import SiteStream, split_stream
from dltta.errors import DataError, SettingError
from dltta.evaluation.overview import check_method
from dltta.methods import METHODS, PAPER_METHODS, Method, Optimizer
from dltta.metrics import SCORING
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.io.opening import ModelSource, open_checkpoint
from dltta.recipes import (
    ADAM,
    ALL,
    CONTROLS,
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
from dltta.training import TrainingSettings
from dltta.training.examples import gather, split_by_group
from dltta.training.settings import AUXILIARIES
from dltta.version import __version__

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


def images_of(experiment: Experiment, target: str, seed: int, checkpoint: Checkpoint | None) -> Dataset:
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
    dataset = images_of(experiment, experiment.targets[0], experiment.first_seed, checkpoint)
    images = [dataset[i].image for i in range(1 if checkpoint.task == "segmentation" else min(2, len(dataset)))]
    if (patch := experiment.training.patch) is not None:
        for axis, size in enumerate(patch, start=1):
            images = [image.narrow(axis, 0, min(size, image.shape[axis])) for image in images]
    return torch.stack(images).float()


def check_sites(experiment: Experiment) -> None:
    """Before anything is trained: every site opens, and all have the same task and classes."""
    specs = (*experiment.source, *(job.target for job in experiment.jobs() if job.target != VALIDATION))
    sites = [experiment.open(spec) for spec in dict.fromkeys(specs)]
    for site in sites[1:]:
        if (site.task, site.classes) != (sites[0].task, sites[0].classes):
            raise DataError(
                f"{site.site} has {site.task} of {', '.join(site.classes)}, "
                f"{sites[0].site} {sites[0].task} of {', '.join(sites[0].classes)}"
            )


def model_folder(experiment: Experiment, model: str) -> Path:
    return experiment.work_folder / "models" / model


def _file_name(target: str) -> str:
    """Its sites, or the first of them and a checksum: file systems take 255 bytes."""
    name = "-".join(Path(site).name for site in target.split(",")).replace(":", "-")
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 9]}-{sha256(target.encode()).hexdigest()[:8]}"
