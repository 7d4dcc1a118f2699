"""9 report. What happened in a demo, for somebody who has not read the paper? Every number comes from results."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from dltta.evaluation.expected import quality_rows
from dltta.evaluation.headline import NO_ADAPTATION, MethodRate, hardest_pair, mean_score, points, shown
from dltta.evaluation.parts import Part, by_part, changing_pairs
from dltta.evaluation.results import SOURCE, Results
from dltta.evaluation.tables import NAMES, Pair, gains, method_label, methods, metric_word, primary_metric
from dltta.recipes import MATCHED, RECOMMENDED

PTBN: MethodRate = ("ptbn", "none")
RECIPE: MethodRate = (RECOMMENDED, "none")
COMPARED = ("fixed", "dynamic", MATCHED)  # rates


@dataclass(frozen=True)
class Line:
    """One step of the story."""

    title: str
    text: str

    @property
    def head(self) -> str:
        """The title as the beginning of a paragraph."""
        return self.title if self.title.endswith("?") else f"{self.title}."


def story(results: Results, changing: Results | None = None) -> list[Line]:
    """At home, at the hardest target, with each kind of recipe, and along a stream that changes its site."""
    pair = hardest_pair(results)
    away = None if pair is None else mean_score(results, pair, NO_ADAPTATION)
    return [] if pair is None or away is None else list(_lines(results, pair, away, changing))


def _lines(results: Results, pair: Pair, away: float, changing: Results | None) -> Iterator[Line]:
    (source, target), word = pair, metric_word(primary_metric(results))
    home, fall = mean_score(results, (source, source), NO_ADAPTATION), ""
    if home is not None:
        text = f"A network was trained on images of {source}. New images of {source}: {word} {points(home)}"
        yield Line("At home", f"{text} (100 would be perfect).")
        fall = f", {_difference(away, home)} at home"
    yield Line("At another hospital", f"The same network on images of {target}: {word} {points(away)}{fall}.")
    if (statistics := mean_score(results, pair, PTBN)) is not None:
        text = "Layers normalize by the image at hand instead of the training images; nothing is learned"
        change = f"{points(statistics)}, {_difference(statistics, away)} no adaptation"
        yield Line("Statistics only (PTBN)", f"{text}: {change}.")
    if text := _paper(results, pair):
        yield Line("The paper's recipes", text)
    if (reached := mean_score(results, pair, RECIPE)) is not None:
        yield Line("The recommended recipe", _recommended(results, pair, reached, away))
    if text := _quality(results, pair):
        yield Line("How good is each prediction?", text)
    if changing is not None and (text := _changing(changing)):
        yield Line("The scanner changes half-way", text)


def _paper(results: Results, pair: Pair) -> str:
    """Methods with a learning step, at every rate that they were run with."""
    rates = [rate for rate in COMPARED if any(rate == found for _, found in methods(results))]
    names = list(dict.fromkeys(method for method, rate in methods(results) if rate in rates))
    scores = {name: [mean_score(results, pair, (name, rate)) for rate in rates] for name in names}
    known = {name: [score for score in row if score is not None] for name, row in scores.items()}
    if not names or any(len(row) != len(rates) for row in known.values()):
        return ""
    listed = ", ".join(f"{NAMES.get(name, name)} {' / '.join(map(points, row))}" for name, row in known.items())
    text = f"A small learning step on each image. With a {' / '.join(rates)} rate: {listed}."
    if MATCHED in rates:
        text += " (Matched: fixed, and as large as the dynamic one is on average.)"
    most = max(shown(max(row)) - shown(min(row)) for row in known.values())
    return f"{text} The rate changes a score by at most {most:.1f} points." if len(rates) > 1 else text


def _recommended(results: Results, pair: Pair, reached: float, away: float) -> str:
    text = "The default of dltta adapt has rehearsed at home, on images made to look like those of other scanners. "
    text += f"What proved best there is given: {points(reached)}, "
    text += f"{_difference(reached, away)} no adaptation"
    if (statistics := mean_score(results, pair, PTBN)) is not None:
        text += f", {_difference(reached, statistics)} statistics only"
    changes = list(gains(results, pair, *RECIPE, primary_metric(results)).values())
    worse = sum(change < 0 for change in changes)
    return f"{text}. It makes {worse or 'none'} of {len(changes)} images worse." if changes else f"{text}."


def _quality(results: Results, pair: Pair) -> str:
    row = next((row for row in quality_rows(results) if (row.target, row.method) == (pair[1], RECOMMENDED)), None)
    if row is None or math.isnan(row.score):
        return ""
    order = "" if math.isnan(row.correlation) else f" Their rank correlation is {row.correlation:.2f} (1: same order)."
    return (
        f"Without labels it expected {points(row.expected)} on average; the truth is {points(row.score)}. "
        f"{round(row.covered * row.cases)} of {row.cases} images lie in their 90 % interval.{order}"
    )


def _changing(results: Results) -> str:
    pair = next(iter(changing_pairs(results)), None)
    if pair is None:
        return ""
    found = by_part(results, pair)
    order = ", then ".join(f"{part.count} of {part.site}" for part in next(iter(found.values())))
    listed = "; ".join(f"{_name(entry)} {_then(row)}" for entry, row in found.items())
    return f"Images come one after another, {order}, and nobody says when. Before and after: {listed}."


def _name(entry: MethodRate) -> str:
    return "no adaptation" if entry[0] == SOURCE else method_label(*entry)


def _then(row: tuple[Part, ...]) -> str:
    return ", then ".join(points(part.score) for part in row)


def _difference(value: float, other: float) -> str:
    """The words between two scores; tables round their difference alike."""
    change = shown(value - other)
    return "as much as" if change == 0 else f"{abs(change):.1f} points {'above' if change > 0 else 'below'}"
