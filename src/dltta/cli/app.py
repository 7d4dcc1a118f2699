"""The command line: reads arguments, shows progress, prints one line for every mistake."""

import json
import math
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from dltta.cli.progress import bars, screen
from dltta.config import (
    METHODS,
    OPTIMIZERS,
    RATES,
    STATISTICS,
    UDA,
    AdaptationSettings,
    TrainConfig,
    build,
    default_architecture,
    default_preprocessing,
    make_uda,
    open_dataset,
    open_target,
    read_toml,
    require,
)
from dltta.data.cards import card
from dltta.data.check import PUBLISHED, check_published, check_site
from dltta.data.inbox import find_incoming, watch_incoming
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DlttaError, SettingError
from dltta.evaluation.demo import NOTES, TASKS, demo_experiment
from dltta.evaluation.experiment import Experiment, run_experiment, write_tables
from dltta.evaluation.folders import record_csv, score_folders
from dltta.evaluation.formats import rich_table
from dltta.evaluation.headline import sentences
from dltta.evaluation.overview import overview
from dltta.evaluation.paper.reproduce import Setup, check, chosen, reproduce
from dltta.evaluation.report import write_report
from dltta.evaluation.results import Results
from dltta.evaluation.tables import by_target
from dltta.files import write_atomically
from dltta.metrics import DISTANCES
from dltta.models.allocator import keep_freed_memory
from dltta.models.io.checkpoint import load_checkpoint
from dltta.models.io.opened import OpenedModel
from dltta.models.io.opening import ModelSource
from dltta.serving.folder import MODES, ON_ERROR, Stream, StreamSettings, Summary
from dltta.serving.maintenance import answered_names, export, list_versions, roll_back, show_version, verify
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.fit import Ranks, Row
from dltta.training.settings import AUXILIARIES
from dltta.training.uda import Method, UDATraining
from dltta.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Test-time adaptation for medical images that chooses how much to adapt to each image.",
)
INTERRUPTED = 130  # what typer makes of Ctrl-C
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …")]
Json = Annotated[bool, typer.Option("--json", help="Print a machine-readable result.")]

# What is said about a network that somebody brings; `ModelSource` takes it.
BROUGHT = "A network of your own"
ModelWeights = Annotated[
    Path | None,
    typer.Option("--weights", help="State dict for code: .safetensors, .pt, .pth.", rich_help_panel=BROUGHT),
]
ModelTask = Annotated[
    str | None,
    typer.Option("--task", help="segmentation or classification [default: as it gives]", rich_help_panel=BROUGHT),
]
ModelClasses = Annotated[
    str | None, typer.Option("--classes", help="Their names in order: background,cord.", rich_help_panel=BROUGHT)
]
ModelChannels = Annotated[
    int | None,
    typer.Option("--channels", help="Channels of an image, for code that has none.", rich_help_panel=BROUGHT),
]
ModelIntensity = Annotated[
    str | None,
    typer.Option(
        "--intensity", help="Code: zscore, scale:255, imagenet:255 [default: as read]", rich_help_panel=BROUGHT
    ),
]
ModelResize = Annotated[
    str | None, typer.Option("--resize", help="Code: resize images to this, such as 256x256.", rich_help_panel=BROUGHT)
]
RunExpressions = Annotated[
    bool,
    typer.Option("--run-expressions", help="Let a MONAI bundle run the Python that is in it.", rich_help_panel=BROUGHT),
]
LEARNING, ARRIVING, SAFETY = "What is learned", "Which images, and when", "What is kept"


def main() -> None:
    """The entry point: a mistake is one line and exit code 2; anything that is not one keeps its traceback."""
    keep_freed_memory()
    try:
        code = app(standalone_mode=False)
    except DlttaError as error:
        _fail(_one_line(error))
    except typer.TyperException as error:
        if message := error.format_message():
            _fail(f"{message} Try --help.")
        sys.exit(2)  # nothing was asked, and help has been shown
    if code == INTERRUPTED:
        screen.print("interrupted; the same command continues where it stopped, adapt and train with --resume")
    sys.exit(code)


