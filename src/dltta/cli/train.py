"""`dltta train`: a source model, or one that learns with the target's images too."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from dltta.cli.options import (
    FLAG,
    Augmenting,
    Device,
    Json,
    Loss,
    Network,
    Schedule,
    require_device,
    split_names,
    split_settings,
    split_size,
)
from dltta.errors import SettingError
from dltta.recipes import UDAName

if TYPE_CHECKING:
    from dltta.training.fit import Row
    from dltta.training.uda import UDAMethod


@dataclass(frozen=True)
class Training:
    """How the model is trained."""

    panel: ClassVar[str] = "Training"
    epochs: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many times each image is seen.", show_default="100, the paper's"),
    ] = None
    batch_size: Annotated[int | None, typer.Option(metavar="N", help="Images per training step.", show_default="8")] = (
        None
    )
    learning_rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="Learning rate of Adam.",
            show_default="the paper's: 1e-3 for segmentation, 3e-4 for classification",
        ),
    ] = None
    loss: Annotated[
        Loss | None,
        typer.Option(metavar="NAME", help="ce (cross-entropy) or ce+dice (plus soft Dice).", show_default="ce"),
    ] = None
    augmentation: Annotated[
        Augmenting | None,
        typer.Option(
            metavar="NAME",
            help="Random changes of images: none, light (mirroring, brightness, noise) or field (nnU-Net's list: "
            "also rotation, scaling, blur, low resolution, gamma; hue and saturation of RGB images).",
            show_default="light",
        ),
    ] = None
    schedule: Annotated[
        Schedule | None,
        typer.Option(
            metavar="NAME", help="Learning rate over time: constant, polynomial or cosine.", show_default="constant"
        ),
    ] = None
    validation: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of the patients kept for validation.", show_default="0.2"),
    ] = None
    with_: Annotated[
        str | None,
        typer.Option(
            "--with",
            metavar="NAMES",
            help="Also train what test-time methods need: ttt (a second network with a rotation head, which takes as "
            "long again), ttt++ (likewise, with a contrastive task), dtta (likewise, behind an image normalizer, and a "
            "denoiser), atta (auto-encoders). memory keeps features and predictions of source images. Several: "
            "ttt,atta.",
            show_default="none",
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Random seed of weights and order.", show_default="0")
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", metavar=FLAG, help="Continue an interrupted training in the same folder.")
    ] = False
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse/--no-rehearse",
            metavar=FLAG,
            help="Whether to rehearse at simulated sites afterwards, by which dltta adapt chooses "
            "(docs/rehearsal.md). Takes minutes.",
        ),
    ] = True
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write a TensorBoard log into this folder.", show_default="no log"),
    ] = None

    def table(self) -> dict[str, Any]:
        """What was given, as the `[training]` table of a configuration."""
        given = {
            "epochs": self.epochs, "batch_size": self.batch_size, "learning_rate": self.learning_rate,
            "loss": None if self.loss is None else self.loss.value, "validation": self.validation, "seed": self.seed,
            "augmentation": None if self.augmentation is None else self.augmentation.value,
            "schedule": None if self.schedule is None else self.schedule.value,
            "with": split_names(self.with_),
        }  # fmt: skip
        return {key: value for key, value in given.items() if value is not None}


@dataclass(frozen=True)
class Built:
    """Which network is trained, on images of which size."""

    panel: ClassVar[str] = "Network and images"
    network: Annotated[
        Network | None,
        typer.Option(
            metavar="NAME",
            help="unet, densenet121 or densenet_small.",
            show_default="unet for segmentation, densenet121 for classification",
        ),
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Start densenet121 from torchvision's state dict.", show_default="random weights"
        ),
    ] = None
    size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Resize all images to this, such as 128x1024.", show_default="not resized"),
    ] = None
    patch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Train on random crops of this size, such as 80x80x80.", show_default="whole images"
        ),
    ] = None


@dataclass(frozen=True)
class WithTarget:
    """Learning with labeled source and unlabeled target images at once."""

    panel: ClassVar[str] = "Learning with images of the target site (docs/uda.md)"
    uda: Annotated[
        UDAName | None,
        typer.Option(
            metavar="NAME",
            help="Unsupervised domain adaptation: uda-st, cyclegan, udas or uda-swav.",
            show_default="none: source images only",
        ),
    ] = None
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="SITE",
            help="Site whose images are used, without their labels. Repeat for several.",
            show_default="none",
        ),
    ] = None
    uda_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--uda-setting",
            metavar="NAME=VALUE",
            help="A setting of the method, such as epochs=20. Repeat for several.",
            show_default="the method's",
        ),
    ] = None
    source_model: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="A model that was trained on the sources.", show_default="one is trained first"
        ),
    ] = None


def train(
    training: Training,
    built: Built,
    with_target: WithTarget,
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A TOML file, such as those in configs/train.")
    ] = None,
    sites: Annotated[
        list[str] | None,
        typer.Option(
            "-i",
            "--input",
            "--source",
            metavar="SITE",
            help="Site folder with labels (docs/data.md), or phantom:TASK:SITE:COUNT for synthetic images. Repeat for "
            "several sites.",
            show_default="those of CONFIG",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Model folder to write.", show_default="that of CONFIG"),
    ] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train a source model on one or more site folders.

    Options given here win over those in CONFIG. With --uda the model learns from labeled source images and unlabeled
    target images at once. Several GPUs (not with --uda): `torchrun --nproc-per-node 2 -m dltta train …`.

    Examples:
        dltta train -i data/hospital_a -o models/a --with ttt,atta
        dltta train -i data/hospital_a -i data/hospital_c -o models/ac
        dltta train --uda udas -i data/a --target data/b -o models/a_to_b
        dltta train configs/train/oct_phantom.toml
    """
    import torch

    from dltta.cli.progress import bars
    from dltta.config import (
        TrainConfig,
        build,
        default_architecture,
        default_preprocessing,
        open_dataset,
        open_target,
        read_toml,
    )
    from dltta.evaluation.home import rehearse_checkpoint
    from dltta.models.io.checkpoint import load_checkpoint
    from dltta.training import SourceTraining, TrainingSettings
    from dltta.training.fit import Ranks
    from dltta.training.uda import UDATraining

    setup = build(TrainConfig, read_toml(config) if config else {}, str(config or "the command line"))
    patch = {"patch": split_size(built.patch)} if built.patch else {}
    settings = build(TrainingSettings, {**setup.training, **training.table(), **patch}, "[training]")
    chosen = tuple(sites or setup.sites)
    folder = output or (Path(setup.output) if setup.output else None)
    if not chosen or folder is None:
        raise SettingError("nothing to train: give sites with -i and a model folder with -o, or a CONFIG with both")
    if not training.resume and (folder / "model.json").exists():
        raise SettingError(f"{folder} already holds a model; add --resume to continue it, or choose another folder")
    datasets = [open_dataset(spec) for spec in chosen]
    options = {**setup.network_options, **({"weights": str(built.weights)} if built.weights else {})}
    architecture = default_architecture(datasets[0], built.network or setup.network, options)
    preprocessing = default_preprocessing(datasets[0], split_size(built.size) or setup.size)
    where = torch.device(require_device(device))
    method = _method(with_target.uda or setup.uda, {**setup.uda_settings, **split_settings(with_target.uda_settings)})
    targets = [open_target(spec) for spec in with_target.targets or setup.targets]
    start = load_checkpoint(with_target.source_model) if with_target.source_model else None
    _require_fitting(method, bool(targets), bool(start), bool(training.with_))
    if start is not None:
        architecture, preprocessing = start.architecture, start.preprocessing
    seen = False
    with bars() as listener, _tensorboard(training.tensorboard) as log:
        common = (architecture, preprocessing, settings, folder, where, training.resume, listener.training(0), log)
        if method is None:
            checkpoint = SourceTraining(datasets, *common).run()
            if training.rehearse and Ranks.join(where).first:
                progress = listener.rehearsal(0)
                checkpoint, home = rehearse_checkpoint(folder, datasets, settings, device=where, progress=progress)
                seen = not home.held_out
        else:
            checkpoint = UDATraining(method, datasets, targets, *common, start).run()
    if Ranks.join(where).first:
        if seen:
            typer.secho("warning: ", fg="yellow", nl=False, err=True)
            typer.echo("no cases were held out: rehearsed with training cases, which look easier than others", err=True)
        _tell(checkpoint.record, folder, as_json)


