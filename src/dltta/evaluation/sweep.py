"""Lists in the table [adaptation] become a grid: every combination of their values is a point with results of its own.

`alpha = [1e-4, 1e-3]` and `steps = [1, 3]` are four points, named `alpha=0.0001,steps=1` and so on.
"""

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dltta.errors import SettingError, require
from dltta.evaluation.results import Results
from dltta.files import write_atomically
from dltta.recipes import Recipe

LISTS = ("betas",)  # settings whose one value is a list already: a list of lists is a sweep of them
COLUMNS = ("source", "target", "method", "rate", "metric", "mean", "sd", "n")


@dataclass(frozen=True)
class Point:
    """One combination of the swept values."""

    values: Mapping[str, Any]  # of the swept settings alone
    table: Mapping[str, Any]  # of all settings

    @property
    def name(self) -> str:
        """Its folder; empty where nothing is swept."""
        return ",".join(f"{key}={_text(value)}" for key, value in self.values.items())


def points(table: Mapping[str, Any]) -> list[Point]:
    """The grid of a table, the last list running fastest; one point without a name where there is no list."""
    for key in table:
        require("key in [adaptation]", key, [entry.name for entry in fields(Recipe)])
    swept = {key: values for key, values in table.items() if _is_swept(key, values)}
    for key, values in swept.items():
        if not values or any(values.count(value) > 1 for value in values):
            raise SettingError(f"{key} in [adaptation] is swept over {values}; list different values, at least one")
    chosen = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    return [Point(values, {**table, **values}) for values in chosen]


def write_sweep(folder: Path, grid: Sequence[Point], results: Mapping[str, Results]) -> Path:
    """All points in one table, `sweep.csv`, a row for each line of their summaries; same results, same bytes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*grid[0].values, *COLUMNS])
    for point in grid:
        values = [_text(value) for value in point.values.values()]
        for row in results[point.name].summary:
            numbers = ["" if math.isnan(number) else repr(number) for number in (row.mean, row.sd)]
            writer.writerow([*values, row.source, row.target, row.method, row.rate, row.metric, *numbers, row.n])
    write_atomically(folder / "sweep.csv", out.getvalue())
    return folder / "sweep.csv"


def _is_swept(key: str, value: object) -> bool:
    return isinstance(value, list) and (key not in LISTS or any(isinstance(each, list) for each in value))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "-".join(map(str, value)) if isinstance(value, list) else str(value)
