"""The boundary: names become objects here and nowhere else, and a misspelled one is answered with the right one."""

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import torch

from dltta.core.adapter import Adapter, Layout, Mode
from dltta.core.discrepancy import Positions
from dltta.core.memory import Distance, MemoryBank, Ready
from dltta.core.objectives import ATTA, PTBN, TTT, Objective, Preparation, Source, Tent
from dltta.core.rates import Exponential, Fixed, LearningRate, Proportional, Relative
from dltta.data.case import Dataset, Task
from dltta.data.datasets.camelyon17 import Camelyon17
from dltta.data.datasets.oct import CIRRUS_SPACING, OCT
from dltta.data.datasets.prostate import Prostate
from dltta.data.phantom import phantom
from dltta.data.preprocessing import Preprocessing
from dltta.data.sites import SiteFolder, Slices, open_site
from dltta.errors import DataError, SettingError
from dltta.models.calibration import Calibration
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.io.opened import OpenedModel
from dltta.models.nets.architecture import BUILDERS, Architecture
from dltta.models.normalization import BATCH_STATISTICS, Statistics
from dltta.models.statistics import Blended, Running, Shrinkage
from dltta.quality.guard import Guard, Limits, SourceGuard
from dltta.training.uda import Method
from dltta.training.uda.cyclegan import CycleGAN
from dltta.training.uda.style import StyleTransfer
from dltta.training.uda.swav import SwAV
from dltta.training.uda.udas import UDAS

METHODS = ("source", "ptbn", "ttt", "tent", "atta")
UDA: dict[str, type[Method]] = {  # these learn with the target's images
    "uda-st": StyleTransfer,
    "cyclegan": CycleGAN,
    "udas": UDAS,
    "uda-swav": SwAV,
}
WITHOUT_RATE = ("source", "ptbn", *UDA)
RATES = ("fixed", "dynamic", "exponential", "relative")
RECOMMENDED = "recommended"  # as a rate: relative, with shrinkage statistics and guard; what `dltta adapt` does
MATCHED = "matched"  # as a rate in a comparison: fixed at the mean rate of the dynamic stream
STATISTICS = ("batch", "shrinkage", "blended", "running")
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
Built = TypeVar("Built")


@dataclass(frozen=True)
class AdaptationSettings:
    """How a stream is adapted. None stands for the paper's value for the task.

    The paper, segmentation / classification: rate 1e-3 / 3e-4, batches of 1 / 200, memory of 20 / 4 batches,
    8 / 12 neighbors, one step, recall from a full memory by L2 distance, plain gradient descent (Eq. 2).
    """

    alpha: float | None = None
    batch_size: int | None = None
    batches_kept: int | None = None
    neighbors: int | None = None
    steps: int = 1
    mode: Mode = "continual"
    optimizer: Literal["sgd", "adam"] = "sgd"
    ready: Ready = "full"
    distance: Distance = "l2"
    pool: int | None = None
    positions: Positions = "mean"  # how Eq. (4) treats the positions of an image
    statistics: Literal["batch", "shrinkage", "blended", "running"] = "batch"
    guard: bool = False
    prefill: bool = False  # the memory begins with the pairs of source images that the checkpoint keeps

    def for_task(self, task: Task) -> "AdaptationSettings":
        """With the paper's values where none were given."""
        paper = PAPER[task]
        given = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return AdaptationSettings(**{k: getattr(paper, k) if v is None else v for k, v in given.items()})

    def deciding(self, method: str, rate: str) -> dict[str, Any]:
        """The settings that decide a stream's outcome: only the batch without a loss, no memory with a fixed rate."""
        memory = {"batches_kept", "neighbors", "ready", "distance", "pool", "positions", "prefill"}
        ignored = memory if rate.partition(":")[0] == "fixed" else set()
        alone = {name: ["batch_size"] for name in WITHOUT_RATE} | {"ptbn": ["batch_size", "statistics"]}
        names = alone[method] if method in alone else [entry.name for entry in fields(self)]
        return {name: getattr(self, name) for name in names if name not in ignored}

    def measures(self, rate: str) -> bool:
        """Whether a stream with this rate measures with the network's calibration."""
        return rate.partition(":")[0] in ("relative", RECOMMENDED) or self.guard or self.statistics == "shrinkage"

    def memory(self) -> MemoryBank:
        """A new bank; settings must be complete (`for_task`)."""
        if self.batches_kept is None or self.batch_size is None or self.neighbors is None:
            raise SettingError("settings are not complete; call for_task first")
        return MemoryBank(
            capacity=self.batches_kept * self.batch_size,
            neighbors=self.neighbors,
            ready=self.ready,
            distance=self.distance,
            pool=self.pool,
            positions=self.positions,
        )