def _fail(message: str) -> None:
    screen.print(f"[red]error:[/red] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


@app.command()
def demo(
    task: Annotated[str, typer.Option(help="oct, histology, prostate or all.")] = "oct",
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for models, results and report.")] = Path(
        "runs/demo"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer images and epochs, for a first look.")] = False,
    seed: Annotated[int, typer.Option(help="Another seed draws other images and weights.")] = 0,
    optimizer: Annotated[str, typer.Option(help="sgd, which is Eq. (2), or adam.")] = "sgd",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train at a synthetic hospital A, adapt to hospital B with every method, write table and report.

    Models and finished streams are kept: a second run takes seconds.

    For example:

        dltta demo

        dltta demo --task all --quick
    """
    require("task", task, (*TASKS, "all"))
    require("optimizer", optimizer, OPTIMIZERS)
    summaries = []
    for name in TASKS if task == "all" else (task,):
        experiment = demo_experiment(name, str(output), seed=seed, quick=quick)
        settings = replace(experiment.adaptation, optimizer="adam" if optimizer == "adam" else "sgd")
        summaries.append(_demo(replace(experiment, adaptation=settings), device, as_json))
    if as_json:
        typer.echo(json.dumps(summaries))


def _demo(experiment: Experiment, device: str, as_json: bool) -> dict[str, Any]:
    with bars() as listener:
        processes = min(2, torch.get_num_threads()) if device == "cpu" else 1
        results = run_experiment(
            experiment, device=_device(device), processes=processes, listener=listener, notes=NOTES
        )
    page = experiment.folder / "report.html"
    if not as_json:
        _show(results)
        typer.echo(f"Synthetic images. Report: {page}")
    return {"report": str(page), "results": str(experiment.folder / "results.json"), "headline": sentences(results)}


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; see configs/train/.")] = None,
    sites: Annotated[
        list[str] | None,
        typer.Option("-i", "--input", "--source", help="Site folder; several may be given. Or phantom:TASK:SITE:N."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Model folder to write.")] = None,
    uda: Annotated[str | None, typer.Option(help=f"Learn with target images too: {', '.join(UDA)}.")] = None,
    targets: Annotated[
        list[str] | None, typer.Option("--target", help="For --uda: site whose images are used, without labels.")
    ] = None,
    uda_settings: Annotated[
        list[str] | None,
        typer.Option("--uda-setting", help="For --uda: NAME=VALUE, such as epochs=20; see docs/uda.md."),
    ] = None,
    source_model: Annotated[
        Path | None, typer.Option(help="For --uda: model trained on the sources [default: train one]")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="[default: 100, the paper's]")] = None,
    with_: Annotated[str | None, typer.Option("--with", help="Train for ttt, atta; keep source pairs: memory.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="[default: 8]")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="[default: 1e-3 segmentation, 3e-4 classification]")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="ce or ce+dice [default: ce]")] = None,
    network: Annotated[str | None, typer.Option(help="unet, densenet121, densenet_small [default: by task]")] = None,
    weights: Annotated[Path | None, typer.Option(help="torchvision densenet121 state dict to start from.")] = None,
    size: Annotated[str | None, typer.Option(help="Resize all images to this, such as 128x1024.")] = None,
    patch: Annotated[str | None, typer.Option(help="Train on random crops of this size, such as 80x80x80.")] = None,
    validation: Annotated[float | None, typer.Option(help="Share of patients to validate on [default: 0.2]")] = None,
    seed: Annotated[int | None, typer.Option(help="[default: 0]")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted training.")] = False,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder for a TensorBoard log.")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train a source model on one or more site folders, with what TTT and ATTA need.

    With --uda it learns from labeled sources and unlabeled targets at once. Options given here win over those in
    CONFIG. Several GPUs (not with --uda): `torchrun --nproc-per-node 2 -m dltta train …`.

    For example:

        dltta train -i data/hospital_a -o models/a --epochs 100 --with ttt,atta

        dltta train --uda udas --source data/hospital_a --target data/hospital_b -o models/a_to_b

        dltta train configs/train/oct_phantom.toml
    """
    setup = build(TrainConfig, read_toml(config) if config else {}, str(config or "the command line"))
    given = {
        "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "loss": loss, "seed": seed,
        "validation": validation, "with": _names(with_), "patch": _sizes(patch),
    }  # fmt: skip
    table = {**setup.training, **{key: value for key, value in given.items() if value is not None}}
    settings = build(TrainingSettings, table, "[training]")
    chosen = tuple(sites or setup.sites)
    folder = output or (Path(setup.output) if setup.output else None)
    if not chosen or folder is None:
        raise SettingError("nothing to train: give sites with -i and a model folder with -o, or a CONFIG with both")
    if not resume and (folder / "model.json").exists():
        raise SettingError(f"{folder} already holds a model; add --resume to continue it, or choose another folder")
    datasets = [open_dataset(spec) for spec in chosen]
    options = {**setup.network_options, **({"weights": str(weights)} if weights else {})}
    architecture = default_architecture(datasets[0], network or setup.network, options)
    preprocessing = default_preprocessing(datasets[0], _sizes(size) or setup.size)
    where = torch.device(_device(device))
    method = _method(uda or setup.uda, {**setup.uda_settings, **_settings(uda_settings)})
    away = [open_target(spec) for spec in targets or setup.targets]
    start = load_checkpoint(source_model) if source_model else None
    if start is not None:
        architecture, preprocessing = start.architecture, start.preprocessing
    if method is None and (away or start):
        raise SettingError("--target and --source-model are for methods that learn with target images; add --uda")
    if method is not None and not away:
        raise SettingError(f"{method.name} learns with target images; say where they are with --target")
    if method is not None and with_:
        raise SettingError("--with is for test-time methods, --uda for others; train a model for each")
    with bars() as listener, _tensorboard(tensorboard) as log:
        common = (architecture, preprocessing, settings, folder, where, resume, listener.training(0), log)
        if method is None:
            checkpoint = SourceTraining(datasets, *common).run()
        else:
            checkpoint = UDATraining(method, datasets, away, *common, start).run()
    if not Ranks.join(where).first:
        return
    record = checkpoint.record
    if as_json:
        keys = ("metric", "score", "epoch", "training", "validation")
        typer.echo(json.dumps({"model": str(folder), **{key: record[key] for key in keys}}))
    elif record["score"] is None:
        typer.echo(f"{folder}: trained on {record['training']} cases for {record['epoch']} epochs, not validated")
    else:
        typer.echo(
            f"{folder}: {record['metric']} {record['score']:.4f} on {record['validation']} held-out source cases"
        )


@app.command(name="inspect")
def inspect_(
    model: Annotated[
        str, typer.Argument(help="Model folder, MONAI bundle (folder or zip), or package.module:function.")
    ],
    weights: ModelWeights = None,
    task: ModelTask = None,
    classes: ModelClasses = None,
    channels: ModelChannels = None,
    size: Annotated[str | None, typer.Option(help="Try it with an image of this size, such as 128x128.")] = None,
    run_expressions: RunExpressions = False,
    as_json: Json = False,
) -> None:
    """Show a network's layers, what each method would adapt in it, and which methods do not work and why.

    Every method takes one step on an image of noise; nothing is written. See docs/models.md for how to bring a model.

    For example:

        dltta inspect models/a

        dltta inspect my_code.networks:build --weights best.pt --size 256x256
    """
    source = ModelSource(
        model,
        weights,
        task,
        _names(classes),
        size=_sizes(size),
        channels=channels,
        run_expressions=run_expressions,
    )
    opened = source.open()
    with bars() as listener:
        seen = overview(opened, _sizes(size), progress=listener.count("try methods"))
    if as_json:
        typer.echo(json.dumps(seen.as_json()))
    else:
        Console().print(seen.tables(), highlight=False)


@app.command()
def adapt(
    model: Annotated[
        str, typer.Option("-m", "--model", help="Model folder, MONAI bundle, or package.module:function.")
    ],
    images: Annotated[Path, typer.Option("-i", "--input", help="Folder of images, or one image.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for answers, log and state.")],
    method: Annotated[str, typer.Option(help="tent, ptbn, ttt, atta or source.", rich_help_panel=LEARNING)] = "tent",
    rate: Annotated[
        str, typer.Option(help="relative, dynamic (Eq. 6), exponential, fixed.", rich_help_panel=LEARNING)
    ] = "relative",
    mode: Annotated[
        str, typer.Option(help="continual, image-specific, shadow, frozen.", rich_help_panel=LEARNING)
    ] = "continual",
    guard: Annotated[
        bool, typer.Option("--guard/--no-guard", help="Undo updates that do harm.", rich_help_panel=LEARNING)
    ] = True,
    alpha: Annotated[
        float | None,
        typer.Option(help="Initial rate [default: 1e-3, classification 3e-4]", rich_help_panel=LEARNING),
    ] = None,
    optimizer: Annotated[str, typer.Option(help="sgd, which is Eq. (2), or adam.", rich_help_panel=LEARNING)] = "sgd",
    steps: Annotated[int, typer.Option(help="Updates per image.", rich_help_panel=LEARNING)] = 1,
    statistics: Annotated[
        str | None,
        typer.Option(
            help="shrinkage, batch, blended, running [default: the first if calibrated, else batch]",
            rich_help_panel=LEARNING,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Classification: images per update [default: 200]", rich_help_panel=LEARNING),
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option(help="Slide a window of this size, such as 96x96x96.", rich_help_panel=LEARNING),
    ] = None,
    order: Annotated[str, typer.Option(help="By name or by time.", rich_help_panel=ARRIVING)] = "name",
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Go on as files arrive; a file STOP ends it.", rich_help_panel=ARRIVING),
    ] = False,
    idle: Annotated[
        float | None,
        typer.Option(help="Watching: end after so many quiet seconds.", rich_help_panel=ARRIVING),
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="A case that cannot be used: stop or skip.", rich_help_panel=ARRIVING)
    ] = "stop",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the stream in this output.", rich_help_panel=SAFETY)
    ] = False,
    save_probabilities: Annotated[
        bool, typer.Option("--save-probabilities", help="Write these too.", rich_help_panel=SAFETY)
    ] = False,
    anonymize: Annotated[
        bool, typer.Option("--anonymize", help="Name cases by their content's hash.", rich_help_panel=SAFETY)
    ] = False,
    weights: ModelWeights = None,
    task: ModelTask = None,
    classes: ModelClasses = None,
    channels: ModelChannels = None,
    intensity: ModelIntensity = None,
    resize: ModelResize = None,
    run_expressions: RunExpressions = False,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Adapt a network to unlabeled images as they come, and write an answer for each.

    Answers have the images' format, size and orientation; classification writes predictions.csv. stream.jsonl tells
    what happened to each case. It can be stopped at any moment: `--resume` continues as if it had not been.

    For example:

        dltta adapt -m models/a -i incoming -o answers

        dltta adapt -m bundles/spleen -i scans -o answers --on-error skip

        dltta adapt -m models/a -i incoming -o answers --watch --resume
    """
    for what, found, known in (
        ("method", method, METHODS), ("rate", rate, RATES), ("mode", mode, MODES), ("optimizer", optimizer, OPTIMIZERS),
        ("order", order, ("name", "time")), ("answer to errors", on_error, ON_ERROR),
    ):  # fmt: skip
        require(what, found, known)
    if idle is not None and not watch:
        raise SettingError("--idle ends a watch; add --watch, or leave it out")
    source = ModelSource(
        model,
        weights,
        task,
        _names(classes),
        _preprocessing(intensity, resize),
        channels=channels,
        patch=_sizes(patch),
        run_expressions=run_expressions,
    )
    cases = _cases(images, order, watch, idle, answered_names(output) if resume and watch else ())
    opened = source.open()
    opened.model.to(_device(device))
    settings = StreamSettings(
        method,
        rate,
        mode,  # type: ignore[arg-type]  # as required above
        AdaptationSettings(
            alpha=alpha,
            batch_size=batch_size,
            steps=steps,
            optimizer="adam" if optimizer == "adam" else "sgd",
            ready="neighbors",
            statistics=_statistics(statistics, opened),
            guard=guard,
        ),
        on_error,  # type: ignore[arg-type]  # as required above
        save_probabilities,
        anonymize,
    )
    with Stream(opened, output, settings, resume=resume) as stream, bars() as listener:
        summary = stream.run(cases, listener.cases(None if watch else len(cases)))
    _report(summary, output, as_json)
    if summary.failed:
        raise typer.Exit(1)


def _statistics(name: str | None, opened: OpenedModel) -> Any:
    if name is not None:
        require("statistics", name, STATISTICS)
    return name or ("shrinkage" if opened.calibration is not None else "batch")


def _cases(images: Path, order: str, watch: bool, idle: float | None, seen: Collection[str]) -> Any:
    chosen: Any = order
    if watch:
        return watch_incoming(images, order=chosen, idle=idle, seen=seen)
    return find_incoming(images, order=chosen)


def _preprocessing(intensity: str | None, resize: str | None) -> Preprocessing | None:
    """`zscore`, `scale:255` or `imagenet:255`, and a size."""
    if intensity is None and resize is None:
        return None
    kind, _, maximum = (intensity or "none").partition(":")
    require("intensity", kind, ("none", "zscore", "scale", "imagenet"))
    if (kind in ("scale", "imagenet")) != bool(maximum):
        raise SettingError(f"intensity {intensity!r} cannot be; write zscore, scale:255 or imagenet:255")
    try:
        return Preprocessing(kind, float(maximum or 1), _sizes(resize))  # type: ignore[arg-type]  # as required above
    except ValueError as error:
        raise SettingError(f"{maximum!r} is not the largest value of an image; write {kind}:255") from error


def _report(summary: Summary, output: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"output": str(output), **asdict(summary)}))
        return
    for sentence in summary.failed:
        screen.print(f"[yellow]skipped:[/yellow] {escape(sentence)}", highlight=False, soft_wrap=True)
    parts = [f"{summary.answered} answered"]
    parts += [f"{summary.repeated} the same as before"] if summary.repeated else []
    parts += [f"{summary.before} had their answer"] if summary.before else []
    parts += [f"{len(summary.failed)} failed"] if summary.failed else []
    typer.echo(f"{output}: {', '.join(parts)}")


state = typer.Typer(no_args_is_help=True, help="Look at, undo, verify and take out what a stream has learned.")
app.add_typer(state, name="state")
Answers = Annotated[Path, typer.Argument(help="The output folder of dltta adapt.")]


@state.command("list")
def state_list(output: Answers, as_json: Json = False) -> None:
    """The versions that one can go back to.

    For example:

        dltta state list answers
    """
    versions = list_versions(output)
    if as_json:
        typer.echo(json.dumps([asdict(version) for version in versions]))
        return
    for version in versions:
        mark = "*" if version.current else " "
        cases = version.cases[:1] if len(version.cases) < 2 else (version.cases[0], "…", version.cases[-1])
        what = version.event or " ".join(cases)
        typer.echo(f"{mark} {version.version:6d}  {version.bytes / 1e6:8.2f} MB  {what}")


@state.command("show")
def state_show(
    output: Answers,
    version: Annotated[int | None, typer.Option(help="[default: the current one]")] = None,
    as_json: Json = False,
) -> None:
    """What a version holds and the settings of its stream.

    For example:

        dltta state show answers --version 12
    """
    found = show_version(output, version)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(f"version {found['version']} after {found['batches']} batches, {found['memory']} pairs in memory")
    typer.echo(f"{len(found['adapted'])} adapted tensors: {', '.join(list(found['adapted'])[:3])} …")
    for key, value in found["settings"].items():
        typer.echo(f"{key}: {value}")


@state.command("rollback")
def state_rollback(
    output: Answers, version: Annotated[int, typer.Option("--to", help="Version to go back to.")]
) -> None:
    """Go on from an older version; the log keeps what happened.

    For example:

        dltta state rollback answers --to 12
    """
    typer.echo(f"{output}: version {roll_back(output, version)} is version {version} again")


@state.command("verify")
def state_verify(output: Answers, as_json: Json = False) -> None:
    """Find altered, moved or missing lines of the log, and altered answers; exit code 1 if there are any.

    For example:

        dltta state verify answers
    """
    problems = verify(output)
    if as_json:
        typer.echo(json.dumps(problems))
    else:
        typer.echo("\n".join(problems) if problems else f"{output}: the record is as it was written")
    raise typer.Exit(1 if problems else 0)


@state.command("export")
def state_export(
    output: Answers,
    model: Annotated[str, typer.Option("-m", "--model", help="The model that the stream was begun with.")],
    target: Annotated[Path, typer.Option("-o", "--output", help="Folder to write.")],
    version: Annotated[int | None, typer.Option(help="[default: the current one]")] = None,
    bundle: Annotated[bool, typer.Option("--bundle", help="As a MONAI bundle.")] = False,
    weights: ModelWeights = None,
    task: ModelTask = None,
    classes: ModelClasses = None,
    channels: ModelChannels = None,
    intensity: ModelIntensity = None,
    resize: ModelResize = None,
    run_expressions: RunExpressions = False,
) -> None:
    """Write the adapted network as a plain model for frozen use, with its stored normalization statistics.

    For example:

        dltta state export answers -m models/a -o models/a_at_b

        dltta state export answers -m bundles/spleen -o bundles/spleen_at_b --bundle
    """
    source = ModelSource(
        model,
        weights,
        task,
        _names(classes),
        _preprocessing(intensity, resize),
        channels=channels,
        run_expressions=run_expressions,
    )
    export(output, source.open(), target, number=version, bundle=bundle)
    typer.echo(f"{target}: the network as {output} left it")


@app.command()
def bench(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; see configs/.")] = None,
    source: Annotated[list[str] | None, typer.Option(help="Source site; several are trained on together.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Target site folder; several may be given.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for models and results.")] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of models and streams that several comparisons share [default: -o]")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(help=f"Also {', '.join(UDA)} [default: source,ptbn,ttt,tent,atta]")
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            help="fixed, dynamic, exponential, relative, matched, recommended; with α: fixed:1e-2 "
            "[default: fixed,dynamic]"
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Source trainings, each with its own seed [default: 1]")] = None,
    orders: Annotated[int | None, typer.Option(help="Random orders of each stream [default: 1]")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of source training [default: 100, the paper's]")] = None,
    alpha: Annotated[float | None, typer.Option(help="Initial rate [default: the paper's, 1e-3 or 3e-4]")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adam [default: sgd, Eq. (2)]")] = None,
    root: Annotated[Path | None, typer.Option("--data", help="Folder that relative site folders are in.")] = None,
    processes: Annotated[int, typer.Option("-j", help="Streams run at once.")] = 1,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Compare methods and rates from a source site to target sites: results.json, tables, report.

    One stream is the unit of work; finished streams are not run again, so the same command continues after a stop.
    Options given here win over those in CONFIG.

    For example:

        dltta bench --source data/a --target data/b --target data/c --methods source,tent --seeds 3 -o runs/ab

        dltta bench configs/real/nuclei_tissue.toml --data sites -j 2
    """
    table = read_toml(config) if config else {}
    training = {**table.pop("training", {}), **({} if epochs is None else {"epochs": epochs})}
    rate = {"alpha": alpha, "optimizer": optimizer}
    adaptation = {**table.pop("adaptation", {}), **{k: v for k, v in rate.items() if v is not None}}
    given = {
        "source": source, "targets": target, "output": str(output) if output else None, "methods": _names(methods),
        "rates": _names(rates), "seeds": seeds, "orders": orders, "root": str(root) if root else None,
        "work": str(work) if work else None,
    }  # fmt: skip
    table.update({key: value for key, value in given.items() if value})
    chosen = table.get("methods", METHODS)
    training.setdefault("with", [name for name in AUXILIARIES if name in chosen])
    experiment = build(
        Experiment,
        {
            **table,
            "training": build(TrainingSettings, training, "[training]"),
            "adaptation": build(AdaptationSettings, adaptation, "[adaptation]"),
        },
        str(config or "the command line"),
    )
    if processes < 1:
        raise SettingError(f"-j must be at least 1, got {processes}")
    with bars() as listener:
        results = run_experiment(experiment, device=_device(device), processes=processes, listener=listener)
    if as_json:
        typer.echo(json.dumps({"results": str(experiment.folder / "results.json"), "headline": sentences(results)}))
        return
    _show(results)
    typer.echo(f"Report: {experiment.folder / 'report.html'}")


@app.command(name="reproduce")
def reproduce_(
    name: Annotated[str, typer.Argument(help="A table or figure, such as oct or figure-loss, or all.")],
    root: Annotated[Path | None, typer.Option("--data", help="Folder of the published data set.")] = None,
    phantom: Annotated[bool, typer.Option("--phantom", help="Synthetic scanners at reduced size instead.")] = False,
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder that NAME, or NAME-phantom, is put in.")
    ] = Path("runs/reproduce"),
    seeds: Annotated[int | None, typer.Option(help="Source trainings [default: 3, with --phantom 1]")] = None,
    epochs: Annotated[int | None, typer.Option(help="Of source training [default: 100, the paper's]")] = None,
    weights: Annotated[Path | None, typer.Option(help="torchvision densenet121 state dict, for histology.")] = None,
    test_time_only: Annotated[
        bool, typer.Option("--test-time-only", help="Leave out methods that learn with target images.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Another seed draws other weights and, with --phantom, images.")] = 0,
    processes: Annotated[int | None, typer.Option("-j", help="Streams run at once [default: 2 on a CPU]")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Make a table or figure of the paper, our numbers beside the published ones.

    Tables: oct, histology, prostate, initial-rates, orders, image-specific, steps, retrieval-size, similarity.
    Figures: figure-segmentation, figure-loss, figure-retrieval. Models and streams are shared and never run twice.

    For example:

        dltta reproduce oct --phantom

        dltta reproduce prostate --data downloads/prostate --device cuda
    """
    names = chosen(name)
    if (root is None) != phantom:
        raise SettingError(
            "where are the images? give --data DIR with the published data, or --phantom for synthetic scanners"
            if root is None
            else "--data and --phantom exclude each other; give one of them"
        )
    usual = min(2, torch.get_num_threads()) if device == "cpu" else 1
    if (processes := usual if processes is None else processes) < 1:
        raise SettingError(f"-j must be at least 1, got {processes}")
    setup = Setup(
        output,
        root,
        seeds=seeds if seeds is not None else 1 if phantom else 3,
        seed=seed,
        epochs=epochs,
        weights=weights,
        test_time_only=test_time_only,
    )
    for each in names:
        check(each, setup)
    where, written = _device(device), {}
    with bars() as listener:
        for each in names:
            written[each] = reproduce(each, setup, device=where, processes=processes, listener=listener)
    if as_json:
        typer.echo(json.dumps({each: [str(file) for file in files] for each, files in written.items()}))
        return
    typer.echo(setup.about)
    for files in written.values():
        typer.echo("\n".join(map(str, files)))


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A results.json, or the folder that holds it.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder [default: beside it]")] = None,
) -> None:
    """Draw tables and report anew from results, without running anything.

    For example:

        dltta report runs/ab/results.json
    """
    file = results / "results.json" if results.is_dir() else results
    loaded = Results.load(file)
    folder = output or file.parent
    write_tables(folder, loaded)
    write_report(folder / "report.html", loaded)
    _show(loaded)
    typer.echo(f"Report: {folder / 'report.html'}")


@app.command()
def evaluate(
    predictions: Annotated[Path, typer.Option("-p", "--predictions", help="Folder of masks, or CSV of probabilities.")],
    labels: Annotated[Path, typer.Option("-l", "--labels", help="labelsTr folder, or labels.csv.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="CSV with a line per case.")] = None,
    as_json: Json = False,
) -> None:
    """Score predictions against labels: a line per case and the means.

    For example:

        dltta evaluate -p predictions -l data/hospital_b/labelsTr -o scores.csv
    """
    with bars() as listener:
        record = score_folders(predictions, labels, progress=listener.count("score"))
    if output is not None:
        write_atomically(output, record_csv(record))
    values = {name: None if math.isnan(value) else value for name, value in record.metrics.items()}
    if as_json:
        typer.echo(json.dumps({"cases": len(record.cases), "unit": record.unit, "metrics": values}))
        return
    typer.echo(f"{len(record.cases)} cases")
    for name, value in values.items():
        unit = f" {record.unit}" if name in DISTANCES and record.unit else ""
        typer.echo(f"{name:24s} {'undefined' if value is None else f'{value:.4f}{unit}'}")


data = typer.Typer(no_args_is_help=True, help="Look at data sets: what is missing or malformed, what they are.")
app.add_typer(data, name="data")


@data.command("check")
def data_check(
    folder: Annotated[Path, typer.Argument(help="Site folder, or the folder of a published data set.")],
    kind: Annotated[str, typer.Option("--as", help="own, oct, camelyon17 or prostate.")] = "own",
    as_json: Json = False,
) -> None:
    """Say everything that is missing or malformed, a line each; exit code 1 if there is anything.

    For example:

        dltta data check data/hospital_a

        dltta data check downloads/camelyon17_v1.0 --as camelyon17
    """
    require("kind of data set", kind, ("own", *PUBLISHED))
    with bars() as listener:
        progress = listener.count("check")
        problems = (
            check_site(folder, progress=progress) if kind == "own" else check_published(kind, folder, progress=progress)
        )
    if as_json:
        typer.echo(json.dumps([{"path": str(p.path), "what": p.what, "do": p.do} for p in problems]))
    else:
        for problem in problems:
            typer.echo(str(problem))
        typer.echo(f"{len(problems)} problems" if problems else f"{folder}: nothing is wrong")
    raise typer.Exit(1 if problems else 0)


@data.command("card")
def data_card(name: Annotated[str, typer.Argument(help="oct, camelyon17 or prostate.")]) -> None:
    """What a published data set holds, its licence, how to get it and the folder we expect.

    For example:

        dltta data card oct
    """
    require("data card", name, PUBLISHED)
    typer.echo(card(name).markdown())


def _show(results: Results) -> None:
    out = Console()
    out.print(rich_table(by_target(results)))
    for sentence in sentences(results):
        out.print(sentence, highlight=False)


@contextmanager
def _tensorboard(folder: Path | None) -> Iterator[Callable[[Row], None]]:
    if folder is None:
        yield lambda row: None
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SettingError("TensorBoard is not installed; pip install 'dltta[tracking]'") from error
    with SummaryWriter(str(folder)) as writer:

        def log(row: Row) -> None:
            for name, value in row.items():
                if isinstance(value, float):
                    writer.add_scalar(f"{row['stage']}/{name}", value, row["epoch"])

        yield log


def _device(name: str) -> str:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise SettingError(f"device {name!r} cannot be used: {_one_line(error)}") from error
    return name


def _method(name: str | None, settings: dict[str, Any]) -> Method | None:
    if name is None and settings:
        raise SettingError("--uda-setting is for methods that learn with target images; add --uda")
    return None if name is None else make_uda(name, settings)


def _settings(given: list[str] | None) -> dict[str, Any]:
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


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def _sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.lower().split("x")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise SettingError(f"{text!r} is not a size; write 128x1024 or 80x80x80")
    return tuple(map(int, parts))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
