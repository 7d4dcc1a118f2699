"""`dltta report`: tables and report of results that are there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dltta.evaluation.results import Results


def report(
    results: Annotated[Path, typer.Argument(metavar="RESULTS", help="A results.json, or the folder that it is in.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Where tables and report.html are written.",
            show_default="the folder of RESULTS",
        ),
    ] = None,
) -> None:
    """Write tables and report again from results.json, without running anything.

    Examples:
        dltta report runs/ab
        dltta report runs/ab/results.json -o paper/tables
    """
    from dltta.evaluation.outputs import write_tables
    from dltta.evaluation.report import write_report
    from dltta.evaluation.results import Results

    file = results / "results.json" if results.is_dir() else results
    loaded = Results.load(file)
    folder = output or file.parent
    write_tables(folder, loaded)
    write_report(folder / "report.html", loaded)
    show(loaded)
    typer.echo(f"Report: {folder / 'report.html'}")


def show(results: "Results") -> None:
    """The table and the sentences of results, on standard output."""
    from rich.console import Console

    from dltta.evaluation.formats import rich_table
    from dltta.evaluation.headline import sentences
    from dltta.evaluation.tables import by_target

    out = Console()
    out.print(rich_table(by_target(results)))
    for sentence in sentences(results):
        out.print(sentence, markup=False, highlight=False)
