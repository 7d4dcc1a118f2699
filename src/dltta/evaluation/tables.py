"""9 tables. Methods in rows, targets or metrics in columns, every number from `Results`.

Values are shown in points (x 100), distances in their unit. The same results give the same bytes.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dltta.errors import SettingError
from dltta.evaluation.comparison import (
    bootstrap_interval,
    case_gains,
    negative_transfer,
    paired_test,
    unit_means,
    worst_site,
)
from dltta.evaluation.results import SOURCE, Results, StreamResult, case_means, case_patients, summarize
from dltta.methods import METHODS, Method
from dltta.metrics import (
    CLASSIFICATION_METRICS,
    DISTANCES,
    SEGMENTATION_METRICS,
    higher_is_better,
    mean_defined,
)
from dltta.models.io.checkpoint import training_words
from dltta.quality.decision import SEVERITY
from dltta.recipes import Rule

SIGNIFICANT = 0.05
PLAIN_RATES = ("none", "fixed")  # a method with one of these goes by its name
FIRST = ("source", "ptbn", "tent", "ttt", "atta")
NAMES = {  # in an order that only grows at its end: colors follow it
    **{name: METHODS[name].facts.title for name in FIRST},
    "uda-st": "UDA-ST",
    "cyclegan": "CycleGAN",
    "udas": "UDAS",
    "uda-swav": "UDA-SwAV",
    **{str(method): method.facts.title for method in Method if method not in FIRST},
}
SEE_TARGET = ("uda-st", "cyclegan", "udas", "uda-swav")  # trained with the images that they are tested on
TITLES = {"dice": "Dice", "hd95": "HD95", "asd": "ASD", "auc": "AUC", "f1": "F1"}

Pair = tuple[str, str]  # source, target
Direction = Literal["better", "worse"]
DIRECTIONS: tuple[Direction, ...] = ("better", "worse")
MARKS: dict[Direction, str] = {"better": "†", "worse": "‡"}


@dataclass(frozen=True)
class Column:
    """What one column shows; `pair` is None for the mean over the targets."""

    title: str
    metric: str
    pair: Pair | None

    @property
    def scale(self) -> float:
        return 1.0 if self.metric in DISTANCES else 100.0

    @property
    def digits(self) -> int:
        return 2 if self.metric in DISTANCES else 1

    def shown(self, value: float) -> float:
        """The value as the table rounds it; never minus zero."""
        return round(value * self.scale, self.digits) + 0.0


@dataclass(frozen=True)
class Cell:
    """One method in one column, unscaled; `nan` where there is no such number."""

    mean: float
    sd: float = math.nan
    gain: float = math.nan  # over the source; positive is better
    interval: tuple[float, float] = (math.nan, math.nan)  # 95 % of the gain, over patients and trainings
    p: float = math.nan  # against the same method with the fixed rate
    significance: Direction | None = None  # significantly better or worse than with the fixed rate
    best: bool = False  # of its column, as shown


@dataclass(frozen=True)
class Row:
    """One method with one rate."""

    method: str
    rate: str
    cells: tuple[Cell | None, ...]  # None: not run
    worse: float  # share of cases made worse than without adaptation
    worst: tuple[str, float] | None = None  # the worst of several targets and its value

    @property
    def label(self) -> str:
        return method_label(self.method, self.rate)


@dataclass(frozen=True)
class Table:
    """A finished table; `dltta.evaluation.formats` only writes it down."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def has_worst(self) -> bool:
        return any(row.worst for row in self.rows)


def method_label(method: str, rate: str) -> str:
    """How a method is called in tables and plots: `Tent` with a fixed rate, `Tent + dynamic` with a dynamic one."""
    name = NAMES.get(method, method)
    return name if rate in PLAIN_RATES else f"{name} + {rate}"


def metric_title(metric: str, *, unit: str | None = None) -> str:
    """How a metric is called in tables and plots."""
    stem, _, part = metric.partition("_")
    title = " ".join(filter(None, [TITLES.get(stem, stem.capitalize()), part]))
    return f"{title} ({unit})" if metric in DISTANCES and unit else title


def metric_word(metric: str) -> str:
    """How a metric is called inside a sentence: `accuracy`, but `Dice` and `AUC`."""
    title = metric_title(metric)
    return title if metric.partition("_")[0] in TITLES else title.lower()


def primary_metric(results: Results) -> str:
    """The metric that headlines: Dice in segmentation, accuracy in classification."""
    return "accuracy" if results.streams and results.streams[0].task == "classification" else "dice"


