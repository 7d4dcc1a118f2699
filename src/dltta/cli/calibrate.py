"""`dltta calibrate`: rehearsal for a model that exists already."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dltta.cli.options import MODEL_HELP, Device, Json, OwnModel, require_device, split_size
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
    own: OwnModel,
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
    """
    from dltta.cli.progress import bars
    from dltta.config import open_target
    from dltta.evaluation.home import calibrate_model

    opened = own.source(model, patch=split_size(patch)).open()
    folder = output or _own_folder(model, opened)
    opened.model.to(require_device(device))
    dataset = open_target(site)
    with bars() as listener:
        found = calibrate_model(opened, dataset, folder, seed=seed, progress=listener.rehearsal(0))
    if as_json:
        typer.echo(json.dumps({"calibration": str(folder), "rehearsal": found}))
        return
    cases = max(found["cases"].values())
    if not found["batch_sizes"]:
        typer.echo(
            f"{folder}: calibrated without labels with {cases} images; dltta adapt knows how far an image is "
            "from them, but not what to expect: give labeled images to rehearse"
        )
        return
    for sentence in sentences(found):
        typer.echo(sentence)
    typer.echo(f"{folder}: rehearsed with {cases} cases at {len(found['sites'])} simulated sites")


def _own_folder(model: str, opened: "OpenedModel") -> Path:
    if opened.checkpoint is None:
        raise SettingError(f"{model} is no folder of dltta train; say where to write with -o FOLDER")
    return Path(model)


def sentences(found: dict[str, Any]) -> list[str]:
    """What was found, for people: one for each batch size."""
    said = []
    for size, efforts in found["batch_sizes"].items():
        best = efforts["default"]
        sites = [row for row in best["scores"] if not row["harmful"] and row["site"] != "source"]
        mean = {key: 100 * sum(row[key] for row in sites) / len(sites) for key in ("source", "batch", "chosen")}
        said.append(
            f"batches of {size}: {', '.join(best['plan']['arms'])}; at simulated sites {mean['chosen']:.1f} "
            f"(source model {mean['source']:.1f}, batch statistics {mean['batch']:.1f})"
        )
    return said
