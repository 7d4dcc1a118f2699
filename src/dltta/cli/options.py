"""What commands share: choices, options, and how a function becomes a command.

Nothing here imports torch: `dltta COMMAND --help` only reads signatures. What a command needs to run, it imports when
it runs.
"""

import inspect
import tomllib
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

import typer

from dltta.errors import SettingError, require

if TYPE_CHECKING:
    from dltta.data.preprocessing import Preprocessing
    from dltta.models.io.opening import ModelSource


# choices


class Task(StrEnum):
    """What a model predicts."""

    SEGMENTATION = "segmentation"
    CLASSIFICATION = "classification"


class StreamMode(StrEnum):
    """What happens along a stream."""

    CONTINUAL = "continual"
    IMAGE_SPECIFIC = "image-specific"
    SHADOW = "shadow"
    FROZEN = "frozen"


class Order(StrEnum):
    """Which image comes first."""

    NAME = "name"
    TIME = "time"


class Loss(StrEnum):
    """What source training minimizes."""

    CE = "ce"
    CE_DICE = "ce+dice"


class Augmenting(StrEnum):
    """How training images are changed."""

    NONE = "none"
    LIGHT = "light"
    FIELD = "field"


class Schedule(StrEnum):
    """How the learning rate of source training goes on."""

    CONSTANT = "constant"
    POLYNOMIAL = "polynomial"
    COSINE = "cosine"


class Network(StrEnum):
    """Networks that can be trained by name."""

    UNET = "unet"
    DENSENET121 = "densenet121"
    DENSENET_SMALL = "densenet_small"


class DemoTask(StrEnum):
    """What the demo shows."""

    OCT = "oct"
    HISTOLOGY = "histology"
    PROSTATE = "prostate"
    ALL = "all"


class PhantomTask(StrEnum):
    """Kinds of synthetic images."""

    OCT = "oct"
    HISTOLOGY = "histology"
    PROSTATE = "prostate"


class PublishedData(StrEnum):
    """The paper's data sets."""

    OCT = "oct"
    CAMELYON17 = "camelyon17"
    PROSTATE = "prostate"


class DataKind(StrEnum):
    """Which layout a folder is checked for."""

    OWN = "own"
    OCT = "oct"
    CAMELYON17 = "camelyon17"
    PROSTATE = "prostate"


# options

FLAG = ""  # shown instead of a type: a flag takes no value
Device = Annotated[str, typer.Option(metavar="NAME", help="Where to compute: cpu, cuda, cuda:1, mps.")]
Json = Annotated[
    bool, typer.Option("--json", metavar=FLAG, help="Print the result as JSON, for programs, instead of text.")
]
MODEL_HELP = (
    "A model folder of dltta train, a MONAI bundle (folder or zip), a result folder of nnU-Net, or "
    "package.module:function."
)


@dataclass(frozen=True)
class DescribedModel:
    """What to say about a model that cannot tell it itself."""

    panel: ClassVar[str] = "A model from your own code, a MONAI bundle or nnU-Net (docs/models.md)"
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Weights to load: a state dict as .safetensors, .pt or .pth.", show_default="none"
        ),
    ] = None
    task: Annotated[
        Task | None,
        typer.Option(
            metavar="TASK",
            help="What the model predicts: segmentation or classification.",
            show_default="seen from its output",
        ),
    ] = None
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Names of the classes in the order of the model's output: background,cord.",
            show_default="numbered",
        ),
    ] = None
    channels: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Own code: channels of an input image.", show_default="seen from its first layer"
        ),
    ] = None
    intensity: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Own code: how intensities are normalized: zscore; scale:255 divides by 255; imagenet:255 divides and "
            "then uses ImageNet's mean and deviation.",
            show_default="values as in the file",
        ),
    ] = None
    resize: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Own code: resize images to this, such as 256x256.", show_default="not resized"
        ),
    ] = None
    run_expressions: Annotated[
        bool,
        typer.Option(
            "--run-expressions",
            metavar=FLAG,
            help="MONAI bundle: run the Python expressions in its configuration. Only for bundles you trust.",
        ),
    ] = False
    untrained: Annotated[
        bool,
        typer.Option(
            "--untrained",
            metavar=FLAG,
            help="Own code: accept it without --weights, because it loads them itself or random ones are meant.",
        ),
    ] = False
    fold: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDS",
            help="nnU-Net: which folds: 0, or 0,1 (each adapts, they predict together), or all.",
            show_default="every fold there is",
        ),
    ] = None

    def source(
        self, spec: str, *, size: tuple[int, ...] | None = None, patch: tuple[int, ...] | None = None
    ) -> "ModelSource":
        """The model of that name with all that was said about it; not opened yet."""
        from dltta.models.io.opening import ModelSource

        return ModelSource(
            spec,
            self.weights,
            None if self.task is None else self.task.value,
            split_names(self.classes),
            self._preprocessing(),
            size=size,
            channels=self.channels,
            patch=patch,
            run_expressions=self.run_expressions,
            untrained=self.untrained,
            fold=self.fold,
        )

    def _preprocessing(self) -> "Preprocessing | None":
        """From `zscore`, `scale:255` or `imagenet:255`, and a size."""
        if self.intensity is None and self.resize is None:
            return None
        kind, _, maximum = (self.intensity or "none").partition(":")
        require("intensity", kind, ("none", "zscore", "scale", "imagenet"))
        if (kind in ("scale", "imagenet")) != bool(maximum):
            raise SettingError(f"--intensity is {self.intensity!r}; write zscore, scale:255 or imagenet:255")
        from dltta.data.preprocessing import Preprocessing

        try:
            return Preprocessing(kind, float(maximum or 1), split_size(self.resize))  # type: ignore[arg-type]
        except ValueError as error:
            raise SettingError(f"{maximum!r} is not the largest value of an image; write {kind}:255") from error