def default_metrics(results: Results) -> tuple[str, ...]:
    """The metrics of the task that some stream has."""
    wanted = CLASSIFICATION_METRICS if primary_metric(results) == "accuracy" else SEGMENTATION_METRICS
    return tuple(metric for metric in wanted if any(metric in stream.metrics for stream in results.streams))


def methods(results: Results) -> list[tuple[str, str]]:
    """Every (method, rate) in table order: the source first, then as they came; none, fixed, dynamic, other rules."""
    found = dict.fromkeys((stream.method, stream.rate) for stream in results.streams)
    names = list(dict.fromkeys(method for method, _ in found))
    names.sort(key=lambda name: name != SOURCE)
    rates = list(dict.fromkeys(["none", "fixed", "dynamic", *(rate for _, rate in found)]))
    return [(name, rate) for name in names for rate in rates if (name, rate) in found]


def pairs(results: Results) -> list[Pair]:
    """Every (source, target), as they came."""
    return list(dict.fromkeys((stream.source, stream.target) for stream in results.streams))


def targets(results: Results) -> list[Pair]:
    """The pairs in which the site really changes; all pairs when none does."""
    return [pair for pair in pairs(results) if pair[0] != pair[1]] or pairs(results)


def gains(results: Results, pair: Pair, method: str, rate: str, metric: str) -> dict[tuple[str, str], float]:
    """Gain over the source of each case of one target, averaged over streams."""
    adapted = results.select(*pair, method, rate)
    source = _beside(adapted, results.select(*pair, SOURCE, "none"))
    return case_gains(case_means(adapted, metric), case_means(source, metric), metric)


def _beside(streams: Iterable[StreamResult], others: Iterable[StreamResult]) -> list[StreamResult]:
    """The others to compare with: of the same trainings, where a method has run with fewer than another."""
    seeds = {stream.seed for stream in streams}
    return [stream for stream in others if stream.seed in seeds]


def by_target(results: Results, metric: str | None = None) -> Table:
    """One metric, a column per target, and their mean when there are several (the source's own site left out)."""
    metric = metric or primary_metric(results)
    columns = [Column(_pair_title(results, pair), metric, pair) for pair in pairs(results)]
    if len(targets(results)) > 1:
        columns.append(Column("Mean", metric, None))
    return _table(results, f"{metric_title(metric, unit=_unit(results))} by target", columns)


def by_metric(results: Results, pair: Pair | None = None, metrics: Sequence[str] | None = None) -> Table:
    """One target (the first that is not the source's own site, unless given), a column per metric."""
    pair = pair or next(iter(targets(results)), None)
    if pair is None or pair not in pairs(results):
        raise SettingError(f"there is no stream of {pair}; found {pairs(results)}")
    columns = [Column(_metric_heading(results, name), name, pair) for name in metrics or default_metrics(results)]
    if not columns:
        raise SettingError(f"no case of {pair[0]} → {pair[1]} was scored; there are no labels to compare with")
    return _table(results, f"{pair[0]} → {pair[1]}", columns)


@dataclass(frozen=True)
class DecisionRow:
    """How many cases of a method got one decision of the guard for one reason."""

    label: str
    decision: str
    reason: str | None  # a code; None where none was recorded
    cases: int


def count_decisions(results: Results, chosen: Collection[Pair]) -> tuple[DecisionRow, ...]:
    """Decisions by method and reason code, harmless ones first, the most frequent reason first."""
    counts: Counter[tuple[str, str, str | None]] = Counter()
    for stream in results.streams:
        if (stream.source, stream.target) in chosen:
            label = method_label(stream.method, stream.rate)
            counts.update((label, case.decision, case.reason) for case in stream.cases if case.decision is not None)
    labels = list(dict.fromkeys(label for label, _, _ in counts))
    rows = [DecisionRow(*key, cases) for key, cases in counts.items()]
    return tuple(sorted(rows, key=lambda row: (labels.index(row.label), _severity(row.decision), -row.cases)))


# ---- filling


def _table(results: Results, title: str, columns: Sequence[Column]) -> Table:
    rows = [_row(results, method, rate, columns) for method, rate in methods(results)]
    return Table(title, tuple(columns), _mark_best(rows, columns), _notes(results, rows, columns))


def _row(results: Results, method: str, rate: str, columns: Sequence[Column]) -> Row:
    cells = tuple(_cell(results, method, rate, column) for column in columns)
    return Row(method, rate, cells, _made_worse(results, method, rate, columns), _worst(columns, cells))