def _require_fitting(method: "UDAMethod | None", targets: bool, start: bool, auxiliaries: bool) -> None:
    """Options that belong together are given together."""
    if method is None and (targets or start):
        raise SettingError("--target and --source-model are for methods that learn with target images; add --uda")
    if method is not None and not targets:
        raise SettingError(f"{method.name} learns with target images; say where they are with --target")
    if method is not None and auxiliaries:
        raise SettingError("--with is for test-time methods, --uda for others; train a model for each")


def _tell(record: Mapping[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        keys = ("metric", "score", "epoch", "training", "validation")
        typer.echo(json.dumps({"model": str(folder), **{key: record[key] for key in keys}}))
    elif record["score"] is None:
        typer.echo(f"{folder}: trained on {record['training']} cases for {record['epoch']} epochs, not validated")
    else:
        typer.echo(
            f"{folder}: {record['metric']} {record['score']:.4f} on {record['validation']} held-out source cases"
        )


def _method(name: str | None, settings: dict[str, Any]) -> "UDAMethod | None":
    from dltta.config import make_uda

    if name is None and settings:
        raise SettingError("--uda-setting is for methods that learn with target images; add --uda")
    return None if name is None else make_uda(name, settings)


@contextmanager
def _tensorboard(folder: Path | None) -> "Iterator[Callable[[Row], None]]":
    if folder is None:
        yield lambda row: None
        return
    from dltta.evaluation.tracking import tensorboard_writer

    with tensorboard_writer()(str(folder)) as writer:

        def log(row: "Row") -> None:
            for name, value in row.items():
                if isinstance(value, float):
                    writer.add_scalar(f"{row['stage']}/{name}", value, row["epoch"])

        yield log
