"""What is a stream run with? `paper` and `recommended` are written here once; every command takes a `Recipe`.

Pure data: nothing here imports torch. `config.make_adapter` turns a recipe and a model into an adapter.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from dltta.errors import SettingError, require
from dltta.methods import METHODS, STEPS, Method, Mode, Optimizer, Predict, Step, Task

RECOMMENDED = "recommended"  # on the command line and in results: a method that brings everything else along


class Rule(StrEnum):
    """Learning-rate rules with a name of their own; `package.module:Class` names any other."""

    FIXED = "fixed"
    DYNAMIC = "dynamic"  # Eq. (6)
    EXPONENTIAL = "exponential"
    RELATIVE = "relative"
    ALIGNED = "aligned"  # by the agreement of two gradients
    LAW = "law"  # each parameter its own, from accumulated gradients
    PALM = "palm"  # each parameter its own, from its sensitivity


NO_RATE = "none"  # of methods without a loss
WITHOUT_MEMORY = (Rule.FIXED, Rule.ALIGNED, Rule.LAW, Rule.PALM, NO_RATE)


class UDAName(StrEnum):
    """Methods that learn with the target's images, before the stream."""

    STYLE = "uda-st"
    CYCLEGAN = "cyclegan"
    UDAS = "udas"
    SWAV = "uda-swav"


UDA = tuple(UDAName)
WITHOUT_RATE = (*(method for method in Method if not method.facts.loss), RECOMMENDED, *UDA)
ALL = "all"  # of a comparison: every method that the model supports
MATCHED = "matched"  # in a comparison: fixed at the mean rate of the dynamic stream
SHUFFLED = "shuffled"  # in a comparison: the rates of the dynamic stream in random order
CONTROLS = (MATCHED, SHUFFLED)  # rates that need another stream to have run
ADAM = "adam"  # as a rate: a fixed one with Adam, as Tent's authors take it (adam:1e-3)


class Statistics(StrEnum):
    """What batch normalization normalizes by."""

    BATCH = "batch"
    SHRINKAGE = "shrinkage"
    BLENDED = "blended"
    RUNNING = "running"


class Effort(StrEnum):
    """How many passes of the network `recommended` may take for an image: 5, or 2; its signals take about one more."""

    DEFAULT = "default"
    LOW = "low"


class Ready(StrEnum):
    """When the memory begins to be asked."""

    FULL = "full"
    NEIGHBORS = "neighbors"


class Distance(StrEnum):
    """By what the memory finds neighbors."""

    L2 = "l2"
    COSINE = "cosine"


