"""Expected quality against scores, by hand."""

import math
from dataclasses import replace

import pytest

from dltta.evaluation.expected import quality_rows, quality_streams, spearman
from dltta.evaluation.provenance import Provenance
from dltta.evaluation.report import render_report
from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.run import CaseRecord, StreamRecord


def case(name, dice, quality, low, high, review=False):
    metrics = {} if dice is None else {"dice": dice}
    return CaseRecord(name, "b", metrics, None, quality=quality, quality_low=low, quality_high=high, review=review)


def results(*cases):
    record = StreamRecord("b", "segmentation", {"dice": 0.5}, cases)
    stream = StreamResult.of(record, source="a", method="recommended", rate="none")
    return Results({}, Provenance.collect(seeds=[0], data={}), (stream,))


def test_a_stream_by_hand():
    found = results(
        case("1", 0.9, 0.8, 0.7, 1.0),
        case("2", 0.5, 0.6, 0.55, 0.7),
        case("3", 0.7, 0.5, 0.4, 0.8, review=True),
        case("4", None, 0.3, 0.2, 0.4, review=True),  # no label
    )
    (row,) = quality_rows(found)
    assert (row.target, row.method, row.cases) == ("b", "recommended", 4)
    assert (row.expected, row.review) == pytest.approx((0.55, 0.5))
    assert (row.score, row.covered) == pytest.approx((0.7, 2 / 3))
    assert row.correlation == pytest.approx(0.5)  # ranks 2, 1, 0 and 2, 0, 1
    page = render_report(found).split("<h2>Expected quality</h2>")[1]
    assert "<td>55.0</td><td>70.0</td><td>0.50</td><td>66.7</td><td>50.0</td>" in page


def test_streams_without_it_have_no_row():
    plain = CaseRecord("1", "b", {"dice": 0.5}, None)
    assert quality_rows(results(plain)) == ()
    assert "Expected quality" not in render_report(results(plain))


def test_what_is_drawn_is_the_first_training_there_is():
    """Seeds may be counted from a later one."""
    (stream,) = results(case("1", 0.9, 0.8, 0.7, 1.0)).streams
    later = [replace(stream, seed=seed, order=order) for seed, order in ((2, 0), (1, 1), (1, 0))]
    assert quality_streams(replace(results(), streams=tuple(later))) == (later[2],)


def test_ties_share_their_rank():
    assert spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert math.isnan(spearman([1, 1], [1, 2]))
