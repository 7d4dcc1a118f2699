"""The boundary: names become objects here and nowhere else; an error about a misspelled one says the right one."""

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, overload

import torch

from dltta.core.adapted import OptimizerFactory
from dltta.core.adapter import Adapter
from dltta.core.adapter import Mode as AdapterMode
from dltta.core.aligned import Aligned
from dltta.core.ensemble import AnyAdapter, Ensemble
from dltta.core.layer_rates import LAW, PALM
from dltta.core.memory import MemoryBank
from dltta.core.objectives import Objective, Preparation, Source
from dltta.core.rates import AnyRate, Exponential, Fixed, Proportional, Relative
from dltta.data.case import Dataset
from dltta.data.datasets.camelyon17 import Camelyon17
from dltta.data.datasets.oct import CIRRUS_SPACING, OCT
from dltta.data.datasets.prostate import Prostate
from dltta.data.phantom import phantom
from dltta.data.preprocessing import Preprocessing
from dltta.data.sites import SiteFolder, Slices, open_site
from dltta.data.streams import SiteStream, split_stream
from dltta.errors import DataError, SettingError, require
from dltta.methods import METHODS, Method, Mode, Optimizer, Predict
from dltta.models.calibration import Calibration
from dltta.models.folds import Folds
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.io.factories import arguments, import_object, required_arguments
from dltta.models.io.opened import OpenedModel
from dltta.models.nets.architecture import BUILDERS, Architecture
from dltta.models.normalization import BATCH_STATISTICS, NormalizationStatistics
from dltta.models.quantiles import SourceValues
from dltta.models.statistics import Blended, Running, Shrinkage
from dltta.quality.choosing import ChoosingAdapter, Rehearsed, Yardstick
from dltta.quality.guard import Guard, Limits, SourceGuard
from dltta.quality.guarded import GuardedAdapter
from dltta.quality.measures import Usual
from dltta.recipes import RECOMMENDED, Distance, Positions, Ready, Recipe, Rule, Statistics, UDAName
from dltta.training.uda import UDAMethod
from dltta.training.uda.cyclegan import CycleGAN
from dltta.training.uda.style import StyleTransfer
from dltta.training.uda.swav import SwAV
from dltta.training.uda.udas import UDAS

UDA: dict[str, type[UDAMethod]] = {
    UDAName.STYLE: StyleTransfer,
    UDAName.CYCLEGAN: CycleGAN,
    UDAName.UDAS: UDAS,
    UDAName.SWAV: SwAV,
}
# of the guard, by source images with another appearance (docs/guard.md)
LIMITS: dict[str, dict[str, float]] = {Method.ATTA: {"consistency_override": 1.0}}
Built = TypeVar("Built")


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


@overload
def make_adapter(model: Checkpoint, recipe: Recipe) -> Adapter: ...
@overload
def make_adapter(model: OpenedModel, recipe: Recipe) -> AnyAdapter: ...
def make_adapter(model: Checkpoint | OpenedModel, recipe: Recipe) -> AnyAdapter:
    """The adapter that runs this recipe on this model; `Recipe.resolved` fills what the recipe leaves to the paper.

    It starts from the network that the method starts from (`Checkpoint.for_method`). Of several networks that predict
    together each has an adapter; but what is expected of a prediction was rehearsed for all of them together, so then
    they are one network.
    """
    model = model.for_method(recipe.method)
    together = recipe.method == RECOMMENDED and model.rehearsal is not None
    if isinstance(model, OpenedModel) and isinstance(model.model, Folds) and not together:
        return Ensemble([_make_single(replace(model, model=fold), recipe) for fold in model.model.folds])
    return _make_single(model, recipe)