class Positions(StrEnum):
    """How Eq. (4) treats the positions of an image."""

    MEAN = "mean"
    SUM = "sum"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a stream of images does to a model; None stands for the usual value for the task.

    That is the paper's, segmentation / classification: rate 1e-3 / 3e-4, batches of 1 / 200, memory of 20 / 4 batches,
    8 / 12 neighbors, one step, recall from a full memory by L2 distance, plain gradient descent (Eq. 2). Methods that
    the paper does not compare take rate, batch, optimizer and the pass that predicts from their authors (`methods.py`).

    `method` and `rate` are names of this module, or `package.module:Class`. `statistics` None is `shrinkage` for a
    calibrated model and `batch` for any other. `name` says where the values come from: `paper`, `recommended`, `own`.
    """

    method: str = Method.TENT
    rate: str = Rule.DYNAMIC
    alpha: float | None = None  # the rate's scale and initial value
    statistics: Statistics | None = Statistics.BATCH
    optimizer: Optimizer | None = None
    momentum: float | None = None  # of SGD
    betas: tuple[float, float] | None = None  # of Adam
    predict: Predict | None = None  # from the pass before or after the update
    steps: int | None = None  # gradient steps per batch
    mode: Mode | None = None
    batch_size: int | None = None
    batches_kept: int | None = None  # the memory's capacity, in batches
    neighbors: int | None = None
    ready: Ready = Ready.FULL
    distance: Distance = Distance.L2
    pool: int | None = None  # positions per axis of the memory's keys; None keeps all, for images of one size
    positions: Positions = Positions.MEAN
    prefill: bool = False  # the memory begins with the pairs of source images that the checkpoint keeps
    guard: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method: keyword arguments of its class
    effort: Effort = Effort.DEFAULT  # of `recommended`
    name: str = "own"

    def __post_init__(self) -> None:
        for key, kind in _CHOICES.items():
            if (value := getattr(self, key)) is not None:
                object.__setattr__(self, key, choice(key, value, kind))
        for key in ("steps", "batch_size", "batches_kept", "neighbors", "pool"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise SettingError(f"{key} must be at least 1, got {value}")
        if self.betas is not None:
            object.__setattr__(self, "betas", (float(self.betas[0]), float(self.betas[1])))  # a list in JSON
        if self.method in WITHOUT_RATE:
            object.__setattr__(self, "rate", NO_RATE)

    def changed(self, **values: Any) -> "Recipe":
        """With other values where any are given (None is not); it is then nobody's recipe but your own."""
        given = {key: value for key, value in values.items() if value is not None}
        return replace(self, **given, name="own") if given else self

    def resolved(self, task: Task, *, calibrated: bool) -> "Recipe":
        """With a value for everything, as a model of this task runs it; what the journal records."""
        step = usual_step(self.method, task)
        usual = {**_PAPER[task], **_of_step(step, self.optimizer), **_of_method(self.method)}
        filled = {key: getattr(self, key) if getattr(self, key) is not None else usual[key] for key in usual}
        if self.batches_kept is None:  # the memory must hold the neighbors, however small the batches
            filled["batches_kept"] = max(usual["batches_kept"], math.ceil(filled["neighbors"] / filled["batch_size"]))
        statistics = self.statistics or (Statistics.SHRINKAGE if calibrated else Statistics.BATCH)
        return replace(self, **filled, statistics=statistics)

    @property
    def calibration_matters(self) -> bool:
        """Whether a stream measures with the model's calibration."""
        measured = self.rate == Rule.RELATIVE or self.guard or self.statistics in (None, Statistics.SHRINKAGE)
        known = METHODS.get(self.method)
        measured = measured or (known is not None and known.facts.calibration)
        measured = measured or self.method == RECOMMENDED
        return measured and self.method not in (Method.SOURCE, *UDA)

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["betas"] = None if self.betas is None else list(self.betas)
        return {key: str(value) if isinstance(value, StrEnum) else value for key, value in values.items()}

    def deciding(self) -> dict[str, Any]:
        """What decides a stream's outcome: only the batch without adaptation, no memory with a fixed rate."""
        values = self.as_json()
        del values["name"]
        if self.method in (Method.SOURCE, *UDA):
            return {"method": values["method"], "batch_size": values["batch_size"]}
        if self.method == RECOMMENDED:
            return {key: values[key] for key in ("method", "batch_size", "mode", "effort")}
        if self.method in WITHOUT_RATE and not self.guard:
            return {key: values[key] for key in ("method", "batch_size", "statistics", "mode", "settings")}
        if self.rate in WITHOUT_MEMORY:
            for key in ("batches_kept", "neighbors", "ready", "distance", "pool", "positions", "prefill"):
                del values[key]
        return values


def paper(method: str = Method.TENT, rate: str = Rule.DYNAMIC) -> Recipe:
    """The paper's settings (Sec. IV), to the letter, for any of its methods; `rate` fixed is its baseline.

    Other methods get the settings of their authors, where `None` stands.
    """
    return Recipe(method, rate, name="paper")


def recommended() -> Recipe:
    """What `dltta adapt` runs unless told otherwise: for each image the prediction that rehearsal expects to be best.

    Candidates are the source model, batch normalization by other statistics, and mixtures of these. Which are computed,
    what to expect of each and by what margins to choose was found where labels exist, at the source site
    (docs/rehearsal.md). A model that was not rehearsed with runs an entropy-weighted mixture of them.
    """
    return Recipe(RECOMMENDED, NO_RATE, name=RECOMMENDED)


