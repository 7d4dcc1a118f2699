"""8 metrics. How good are predictions that lie in a folder?"""

import csv
import json
import math
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import torch

from dltta.data.case import Task
from dltta.data.formats.images import difference, ending, read_geometry, read_mask
from dltta.data.sites import read_description
from dltta.errors import DataError
from dltta.evaluation.run import CaseRecord, StreamRecord, stream_metrics, with_scores
from dltta.files import csv_table, from_csv
from dltta.metrics import score_classification, score_segmentation
from dltta.quality.decision import EXPECTED

Progress = Callable[[int, int], None]


def score_folders(predictions: Path, labels: Path, *, progress: Progress = lambda done, total: None) -> StreamRecord:
    """Score masks against masks of the same name, or a table of probabilities against `labels.csv`.

    `labels` is a site's `labelsTr` (its `dataset.json` names the classes) or `labels.csv`; every label needs a
    prediction. A table may be given by the folder of its `predictions.csv`.
    """
    if labels.is_file():
        table = predictions / "predictions.csv" if predictions.is_dir() else predictions
        return _score_table(table, labels, progress)
    if not labels.is_dir():
        raise DataError(f"there is no {labels}; give a folder of masks or a labels.csv")
    return _score_masks(predictions, labels, progress)


def record_csv(record: StreamRecord) -> str:
    """One line per case: name, then every metric; empty where a metric is not defined."""
    names = list(dict.fromkeys(name for row in record.cases for name in row.metrics))
    rows: list[list[str]] = [["case", *names]]
    for row in record.cases:
        values = (row.metrics.get(name, math.nan) for name in names)
        rows.append([row.case, *("" if math.isnan(value) else repr(float(value)) for value in values)])
    return csv_table(rows)


def _score_masks(predictions: Path, labels: Path, progress: Progress) -> StreamRecord:
    files = sorted(file for file in labels.iterdir() if file.is_file() and ending(file))
    if not files:
        inside = [labels / name for name in ("labelsTr", "labelsTs", "labels.csv") if (labels / name).exists()]
        raise DataError(f"{labels} holds no masks; give {inside[0] if inside else 'a folder of masks or a labels.csv'}")
    if not predictions.is_dir():
        raise DataError(f"there is no folder {predictions}; give the output folder of dltta adapt")
    missing = [file.name for file in files if not (predictions / file.name).is_file()]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise DataError(f"{predictions} has no prediction {missing[0]}{more}; every label needs one of the same name")
    masks = [(file, torch.from_numpy(read_mask(file))) for file in files]
    classes = _classes(predictions, labels, max(int(mask.max()) for _, mask in masks))
    for file, mask in masks:
        if (value := int(mask.max())) >= len(classes):
            raise DataError(
                f"{file}: label value {value}, but the classes are 0 to {len(classes) - 1} ({', '.join(classes)}); a "
                "mask holds the number of each class, 0, 1, 2 …"
            )
    rows = []
    for number, (file, label) in enumerate(masks, start=1):
        wrong = difference(read_geometry(file), read_geometry(predictions / file.name))
        if wrong is not None:
            raise DataError(f"{predictions / file.name}: {wrong}")
        prediction = torch.from_numpy(read_mask(predictions / file.name))
        scores = score_segmentation(prediction, label, classes, spacing=read_geometry(file).spacing)
        name = file.name.removesuffix(ending(file) or "")
        rows.append(with_scores(CaseRecord(name, labels.name, {}, None), scores))
        progress(number, len(files))
    return StreamRecord(labels.name, "segmentation", stream_metrics(rows, "segmentation"), tuple(rows))


def _classes(predictions: Path, labels: Path, largest: int) -> tuple[str, ...]:
    """As `dataset.json` beside the labels names them, or the log beside the predictions; else by number."""
    if (labels.parent / "dataset.json").is_file():
        return read_description(labels.parent).classes
    if named := _logged_classes(predictions / "stream.jsonl"):
        return named
    return ("background", *(f"class_{value}" for value in range(1, largest + 1)))


def _logged_classes(log: Path) -> tuple[str, ...]:
    """Those of the stream that `dltta adapt` began there; none if there is no such log."""
    try:
        with log.open(encoding="utf-8") as file:
            begun = json.loads(file.readline())
    except (OSError, ValueError):
        return ()
    classes = begun.get("classes") if isinstance(begun, dict) else None
    return tuple(map(str, classes)) if isinstance(classes, list) else ()


def _score_table(predictions: Path, labels: Path, progress: Progress) -> StreamRecord:
    truth = {row["image"]: row["label"] for row in _read(labels, {"image", "label"})}
    rows = _read(predictions, {"image"})
    classes = [name for name in rows[0] if name not in ("image", "prediction", *EXPECTED)]
    unknown = sorted(set(truth.values()) - set(classes))
    if unknown:
        raise DataError(f"{predictions} has no column for class {unknown[0]!r}; it has {', '.join(classes) or 'none'}")
    predicted = {row["image"]: [_number(row[name], predictions) for name in classes] for row in rows}
    missing = sorted(truth.keys() - predicted.keys())
    if missing:
        raise DataError(f"{predictions} has no line for {missing[0]!r}; every labeled image needs one")
    probabilities = torch.tensor([predicted[name] for name in truth], dtype=torch.float64)
    values = torch.tensor([classes.index(label) for label in truth.values()])
    cases = tuple(
        CaseRecord(name, labels.parent.name, {"accuracy": float(row.argmax() == value)}, None, label=int(value))
        for name, row, value in zip(truth, probabilities, values, strict=True)
    )
    task: Task = "classification"
    progress(len(cases), len(cases))
    return StreamRecord(labels.parent.name, task, score_classification(probabilities, values), cases)


def _read(path: Path, needed: set[str]) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            table = [list(map(from_csv, row)) for row in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    rows = [dict(zip_longest(table[0], row[: len(table[0])], fillvalue="")) for row in table[1:] if row]
    if not rows or not needed <= rows[0].keys():
        raise DataError(f"{path} must be a CSV with the columns {', '.join(sorted(needed))} and at least one line")
    return rows


def _number(text: str | None, path: Path) -> float:
    try:
        return float(text or "")
    except ValueError as error:
        raise DataError(f"{path} holds {text!r} where a probability should be") from error
