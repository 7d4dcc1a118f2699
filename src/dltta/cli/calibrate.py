"""`dltta calibrate`: rehearsal for a model that exists already."""

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dltta.cli.grid import Place
from dltta.cli.options import MODEL_HELP, DescribedModel, Device, Json, count_processes, require_device, split_size
from dltta.errors import SettingError

if TYPE_CHECKING:
    from dltta.models.io.opened import OpenedModel


def calibrate(
    model: Annotated[str, typer.Option("-m", "--model", metavar="MODEL", help=MODEL_HELP)],
    site: Annotated[
        str,
        typer.Option(
            "-i",
            "--input",
            metavar="SITE",
            help="Labeled images of the source site, best ones that training did not see (docs/data.md). Without "
            "labels only the statistics of its images are measured.",
        ),
    ],
    own: DescribedModel,
    place: Place,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FOLDER",
            help="Where what was learned is written; dltta adapt takes it as --calibration.",
            show_default="the model folder, if it is one of dltta train",
        ),
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Windows of this size, such as 96x96x96, as dltta adapt will use.",
            show_default="the model's",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Random seed of the simulated sites.")] = 0,
    processes: Annotated[int, typer.Option("-j", "--jobs", metavar="N", help="Streams that run at the same time.")] = 1,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Rehearse at simulated sites: what dltta adapt needs to know to choose for each image how to predict it.

    Labeled images of the source site are changed as other sites would change them. How well each way of adapting does
    there, and which signals tell it without a label, decides at new sites (docs/rehearsal.md). Takes minutes; after an
    interruption the same command continues.

    Examples:
        dltta calibrate -m models/a -i data/hospital_a
        dltta calibrate -m bundles/spleen -i data/spleen_a -o calibrations/spleen
        dltta calibrate -m models/a -i data/hospital_a -j 2
    """
    from dltta.cli.progress import bars
    from dltta.config import open_target
    from dltta.evaluation.card import rehearsal_extent, rehearsal_sentences
    from dltta.evaluation.home import calibrate_model, site_setup, streams_on
    from dltta.evaluation.runners import threads_each, using_threads

    source = own.source(model, patch=split_size(patch))
    opened = source.open()
    folder = output or _own_folder(model, opened)
    runner = place.runner(count_processes(processes, device), folder / "jobs")
    opened.model.to(where := require_device(device))
    dataset = open_target(site)
    with bars() as listener, using_threads(threads_each(runner, runner.jobs)):
        progress, elsewhere = listener.rehearsal(0), None
        if not runner.here(runner.jobs):
            prepare = partial(site_setup, source, site, seed, where)
            elsewhere = streams_on(runner, prepare, folder, done=progress, lost=lambda task: listener.lost(task.name))
        found = calibrate_model(opened, dataset, folder, seed=seed, progress=progress, elsewhere=elsewhere)
    if as_json:
        typer.echo(json.dumps({"calibration": str(folder), "rehearsal": found}))
        return
    if not found["batch_sizes"]:
        cases = max(found["cases"].values())
        typer.echo(
            f"{folder}: calibrated without labels with {cases} images; dltta adapt knows how far an image is "
            "from them, but not what to expect: give labeled images to rehearse"
        )
        return
    for sentence in rehearsal_sentences(found):
        typer.echo(sentence)
    typer.echo(f"{folder}: rehearsed with {rehearsal_extent(found)}")


def _own_folder(model: str, opened: "OpenedModel") -> Path:
    if opened.checkpoint is None:
        raise SettingError(f"{model} is no folder of dltta train; say where to write with -o FOLDER")
    return Path(model)
