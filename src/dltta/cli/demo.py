"""`dltta demo`: every method on synthetic images."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dltta.cli.options import FLAG, DemoTask, Device, Json, count_processes, require_device
from dltta.methods import Optimizer
from dltta.recipes import RECOMMENDED

if TYPE_CHECKING:
    from dltta.evaluation.experiment import Experiment


def demo(
    task: Annotated[
        DemoTask,
        typer.Option(
            metavar="TASK",
            help="Which synthetic images: oct (layers of the retina), histology (tumor or not), prostate (3-D MRI), or "
            "all three.",
        ),
    ] = DemoTask.OCT,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where models, results and the report are written.")
    ] = Path("runs/demo"),
    quick: Annotated[
        bool, typer.Option("--quick", metavar=FLAG, help="Use fewer images and epochs, for a first look.")
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Random seed; another one draws other images and weights.")
    ] = 0,
    optimizer: Annotated[
        Optimizer,
        typer.Option(metavar="NAME", help="What takes the adaptation step: sgd (Eq. 2 of the paper) or adam."),
    ] = Optimizer.SGD,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train a model at a synthetic hospital A, adapt it to hospital B with every method, write a table and a report.

    Needs no data. Without --quick the default recipe of dltta adapt is run beside the paper's methods, after it has
    rehearsed at simulated sites. Models and finished streams are kept: a second run takes seconds.

    Examples:
        dltta demo
        dltta demo --task all --quick
    """
    from dltta.evaluation.demo import TASKS, demo_experiment

    summaries = []
    for name in TASKS if task is DemoTask.ALL else (task.value,):
        experiment = demo_experiment(name, str(output), seed=seed, quick=quick)
        experiment = replace(experiment, adaptation=replace(experiment.adaptation, optimizer=optimizer))
        if not quick:  # the default of dltta adapt beside the paper's methods; it rehearses first
            experiment = replace(experiment, methods=(*experiment.methods, RECOMMENDED))
        summaries.append(_run(experiment, device, as_json))
    if as_json:
        typer.echo(json.dumps(summaries))


def _run(experiment: "Experiment", device: str, as_json: bool) -> dict[str, Any]:
    from dltta.cli.progress import bars
    from dltta.cli.report import show
    from dltta.evaluation.demo import NOTES
    from dltta.evaluation.experiment import run_experiment
    from dltta.evaluation.headline import sentences
    from dltta.evaluation.runners import Local

    runner = Local(count_processes(None, device))
    with bars() as listener:
        results = run_experiment(
            experiment, device=require_device(device), runner=runner, listener=listener, notes=NOTES
        )
    page = experiment.folder / "report.html"
    if not as_json:
        show(results)
        typer.echo(f"Synthetic images. Report: {page}")
    return {"report": str(page), "results": str(experiment.folder / "results.json"), "headline": sentences(results)}