def recipe_for(method: str, rate: str | None = None, **changes: Any) -> Recipe:
    """The recipe that a method's name stands for; `recommended` brings its own rate, rule by rule.

    Methods that the paper does not compare have the rate of their authors, most often fixed, unless another is named.
    A rate may carry its α: `fixed:1e-2`. Changes that are None are not made; `recommended` takes batch size, mode
    and effort only.
    """
    given = {key: value for key, value in changes.items() if value is not None}
    if method == RECOMMENDED:
        refused = [*(["rate"] if rate is not None else []), *sorted(set(given) - {"batch_size", "mode", "effort"})]
        if refused:
            option = refused[0].replace("_", "-")
            raise SettingError(f"recommended chooses its own {option}; name a method to set it, such as --method tent")
        return replace(recommended(), **given)
    if "effort" in given:
        raise SettingError(f"effort is for recommended; {method} costs what it costs")
    rule, alpha = split_rate(rate) if rate is not None else (usual_rate(method), None)
    if alpha is not None:
        given["alpha"] = alpha
    if rule == ADAM:
        rule, given["optimizer"] = Rule.FIXED, Optimizer.ADAM
    return paper(check_name("method", method, (*Method, *UDA, RECOMMENDED)), rule).changed(**given)


def usual_rate(method: str) -> str:
    """The paper's dynamic rate, or for a method that the paper does not compare that of its authors."""
    known = METHODS.get(method)
    return str(Rule.DYNAMIC) if known is None or known.facts.of_paper else known.facts.rate


def usual_step(method: str, task: Task) -> Step:
    """How a method's authors take a step in a task; the paper's for its own methods and those from outside."""
    known = METHODS.get(method)
    return STEPS[task] if known is None else known.facts.step(task)


def _of_method(method: str) -> dict[str, Any]:
    """What one image leaves for the next, and which pass predicts, as a method's authors have it."""
    known = METHODS.get(method)
    if known is None:
        return {"mode": Mode.CONTINUAL, "predict": Predict.AFTER}
    return {"mode": known.facts.mode, "predict": known.facts.predict}


def _of_step(step: Step, chosen: Optimizer | None) -> dict[str, Any]:
    """The values of a step; momentum and betas go with the optimizer that they were chosen for."""
    plain = Step(step.alpha, step.batch_size)
    tuned = step if chosen in (None, step.optimizer) else plain
    return {
        "alpha": step.alpha, "batch_size": step.batch_size, "optimizer": step.optimizer, "momentum": tuned.momentum,
        "betas": tuned.betas, "steps": step.updates,
    }  # fmt: skip


def split_rate(rate: str) -> tuple[str, float | None]:
    """`fixed:1e-2` is the rule and its α; without one the recipe's α holds. `package.module:Class` is a rule."""
    name, colon, alpha = rate.rpartition(":") if ":" in rate else (rate, "", "")
    known = [str(rule) for rule in (*Rule, ADAM, *CONTROLS)]
    if colon and name not in known and alpha.isidentifier():
        return rate, None
    require("rate", name, known)
    try:
        return name, float(alpha) if colon else None
    except ValueError as error:
        raise SettingError(f"{rate!r} is not a rate; write a rule and its α, such as fixed:1e-2") from error


def check_name(what: str, found: str, known: Iterable[str]) -> str:
    """The name if it is known or names a class of one's own, `package.module:Class`."""
    if ":" not in found:
        require(what, found, [str(name) for name in known])
    return found


def choice(field: str, value: Any, kind: type[StrEnum]) -> StrEnum:
    """The value as one of a kind of choices."""
    try:
        return kind(value)
    except ValueError as error:
        raise SettingError(f"{field} must be one of {', '.join(kind)}, got {value!r}") from error


_CHOICES: dict[str, type[StrEnum]] = {
    "statistics": Statistics, "optimizer": Optimizer, "mode": Mode, "ready": Ready, "distance": Distance,
    "positions": Positions, "predict": Predict, "effort": Effort,
}  # fmt: skip
_PAPER: dict[Task, dict[str, Any]] = {  # Sec. IV
    "segmentation": {"batches_kept": 20, "neighbors": 8},
    "classification": {"batches_kept": 4, "neighbors": 12},
}
