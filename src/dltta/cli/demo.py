"""`dltta demo`: every method on synthetic images."""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dltta.cli.options import FLAG, DemoTask, Device, Json, count_processes, require_device
from dltta.methods import Optimizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dltta.evaluation.experiment import Experiment
    from dltta.evaluation.results import Results
    from dltta.evaluation.story import Line


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
    """Train a model at a synthetic hospital A, adapt it to hospital B with every method, and tell what happened.

    Needs no data. Writes a table and a report. Without --quick the default recipe of dltta adapt is run beside the
    paper's methods, after it has rehearsed at simulated sites. Models and finished streams are kept: a second run
    takes seconds.

    Examples:
        dltta demo
        dltta demo --task all --quick
    """
    from dltta.evaluation.demo import TASKS, changing_experiment, demo_experiment

    summaries = []
    for name in TASKS if task is DemoTask.ALL else (task.value,):
        experiment = demo_experiment(name, str(output), seed=seed, quick=quick)
        experiment = replace(experiment, adaptation=replace(experiment.adaptation, optimizer=optimizer))
        summaries.append(_run(experiment, changing_experiment(experiment, quick=quick), device, as_json))
    if as_json:
        typer.echo(json.dumps(summaries))


def _run(experiment: "Experiment", half_way: "Experiment", device: str, as_json: bool) -> dict[str, Any]:
    from dltta.cli.progress import bars
    from dltta.evaluation.bench import run_experiment
    from dltta.evaluation.demo import NOTES
    from dltta.evaluation.runners import Local
    from dltta.evaluation.story import story

    place = require_device(device)
    with bars() as listener, Local(count_processes(None, device)) as runner:
        changing = run_experiment(half_way, device=place, runner=runner, listener=listener, notes=NOTES)
        results = run_experiment(
            experiment, device=place, runner=runner, listener=listener, notes=NOTES, changing=changing
        )
    told, page = story(results, changing), experiment.folder / "report.html"
    if not as_json:
        _tell(results, told)
        typer.echo(f"\nPictures, every case and all settings: {page}")
    return {
        "report": str(page),
        "results": str(experiment.folder / "results.json"),
        "changing": str(half_way.folder / "results.json"),
        "story": [f"{line.head} {line.text}" for line in told],
    }


def _tell(results: "Results", told: "Sequence[Line]") -> None:
    """The table, then what a newcomer should take from it."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from dltta.evaluation.formats import rich_table
    from dltta.evaluation.tables import by_target

    out = Console()
    out.print(rich_table(by_target(results)))
    out.print("\nWhat happened (synthetic images):", highlight=False)
    for number, line in enumerate(told, start=1):
        out.print(Padding(Text.assemble(f"{number}. ", (line.head, "bold"), f" {line.text}"), (0, 0, 0, 2)))