# of the guard, by source images with another appearance (docs/guard.md)
LIMITS: dict[str, dict[str, float]] = {"atta": {"overrule": 1.0}}

PAPER: dict[Task, AdaptationSettings] = {
    "segmentation": AdaptationSettings(alpha=1e-3, batch_size=1, batches_kept=20, neighbors=8),
    "classification": AdaptationSettings(alpha=3e-4, batch_size=200, batches_kept=4, neighbors=12),
}


@dataclass(frozen=True)
class TrainConfig:
    """A training as a TOML file: `dltta train CONFIG`. `uda` with `targets` and `uda_settings` learns with both."""

    sites: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    uda: str | None = None
    uda_settings: Mapping[str, Any] = field(default_factory=dict)
    output: str | None = None
    network: str | None = None
    network_options: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, ...] | None = None
    training: Mapping[str, Any] = field(default_factory=dict)


def make_statistics(name: str, calibration: Calibration | None, batch_size: int = 1) -> Statistics:
    """The normalization statistics of that name; `shrinkage` needs a calibrated network."""
    require("statistics", name, STATISTICS)
    if name == "shrinkage":
        if calibration is None:
            raise SettingError(
                "shrinkage statistics need a calibrated model; train it again, or use batch statistics"
            )
        return Shrinkage(calibration.moments(batch_size))
    plain: dict[str, Statistics] = {"batch": BATCH_STATISTICS, "blended": Blended(), "running": Running()}
    return plain[name]


def make_guard(calibration: Calibration | None, method: str) -> Guard:
    """With limits from source images where there are any."""
    if calibration is None:
        return SourceGuard()
    return SourceGuard(Limits.calibrated(calibration.predictions, **LIMITS.get(method, {})), calibration)


def make_objective(
    method: str, checkpoint: Checkpoint | OpenedModel, statistics: Statistics = BATCH_STATISTICS
) -> Objective | Preparation:
    """The method of that name for this network; says how to train what it lacks."""
    require("method", method, (*METHODS, *UDA))
    if method in UDA:
        return Source()  # all adaptation was in training
    if method == "ttt":
        part = checkpoint.rotation
        if part is None:
            raise SettingError("this model has no rotation head, which TTT needs; train it with `--with ttt`")
        return TTT(part.head, part.layer, part.shared, statistics)
    if method == "atta":
        parts = checkpoint.reconstructions
        if parts is None:
            raise SettingError("this model has no auto-encoders, which ATTA needs; train it with `--with atta`")
        return ATTA(parts.autoencoders, parts.levels, parts.channels, statistics=statistics)
    plain: dict[str, Objective | Preparation] = {
        "source": Source(),
        "ptbn": PTBN(statistics),
        "tent": Tent(statistics),
    }
    return plain[method]


def make_uda(name: str, settings: Mapping[str, Any] = {}) -> Method:
    """The method of that name, with these of its settings and its defaults for the others."""
    require("method that learns with target images", name, UDA)
    return build(UDA[name], settings, f"[uda.{name}]")


def make_rate(rate: str, alpha: float, calibration: Calibration | None = None) -> LearningRate:
    """`fixed`, `dynamic` (Eq. 6), `exponential` or `relative`, with alpha as scale and initial value."""
    require("rate", rate, RATES)
    if rate == "relative":
        return Relative(alpha, level=None if calibration is None else calibration.predictions.get("discrepancy"))
    rules: dict[str, LearningRate] = {
        "fixed": Fixed(alpha),
        "dynamic": Proportional(alpha),
        "exponential": Exponential(alpha),
    }
    return rules[rate]


