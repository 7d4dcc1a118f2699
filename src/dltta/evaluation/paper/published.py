"""9 tables. What did the paper print, and what did we measure? Both in one table, clearly headed.

Published numbers come from `tables/*.json`, ours from `Results`; nothing is typed here.
"""

import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from dltta.evaluation.formats import LATEX_SPECIAL
from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.tables import method_label, target_note, training_notes
from dltta.files import csv_table
from dltta.metrics import mean_defined

NOT_RUN = "not run"
NOT_PRINTED = "–"
DIVERGED = "diverged"  # a loss, gradient or prediction became infinite
QUOTED = "§"  # behind numbers that the paper quotes from another one
RATE = "rate"  # as a metric: the mean learning rate, x 1000, of the images with a discrepancy where any has one


@dataclass(frozen=True)
class Number:
    """A mean in the table's unit; `sd` is `nan` where there is none. `quoted` names the paper it was taken from."""

    mean: float
    sd: float = math.nan
    quoted: str | None = None

    def shown(self, digits: int) -> str:
        spread = "" if math.isnan(self.sd) else f" ± {self.sd:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}{f' {QUOTED}' if self.quoted else ''}"


@dataclass(frozen=True)
class PublishedRow:
    """One method as printed; `method` and `rate` are ours."""

    name: str
    method: str
    rate: str
    values: tuple[Number | None, ...]  # None: not printed


@dataclass(frozen=True)
class Published:
    """A table or figure of the paper. `where` is its label, `says` what the text adds."""

    paper: str
    where: str
    caption: str
    columns: tuple[str, ...]
    says: tuple[str, ...]
    rows: tuple[PublishedRow, ...]

    @classmethod
    def load(cls, name: str) -> "Published":
        """The numbers kept under this name in `tables/`."""
        text = files("dltta.evaluation.paper").joinpath("tables", f"{name}.json").read_text(encoding="utf-8")
        record = json.loads(text)
        columns = record["columns"]
        rows = [
            PublishedRow(row["name"], row["method"], row["rate"], _published_numbers(row, columns))
            for row in record["rows"]
        ]
        return cls(
            record["paper"], record["where"], record["caption"],
            tuple(columns), tuple(record["says"]), tuple(rows),
        )  # fmt: skip


def _published_numbers(row: Mapping[str, Any], columns: Sequence[str]) -> tuple[Number | None, ...]:
    """The numbers of a row; `quoted` holds for `quoted_columns`, or for all when there are none."""
    quoted = row.get("quoted_columns", columns if "quoted" in row else ())
    return tuple(
        None if value is None else replace(Number(*value), quoted=row["quoted"] if column in quoted else None)
        for column, value in zip(columns, row["values"], strict=True)
    )


@dataclass(frozen=True)
class Place:
    """Where our number for a column is found: one metric of one run, the mean over `targets`."""

    run: str
    metric: str
    targets: tuple[str, ...]
    order: int | None = None  # None: every order
    rate: str | None = None  # None: that of the row
    by_method: bool = False  # a run of its own for each method, which may diverge; dynamic rates only

    def run_of(self, method: str) -> str:
        return f"{self.run}-{method}" if self.by_method else self.run


@dataclass(frozen=True)
class Derived:
    """A column that is computed from others, for our numbers and for the paper's."""

    title: str
    columns: tuple[str, ...]
    compute: Callable[[Sequence[float]], float]


@dataclass(frozen=True)
class ComparisonCell:
    """Our number and the paper's; None: not run, not printed. `instead` stands where ours would."""

    ours: Number | None
    published: Number | None = None
    instead: str = NOT_RUN


@dataclass(frozen=True)
class ComparisonRow:
    """One method."""

    label: str
    method: str
    rate: str
    cells: tuple[ComparisonCell, ...]


@dataclass(frozen=True)
class Comparison:
    """A finished table; `about` is what a reader must know before the first number."""

    title: str
    about: str
    columns: tuple[str, ...]
    rows: tuple[ComparisonRow, ...]
    notes: tuple[str, ...]
    digits: int = 2

    def prints(self, column: int) -> bool:
        """Whether the paper prints any number of a column."""
        return any(row.cells[column].published for row in self.rows)


