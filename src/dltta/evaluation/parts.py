"""9 results. A stream that changes its site: how good was each method before the change, and how good after it?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.run import CaseRecord
from dltta.evaluation.tables import Pair, methods, primary_metric, targets
from dltta.metrics import mean_defined

MOST_PARTS = 8  # sites that take turns image by image are no parts


@dataclass(frozen=True)
class Part:
    """Images of one site that come in a row."""

    site: str
    first: int  # place in the stream, counted from one
    count: int
    score: float  # mean, Dice or accuracy


def parts(cases: Sequence[CaseRecord], metric: str) -> tuple[Part, ...]:
    """The parts of a stream in the order in which they came."""
    found, first = [], 1
    for site, rows in groupby(cases, key=lambda case: case.site):
        part = list(rows)
        score = mean_defined(row.metrics[metric] for row in part if metric in row.metrics)
        found.append(Part(site, first, len(part), score))
        first += len(part)
    return tuple(found)


def changes_site(stream: StreamResult) -> bool:
    """Whether a stream has a few parts, all with scores of single cases."""
    rows = stream.cases
    return 1 < len(parts(rows, "")) <= MOST_PARTS and all(row.metrics for row in rows)


def changing_pairs(results: Results) -> list[Pair]:
    """The targets that change their site on the way."""
    found = {(s.source, s.target) for s in results.streams if changes_site(s)}
    return [pair for pair in targets(results) if pair in found]


def by_part(results: Results, pair: Pair) -> dict[tuple[str, str], tuple[Part, ...]]:
    """The parts of each method's first stream, by method and rate."""
    metric = primary_metric(results)
    streams = {entry: results.select(*pair, *entry) for entry in methods(results)}
    return {entry: parts(found[0].cases, metric) for entry, found in streams.items() if found}