def _make_memory(checkpoint: Checkpoint | OpenedModel, settings: AdaptationSettings) -> MemoryBank:
    """Empty, or filled with what source images gave."""
    memory = settings.memory()
    if settings.prefill:
        trained = checkpoint.checkpoint if isinstance(checkpoint, OpenedModel) else checkpoint
        pairs = None if trained is None else trained.pairs
        if pairs is None:
            raise SettingError("this model keeps no source pairs to begin with; train it with `--with memory`")
        memory.layer = pairs.layer
        memory.push(pairs.features.float(), pairs.predictions.float())
    return memory


def split_rate(rate: str) -> tuple[str, float | None]:
    """`fixed:1e-2` is the rule and its α; without one the settings' α holds."""
    name, colon, alpha = rate.partition(":")
    require("rate", name, (*RATES, RECOMMENDED, MATCHED))
    try:
        return name, float(alpha) if colon else None
    except ValueError as error:
        raise SettingError(f"{rate!r} is not a rate; write a rule and its α, such as fixed:1e-2") from error


def make_adapter(checkpoint: Checkpoint | OpenedModel, method: str, rate: str, settings: AdaptationSettings) -> Adapter:
    """The adapter that one stream is run with; `rate` is as `split_rate` reads it, or "none" without a loss."""
    rule_name, alpha = ("none", None) if rate == "none" else split_rate(rate)
    if rule_name == RECOMMENDED:
        settings = replace(settings, statistics="shrinkage", guard=True, ready="neighbors")
        rule_name = "relative"
    settings = settings.for_task(checkpoint.task)
    calibration = checkpoint.calibration
    adapting = method not in ("source", *UDA)
    statistics = settings.statistics if adapting else "batch"
    objective = make_objective(method, checkpoint, make_statistics(statistics, calibration, settings.batch_size or 1))
    guard = make_guard(calibration, method) if settings.guard and adapting else None
    if method in WITHOUT_RATE:
        layout: Layout = "given" if method == "source" else "auto"  # the network exactly as it was trained
        return Adapter(checkpoint.model, objective, guard=guard, layout=layout)
    rule = make_rate(rule_name, alpha if alpha is not None else settings.alpha or 0.0, calibration)
    return Adapter(
        checkpoint.model,
        objective,
        rule,
        memory=_make_memory(checkpoint, settings) if getattr(rule, "needs_memory", False) else None,
        optimizer=OPTIMIZERS[settings.optimizer],
        steps=settings.steps,
        mode=settings.mode,
        guard=guard,
    )


def open_dataset(spec: str) -> Dataset:
    """A site: a folder of one's own, synthetic cases, or a part of one of the paper's data sets in a folder DIR.

    - `DIR`: see `open_site`; `slices:DIR` for its volumes slice by slice
    - `phantom:TASK:SITE:COUNT[:SEED]`, such as `phantom:oct:cirrus:48:1`
    - `oct:spectralis[:SPLIT]@DIR` with train, val, train+val or test; `oct:cirrus@DIR` for prepared slices and
      `oct:cirrus:acquired@DIR` for slices still to be resampled, flattened and cropped
    - `camelyon17:PART@DIR` with center_0 to center_4, train, id_val, val or test
    - `prostate:SITE@DIR` with A to F, or RUNMC, BMC, I2CVB, UCL, BIDMC or HK
    """
    name, _, part = spec.partition(":")
    if name == "phantom":
        return _open_phantom(spec)
    if name in _PUBLISHED and part:
        part, _, folder = part.partition("@")
        if not (part and folder):
            raise SettingError(f"{spec!r} does not say which part of which folder; write {name}:PART@DIR")
        return _PUBLISHED[name](part, folder)
    folder = part if name == "slices" else spec
    if not Path(folder).is_dir():
        raise DataError(f"there is no folder {folder}; give a site folder, or phantom:TASK:SITE:COUNT[:SEED]")
    return open_site(folder, slices=name == "slices")


def open_target(spec: str) -> Dataset:
    """A site whose labels are not needed: as `open_dataset`, or the test cases of a folder that has no others."""
    folder = Path(spec)
    only_tests = (folder / "imagesTs").is_dir() and not any((folder / name).is_dir() for name in ("imagesTr", "images"))
    return open_site(folder, split="test") if only_tests else open_dataset(spec)