def _make_single(model: Checkpoint | OpenedModel, recipe: Recipe) -> Adapter:
    recipe = recipe.resolved(model.task, calibrated=model.calibration is not None)
    if recipe.method == RECOMMENDED:
        return make_choosing(model, recipe)
    if recipe.method == Method.SOURCE:  # exactly
        return Adapter(model.model, make_objective(recipe.method, model, settings=recipe.settings), layout="given")
    if recipe.method in UDA:  # adapted in training
        return Adapter(model.model, Source())
    objective = make_objective(
        recipe.method, model, make_statistics(recipe, model.calibration), settings=recipe.settings
    )
    settings: dict[str, Any] = {"mode": str(recipe.mode)}
    if isinstance(objective, Objective):
        rate = make_rate(recipe.rate, recipe.alpha or 0.0, model.calibration)
        memory = _make_memory(model, recipe) if getattr(rate, "needs_memory", False) else None
        settings |= {"rate": rate, "memory": memory, "optimizer": make_optimizer(recipe), "steps": recipe.steps or 1}
        settings |= {"predict": str(recipe.predict or Predict.AFTER)}
    if not recipe.guard:
        return Adapter(model.model, objective, **settings)
    return GuardedAdapter(model.model, objective, guard=make_guard(model.calibration, recipe.method), **settings)


def make_choosing(model: Checkpoint | OpenedModel, recipe: Recipe) -> ChoosingAdapter:
    """The adapter of the recommended recipe, resolved; with what the model rehearsed at the nearest batch size."""
    batch_size = recipe.batch_size or 1
    mode: AdapterMode = "continual" if recipe.mode == Mode.CONTINUAL else "image-specific"
    saved = model.rehearsal
    if saved is None:
        return ChoosingAdapter(model.model, batch_size=batch_size, mode=mode)
    nearest = nearest_rehearsed(saved, batch_size)
    values = SourceValues(tuple(map(tuple, saved["values"]["mean"])), tuple(saved["values"]["spread"]))
    yardstick = Yardstick(Usual.from_json(saved["usual"]), values, model.calibration)
    rehearsed = Rehearsed.from_json(saved["batch_sizes"][nearest][recipe.effort.value])
    return ChoosingAdapter(model.model, rehearsed, yardstick, batch_size=batch_size, mode=mode)


def nearest_rehearsed(rehearsal: Mapping[str, Any], batch_size: int) -> str:
    """The batch size, as a key of the rehearsal, whose findings a stream in batches of this size runs with."""
    sizes: Iterable[str] = rehearsal["batch_sizes"]
    return min(sizes, key=lambda size: abs(math.log(int(size)) - math.log(batch_size)))


def make_statistics(recipe: Recipe, calibration: Calibration | None) -> NormalizationStatistics:
    """The normalization statistics of a resolved recipe; `shrinkage` needs a calibrated model."""
    if recipe.statistics == Statistics.SHRINKAGE:
        if calibration is None:
            raise SettingError("shrinkage statistics need a calibrated model; train it again, or use batch statistics")
        return Shrinkage(calibration.moments(recipe.batch_size or 1))
    plain: dict[str | None, NormalizationStatistics] = {
        Statistics.BATCH: BATCH_STATISTICS,
        Statistics.BLENDED: Blended(),
        Statistics.RUNNING: Running(),
    }
    return plain[recipe.statistics]


def make_guard(calibration: Calibration | None, method: str) -> Guard:
    """With limits from source images where there are any."""
    if calibration is None:
        return SourceGuard()
    return SourceGuard(Limits.calibrated(calibration.predictions, **LIMITS.get(method, {})), calibration)


def make_optimizer(recipe: Recipe) -> OptimizerFactory:
    """The optimizer of a resolved recipe; its learning rate is the recipe's rate."""
    if recipe.optimizer == Optimizer.ADAM:
        return partial(torch.optim.Adam, betas=recipe.betas or (0.9, 0.999))
    return partial(torch.optim.SGD, momentum=recipe.momentum or 0.0)


def make_objective(
    method: str,
    model: Checkpoint | OpenedModel,
    statistics: NormalizationStatistics = BATCH_STATISTICS,
    *,
    settings: Mapping[str, Any] = {},
) -> Objective | Preparation:
    """The method of that name for this model, or an object of the class `package.module:Class`.

    `settings` are keyword arguments of its class.
    """
    offered: dict[str, Any] = {"statistics": statistics, **_described(model)}
    if model.calibration is not None and model.calibration.fisher:
        offered["fisher"] = model.calibration.fisher
    if ":" not in method:
        require("method", method, [str(name) for name in Method])
        facts = METHODS[method].facts
        if not facts.statistics and statistics != BATCH_STATISTICS:
            raise SettingError(f"{method} has normalization statistics of its own; leave --statistics out")
        if not facts.statistics:
            del offered["statistics"]
        offered |= {} if facts.part is None else _PARTS[facts.part](model)
        return cast(Objective | Preparation, _own(facts.path, offered, settings, name=method))
    made = _own(method, offered, settings)
    if not isinstance(made, Preparation):
        raise SettingError(f"{method} has no prepare(model), which every method needs; see docs/write-objective.md")
    return made


