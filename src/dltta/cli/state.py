"""`dltta state`: what a stream has learned, version by version."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dltta.cli.options import FLAG, Json, OwnModel, add_command

if TYPE_CHECKING:
    from dltta.serving.maintenance import Listed

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look after what a stream of dltta adapt has learned: list versions, go back to one, find alterations, write "
    "the adapted model.",
    epilog="Examples:\n\n```text\ndltta state list predictions\ndltta state rollback predictions --to 12\n```",
)
Output = Annotated[Path, typer.Argument(metavar="FOLDER", help="The output folder of dltta adapt.")]
Sign = Annotated[
    Path | None,
    typer.Option(metavar="KEYFILE", help="The file with the key of a signed stream.", show_default="not signed"),
]
Version = Annotated[
    int | None, typer.Option(metavar="N", help="Which version, as `dltta state list` shows it.", show_default="latest")
]
HASH = re.compile("[0-9a-f]{64}")
COMPARED = 8  # images that an exported model is compared on


def list_(output: Output, as_json: Json = False) -> None:
    """List the versions that a stream can go back to, the oldest first.

    A version is made after every batch; * marks the current one.

    Examples:
        dltta state list predictions
    """
    from rich.console import Console

    from dltta.serving.maintenance import list_versions

    versions = list_versions(output)
    if as_json:
        typer.echo(json.dumps([asdict(version) for version in versions]))
    else:
        Console().print(_table(versions), highlight=False)


def _table(versions: "list[Listed]") -> Any:
    """Fits a terminal: long names of cases are cut."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("version", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("made by", no_wrap=True, overflow="ellipsis")
    for version in versions:
        cases = version.cases[:1] if len(version.cases) < 2 else (version.cases[0], "…", version.cases[-1])
        mark = "*" if version.current else " "
        table.add_row(mark, str(version.version), _size(version.bytes), Text(version.event or " ".join(cases)))
    return table


def _size(bytes_: int) -> str:
    return f"{bytes_ / 1e6:.1f} MB" if bytes_ >= 1e6 else f"{bytes_ / 1e3:.1f} kB"


