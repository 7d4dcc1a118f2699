"""`dltta data`: data sets on disk."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dltta.cli.options import DataKind, Json, PublishedData, add_command

if TYPE_CHECKING:
    from dltta.data.sites import Problem

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look at data sets: what is missing or malformed, and what the paper's data sets are.",
    epilog="Examples:\n\n```text\ndltta data check data/hospital_a\ndltta data card oct\n```",
)
NAMED = 3  # files that one cause is shown with


def check(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A site folder (docs/data.md), or a published data set's.")
    ],
    kind: Annotated[
        DataKind,
        typer.Option(
            "--as",
            metavar="KIND",
            help="What the folder should hold: own (a site of your own), or the published oct, camelyon17 or prostate.",
        ),
    ] = DataKind.OWN,
    as_json: Json = False,
) -> None:
    """Check a data set for anything missing or malformed; exit code 1 if there is anything.

    Each cause is one line; where many files share it, the first few are named.

    Examples:
        dltta data check data/hospital_a
        dltta data check downloads/camelyon17_v1.0 --as camelyon17
    """
    from dltta.cli.progress import bars
    from dltta.data.check import check_published, check_site

    with bars() as listener:
        progress = listener.count("check")
        if kind is DataKind.OWN:
            problems = check_site(folder, progress=progress)
        else:
            problems = check_published(kind.value, folder, progress=progress)
    if as_json:
        typer.echo(json.dumps([{"path": str(p.path), "what": p.what, "do": p.do} for p in problems]))
    else:
        for line in grouped(problems):
            typer.echo(line)
        typer.echo(f"{len(problems)} problem{'s' * (len(problems) > 1)}" if problems else f"{folder}: nothing is wrong")
    raise typer.Exit(1 if problems else 0)


def grouped(problems: "Iterable[Problem]") -> Iterator[str]:
    """A line per cause, with the files that share it; a case's own name in a message makes no other cause."""
    causes: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        own = re.escape(problem.path.name.split(".")[0])
        what = re.sub(rf"\b{own}(?![^\W_])", "*", problem.what)
        causes.setdefault((what, problem.do), []).append(problem)
    for first, *others in causes.values():
        yield str(first)
        if others:
            named = ", ".join(other.path.name for other in others[:NAMED])
            more = " …" if len(others) > NAMED else ""
            yield f"  the same in {len(others)} more: {named}{more}"


def card(name: Annotated[PublishedData, typer.Argument(metavar="NAME", help="oct, camelyon17 or prostate.")]) -> None:
    """Describe one of the paper's data sets: content, license, how to get it, and the folders we expect.

    Examples:
        dltta data card oct
    """
    from dltta.data.cards import card as read_card

    typer.echo(read_card(name.value).markdown())


for command in (check, card):
    add_command(app, command)