def _described(model: Checkpoint | OpenedModel) -> dict[str, Any]:
    """What a method may want to know about a model's input."""
    about = model.architecture if isinstance(model, Checkpoint) else model
    return {"channels": about.in_channels, "spatial_dims": about.spatial_dims}


def _rotation(model: Checkpoint | OpenedModel) -> dict[str, Any]:
    part = model.rotation
    if part is None:
        raise SettingError("this network has no rotation head, which TTT needs; take model.for_method('ttt')")
    return {"head": part.head, "layer": part.layer, "shared": part.shared}


def _contrast(model: Checkpoint | OpenedModel) -> dict[str, Any]:
    part = model.contrast
    if part is None or part.features is None or part.projections is None:
        raise SettingError("this network has no projection head, which TTT++ needs; take model.for_method('ttt++')")
    return {
        "head": part.head, "layer": part.layer, "shared": part.shared, "features": part.features,
        "projections": part.projections,
    }  # fmt: skip


def _normalizer(model: Checkpoint | OpenedModel) -> dict[str, Any]:
    if model.denoiser is None:
        raise SettingError("this network has no denoiser, which DTTA needs; take model.for_method('dtta')")
    return {"denoiser": model.denoiser}


def _reconstructions(model: Checkpoint | OpenedModel) -> dict[str, Any]:
    parts = model.reconstructions
    if parts is None:
        raise SettingError("this model has no auto-encoders, which ATTA needs; train it with `--with atta`")
    return {"autoencoders": parts.autoencoders, "levels": parts.levels, "channels": parts.channels}


_PARTS: dict[str, Callable[[Checkpoint | OpenedModel], dict[str, Any]]] = {
    "ttt": _rotation,
    "ttt++": _contrast,
    "dtta": _normalizer,
    "atta": _reconstructions,
}


def make_rate(rate: str, alpha: float, calibration: Calibration | None = None) -> AnyRate:
    """The rule of that name with α as scale and initial value, or an object of the class `package.module:Class`."""
    if ":" in rate:
        made: AnyRate = _own(rate, {"alpha": alpha})
        if not callable(made):
            raise SettingError(f"{rate} gives a {type(made).__name__}, which cannot be called; see docs/write-rate.md")
        return made
    require("rate", rate, [str(name) for name in Rule])
    if rate == Rule.RELATIVE:
        return Relative(alpha, level=None if calibration is None else calibration.predictions.get("discrepancy"))
    rules: dict[str, AnyRate] = {
        Rule.FIXED: Fixed(alpha),
        Rule.DYNAMIC: Proportional(alpha),
        Rule.EXPONENTIAL: Exponential(alpha),
        Rule.ALIGNED: Aligned(alpha),
        Rule.LAW: LAW(alpha),
        Rule.PALM: PALM(alpha),
    }
    return rules[rate]


def _own(spec: str, offered: Mapping[str, Any], settings: Mapping[str, Any] = {}, *, name: str = "") -> Any:
    """An object of a class, made with those of the offered arguments that it takes and with all settings."""
    made = import_object(spec)
    known = arguments(made)
    for setting in settings:
        require(f"setting of {name or spec}", setting, [each for each in known if each not in offered])
    missing = [each for each in required_arguments(made) if each not in {*offered, *settings}]
    if missing:
        passed = " and ".join(offered)
        raise SettingError(f"{spec} needs the argument {missing[0]!r}; give it a default, only {passed} is passed")
    return made(**{each: value for each, value in offered.items() if each in known}, **settings)


