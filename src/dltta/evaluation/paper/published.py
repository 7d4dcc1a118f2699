"""9 tables. What did the paper print, and what did we measure? Both in one table, clearly headed.

Published numbers come from `tables/*.json`, ours from `Results`; nothing is typed here.
"""

import csv
import io
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from dltta.evaluation.formats import LATEX_SPECIAL
from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.tables import method_label, target_note
from dltta.metrics import mean_defined

NOT_RUN = "not run"
NOT_PRINTED = "–"


@dataclass(frozen=True)
class Number:
    """A mean in the table's unit; `sd` is `nan` where there is none."""

    mean: float
    sd: float = math.nan

    def shown(self, digits: int) -> str:
        spread = "" if math.isnan(self.sd) else f" ± {self.sd:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


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
        rows = [
            PublishedRow(
                row["name"], row["method"], row["rate"], tuple(v if v is None else Number(*v) for v in row["values"])
            )
            for row in record["rows"]
        ]
        return cls(
            record["paper"], record["where"], record["caption"],
            tuple(record["columns"]), tuple(record["says"]), tuple(rows),
        )  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where our number for a column is found: one metric of one run, the mean over `targets`."""

    run: str
    metric: str
    targets: tuple[str, ...]
    order: int | None = None  # None: every order
    rate: str | None = None  # None: that of the row


@dataclass(frozen=True)
class ComparisonCell:
    """Our number and the paper's; None: not run, not printed."""

    ours: Number | None
    published: Number | None = None


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

    @property
    def prints(self) -> bool:
        """Whether the paper prints any of these numbers."""
        return any(cell.published for row in self.rows for cell in row.cells)


def compare(
    published: Published, places: Mapping[str, Place], results: Mapping[str, Results], about: str
) -> Comparison:
    """The paper's table with our number beside each of its own."""
    rows = []
    for row in published.rows:
        ours = [_measured(results, row.method, row.rate, places[column]) for column in published.columns]
        cells = tuple(ComparisonCell(mine, theirs) for mine, theirs in zip(ours, row.values, strict=True))
        rows.append(ComparisonRow(_label(row), row.method, row.rate, cells))
    notes = [*_notes(published), _spread_note(rows), *_count_notes(results, places)]
    if (seeing := target_note(row.method for row in rows if any(cell.ours for cell in row.cells))) is not None:
        notes.append(seeing)
    return Comparison(published.caption, about, published.columns, tuple(rows), tuple(notes))


def ours_only(
    published: Published, columns: Sequence[str], rows: Iterable[ComparisonRow], about: str, *, digits: int
) -> Comparison:
    """The numbers behind a figure of which the paper prints none."""
    return Comparison(published.caption, about, tuple(columns), tuple(rows), tuple(_notes(published)), digits)


def comparison_markdown(table: Comparison) -> str:
    """GitHub Markdown: what it is, the table, notes."""
    heads = ["Method", *_heads(table)]
    lines = [f"**{table.title}**", "", f"{table.about}", "", _line(heads), "|:--|" + "--:|" * (len(heads) - 1)]
    lines.extend(_line([row.label, *_texts(row, table)]) for row in table.rows)
    return "\n".join([*lines, "", *(f"{note}  " for note in table.notes)]) + "\n"


def comparison_latex(table: Comparison) -> str:
    """A `tabular` for the booktabs package: ours and published under each heading; the notes are comments."""
    each = 2 if table.prints else 1
    heads = [rf"\multicolumn{{{each}}}{{c}}{{{_latex(column)}}}" for column in table.columns]
    whose = ["ours", "published"][:each] * len(table.columns)
    lines = [f"% {table.title}", f"% {table.about}", rf"\begin{{tabular}}{{l{'r' * len(whose)}}}", r"\toprule"]
    lines += [_latex_line(["Method", *heads]), _latex_line(["", *whose]), r"\midrule"]
    lines += [_latex_line([_latex(row.label), *map(_latex, _texts(row, table))]) for row in table.rows]
    lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def comparison_csv(table: Comparison) -> str:
    """One line per number, empty where there is none; `about` in the last column."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    parts = ["ours mean", "ours sd", "published mean", "published sd"]
    writer.writerow(["row", "method", "rate", "column", *parts, "about"])
    for row in table.rows:
        for column, cell in zip(table.columns, row.cells, strict=True):
            numbers = [_plain(part) for number in (cell.ours, cell.published) for part in _parts(number)]
            writer.writerow([row.label, row.method, row.rate, column, *numbers, table.about])
    return out.getvalue()


# ---- our numbers


def _measured(results: Mapping[str, Results], method: str, rate: str, place: Place) -> Number | None:
    """Mean and sd over streams (seeds x orders), in points; None where nothing was run at one of the targets."""
    wanted = (method, place.rate or rate)
    streams = [s for s in results[place.run].streams if (s.method, s.rate) == wanted and _is_at(s, place)]
    groups: dict[tuple[int, int], dict[str, float]] = {}
    for stream in streams:
        groups.setdefault((stream.seed, stream.order), {})[stream.target] = stream.metrics.get(place.metric, math.nan)
    means = [100 * mean_defined(found.values()) for found in groups.values() if found.keys() == set(place.targets)]
    defined = [mean for mean in means if not math.isnan(mean)]
    if not defined:
        return None
    return Number(statistics.fmean(defined), statistics.stdev(defined) if len(defined) > 1 else math.nan)


def _is_at(stream: StreamResult, place: Place) -> bool:
    return stream.target in place.targets and place.order in (None, stream.order)


# ---- words


def _label(row: PublishedRow) -> str:
    """Our name of the method, with the paper's where it differs."""
    label = method_label(row.method, row.rate)
    return label if label == row.name else f"{label} ({row.name})"


def _notes(published: Published) -> list[str]:
    return [f"Published: {published.where} in {published.paper}.", *published.says]


def _spread_note(rows: Sequence[ComparisonRow]) -> str:
    several = any(cell.ours and not math.isnan(cell.ours.sd) for row in rows for cell in row.cells)
    return f"Ours: {'mean ± sd over source trainings' if several else 'one source training, so no sd'}; points."


def _count_notes(results: Mapping[str, Results], places: Mapping[str, Place]) -> list[str]:
    """How many images each number of ours is from."""
    wanted = {target: place.run for place in places.values() for target in place.targets}
    counts = {
        target: max((len(s.cases) for s in results[run].streams if s.target == target), default=0)
        for target, run in wanted.items()
    }
    listed = ", ".join(f"{target} {count}" for target, count in counts.items())
    return [f"Ours, images of each target: {listed}."]


def _heads(table: Comparison) -> list[str]:
    if not table.prints:
        return [f"{column}, ours" for column in table.columns]
    return [f"{column}, {whose}" for column in table.columns for whose in ("ours", "published")]


def _texts(row: ComparisonRow, table: Comparison) -> list[str]:
    texts = []
    for cell in row.cells:
        texts.append(cell.ours.shown(table.digits) if cell.ours else NOT_RUN)
        if table.prints:
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
