"""9 results. How good was what was expected? Expected quality beside the scores that labels gave."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from dltta.evaluation.results import Results, StreamResult


@dataclass(frozen=True)
class QualityRow:
    """The expected quality of one stream's predictions against their scores; the last four need labels."""

    target: str
    method: str
    seed: int
    order: int
    cases: int
    expected: float  # mean
    review: float  # share of the predictions
    score: float  # mean, Dice or accuracy
    correlation: float  # Spearman's, of expected and score over the cases
    covered: float  # share of the scores within their interval


def quality_rows(results: Results) -> tuple[QualityRow, ...]:
    """One for each stream whose predictions came with an expected quality."""
    rows = [_row(stream) for stream in results.streams]
    return tuple(row for row in rows if row is not None)


def quality_streams(results: Results) -> tuple[StreamResult, ...]:
    """Streams with an expected quality and scores to compare it with: the first seed and order of each method."""
    first = min((stream.seed for stream in results.streams), default=0)
    return tuple(
        stream
        for stream in results.streams
        if (stream.seed, stream.order) == (first, 0) and (row := _row(stream)) is not None and not math.isnan(row.score)
    )


def _row(stream: StreamResult) -> QualityRow | None:
    metric = "dice" if stream.task == "segmentation" else "accuracy"
    cases = [case for case in stream.cases if case.quality is not None]
    if not cases:
        return None
    known = [
        (case.quality or 0.0, case.quality_low or 0.0, case.quality_high or 0.0, score)
        for case in cases
        if not math.isnan(score := case.metrics.get(metric, math.nan))
    ]
    return QualityRow(
        stream.target,
        stream.method,
        stream.seed,
        stream.order,
        len(cases),
        fmean(case.quality or 0.0 for case in cases),
        fmean(bool(case.review) for case in cases),
        fmean(score for *_, score in known) if known else math.nan,
        spearman([quality for quality, *_ in known], [score for *_, score in known]),
        fmean(low <= score <= high for _, low, high, score in known) if known else math.nan,
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Correlation of ranks, ties sharing their mean rank; nan where one of them does not vary."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return math.nan
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    places: dict[float, list[int]] = {}
    for place, value in enumerate(ordered):
        places.setdefault(value, []).append(place)
    return [fmean(places[value]) for value in values]