def _make_memory(model: Checkpoint | OpenedModel, recipe: Recipe) -> MemoryBank:
    """Empty, or filled with what source images gave."""
    memory = MemoryBank(
        capacity=(recipe.batches_kept or 0) * (recipe.batch_size or 0),
        neighbors=recipe.neighbors or 0,
        ready="full" if recipe.ready == Ready.FULL else "neighbors",
        distance="l2" if recipe.distance == Distance.L2 else "cosine",
        pool=recipe.pool,
        positions="mean" if recipe.positions == Positions.MEAN else "sum",
    )
    if recipe.prefill:
        trained = model.checkpoint if isinstance(model, OpenedModel) else model
        pairs = None if trained is None else trained.pairs
        if pairs is None:
            raise SettingError("this model keeps no source pairs to begin with; train it with `--with memory`")
        memory.layer = pairs.layer
        memory.push(pairs.features.float(), pairs.predictions.float())
    return memory


def make_uda(name: str, settings: Mapping[str, Any] = {}) -> UDAMethod:
    """The method of that name, with these of its settings and its defaults for the others."""
    require("method that learns with target images", name, UDA)
    return build(UDA[name], settings, f"[uda.{name}]")


def open_dataset(spec: str) -> Dataset:
    """A site: a folder of one's own, synthetic cases, or a part of one of the paper's data sets in a folder DIR.

    - `DIR`: see `open_site`; `slices:DIR` for its volumes slice by slice
    - `phantom:TASK:SITE:COUNT[:SEED[:SIZE]]`, such as `phantom:oct:cirrus:48:1` or `phantom:oct:cirrus:48:1:128x64`
    - `oct:spectralis[:SPLIT]@DIR` with train, val, train+val or test; `oct:cirrus@DIR` for prepared slices and
      `oct:cirrus:acquired@DIR` for slices still to be resampled, flattened and cropped
    - `camelyon17:PART@DIR` with center_0 to center_4, train, id_val, val or test
    - `prostate:SITE@DIR` with A to F, or RUNMC, BMC, I2CVB, UCL, BIDMC or HK
    - `sequence:SITE,SITE` for one after another, `interleave:SITE,SITE` for taking turns, `drift:SITE,SITE` for the
      first giving way to the second; any of the above as SITE
    """
    if (several := split_stream(spec)) is not None:
        return SiteStream(tuple(open_dataset(site) for site in several[1]), several[0])
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
    sizes = parts[4].split("x") if len(parts) == 5 else []
    if len(parts) not in (3, 4, 5) or not all(part.isdigit() for part in (*parts[2:4], *sizes)):
        raise SettingError(f"{spec!r} is not phantom:TASK:SITE:COUNT[:SEED[:SIZE]], such as phantom:oct:cirrus:48:1")
    task, site, count, *seed = parts[:4]
    size = tuple(map(int, sizes)) or None
    return phantom(task, site, int(count), seed=int(seed[0]) if seed else 0, size=size)  # type: ignore[arg-type]


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
    """As nnU-Net chooses: 8- and 16-bit 2-D images are scaled by their type's maximum, volumes get z-scores.

    Synthetic images come ready. The type is the first image's; floats count as 8 bits up to 255, as 16 bits beyond.
    """
    if isinstance(dataset, SiteStream):
        return default_preprocessing(dataset.parts[0], size)
    folder = dataset.volumes if isinstance(dataset, Slices) else dataset
    if not isinstance(folder, SiteFolder):
        return Preprocessing(size=size)
    if folder.entries and folder.entries[0].files[0].name.endswith((".nii", ".nii.gz")):
        return Preprocessing("zscore", size=size)
    first = dataset[0]
    limit = first.limit or (255 if float(first.image.max()) <= 255 else 65535)
    return Preprocessing("scale", float(max(limit, 255)), size)


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


def _check_type(what: str, value: object, kind: Any) -> None:
    if _accepts(kind, value):
        return
    choices = [each for each in (kind, *get_args(kind)) if isinstance(each, type) and issubclass(each, StrEnum)]
    if choices:
        raise SettingError(f"{what} must be one of {', '.join(choices[0])}, got {value!r}")
    if get_origin(kind) is Literal:
        raise SettingError(f"{what} must be one of {', '.join(get_args(kind))}, got {value!r}")
    raise SettingError(f"{what} must be {getattr(kind, '__name__', kind)}, got {value!r}")


def _accepts(kind: Any, value: object) -> bool:
    """Whether a value from TOML fits an annotation; a whole number is fine where a real one is asked."""
    inner = get_args(kind)
    match get_origin(kind):
        case None if isinstance(kind, type) and issubclass(kind, StrEnum):
            return isinstance(value, str) and value in list(kind)
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
