"""`dltta evaluate`: how good are predictions?"""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from dltta.cli.options import Json


def evaluate(
    predictions: Annotated[
        Path,
        typer.Option(
            "-p",
            "--predictions",
            metavar="PATH",
            help="Segmentation: folder of masks. Classification: CSV of probabilities, or the folder with a "
            "predictions.csv.",
        ),
    ],
    labels: Annotated[
        Path,
        typer.Option(
            "-l",
            "--labels",
            metavar="PATH",
            help="Segmentation: folder of masks (labelsTr). Classification: labels.csv.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="Write a CSV with the scores of every case.",
            show_default="not written",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Score predictions against labels: means over all cases, and each case in a CSV if asked for.

    Every label needs a prediction of the same name.

    Examples:
        dltta evaluate -p predictions -l data/b/labelsTr -o scores.csv
        dltta evaluate -p predictions -l data/cells/labels.csv
    """
    from dltta.cli.progress import bars
    from dltta.evaluation.folders import record_csv, score_folders
    from dltta.files import write_atomically
    from dltta.metrics import DISTANCES

    with bars() as listener:
        record = score_folders(predictions, labels, progress=listener.count("score"))
    if output is not None:
        write_atomically(output, record_csv(record))
    values = {name: None if math.isnan(value) else value for name, value in record.metrics.items()}
    counts = {"missed": record.missed, "invented": record.invented} if record.task == "segmentation" else {}
    if as_json:
        typer.echo(json.dumps({"cases": len(record.cases), "unit": record.unit, "metrics": values, **counts}))
        return
    listed = "".join(f", {count} structures {name}" for name, count in counts.items() if count)
    typer.echo(f"{len(record.cases)} cases{listed}")
    for name, value in values.items():
        unit = f" {record.unit}" if name in DISTANCES and record.unit else ""
        typer.echo(f"{name:24s} {'undefined' if value is None else f'{value:.4f}{unit}'}")
