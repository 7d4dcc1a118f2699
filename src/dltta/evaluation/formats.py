"""9 tables. How is a finished table written: Markdown, LaTeX, CSV, the terminal?"""

import math

from rich.table import Table as RichTable
from rich.text import Text

from dltta.evaluation.tables import MARKS, Cell, Column, Row, Table
from dltta.files import csv_table

NOT_RUN = "–"
LATEX_SPECIAL = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "→": r"$\rightarrow$",
    "↑": r"$\uparrow$", "↓": r"$\downarrow$", "±": r"$\pm$", "−": "$-$", "†": r"$^{\dagger}$", "‡": r"$^{\ddagger}$",
    "–": "--", "§": r"\S", **{letter: f"\\{letter}" for letter in "&%$#_{}"},
}  # fmt: skip


def markdown(table: Table) -> str:
    """GitHub Markdown, notes below."""
    heads = ["Method", *headings(table)]
    lines = [_markdown_row(heads), "|:--|" + "--:|" * (len(heads) - 1)]
    for row in table.rows:
        cells = [_markdown_cell(cell, column) for cell, column in zip(row.cells, table.columns, strict=True)]
        lines.append(f"| {' | '.join([_markdown_text(row.label), *cells, *map(_markdown_text, extras(row, table))])} |")
    return "\n".join([*lines, "", *(f"{_markdown_text(note)}  " for note in table.notes)]) + "\n"


def latex(table: Table) -> str:
    """A `tabular` for the booktabs package; the notes are comments."""
    heads = ["Method", *headings(table)]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}", r"\toprule", _latex_row(map(_latex_text, heads))]
    lines.append(r"\midrule")
    for row in table.rows:
        cells = [_latex_cell(cell, column) for cell, column in zip(row.cells, table.columns, strict=True)]
        lines.append(_latex_row([_latex_text(row.label), *cells, *map(_latex_text, extras(row, table))]))
    lines.extend([r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in table.notes)])
    return "\n".join(lines) + "\n"


def csv_text(table: Table) -> str:
    """Plain numbers: points or units, empty where there is none; `made worse` is a fraction.

    Low and high: the 95 % interval of the gain.
    """
    names = [column.title.rstrip(" ↑↓") for column in table.columns]
    parts = [f"{name} {part}" for name in names for part in ("mean", "sd", "gain", "gain low", "gain high", "p")]
    rows = [["method", "rate", *parts, "made worse"]]
    for row in table.rows:
        cells = zip(row.cells, table.columns, strict=True)
        numbers = [number for cell, column in cells for number in _csv_numbers(cell, column)]
        rows.append([row.method, row.rate, *numbers, _plain(row.worse)])
    return csv_table(rows)


def rich_table(table: Table) -> RichTable:
    """The table for a terminal."""
    title, notes = Text(table.title, "table.title"), Text("\n".join(table.notes), "table.caption")
    shown = RichTable(title=title, caption=notes, title_justify="left", caption_justify="left")
    shown.add_column("Method", no_wrap=True)
    for head in headings(table):
        shown.add_column(Text(head), justify="right")
    for row in table.rows:
        cells = [_rich_cell(cell, column) for cell, column in zip(row.cells, table.columns, strict=True)]
        shown.add_row(Text(row.label), *cells, *map(Text, extras(row, table)))
    return shown


def headings(table: Table) -> list[str]:
    """Titles of all columns but the methods'."""
    return [*(column.title for column in table.columns), *(["Worst site"] if table.has_worst else []), "Made worse"]


def extras(row: Row, table: Table) -> list[str]:
    """What stands behind the cells: `70.5 (cirrus)` when the table has several targets, and `4%`."""
    worst = [_worst(row.worst, table.columns[0])] if table.has_worst else []
    return [*worst, share(row.worse)]


def _worst(worst: tuple[str, float] | None, column: Column) -> str:
    return f"{value(Cell(worst[1]), column)} ({worst[0]})" if worst else NOT_RUN


def value(cell: Cell, column: Column) -> str:
    """`85.3 ± 2.1`."""
    if math.isnan(cell.mean):
        return "undefined"
    spread = "" if math.isnan(cell.sd) else f" ± {column.shown(cell.sd):.{column.digits}f}"
    return signed(f"{column.shown(cell.mean):.{column.digits}f}") + spread


def gain(cell: Cell, column: Column) -> str:
    """`+11.0` over the source, or nothing."""
    number = column.shown(cell.gain) if not math.isnan(cell.gain) else math.nan
    return "" if math.isnan(number) else signed(f"{number:+.{column.digits}f}")


def signed(number: str) -> str:
    """A number with a typographic minus."""
    return number.replace("-", "−")


def mark(cell: Cell) -> str:
    """The sign of significance, or nothing."""
    return MARKS[cell.significance] if cell.significance else ""


def share(fraction: float) -> str:
    """`4%`, or nothing."""
    return "" if math.isnan(fraction) else f"{100 * fraction:.0f}%"


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(map(_markdown_text, cells))} |"


def _markdown_cell(cell: Cell | None, column: Column) -> str:
    if cell is None:
        return NOT_RUN
    text = f"**{value(cell, column)}**" if cell.best else value(cell, column)
    return text + mark(cell) + _parenthesized(gain(cell, column))


def _markdown_text(text: str) -> str:
    """Names cannot open markup or leave their cell."""
    for letter in "\\|*_`<>[]":
        text = text.replace(letter, f"\\{letter}")
    return " ".join(text.split())


def _parenthesized(text: str) -> str:
    return f" ({text})" if text else ""


def _latex_row(cells: "map[str] | list[str]") -> str:
    return " & ".join(cells) + r" \\"


def _latex_cell(cell: Cell | None, column: Column) -> str:
    if cell is None:
        return "--"
    text = _latex_text(value(cell, column))
    text = rf"\textbf{{{text}}}" if cell.best else text
    return text + _latex_text(mark(cell) + _parenthesized(gain(cell, column)))


def _latex_text(text: str) -> str:
    return "".join(LATEX_SPECIAL.get(letter, letter) for letter in text)


def _csv_numbers(cell: Cell | None, column: Column) -> list[str]:
    if cell is None:
        return [""] * 6
    scaled = (cell.mean, cell.sd, cell.gain, *cell.interval)
    return [*(_plain(number * column.scale) for number in scaled), "" if math.isnan(cell.p) else f"{cell.p:.3g}"]


def _plain(number: float) -> str:
    return "" if math.isnan(number) else f"{round(number, 4) + 0.0:.4f}"


def _rich_cell(cell: Cell | None, column: Column) -> Text:
    if cell is None:
        return Text(NOT_RUN, style="dim")
    text = Text(value(cell, column), style="bold" if cell.best else "")
    text.append(mark(cell))
    text.append(_parenthesized(gain(cell, column)), style="not bold dim")
    return text
