"""`dltta reproduce`: the paper's tables and figures."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dltta.cli.grid import GridOptions
from dltta.cli.options import FLAG, Device, Json, count_processes
from dltta.errors import SettingError


def reproduce(
    grid: GridOptions,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A table or figure of the list above, such as oct, or all.")
    ],
    root: Annotated[
        Path | None,
        typer.Option(
            "--data",
            metavar="FOLDER",
            help="Folder of the published data set; `dltta data card` says how to get it.",
            show_default="none: give --phantom",
        ),
    ] = None,
    phantom: Annotated[
        bool,
        typer.Option("--phantom", metavar=FLAG, help="Use synthetic images at reduced size instead of published data."),
    ] = False,
    small: Annotated[
        bool,
        typer.Option(
            "--small",
            metavar=FLAG,
            help="With --phantom: smaller images still, so that all names with three seeds take an hour of two cores.",
        ),
    ] = False,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FOLDER", help="Results go into FOLDER/NAME or FOLDER/NAME-phantom."),
    ] = Path("runs/reproduce"),
    seeds: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Source models to train, each with its own seed.",
            show_default="3; with --phantom 1",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Epochs of source training.",
            show_default="100, the paper's; with --phantom the demo's",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="histology: start from torchvision's state dict of densenet121.",
            show_default="random weights",
        ),
    ] = None,
    vgg: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="oct: torchvision's state dict of vgg19, by which uda-st compares styles.",
            show_default="the source model's encoder",
        ),
    ] = None,
    test_time_only: Annotated[
        bool,
        typer.Option(
            "--test-time-only",
            metavar=FLAG,
            help="Leave out methods that learn with target images (uda-st, cyclegan, udas, uda-swav).",
        ),
    ] = False,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", help="The first random seed; another one draws other weights and, with --phantom, images."
        ),
    ] = 0,
    processes: Annotated[
        int | None,
        typer.Option(
            "-j",
            "--jobs",
            metavar="N",
            help="Tasks that run at the same time.",
            show_default="2 on a CPU, 1 on a GPU",
        ),
    ] = None,
    pages: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Also write a page for each table and figure into FOLDER.", show_default="no pages"
        ),
    ] = None,
    pages_only: Annotated[
        bool,
        typer.Option(
            "--pages-only", metavar=FLAG, help="Run nothing: write the pages of what is finished, and say what is not."
        ),
    ] = False,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Make a table or figure of the paper, our numbers beside the published ones.

    Tables: oct, histology (or camelyon17), prostate, initial-rates, orders, image-specific, steps, retrieval-size,
    similarity. Figures: figure-rates, figure-segmentation, figure-loss, figure-retrieval. Models and streams are shared
    between them and never run twice.

    Examples:
        dltta reproduce oct --phantom
        dltta reproduce all --phantom --small --seeds 3 --pages docs/reproduced
        dltta reproduce prostate --data downloads/prostate --device cuda
    """
    from dltta.cli.progress import bars
    from dltta.evaluation.paper.pages import write_pages
    from dltta.evaluation.paper.reproduce import REPRODUCTIONS, check, chosen
    from dltta.evaluation.paper.reproduce import reproduce as make
    from dltta.evaluation.paper.tasks import Setup, about

    names = chosen(name)
    if (root is None) != phantom:
        raise SettingError(
            "where are the images? give --data FOLDER with the published data, or --phantom for synthetic images"
            if root is None
            else "--data and --phantom exclude each other; give one of them"
        )
    if small and not phantom:
        raise SettingError("--small is for synthetic images; give it with --phantom")
    if pages_only and pages is None:
        raise SettingError("--pages-only says what to write, not where; give --pages FOLDER too")
    processes = count_processes(processes, device)
    setup = Setup(
        output,
        root,
        seeds=seeds if seeds is not None else 1 if phantom else 3,
        seed=seed,
        epochs=epochs,
        weights=weights,
        vgg=vgg,
        test_time_only=test_time_only,
        small=small,
    )
    for each in names:
        check(each, setup)
    runner, tracker = grid.runner(processes, output / "jobs"), grid.tracker(output)
    where, written = grid.device(device), {}
    with bars() as listener:
        for each in () if pages_only else names:
            written[each] = make(each, setup, device=where, runner=runner, listener=listener, tracker=tracker)
    if pages is not None:
        written["pages"] = write_pages(names, setup, pages, unfinished=pages_only)
    if as_json:
        typer.echo(json.dumps({each: [str(file) for file in files] for each, files in written.items()}))
        return
    for bed in dict.fromkeys(REPRODUCTIONS[each].bed for each in names):
        typer.echo(about(bed, setup))
    for files in written.values():
        typer.echo("\n".join(map(str, files)))
