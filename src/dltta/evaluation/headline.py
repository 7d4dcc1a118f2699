"""9 report. What do the numbers say, in a few plain sentences, also when they are bad?"""

import math
from dataclasses import dataclass

from dltta.evaluation.comparison import worst_site
from dltta.evaluation.results import SOURCE, Results, summarize
from dltta.evaluation.tables import (
    Column,
    Pair,
    gains,
    method_label,
    methods,
    metric_word,
    primary_metric,
    targets,
)
from dltta.metrics import mean_defined

MethodRate = tuple[str, str]  # method, rate
NO_ADAPTATION: MethodRate = (SOURCE, "none")
SIMPLEST_FIRST = (SOURCE, "ptbn", "tent", "ttt", "atta")  # methods not named here come after these


@dataclass(frozen=True)
class Finding:
    """What a reader should remember about one target; values are fractions, None where nothing was run."""

    metric: str
    pair: Pair
    at_source: float | None  # the source model at the source site
    at_target: float | None  # the source model at the target site
    best: MethodRate | None  # the best adapted method at the target
    reached: float  # by the best method


def hardest_pair(results: Results) -> Pair | None:
    """The target at which the source model is worst; the first one when it was never run; None without any stream."""
    found = {pair: mean_score(results, pair, NO_ADAPTATION) for pair in targets(results)}
    values = {pair: value for pair, value in found.items() if value is not None}
    return min(values, key=lambda pair: values[pair]) if values else next(iter(found), None)


def find(results: Results) -> Finding | None:
    """The finding at the hardest target; None when nothing was scored."""
    pair, metric = hardest_pair(results), primary_metric(results)
    if pair is None:
        return None
    reached = {entry: mean_score(results, pair, entry) for entry in methods(results) if entry[0] != SOURCE}
    values = {entry: value for entry, value in reached.items() if value is not None}
    at_source = mean_score(results, (pair[0], pair[0]), NO_ADAPTATION) if pair[0] != pair[1] else None
    at_target = mean_score(results, pair, NO_ADAPTATION)
    if at_target is None and not values:
        return None
    best = max(values, key=lambda entry: (shown(values[entry]), -_complexity(entry))) if values else None
    return Finding(metric, pair, at_source, at_target, best, values[best] if best else math.nan)


def sentences(results: Results) -> list[str]:
    """The headline first, then what qualifies it."""
    finding = find(results)
    if finding is None:
        return ["No case was scored: there are no labels to compare with."]
    said = [_fall(finding) + _win(finding), _harm(results, finding), _losers(results, finding)]
    return list(filter(None, [*said, _rates(results, finding), _everywhere(results, finding)]))


def _complexity(entry: MethodRate) -> int:
    """The place of a method in the order of simplicity; rates are already in that order (`methods`)."""
    return SIMPLEST_FIRST.index(entry[0]) if entry[0] in SIMPLEST_FIRST else len(SIMPLEST_FIRST)


def _fall(finding: Finding) -> str:
    title, target = metric_word(finding.metric), finding.pair[1]
    if finding.at_target is None:
        return f"At {target} the source model was not run"
    if finding.at_source is None:
        return f"Without adaptation {title} is {points(finding.at_target)} at {target}"
    if _loss(finding) > 0:
        before, after = points(finding.at_source), points(finding.at_target)
        return f"Without adaptation {title} falls from {before} at {finding.pair[0]} to {after} at {target}"
    return (
        f"Without adaptation {title} does not fall: "
        f"{points(finding.at_source)} at {finding.pair[0]}, {points(finding.at_target)} at {target}"
    )


def _win(finding: Finding) -> str:
    if finding.best is None:
        return "."
    label = method_label(*finding.best)
    if finding.at_target is None:
        return f"; the best method, {label}, reaches {points(finding.reached)}."
    gain = shown(finding.reached - finding.at_target)
    if gain > 0:
        verb = "wins back" if finding.at_source is not None and _loss(finding) > 0 else "gains"
        return f"; the best method, {label}, {verb} {gain:.1f} points and reaches {points(finding.reached)}."
    lost = f"loses {-gain:.1f} points" if gain < 0 else "changes nothing"
    return f"; no method improves on that: the best, {label}, {lost}."