def _worst(columns: Sequence[Column], cells: Sequence[Cell | None]) -> tuple[str, float] | None:
    """The worst target of a table that has their mean, for methods that ran on all of them."""
    if columns[-1].pair is not None or cells[-1] is None:
        return None
    run = [(column, cell) for column, cell in zip(columns, cells, strict=True) if column.pair and cell]
    shifted = [(column, cell) for column, cell in run if column.pair and column.pair[0] != column.pair[1]]
    return worst_site({column.title: cell.mean for column, cell in shifted or run}, columns[0].metric)


def _cell(results: Results, method: str, rate: str, column: Column) -> Cell | None:
    if column.pair is None:
        return _mean_cell([_cell(results, method, rate, replace(column, pair=pair)) for pair in targets(results)])
    streams = results.select(*column.pair, method, rate)
    if not streams:
        return None
    row = summarize(streams, column.metric)
    p, significance = _against_fixed(results, method, rate, column.pair, column.metric)
    sd = row.case_sd if len(streams) == 1 else row.sd
    interval = _interval(results, method, rate, column.pair, column.metric)
    return Cell(row.mean, sd, _gain(results, method, streams, column), interval, p, significance)


def _mean_cell(cells: Sequence[Cell | None]) -> Cell | None:
    """Mean over targets; None unless every target has a value, because means over different sites do not compare."""
    run = [cell for cell in cells if cell is not None and not math.isnan(cell.mean)]
    if len(run) < len(cells):
        return None
    gains = [cell.gain for cell in run]
    everywhere = not any(math.isnan(gain) for gain in gains)
    return Cell(mean_defined(cell.mean for cell in run), gain=mean_defined(gains) if everywhere else math.nan)


def _gain(results: Results, method: str, adapted: Sequence[StreamResult], column: Column) -> float:
    source = _beside(adapted, results.select(*column.pair, SOURCE, "none")) if column.pair else []
    if method == SOURCE or not source:
        return math.nan
    difference = summarize(adapted, column.metric).mean - summarize(source, column.metric).mean
    return difference if higher_is_better(column.metric) else -difference


def _interval(results: Results, method: str, rate: str, pair: Pair, metric: str) -> tuple[float, float]:
    """Of the gain over the source; each training is compared with the source model of the same training."""
    adapted = results.select(*pair, method, rate)
    source = _beside(adapted, results.select(*pair, SOURCE, "none"))
    if method == SOURCE:
        return math.nan, math.nan
    seeds = dict.fromkeys(stream.seed for stream in source)
    of_seed = [[[s for s in side if s.seed == seed] for side in (adapted, source)] for seed in seeds]
    gained = [case_gains(case_means(ours, metric), case_means(theirs, metric), metric) for ours, theirs in of_seed]
    return bootstrap_interval([gains for gains in gained if gains], case_patients(adapted))


def _against_fixed(results: Results, method: str, rate: str, pair: Pair, metric: str) -> tuple[float, Direction | None]:
    """P of the paired test against the same method with the fixed rate, and which way it goes when significant."""
    if rate in PLAIN_RATES:
        return math.nan, None
    streams = results.select(*pair, method, rate)
    others = _beside(streams, results.select(*pair, method, "fixed"))
    ours, fixed = case_means(streams, metric), case_means(others, metric)
    shared, patients = ours.keys() & fixed.keys(), case_patients(streams)
    first, second = (unit_means({c: v for c, v in side.items() if c in shared}, patients) for side in (ours, fixed))
    p = paired_test(list(first.values()), [second[patient] for patient in first]).p
    if not p < SIGNIFICANT:
        return p, None
    return p, "better" if mean_defined(case_gains(first, second, metric).values()) > 0 else "worse"


def _made_worse(results: Results, method: str, rate: str, columns: Sequence[Column]) -> float:
    if method == SOURCE or not columns:
        return math.nan
    metric = _per_case_metric(results, columns)
    chosen = list(dict.fromkeys(column.pair for column in columns if column.pair))
    shifted = [pair for pair in chosen if pair[0] != pair[1]] or chosen
    return negative_transfer(gain for pair in shifted for gain in gains(results, pair, method, rate, metric).values())


def _per_case_metric(results: Results, columns: Sequence[Column]) -> str:
    """The first column's metric when cases have it, else the primary one (AUC belongs to a stream, not to a case)."""
    first = columns[0].metric
    has_it = any(first in case.metrics for stream in results.streams for case in stream.scored)
    return first if has_it else primary_metric(results)


