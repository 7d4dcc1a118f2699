"""`dltta data`: data sets on disk."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dltta.cli.options import DataKind, Json, PhantomTask, PublishedData, add_command, split_size

if TYPE_CHECKING:
    from dltta.data.sites import Problem

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Data sets: what is missing or malformed in one, synthetic ones to try things with, and what the paper's are.",
    epilog="Examples:\n\n```text\ndltta data check data/hospital_a\ndltta data phantom oct cirrus -o data/hospital_b\n"
    "dltta data card oct\n```",
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


def phantom(
    task: Annotated[
        PhantomTask,
        typer.Argument(metavar="TASK", help="oct (masks of layers), histology (classes) or prostate (3-D masks)."),
    ],
    site: Annotated[
        str,
        typer.Argument(
            metavar="SITE",
            help="oct: spectralis, cirrus. histology: hospital_0 to hospital_4. prostate: RUNMC, BMC, I2CVB, UCL, "
            "BIDMC, HK. The first one is the source.",
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Site folder to write; a new one.")],
    count: Annotated[int, typer.Option("-n", "--count", metavar="N", help="How many cases.")] = 24,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed draws other patients.")] = 0,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of the images, such as 128x64.",
            show_default="128x256, 64x64 or 48x48x32",
        ),
    ] = None,
) -> None:
    """Write synthetic images of a scanner with their labels, to try the other commands without data of your own.

    No pixel comes from a patient (docs/phantoms.md).

    Examples:
        dltta data phantom oct spectralis -o data/hospital_a
        dltta data phantom oct cirrus -o data/hospital_b -n 12 --seed 1
    """
    from dltta.cli.progress import bars
    from dltta.data.phantom import phantom as make
    from dltta.data.phantom.folder import write_site

    cases = make(task.value, site, count, seed=seed, size=split_size(size))
    with bars() as listener:
        write_site(cases, output, progress=listener.count("draw"))
    typer.echo(f"{output}: {count} synthetic cases of {site}, {task.value} {cases.task}")


for command in (check, phantom, card):
    add_command(app, command)
