"""The command line: reads arguments, shows progress, prints one line for every mistake."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from dltta.allocator import keep_freed_memory
from dltta.config import (
    METHODS,
    OPTIMIZERS,
    AdaptationSettings,
    TrainConfig,
    build,
    default_architecture,
    default_preprocessing,
    open_dataset,
    read_toml,
    require,
)
from dltta.data.cards import card
from dltta.data.check import PUBLISHED, check_published, check_site
from dltta.demo import NOTES, TASKS, demo_experiment
from dltta.errors import DlttaError, SettingError
from dltta.evaluation import Results, by_target, rich_table, sentences, write_report
from dltta.evaluation.folders import record_csv, score_folders
from dltta.evaluation.metrics import DISTANCES
from dltta.experiment import Experiment, run_experiment, write_tables
from dltta.files import write_atomically
from dltta.progress import bars, screen
from dltta.reproduce import Setup, check, chosen, reproduce
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.fit import Ranks, Row
from dltta.training.settings import AUXILIARIES
from dltta.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Test-time adaptation for medical images that chooses how much to adapt to each image.",
)
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …")]
Json = Annotated[bool, typer.Option("--json", help="Print a machine-readable result.")]


def main() -> None:
    """The entry point: a mistake is one line and exit code 2; anything that is not one keeps its traceback."""
    keep_freed_memory()
    try:
        sys.exit(app(standalone_mode=False))
    except DlttaError as error:
        _fail(_one_line(error))
    except typer.TyperException as error:
        if message := error.format_message():
            _fail(f"{message} Try --help.")
        sys.exit(2)  # nothing was asked, and help has been shown
    except KeyboardInterrupt:
        screen.print("interrupted; the same command continues where it stopped")
        sys.exit(130)


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
        typer.Option("-i", "--input", help="Site folder; several may be given. Or phantom:TASK:SITE:N."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Model folder to write.")] = None,
    epochs: Annotated[int | None, typer.Option(help="[default: 100, the paper's]")] = None,
    with_: Annotated[str | None, typer.Option("--with", help="Train for these methods too: ttt,atta.")] = None,
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

    Options given here win over those in CONFIG. Several GPUs: `torchrun --nproc-per-node 2 -m dltta train …`.

    For example:

        dltta train -i data/hospital_a -o models/a --epochs 100 --with ttt,atta

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
    with bars() as listener, _tensorboard(tensorboard) as log:
        training = SourceTraining(
            datasets, architecture, preprocessing, settings, folder, where, resume, listener.training(0), log
        )
        checkpoint = training.run()
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


@app.command()
def bench(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; see configs/.")] = None,
    source: Annotated[list[str] | None, typer.Option(help="Source site; several are trained on together.")] = None,
    target: Annotated[list[str] | None, typer.Option(help="Target site folder; several may be given.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for models and results.")] = None,
    methods: Annotated[str | None, typer.Option(help="[default: source,ptbn,ttt,tent,atta]")] = None,
    rates: Annotated[str | None, typer.Option(help="fixed, dynamic, exponential [default: fixed,dynamic]")] = None,
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