def _mark_best(rows: Sequence[Row], columns: Sequence[Column]) -> tuple[Row, ...]:
    best = [_best_shown(rows, index, column) for index, column in enumerate(columns)]
    return tuple(replace(row, cells=tuple(map(_marked, row.cells, columns, best))) for row in rows)


def _marked(cell: Cell | None, column: Column, best: float) -> Cell | None:
    return cell and replace(cell, best=column.shown(cell.mean) == best)


def _best_shown(rows: Sequence[Row], index: int, column: Column) -> float:
    """The best value of a column as shown, so that ties are all best; `nan` when there is nothing to compare."""
    means = [cell.mean for row in rows if (cell := row.cells[index]) is not None and not math.isnan(cell.mean)]
    choose = max if higher_is_better(column.metric) else min
    return choose(map(column.shown, means)) if len(means) > 1 else math.nan


def _notes(results: Results, rows: Sequence[Row], columns: Sequence[Column]) -> tuple[str, ...]:
    cells = [cell for row in rows for cell in row.cells if cell is not None]
    notes = [_spread_note(results, columns)]
    if any(not math.isnan(cell.gain) for cell in cells):
        notes.append("With a sign: gain over Source; plus is better.")
    if any(not math.isnan(row.worse) for row in rows):
        title = metric_word(_per_case_metric(results, columns))
        notes.append(f"Made worse: share of cases that score worse than without adaptation ({title}).")
    if any(not math.isnan(cell.p) for cell in cells):
        notes.append(_significance_note(results, cells))
    notes.extend(_memory_notes(results, columns))
    notes.extend(_count_notes(results, columns))
    notes.extend(_different_cases_notes(results, columns))
    notes.extend(_decision_notes(results, columns))
    notes.extend(f"{NAMES[name]} left out: {why}" for name, why in results.config.get("left_out", {}).items())
    notes.extend(
        f"{method_label(each['method'], each['rate'])} diverged at {each['target']}, so no number: {each['why']}"
        for each in results.config.get("diverged", ())
    )
    notes.extend(training_notes(results, {row.method for row in rows}))
    if (seeing := target_note(row.method for row in rows)) is not None:
        notes.append(seeing)
    return tuple(notes)


def training_notes(results: Results, methods: Collection[str]) -> Iterator[str]:
    """How the networks that methods start from were trained, where the results say it."""
    losses: Mapping[str, Sequence[str]] = results.config.get("trained_with", {})
    if "source" in losses:
        yield f"Source: trained with {training_words(losses['source'])}."
    for name in ("ttt", "ttt++", "dtta"):
        if name in losses and name in methods:
            yield f"{NAMES[name]} starts from another network, trained with {training_words(losses[name])}."


def target_note(names: Iterable[str]) -> str | None:
    """What a reader must know about methods that learned with the target's images; None when there are none."""
    found = set(names)
    seeing = [NAMES[name] for name in SEE_TARGET if name in found]
    if not seeing:
        return None
    verb = "was" if len(seeing) == 1 else "were"
    return (
        f"{', '.join(seeing)} {verb} trained with labeled source images and all images of the target at once, without "
        "its labels; the other methods see one target image after another and no source image."
    )


def _spread_note(results: Results, columns: Sequence[Column]) -> str:
    points = "Points" if any(column.metric not in DISTANCES for column in columns) else "Distances"
    shown = {column.pair for column in columns if column.pair}
    counts = {len(results.select(*pair, *row)) for pair in shown for row in methods(results)} - {0}
    if counts <= {1}:
        right_or_wrong = primary_metric(results) == "accuracy"
        return f"{points}, one stream." if right_or_wrong else f"{points}, mean ± sd over the cases of one stream."
    number = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    return f"{points}, mean ± sd over {number} streams (seeds x orders)."


def _memory_notes(results: Results, columns: Sequence[Column]) -> Iterator[str]:
    """Streams that ended before the memory was ready: their dynamic rate and its controls are the initial one."""
    for pair in dict.fromkeys(column.pair for column in columns if column.pair):
        streams = [s for s in results.streams if (s.source, s.target) == pair and s.rate == Rule.DYNAMIC]
        silent = [s for s in streams if all(case.discrepancy is None for case in s.cases)]
        labels = ", ".join(dict.fromkeys(method_label(stream.method, stream.rate) for stream in silent))
        if labels:
            yield (
                f"At {pair[1]} the stream ended before the memory was ready, so the dynamic rate and its controls "
                f"stayed the initial one: {labels}."
            )