def _harm(results: Results, finding: Finding) -> str:
    if finding.best is None:
        return ""
    values = list(gains(results, finding.pair, *finding.best, finding.metric).values())
    worse = sum(value < 0 for value in values)
    if not values:
        return ""
    return f"{method_label(*finding.best)} makes {worse or 'none'} of the {len(values)} cases worse."


def _losers(results: Results, finding: Finding) -> str:
    """Methods that harm on average, when the best one does not."""
    if finding.at_target is None or shown(finding.reached - finding.at_target) <= 0:
        return ""
    changes = {entry: _change(results, finding.pair, entry, NO_ADAPTATION) for entry in methods(results)}
    losses = {entry: -change for entry, change in changes.items() if change is not None and change < 0}
    listed = [f"{method_label(*entry)} ({loss:.1f} points)" for entry, loss in losses.items()]
    return f"Worse than no adaptation: {', '.join(listed)}." if listed else ""


def _rates(results: Results, finding: Finding) -> str:
    """How often the dynamic rate beats the fixed one."""
    names = [method for method, rate in methods(results) if rate == "dynamic"]
    found = {name: _change(results, finding.pair, (name, "dynamic"), (name, "fixed")) for name in names}
    changes = {name: change for name, change in found.items() if change is not None}
    if not changes:
        return ""
    won, lost = sum(change > 0 for change in changes.values()), sum(change < 0 for change in changes.values())
    if len(changes) == 1:
        verdict = "beats" if won else "falls behind" if lost else "scores like"
        return f"With {method_label(next(iter(changes)), 'fixed')} the dynamic rate {verdict} the fixed one."
    behind = f" and falls behind it for {lost}" if lost else ""
    return f"The dynamic rate beats the fixed one for {won or 'none'} of {len(changes)} methods{behind}."


def _everywhere(results: Results, finding: Finding) -> str:
    """The best method over all targets, when there are several and it ran on all of them."""
    if finding.best is None or len(targets(results)) < 2:
        return ""
    values = {pair[1]: mean_score(results, pair, finding.best) for pair in targets(results)}
    starts = [mean_score(results, pair, NO_ADAPTATION) for pair in targets(results)]
    sites = {site: value for site, value in values.items() if value is not None}
    known = [start for start in starts if start is not None]
    if not len(sites) == len(known) == len(starts):
        return ""
    change = shown(mean_defined(sites.values()) - mean_defined(known))
    site, worst = worst_site(sites, finding.metric)
    return (
        f"Over all {len(sites)} targets {method_label(*finding.best)} {'gains' if change >= 0 else 'loses'} "
        f"{abs(change):.1f} points on average; its worst site is {site} ({points(worst)})."
    )


def _change(results: Results, pair: Pair, entry: MethodRate, baseline: MethodRate) -> float | None:
    """Points that one method is ahead of another at a target."""
    value, start = mean_score(results, pair, entry), mean_score(results, pair, baseline)
    return None if value is None or start is None else shown(value - start)


def mean_score(results: Results, pair: Pair, entry: MethodRate) -> float | None:
    """Dice or accuracy of a method at a target, from 0 to 1; None where it was not run or not scored."""
    streams = results.select(*pair, *entry)
    mean = summarize(streams, primary_metric(results)).mean if streams else math.nan
    return None if math.isnan(mean) else mean


def _loss(finding: Finding) -> float:
    return shown((finding.at_source or 0.0) - (finding.at_target or 0.0))


def shown(fraction: float) -> float:
    """Points as tables round them, so that sentences and tables agree."""
    return Column("", "dice", None).shown(fraction)


def points(fraction: float) -> str:
    """A score as sentences say it."""
    return f"{shown(fraction):.1f}"