def _open_phantom(spec: str) -> Dataset:
    parts = spec.split(":")[1:]
    if len(parts) not in (3, 4) or not all(part.isdigit() for part in parts[2:]):
        raise SettingError(f"{spec!r} is not phantom:TASK:SITE:COUNT[:SEED], such as phantom:oct:cirrus:48:1")
    task, site, count, *seed = parts
    return phantom(task, site, int(count), seed=int(seed[0]) if seed else 0)  # type: ignore[arg-type]


def _open_oct(part: str, folder: str) -> Dataset:
    site, _, split = part.partition(":")
    if (site, split) == ("cirrus", "acquired"):
        return OCT(folder, site, spacing=CIRRUS_SPACING)
    return OCT(folder, site, split=split or "all")  # type: ignore[arg-type]


_PUBLISHED: dict[str, Callable[[str, str], Dataset]] = {
    "oct": _open_oct,
    "camelyon17": lambda part, folder: Camelyon17(folder, part),
    "prostate": lambda part, folder: Prostate(folder, part),
}


def default_preprocessing(dataset: Dataset, size: tuple[int, ...] | None = None) -> Preprocessing:
    """As nnU-Net chooses: 8- and 16-bit pictures are scaled by their type's maximum, volumes get z-scores.

    Synthetic images come ready. For pictures the maximum is 255 unless the first image has larger values.
    """
    folder = dataset.volumes if isinstance(dataset, Slices) else dataset
    if not isinstance(folder, SiteFolder):
        return Preprocessing(size=size)
    if folder.entries and folder.entries[0].files[0].name.endswith((".nii", ".nii.gz")):
        return Preprocessing("zscore", size=size)
    brightest = float(dataset[0].image.max())
    return Preprocessing("scale", 255.0 if brightest <= 255 else 65535.0, size)


def default_architecture(dataset: Dataset, name: str | None = None, options: Mapping[str, Any] = {}) -> Architecture:
    """The paper's network for the task and the images' dimensions, or the one that is named."""
    case = dataset[0]
    name = name or ("unet" if dataset.task == "segmentation" else "densenet121")
    require("network", name, BUILDERS)
    return Architecture(name, case.image.ndim - 1, len(case.image), len(dataset.classes), dict(options))


def read_toml(path: Path) -> dict[str, Any]:
    """A configuration file, or one line that says what is wrong with it."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not TOML: {error}") from error


def build(kind: type[Built], table: Mapping[str, Any], where: str) -> Built:
    """A dataclass from a table: unknown and missing keys fail with the right spelling, lists become tuples."""
    known = {entry.name.rstrip("_"): entry for entry in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        require(f"key in {where}", key, known)
    for key, entry in known.items():
        if key not in table and entry.default is MISSING and entry.default_factory is MISSING:
            raise SettingError(f"{where} lacks the key {key!r}")
    values = {known[key].name: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
    for key, value in table.items():
        _check_type(f"{key} in {where}", value, known[key].type)
    return kind(**values)


def require(what: str, found: str, known: Iterable[str]) -> None:
    """Raise with the nearest right spelling unless `found` is known."""
    known = list(known)
    if found in known:
        return
    close = difflib.get_close_matches(found, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    raise SettingError(f"there is no {what} {found!r}; {hint}")


def _check_type(what: str, value: object, kind: Any) -> None:
    if _accepts(kind, value):
        return
    if get_origin(kind) is Literal:
        raise SettingError(f"{what} must be one of {', '.join(get_args(kind))}, got {value!r}")
    raise SettingError(f"{what} must be {getattr(kind, '__name__', kind)}, got {value!r}")


def _accepts(kind: Any, value: object) -> bool:
    """Whether a value from TOML fits an annotation; a whole number is fine where a real one is asked."""
    inner = get_args(kind)
    match get_origin(kind):
        case None:
            wanted = {float: (int, float)}.get(kind, kind)
            return isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))
        case origin if origin is Literal:
            return value in inner
        case origin if origin is UnionType or origin is Union:
            return any(_accepts(each, value) for each in inner)
        case origin if origin is tuple:
            return isinstance(value, list | tuple) and all(_accepts(inner[0], each) for each in value)
        case _:
            return isinstance(value, Mapping)