def compare(
    published: Published,
    places: Mapping[str, Place],
    results: Mapping[str, Results],
    about: str,
    *,
    derived: Sequence[Derived] = (),
    diverged: Collection[str] = (),
) -> Comparison:
    """The paper's table with our number beside each of its own; columns that it does not have are ours only.

    `diverged` are runs without results because numbers became infinite.
    """
    rows = [_compared_row(published, row, places, results, derived, diverged) for row in published.rows]
    notes = [*_notes(published), *_quoted_notes(rows), _spread_note(rows, results), *_count_notes(results, places)]
    run = {row.method for row in rows if any(cell.ours for cell in row.cells)}
    notes += dict.fromkeys(note for found in results.values() for note in training_notes(found, run))
    if (seeing := target_note(run)) is not None:
        notes.append(seeing)
    columns = (*places, *(column.title for column in derived))
    return Comparison(published.caption, about, columns, tuple(rows), tuple(notes))


def _compared_row(
    published: Published,
    row: PublishedRow,
    places: Mapping[str, Place],
    results: Mapping[str, Results],
    derived: Sequence[Derived],
    diverged: Collection[str],
) -> ComparisonRow:
    theirs = dict(zip(published.columns, row.values, strict=True))
    cells = {column: _cell(results, row, place, theirs.get(column), diverged) for column, place in places.items()}
    for column in derived:
        chosen = [cells[name] for name in column.columns]
        cells[column.title] = ComparisonCell(
            _derive(column, [cell.ours for cell in chosen]), _derive(column, [cell.published for cell in chosen])
        )
    return ComparisonRow(_label(row), row.method, row.rate, tuple(cells.values()))


def _cell(
    results: Mapping[str, Results], row: PublishedRow, place: Place, theirs: Number | None, diverged: Collection[str]
) -> ComparisonCell:
    run = place.run_of(row.method)
    if place.by_method and row.rate != "dynamic":
        return ComparisonCell(None, theirs, NOT_PRINTED)
    if run not in results:
        return ComparisonCell(None, theirs, DIVERGED if run in diverged else NOT_RUN)
    return ComparisonCell(_measured(results, row.method, row.rate, place), theirs)


def _derive(column: Derived, numbers: Sequence[Number | None]) -> Number | None:
    means = [number.mean for number in numbers if number is not None]
    return Number(column.compute(means)) if len(means) == len(numbers) else None


def ours_only(
    published: Published, columns: Sequence[str], rows: Iterable[ComparisonRow], about: str, *, digits: int
) -> Comparison:
    """The numbers behind a figure of which the paper prints none; it shows one stream."""
    notes = (*_notes(published), "Ours: the first source training, the first order of images.")
    return Comparison(published.caption, about, tuple(columns), tuple(rows), notes, digits)


def comparison_markdown(table: Comparison) -> str:
    """GitHub Markdown: what it is, the table, notes."""
    heads = ["Method", *_heads(table)]
    lines = [f"**{table.title}**", "", f"{table.about}", "", _line(heads), "|:--|" + "--:|" * (len(heads) - 1)]
    lines.extend(_line([row.label, *_texts(row, table)]) for row in table.rows)
    return "\n".join([*lines, "", *(f"{note}  " for note in table.notes)]) + "\n"


def comparison_latex(table: Comparison) -> str:
    """A `tabular` for the booktabs package: ours and published under each heading; the notes are comments."""
    each = [2 if table.prints(place) else 1 for place in range(len(table.columns))]
    heads = [rf"\multicolumn{{{n}}}{{c}}{{{_latex(column)}}}" for n, column in zip(each, table.columns, strict=True)]
    whose = [name for n in each for name in ("ours", "published")[:n]]
    lines = [f"% {table.title}", f"% {table.about}", rf"\begin{{tabular}}{{l{'r' * len(whose)}}}", r"\toprule"]
    lines += [_latex_line(["Method", *heads]), _latex_line(["", *whose]), r"\midrule"]
    lines += [_latex_line([_latex(row.label), *map(_latex, _texts(row, table))]) for row in table.rows]
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def comparison_csv(table: Comparison) -> str:
    """One line per number, empty where there is none; `about` in the last column."""
    parts = ["ours mean", "ours sd", "published mean", "published sd"]
    rows = [["row", "method", "rate", "column", *parts, "quoted from", "about"]]
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            numbers = [_plain(part) for number in (cell.ours, cell.published) for part in _parts(number)]
            quoted = cell.published.quoted if cell.published and cell.published.quoted else ""
            rows.append([row.label, row.method, row.rate, column, *numbers, quoted, table.about])
    return csv_table(rows)


