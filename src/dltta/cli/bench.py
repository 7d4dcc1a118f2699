"""`dltta bench`: methods, rates, seeds and orders from source to target sites."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from dltta.cli.grid import GridOptions, plan_json, plan_lines
from dltta.cli.options import FLAG, MODEL_HELP, Device, Json, OwnModel, count_processes, split_names
from dltta.errors import SettingError
from dltta.methods import PAPER_METHODS, Method, Optimizer
from dltta.recipes import ALL, UDA, Recipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dltta.evaluation.results import Results


@dataclass(frozen=True)
class Compared:
    """What is compared."""

    panel: ClassVar[str] = "What is compared"
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Test-time methods, with commas: {', '.join(Method)}, recommended, package.module:Class; all stands "
            "for every one that the model supports; or methods that learn with target images: "
            f"{', '.join(UDA)}.",
            show_default="source,ptbn,ttt,tent,atta; of a given model those that it has all parts for",
        ),
    ] = None
    rates: Annotated[
        str | None,
        typer.Option(
            metavar="RULES",
            help="Learning-rate rules, with commas: fixed, dynamic, exponential, relative, aligned, law, palm, "
            "matched (fixed at the mean of dynamic), shuffled (the rates of dynamic in random order), "
            "package.module:Class. fixed:1e-2 sets the rate; adam:1e-3 is a fixed one with Adam.",
            show_default="fixed,dynamic",
        ),
    ] = None
    seeds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Source models to train, each with its own seed.", show_default="1"),
    ] = None
    first_seed: Annotated[
        int | None,
        typer.Option(
            "--first-seed",
            metavar="K",
            help="The first of these seeds; with --seeds 2 --first-seed 1 the second and third source model.",
            show_default="0",
        ),
    ] = None
    orders: Annotated[int | None, typer.Option(metavar="N", help="Random orders of each stream.", show_default="1")] = (
        None
    )
    cases: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="At most so many cases of each target site (volumes where slices are taken), evenly spread.",
            show_default="all",
        ),
    ] = None
    epochs: Annotated[
        int | None, typer.Option(metavar="N", help="Epochs of source training.", show_default="100, the paper's")
    ] = None
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="The learning rate that the rules scale.",
            show_default="the paper's: 1e-3 for segmentation, 3e-4 for classification; of newer methods their authors'",
        ),
    ] = None
    optimizer: Annotated[
        Optimizer | None,
        typer.Option(
            metavar="NAME",
            help="What takes the adaptation step: sgd (Eq. 2 of the paper) or adam.",
            show_default="sgd; of newer methods their authors'",
        ),
    ] = None
    prefill: Annotated[
        bool,
        typer.Option(
            "--prefill",
            metavar=FLAG,
            help="Begin each stream with features and predictions of source images in the memory.",
        ),
    ] = False


@dataclass(frozen=True)
class RunOptions:
    """How it is run."""

    panel: ClassVar[str] = "How it is run"
    root: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="FOLDER", help="The folder that site folders are in.", show_default="the current one"
        ),
    ] = None
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where models and streams are kept; several comparisons can share them.",
            show_default="the output folder",
        ),
    ] = None
    processes: Annotated[int, typer.Option("-j", "--jobs", metavar="N", help="Tasks that run at the same time.")] = 1
    device: Device = "cpu"
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", metavar=FLAG, help="List the trainings and streams with an estimate, and run nothing."
        ),
    ] = False


def bench(
    compared: Compared,
    running: RunOptions,
    grid: GridOptions,
    own: OwnModel,
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="A TOML file, such as those in configs.")
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE",
            help="Source site with labels; repeat to train on several together.",
            show_default="those of CONFIG",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            help=f"Compare on this model instead of training one on --source. {MODEL_HELP}",
            show_default="none",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE",
            help="Target site; its labels are used for scores only. Repeat for several; sequence:SITE,SITE, "
            "interleave:SITE,SITE and drift:SITE,SITE are streams of several sites.",
            show_default="those of CONFIG",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="Where results are written.", show_default="that of CONFIG"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare methods and learning-rate rules from source sites to target sites: results.json, tables, report.

    Options given here win over those in CONFIG. Finished streams are not run again: after an interruption the same
    command continues. Lists in the table [adaptation] of CONFIG, such as alpha = [1e-4, 1e-3], are run in every
    combination, with results in a folder for each.

    Examples:
        dltta bench --source data/a --target data/b -o runs/ab
        dltta bench --source data/a --target data/b --methods all -o runs/ab
        dltta bench --model bundles/spleen --target data/b -o runs/spleen
        dltta bench configs/real/nuclei_tissue.toml --data sites -j 2
        dltta bench configs/real/nuclei_tissue.toml --dry-run
        dltta bench configs/real/nuclei_tissue.toml --on slurm -j 8
    """
    from dltta.cli.progress import bars
    from dltta.config import build, read_toml
    from dltta.evaluation.bench import run_sweep
    from dltta.evaluation.experiment import Experiment
    from dltta.evaluation.plan import make_plan
    from dltta.evaluation.sweep import points, write_sweep
    from dltta.training import TrainingSettings
    from dltta.training.settings import AUXILIARIES

    table = read_toml(config) if config else {}
    training = {**table.pop("training", {}), **_given(epochs=compared.epochs)}
    optimizer = None if compared.optimizer is None else compared.optimizer.value
    adaptation = {**table.pop("adaptation", {}), **_given(alpha=compared.alpha, optimizer=optimizer)}
    adaptation |= {"prefill": True} if compared.prefill else {}
    table |= _given(
        source=source, targets=target, output=_text(output), root=_text(running.root), work=_text(running.work),
        methods=split_names(compared.methods), rates=split_names(compared.rates), seeds=compared.seeds,
        first_seed=compared.first_seed, orders=compared.orders, cases=compared.cases,
    )  # fmt: skip
    if "targets" not in table:
        raise SettingError("there is no target to compare on; give --target SITE")
    model = model or table.pop("model", None)
    table |= _given_model(own, model, table)
    asked = "with" in training
    needed = [*table.get("methods", list(PAPER_METHODS)), *(["memory"] if adaptation.get("prefill") else [])]
    training.setdefault("with", [name for name in AUXILIARIES if name in needed])
    swept = points(adaptation)
    recipes = {point.name: _shared_recipe(dict(point.table)) for point in swept}
    experiment = build(
        Experiment,
        {
            **table,
            "training": build(TrainingSettings, training, "[training]"),
            "adaptation": recipes[swept[0].name],
        },
        str(config or "the command line"),
    )
    if ALL in experiment.methods and not asked:
        experiment = experiment.with_all_parts()
    processes = count_processes(running.processes, running.device)
    runner = grid.runner(processes, experiment.work_folder / "jobs")
    if running.dry_run:
        plan = make_plan(experiment, recipes)
        typer.echo(json.dumps(plan_json(plan, processes)) if as_json else "\n".join(plan_lines(plan, processes)))
        return
    device, tracker = grid.device(running.device), grid.tracker(experiment.folder)
    with bars() as listener:
        results = run_sweep(
            experiment, recipes, device=device, runner=runner, listener=listener, tracker=tracker, diverging="note"
        )
    if "" in results:
        _tell(experiment.folder, results[""], as_json)
    else:
        _tell_sweep(write_sweep(experiment.folder, swept, results), results, as_json)