@dataclass(frozen=True)
class OwnModel(DescribedModel):
    """The same, and what the model learned in rehearsal."""

    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="What dltta calibrate wrote for this model.",
            show_default="that of a folder of dltta train",
        ),
    ] = None

    def source(
        self, spec: str, *, size: tuple[int, ...] | None = None, patch: tuple[int, ...] | None = None
    ) -> "ModelSource":
        return replace(super().source(spec, size=size, patch=patch), calibration=self.calibration)


# values


def split_names(text: str | None) -> tuple[str, ...] | None:
    """`a, b` as (a, b)."""
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def split_size(text: str | None) -> tuple[int, ...] | None:
    """`128x1024` as (128, 1024)."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise SettingError(f"{text!r} is not a size; write 128x1024 or 80x80x80")
    return tuple(map(int, parts))


def split_settings(given: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE with values as in TOML; a word that is none, such as single, is a string."""
    settings: dict[str, Any] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingError(f"{text!r} is not a setting; write NAME=VALUE, such as epochs=20")
        try:
            settings[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            settings[name.strip()] = value
    return settings


def require_device(name: str) -> str:
    """The device, once something could be put on it."""
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"device {name!r} cannot be used: {one_line(error)}") from error
    return name


def count_processes(given: int | None, device: str) -> int:
    """As many as were asked for; two on a CPU that has them, one on a GPU."""
    import torch

    usual = min(2, torch.get_num_threads()) if device == "cpu" else 1
    if (chosen := usual if given is None else given) < 1:
        raise SettingError(f"-j must be at least 1, got {chosen}")
    return chosen


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


# commands


def add_command(app: typer.Typer, function: Callable[..., None], name: str | None = None) -> None:
    """Make a function a command. What its docstring has after `Examples:` is shown below the options."""
    text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\nExamples:\n")
    epilog = f"Examples:\n\n```text\n{dedent(examples).strip()}\n```"
    app.command(name or function.__name__, help=text, epilog=epilog)(spread(function))


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """The same function with every parameter that is a dataclass replaced by its fields, as Typer wants options.

    A field is annotated as a parameter would be; the dataclass's `panel` is the title they are shown under.
    """
    groups: dict[str, Any] = {name: kind for name, kind in get_type_hints(function).items() if is_dataclass(kind)}

    def command(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{entry.name: given.pop(entry.name) for entry in fields(kind)})
        function(**given)

    command.__name__ = function.__name__
    signature = inspect.signature(function)
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in signature.parameters.values()
            for each in (_parameters(groups[parameter.name]) if parameter.name in groups else (parameter,))
        ]
    )
    return command


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    """The fields of a group of options as parameters, in its panel."""
    hints = get_type_hints(group, include_extras=True)
    for entry in fields(group):
        kind, option = get_args(hints[entry.name])
        option = copy(option)
        option.rich_help_panel = group.panel
        yield inspect.Parameter(
            entry.name, inspect.Parameter.KEYWORD_ONLY, default=entry.default, annotation=Annotated[kind, option]
        )
