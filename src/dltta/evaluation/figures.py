"""9 figures. What do gains, rates, discrepancies and losses look like?

Each chart is SVG text for the inside of an HTML page. It is drawn with placeholder colors that become CSS variables, so
that one drawing serves light and dark pages and a method has the same color in all of them.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from statistics import fmean, stdev
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dltta.evaluation.parts import parts
from dltta.evaluation.results import SOURCE, Results, StreamResult, summarize
from dltta.evaluation.tables import NAMES, PLAIN_RATES, Pair, gains, method_label, methods, metric_word, primary_metric
from dltta.metrics import DISTANCES
from dltta.recipes import RECOMMENDED

# Placeholder colors and the CSS variables that replace them.
INK, MUTED, RULE, PAPER, BAD = "#010101", "#020202", "#030303", "#040404", "#050505"
SERIES = [f"#0601{number:02x}" for number in range(10)]
VARIABLES = {INK: "ink", MUTED: "muted", RULE: "rule", PAPER: "paper", BAD: "bad"} | {
    color: f"series-{number}" for number, color in enumerate(SERIES)
}
KNOWN = [name for name in NAMES if name != SOURCE]  # these keep their color from report to report
WIDTH = 6.0  # inches; 72 units each
MOST_POINTS = 400  # of one line or one row of dots
LONGEST_NAME = 24  # letters

Quantity = Literal["rate", "discrepancy", "loss"]
Point = tuple[int, float, float]  # position in the stream, counted from one; mean and sd over streams

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 12,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "axes.formatter.limits": (-5, 5),
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def method_color(method: str, known: Sequence[str] = ()) -> str:
    """The placeholder color of a method; methods we do not know take the free ones in the order of `known`."""
    if method == SOURCE:
        return MUTED
    if method == RECOMMENDED:
        return SERIES[4]
    others = [name for name in known if name not in NAMES]
    order = [*KNOWN, *others]
    return SERIES[order.index(method) % len(SERIES)] if method in order else SERIES[-1]


def gain_chart(results: Results, pair: Pair, metric: str) -> str:
    """Gain over the source per method; hollow for the fixed rate, full for the others."""
    shown = _gains_by_method(results, pair, metric)
    with _style(f"gain {pair} {metric}"):
        figure, axes = _canvas(0.75 + 0.42 * max(1, len(shown)))
        for place, (method, values) in enumerate(shown.items()):
            color = method_color(method, list(shown))
            axes.plot(
                [min(values.values()), max(values.values())], [place, place], color=color, linewidth=2.5, alpha=0.4
            )
            for rate, value in values.items():
                fill = PAPER if rate == "fixed" else color
                axes.plot(value, place, "o", ms=9, mew=2, mec=color, mfc=fill)
        _name_rows(axes, [NAMES.get(method, method) for method in shown])
        axes.axvline(0, color=MUTED, linewidth=1)
        axes.set_xlabel(_gain_label(metric))
        return _svg(figure)


def case_gain_chart(results: Results, pair: Pair, metric: str) -> str:
    """Gain over the source of every case, a row per method; cases made worse stand out, their share is written out."""
    rows = [(m, r, list(gains(results, pair, m, r, metric).values())) for m, r in methods(results) if m != SOURCE]
    rows = [row for row in rows if row[2]]
    draw = _right_wrong_row if metric == "accuracy" else _strip_row
    with _style(f"cases {pair} {metric}"):
        figure, axes = _canvas(0.75 + 0.42 * max(1, len(rows)))
        for place, (method, _, values) in enumerate(rows):
            draw(axes, place, values, method_color(method, [name for name, _, _ in rows]), _scale(metric))
            worse = sum(value < 0 for value in values) / len(values)
            _beside(axes, place, f"{100 * worse:.0f}%", BAD if worse else MUTED)
        _beside(axes, -0.85, "worse", MUTED)
        _name_rows(axes, [method_label(method, rate) for method, rate, _ in rows])
        axes.axvline(0, color=MUTED, linewidth=1)
        axes.set_xlabel("share of cases newly wrong | newly right, %" if metric == "accuracy" else _gain_label(metric))
        return _svg(figure)


def stream_chart(results: Results, pair: Pair, quantity: Quantity) -> str | None:
    """`rate` or `discrepancy` along the stream, a line per method that has one; None when no method does."""
    lines = [(method, rate, _along(results.select(*pair, method, rate), quantity)) for method, rate in methods(results)]
    lines = [line for line in lines if line[2] and (line[1] not in PLAIN_RATES or quantity != "rate")]
    if not lines:
        return None
    with _style(f"{quantity} {pair}"):
        figure, axes = _canvas(2.6)
        for method, rate, points in lines:
            color, label = method_color(method, [name for name, _, _ in lines]), method_label(method, rate)
            if quantity == "rate":  # a running mean would hide the moment at which the memory is ready
                places, means, _ = zip(*_blocks(points), strict=True)
                axes.plot(places, means, color=color, label=_short(label), linewidth=1.4)
            else:
                _line(axes, points, color, label, dashed=rate == "fixed")
        _place_axis(axes, "case", max(points[-1][0] for _, _, points in lines))
        axes.set_ylim(bottom=0)
        _legend(axes)
        return _svg(figure)


def loss_chart(results: Results, pair: Pair, method: str) -> str | None:
    """The test-time loss of one method along the stream, a line per rate; None for methods without a loss."""
    rates = [rate for name, rate in methods(results) if name == method]
    lines = {rate: _along(results.select(*pair, method, rate), "loss") for rate in rates}
    lines = {rate: points for rate, points in lines.items() if points}
    if not lines:
        return None
    with _style(f"loss {pair} {method}"):
        figure, axes = _canvas(2.4)
        for rate, points in lines.items():
            color = method_color(method, [name for name, _ in methods(results)])
            _line(axes, points, color, rate, dashed=rate == "fixed")
        _place_axis(axes, "case", max(points[-1][0] for points in lines.values()))
        _legend(axes)
        return _svg(figure)


def change_chart(results: Results, pair: Pair) -> str:
    """Scores along a stream that changes its site, a line per method; upright lines where it changes."""
    metric = primary_metric(results)
    streams = {entry: results.select(*pair, *entry)[0] for entry in methods(results) if results.select(*pair, *entry)}
    found = parts(next(iter(streams.values())).cases, metric)
    with _style(f"change {pair}"):
        figure, axes = _canvas(3.4)
        for (method, rate), stream in streams.items():
            color, label = method_color(method, [name for name, _ in streams]), method_label(method, rate)
            for part in found:  # a running mean that crosses the change would hide it
                rows = enumerate(stream.cases[part.first - 1 : part.first - 1 + part.count], start=part.first)
                points = [(place, 100 * row.metrics[metric], 0.0) for place, row in rows if metric in row.metrics]
                _line(axes, points, color, label if part.first == 1 else "", dashed=method == SOURCE)
        for part in found:
            if part.first > 1:
                axes.axvline(part.first - 0.5, color=INK, linewidth=1)
            axes.text(part.first, 1, f" {_short(part.site)}", color=MUTED, va="bottom")
        _place_axis(axes, "image of the stream", sum(part.count for part in found))
        axes.set_ylim(0, 101)
        axes.set_ylabel(f"{metric_word(metric)}, points")
        _legend(axes)
        return _svg(figure)


def quality_chart(stream: StreamResult) -> str:
    """Expected against true score, a dot per case with its interval; those outside of it stand out."""
    metric = "dice" if stream.task == "segmentation" else "accuracy"
    known = [case for case in stream.cases if case.quality is not None and metric in case.metrics]
    with _style(f"quality {stream.target} {stream.method} {stream.seed} {stream.order}"):
        figure, axes = _canvas(4.2)
        axes.plot([0, 100], [0, 100], color=MUTED, linewidth=1)
        for case in known[:: -(-len(known) // MOST_POINTS) or 1]:
            low, middle, high = (100 * (value or 0.0) for value in (case.quality_low, case.quality, case.quality_high))
            score = 100 * case.metrics[metric]
            color = method_color(stream.method, [stream.method]) if low <= score <= high else BAD
            axes.plot([low, high], [score, score], color=color, linewidth=1.2, alpha=0.45)
            axes.plot(middle, score, "o", color=color, markersize=5, markeredgewidth=0)
        axes.set(xlim=(0, 101), ylim=(0, 101))
        axes.set_xlabel(f"expected {metric_word(metric)}, with its 90 % interval")
        axes.set_ylabel(f"true {metric_word(metric)}")
        return _svg(figure)


def training_chart(name: str, values: Sequence[float]) -> str:
    """A curve over epochs."""
    with _style(f"training {name}"):
        figure, axes = _canvas(2.4)
        axes.plot(range(1, len(values) + 1), values, color=INK)
        _place_axis(axes, "epoch", len(values))
        return _svg(figure)


# ---- numbers


def _gains_by_method(results: Results, pair: Pair, metric: str) -> dict[str, dict[str, float]]:
    """Method, then rate, then gain of the mean, scaled for showing."""
    source = results.select(*pair, SOURCE, "none")
    if not source:
        return {}
    start = summarize(source, metric).mean
    sign = -1.0 if metric in DISTANCES else 1.0
    shown: dict[str, dict[str, float]] = {}
    for method, rate in methods(results):
        streams = results.select(*pair, method, rate)
        if method == SOURCE or not streams:
            continue
        gain = sign * (summarize(streams, metric).mean - start) * _scale(metric)
        if not math.isnan(gain):
            shown.setdefault(method, {})[rate] = gain
    return shown


def _along(streams: Iterable[StreamResult], quantity: Quantity) -> list[Point]:
    """A value at each position of the stream; positions without one are left out."""
    columns: dict[int, list[float]] = {}
    for stream in streams:
        for position, case in enumerate(stream.cases, start=1):
            value = getattr(case, quantity)
            if value is not None:
                columns.setdefault(position, []).append(value)
    return [(place, fmean(v), stdev(v) if len(v) > 1 else 0.0) for place, v in sorted(columns.items())]


def _smooth(values: Sequence[float]) -> list[float]:
    """Centered running mean over a twelfth of the values; shorter at the ends."""
    half = len(values) // 24
    return [fmean(values[max(0, place - half) : place + half + 1]) for place in range(len(values))]


def _blocks(points: Sequence[Point]) -> list[Point]:
    """Long streams in blocks of consecutive positions, each as its mean."""
    size = -(-len(points) // MOST_POINTS)
    blocks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(block[0][0], fmean(mean for _, mean, _ in block), fmean(sd for _, _, sd in block)) for block in blocks]


def _spaced(values: Sequence[float]) -> list[float]:
    """Many values as a few with the same distribution, the smallest and the largest among them."""
    if len(values) <= MOST_POINTS:
        return list(values)
    ordered = sorted(values)
    return [ordered[round(place * (len(ordered) - 1) / (MOST_POINTS - 1))] for place in range(MOST_POINTS)]


def _scale(metric: str) -> float:
    return 1.0 if metric in DISTANCES else 100.0


# ---- drawing


def _style(name: str) -> AbstractContextManager[None]:
    """Our style for the time of one drawing; the name keeps the ids of several drawings on one page apart."""
    return matplotlib.rc_context({**STYLE, "svg.hashsalt": name})


def _canvas(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.add_subplot()


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), list(map(_short, names)))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(max(1, len(names)) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _beside(axes: Axes, place: float, text: str, color: str) -> None:
    """A word to the right of a row."""
    axes.text(1.01, place, text, transform=axes.get_yaxis_transform(), va="center", color=color)


def _strip_row(axes: Axes, place: int, values: Sequence[float], color: str, scale: float) -> None:
    """Dots spread a little, always the same way, so that equal values stay visible."""
    mean = fmean(values) * scale
    values = _spaced(values)
    spread = [place + 0.26 * ((7 * number) % 11 / 5 - 1) for number in range(len(values))]
    for bad, shade in ((False, color), (True, BAD)):
        dots = [(v * scale, y) for v, y in zip(values, spread, strict=True) if (v < 0) == bad]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=shade, markersize=4, alpha=0.65, markeredgewidth=0)
    axes.plot([mean, mean], [place - 0.34, place + 0.34], color=INK, linewidth=2)


def _right_wrong_row(axes: Axes, place: int, values: Sequence[float], color: str, scale: float) -> None:
    """Right and wrong predictions: newly wrong to the left, newly right to the right."""
    axes.barh(place, sum(min(value, 0.0) for value in values) / len(values) * scale, color=BAD, height=0.5)
    axes.barh(place, sum(max(value, 0.0) for value in values) / len(values) * scale, color=color, height=0.5)


def _line(axes: Axes, points: Sequence[Point], color: str, label: str, *, dashed: bool = False) -> None:
    """Faint as measured, strong as a running mean; a band of one sd when there are several streams."""
    places, means, spreads = zip(*_blocks(points), strict=True)
    axes.plot(places, means, color=color, linewidth=0.8, alpha=0.35)
    axes.plot(places, _smooth(means), color=color, label=_short(label), linestyle=(0, (4, 2)) if dashed else "solid")
    if any(spreads):
        low = [mean - spread for mean, spread in zip(means, spreads, strict=True)]
        high = [mean + spread for mean, spread in zip(means, spreads, strict=True)]
        axes.fill_between(places, low, high, color=color, alpha=0.12, linewidth=0)


def _place_axis(axes: Axes, name: str, last: int) -> None:
    """Cases or epochs, counted from one."""
    axes.set_xlim(1, max(2, last))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(name)


def _short(name: str) -> str:
    """A name that leaves room for the drawing."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


def _legend(axes: Axes) -> None:
    """Above the chart, where it covers nothing."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, labelcolor=INK, handlelength=1.6, borderpad=0)


def _gain_label(metric: str) -> str:
    return "gain over Source" + ("" if metric in DISTANCES else ", points")


def _svg(figure: Figure) -> str:
    """The drawing as an element of an HTML page: no prolog, no names of its own, colors and font from the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<g id=\"[^\"]*\"", "<g", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: inherit", text)
    text = re.sub(r"<svg [^>]*viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    text = text.replace("xlink:href", "href")
    for color, variable in VARIABLES.items():
        text = text.replace(color, f"var(--{variable})")
    return text.strip()