def _tell(folder: Path, results: "Results", as_json: bool) -> None:
    from dltta.cli.report import show
    from dltta.evaluation.headline import sentences

    if as_json:
        typer.echo(json.dumps({"results": str(folder / "results.json"), "headline": sentences(results)}))
        return
    show(results)
    typer.echo(f"Report: {folder / 'report.html'}")


def _tell_sweep(table: Path, results: "Mapping[str, Results]", as_json: bool) -> None:
    from dltta.cli.report import show

    files = {point: str(table.parent / point / "results.json") for point in results}
    if as_json:
        typer.echo(json.dumps({"sweep": str(table), "results": files}))
        return
    for point, found in results.items():
        typer.echo(point)
        show(found)
    typer.echo(f"All points: {table}; a report in the folder of each")


def _shared_recipe(table: dict[str, Any]) -> Recipe:
    """What all methods share, from the table [adaptation]."""
    from dltta.config import build

    for key in ("method", "rate", "name"):
        if key in table:
            raise SettingError(
                f"[adaptation] is for all methods; {key} is no part of it: use methods and rates above it"
            )
    return build(Recipe, table, "[adaptation]")


def _given_model(own: OwnModel, model: str | None, table: dict[str, Any]) -> dict[str, Any]:
    """The model to compare on, and unless they are named the methods that it has all parts for."""
    if model is None:
        if own != OwnModel():
            raise SettingError("options about a model of your own need one; add --model MODEL")
        return {}
    from dltta.evaluation.source_models import open_given, working_methods

    source = own.source(model)
    return {
        "source": table.get("source", []),
        "model": source,
        **({} if "methods" in table else {"methods": working_methods(open_given(source))}),
    }


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value not in (None, [], ())}


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