# ---- our numbers


def _measured(results: Mapping[str, Results], method: str, rate: str, place: Place) -> Number | None:
    """Mean and sd over streams (seeds x orders), in points; None where nothing was run at one of the targets."""
    wanted = (method, place.rate or rate)
    streams = [s for s in results[place.run_of(method)].streams if (s.method, s.rate) == wanted and _is_at(s, place)]
    groups: dict[tuple[int, int], dict[str, float]] = {}
    for stream in streams:
        groups.setdefault((stream.seed, stream.order), {})[stream.target] = _value(stream, place.metric)
    scale = 1000 if place.metric == RATE else 100
    means = [scale * mean_defined(found.values()) for found in groups.values() if found.keys() == set(place.targets)]
    defined = [mean for mean in means if not math.isnan(mean)]
    if not defined:
        return None
    return Number(statistics.fmean(defined), statistics.stdev(defined) if len(defined) > 1 else math.nan)


def _value(stream: StreamResult, metric: str) -> float:
    if metric != RATE:
        return stream.metrics.get(metric, math.nan)
    rates = [(case.rate, case.discrepancy) for case in stream.cases if case.rate is not None]
    compared = [rate for rate, discrepancy in rates if discrepancy is not None]
    return mean_defined(compared or [rate for rate, _ in rates])


def _is_at(stream: StreamResult, place: Place) -> bool:
    return stream.target in place.targets and place.order in (None, stream.order)


# ---- words


def _label(row: PublishedRow) -> str:
    """Our name of the method, with the paper's where it differs."""
    label = method_label(row.method, row.rate)
    return label if label == row.name else f"{label} ({row.name})"


def _notes(published: Published) -> list[str]:
    return [f"Published: {published.where} in {published.paper}.", *published.says]


def _quoted_notes(rows: Sequence[ComparisonRow]) -> list[str]:
    cells = [cell.published for row in rows for cell in row.cells if cell.published is not None]
    return [
        f"{QUOTED} quoted by the paper from {origin}; not run by its authors."
        for origin in dict.fromkeys(number.quoted for number in cells if number.quoted)
    ]


def _spread_note(rows: Sequence[ComparisonRow], results: Mapping[str, Results]) -> str:
    if not any(cell.ours and not math.isnan(cell.ours.sd) for row in rows for cell in row.cells):
        return "Ours: one source training, so no sd; points."
    counts = sorted({trainings(found) for found in results.values()})
    return f"Ours: mean ± sd over {' or '.join(map(str, counts))} source trainings; points."


def trainings(results: Results) -> int:
    """How many source models the streams were run with."""
    return len({stream.seed for stream in results.streams})


def _count_notes(results: Mapping[str, Results], places: Mapping[str, Place]) -> list[str]:
    """How many images each number of ours is from."""
    wanted = {target: place.run for place in places.values() if not place.by_method for target in place.targets}
    counts = {
        target: max((len(s.scored) for s in results[run].streams if s.target == target), default=0)
        for target, run in wanted.items()
    }
    listed = ", ".join(f"{target} {count}" for target, count in counts.items() if count)
    return [f"Ours, images of each target: {listed}."]


def _heads(table: Comparison) -> list[str]:
    return [
        f"{column}, {whose}"
        for place, column in enumerate(table.columns)
        for whose in ("ours", "published")[: 2 if table.prints(place) else 1]
    ]


def _texts(row: ComparisonRow, table: Comparison) -> list[str]:
    texts = []
    for place, cell in enumerate(row.cells):
        texts.append(cell.ours.shown(table.digits) if cell.ours else cell.instead)
        if table.prints(place):
            texts.append(cell.published.shown(table.digits) if cell.published else NOT_PRINTED)
    return texts


def _parts(number: Number | None) -> tuple[float, float]:
    return (number.mean, number.sd) if number else (math.nan, math.nan)


def _plain(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _latex(text: str) -> str:
    return "".join(LATEX_SPECIAL.get(letter, letter) for letter in text)


def _latex_line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"