def cases(
    output: Output,
    review: Annotated[
        bool, typer.Option("--review", metavar=FLAG, help="Only cases that somebody should look at.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the log as a table: for each case what was decided, what to expect of it, and whether to look at it.

    Expected is the score that the recommended recipe expects, in points of 100, with its 90 % interval. Changed is
    what adaptation would have changed, in shadow mode.

    Examples:
        dltta state cases predictions
        dltta state cases predictions --review
    """
    from rich.console import Console

    from dltta.serving.maintenance import logged_cases
    from dltta.serving.summary import needs_review

    found = [line for line in logged_cases(output) if needs_review(line) or not review]
    if as_json:
        typer.echo(json.dumps(found))
    elif found:
        Console().print(_cases(found), highlight=False)
    else:
        typer.echo(f"{output}: no case{' to review' if review else ' yet'}")


def _cases(lines: "list[dict[str, Any]]") -> Any:
    """Only columns that some case has something in; long names are cut."""
    from rich.table import Table
    from rich.text import Text

    rows = [_told(line) for line in lines]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        if any(row[name] for row in rows):
            right = name in ("expected", "changed", "rate")
            table.add_column(
                name, justify="right" if right else "left", no_wrap=right or name == "case", overflow="ellipsis"
            )
    for row in rows:
        table.add_row(*(Text(row[str(column.header)]) for column in table.columns))
    return table


def _told(line: Mapping[str, Any]) -> dict[str, str]:
    """A line of the log in words."""
    from dltta.serving.summary import needs_review

    quality, change, rate = (line.get(key) for key in ("quality", "change", "rate"))
    low, high = line.get("quality_low"), line.get("quality_high")
    interval = "" if low is None or high is None else f" ({low * 100:.0f}–{high * 100:.0f})"
    return {
        "case": str(line["case"]),
        "decision": "skipped" if "error" in line else str(line.get("decision") or "predicted"),
        "reason": str(line.get("error") or line.get("reason") or ""),
        "given": str(line.get("candidate") or ""),
        "expected": "" if quality is None else f"{quality * 100:.0f}{interval}",
        "changed": "" if change is None else f"{change:.1%}",
        "rate": "" if rate is None else f"{rate:.3g}",
        "review": "look at it" if needs_review(line) else "",
    }


def show(output: Output, version: Version = None, as_json: Json = False) -> None:
    """Show what a version holds and the settings of its stream.

    Examples:
        dltta state show predictions
        dltta state show predictions --version 12
    """
    from dltta.serving.maintenance import show_version

    found = show_version(output, version)
    if as_json:
        typer.echo(json.dumps(found))
        return
    adapted = list(found["adapted"])
    rows = {
        "version": found["version"],
        "batches seen": found["batches"],
        "pairs in memory": found["memory"],
        "adapted tensors": f"{len(adapted)}, such as {adapted[0]}" if adapted else "none",
    }
    typer.echo("\n".join([*_aligned(rows), "", "settings", *_aligned(_flat(found["settings"]), indent="  ")]))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings within settings as `adaptation.alpha`."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _aligned(rows: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    width = max(map(len, rows))
    return (f"{indent}{key:{width}s}  {_words(value)}" for key, value in rows.items())


def _words(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_words, value)) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = "none" if value is None else str(value)
    return f"{text[:12]}…" if HASH.fullmatch(text) else text


def rollback(
    output: Output,
    version: Annotated[int, typer.Option("--to", metavar="N", help="The version to go back to.")],
    sign: Sign = None,
) -> None:
    """Go back to an older version: the next image is adapted from there. The log keeps what happened.

    Examples:
        dltta state rollback predictions --to 12
    """
    from dltta.serving.maintenance import roll_back

    typer.echo(f"{output}: version {roll_back(output, version, sign)} is version {version} again")


def verify(
    output: Output,
    sign: Sign = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="HASH",
            help="The hash that dltta adapt printed at its end: the log must still hold that line.",
            show_default="not checked",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find everything that is not as dltta adapt wrote it: log, predictions, state, foreign files.

    Exit code 1 if there is anything.

    Examples:
        dltta state verify predictions
        dltta state verify predictions --sign key --expect 9f86d081884c7d65
    """
    from dltta.serving.verification import verify as find_alterations

    problems = find_alterations(output, sign, expect)
    if as_json:
        typer.echo(json.dumps(problems))
    else:
        typer.echo("\n".join(problems) if problems else f"{output}: the record is as it was written")
    raise typer.Exit(1 if problems else 0)


def export(
    output: Output,
    model: Annotated[
        str, typer.Option("-m", "--model", metavar="MODEL", help="The source model that the stream was begun with.")
    ],
    target: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where the model is written.")],
    own: OwnModel,
    images: Annotated[
        Path | None,
        typer.Option(
            "-i",
            "--input",
            metavar="PATH",
            help="Images to compare the written model with the adapting one on; the first 8 are taken.",
            show_default="one image of noise",
        ),
    ] = None,
    version: Version = None,
    bundle: Annotated[bool, typer.Option("--bundle", metavar=FLAG, help="Write a MONAI bundle.")] = False,
    as_json: Json = False,
) -> None:
    """Write the adapted model as a plain model that no longer adapts, and measure how far it is from the adapting one.

    It has the form of the source model (a model folder, a bundle, a result folder of nnU-Net, or weights for your own
    code), or is a MONAI bundle. Statistics that went along with the stream (--statistics running) are in it; otherwise
    it has the source model's, and differs from the model that adapts by what the statistics of each image do. A method
    that moves nothing (recommended chooses among predictions) leaves the source model, which is said.

    Examples:
        dltta state export predictions -m models/a -o models/a_at_b
        dltta state export predictions -m bundles/spleen -o spleen_at_b -i scans
        dltta state export predictions -m models/a -o a_at_b --bundle
    """
    from dltta.data.inbox import find_incoming, read_incoming
    from dltta.serving.maintenance import export as write_model

    opened = own.source(model).open()
    read = [] if images is None else [read_incoming(case) for case in find_incoming(images)[:COMPARED]]
    done = write_model(output, opened, target, number=version, bundle=bundle, images=read)
    unit = "positions" if done.opened.task == "segmentation" else "images"
    if as_json:
        found = {"model": str(target), "version": done.version, "method": done.method, "moved": len(done.moved)}
        compared = {"difference": done.difference, "unit": unit, "images": len(read)}
        typer.echo(json.dumps(found | compared))
        return
    if done.moved:
        typer.echo(f"{target}: the model as adapted in {output}")
    else:
        typer.echo(f"{target}: the source model again; {done.method} moved no weights and no statistics in {output}")
    on = f"{len(read)} images" if read else "one image of noise (give images with -i)"
    typer.echo(f"it predicts {done.difference:.2%} of {unit} otherwise than the model that adapts, on {on}")


add_command(app, list_, "list")
for command in (cases, show, rollback, verify, export):
    add_command(app, command)