def _significance_note(results: Results, cells: Sequence[Cell]) -> str:
    test = "McNemar" if _right_or_wrong(results) else "Wilcoxon"
    units = "patients" if _several_cases_per_patient(results) else "cases"
    how = f"(paired {test} test over {units}, p < {SIGNIFICANT}, not corrected for the number of tests)"
    found = [direction for direction in DIRECTIONS if any(cell.significance == direction for cell in cells)]
    if not found:
        return f"No difference from the fixed rate is significant {how}."
    marks = ", ".join(f"{MARKS[direction]} significantly {direction}" for direction in found)
    return f"{marks} than with the fixed rate {how}."


def _right_or_wrong(results: Results) -> bool:
    """True when patients are right or wrong, once: several streams or cases have shares of right predictions."""
    several = {len(results.select(*pair, *row)) for pair in pairs(results) for row in methods(results)} - {0, 1}
    return primary_metric(results) == "accuracy" and not several and not _several_cases_per_patient(results)


def _several_cases_per_patient(results: Results) -> bool:
    return any(len({case.patient for case in stream.scored}) < len(stream.scored) for stream in results.streams)


def _count_notes(results: Results, columns: Sequence[Column]) -> Iterator[str]:
    """Structures that were missed, where distances are shown, and invented ones, which no mean shows."""
    shown = {column.pair for column in columns}
    streams = [stream for stream in results.streams if (stream.source, stream.target) in shown]
    missed = _totals(streams, lambda stream: stream.missed)
    if missed and any(column.metric in DISTANCES for column in columns):
        yield f"Missed structures, whose distance counts as the diagonal of the image: {missed}."
    if invented := _totals(streams, lambda stream: stream.invented):
        yield f"Invented structures, which the label does not have and no mean shows: {invented}."


def _totals(streams: Iterable[StreamResult], count: Callable[[StreamResult], int]) -> str:
    totals: Counter[str] = Counter()
    for stream in streams:
        totals[method_label(stream.method, stream.rate)] += count(stream)
    return ", ".join(f"{label} {total}" for label, total in totals.items() if total)


def _different_cases_notes(results: Results, columns: Sequence[Column]) -> Iterator[str]:
    """A warning for results whose means are over different cases, such as those of older versions."""
    for column in columns:
        if column.pair is None:
            continue
        counts = {
            method_label(*row): len(case_means(streams, column.metric))
            for row in methods(results)
            if (streams := results.select(*column.pair, *row))
        }
        if len(set(counts.values()) - {0}) > 1:
            listed = ", ".join(f"{label} {count}" for label, count in counts.items())
            yield f"{column.title}: means over different numbers of cases, which do not compare: {listed}."


def _decision_notes(results: Results, columns: Sequence[Column]) -> list[str]:
    """How often the guard, or rehearsal, gave a method's prediction, and what was given otherwise."""
    shown = {column.pair for column in columns if column.pair}
    counts: dict[str, Counter[str]] = {}
    for row in count_decisions(results, shown):
        counts.setdefault(row.label, Counter())[row.decision] += row.cases
    listed = "; ".join(f"{label} {_shares(count)}" for label, count in counts.items())
    return [f"Decisions: {listed}."] if listed else []


def _shares(counts: Mapping[str, int]) -> str:
    """From harmless to severe, as shares of all."""
    names = sorted(counts, key=_severity)
    return ", ".join(f"{counts[name] / sum(counts.values()):.0%} {name}" for name in names)


def _severity(decision: str) -> int:
    """The place of a decision from harmless to severe; one that we do not know comes last."""
    order = [str(outcome) for outcome in SEVERITY]
    return order.index(decision) if decision in order else len(order)


def _pair_title(results: Results, pair: Pair) -> str:
    source, target = pair
    several = len({source for source, _ in pairs(results)}) > 1
    if source == target:
        return f"{target} (source)"
    return f"{source} → {target}" if several else target


def _metric_heading(results: Results, metric: str) -> str:
    return f"{metric_title(metric, unit=_unit(results))} {'↑' if higher_is_better(metric) else '↓'}"


def _unit(results: Results) -> str | None:
    units = {stream.unit for stream in results.streams if stream.unit is not None}
    return "mixed units" if len(units) > 1 or "mixed" in units else next(iter(units), None)
