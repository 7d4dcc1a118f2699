"""Results without names, in columns: what comes back makes the same tables."""

import json
from dataclasses import replace

import pytest
from small_results import PROVENANCE, one_target, results, stream

from dltta.evaluation.columns import from_columns, to_columns, without_names
from dltta.evaluation.expected import quality_rows
from dltta.evaluation.formats import markdown
from dltta.evaluation.results import Results, StreamResult, strict
from dltta.evaluation.run import CaseRecord, StreamRecord
from dltta.evaluation.tables import by_target


def again(found, *metrics):
    return from_columns(json.loads(json.dumps(strict(to_columns(without_names(found), metrics or ("dice",))))))


def test_the_same_table_comes_of_the_columns():
    assert markdown(by_target(again(one_target()))) == markdown(by_target(one_target()))


def test_no_name_of_a_case_or_patient_is_in_them():
    found = one_target()
    named = [
        replace(s, cases=tuple(replace(case, group=f"patient {i // 2}") for i, case in enumerate(s.cases)))
        for s in found.streams
    ]
    text = json.dumps(to_columns(without_names(replace(found, streams=tuple(named))), ("dice",)))
    assert "case_" not in text
    assert "patient " not in text
    cases = again(replace(found, streams=tuple(named))).streams[1].cases
    assert len({case.patient for case in cases}) == 4  # two cases each


def test_scores_are_paired_by_case_in_whatever_order_they_came():
    forward = stream("source", "none", [0.1, 0.5])
    backward = replace(stream("tent", "fixed", [0.2, 0.9]), cases=stream("tent", "fixed", [0.2, 0.9]).cases[::-1])
    first, second = again(results(forward, backward)).streams
    scores = [{case.key: case.metrics["dice"] for case in each.cases} for each in (first, second)]
    assert scores[0].keys() == scores[1].keys()
    assert sorted(round(scores[1][key] - scores[0][key], 6) for key in scores[0]) == [0.1, 0.4]


def test_expected_quality_and_decisions_stay():
    rows = tuple(
        CaseRecord(f"case_{i}", "B", {"dice": score}, 0.1, decision="accepted", quality=score - 0.1,
                   quality_low=0.0, quality_high=score + 0.01 * i, review=i == 0)
        for i, score in enumerate([0.5, 0.7, 0.6])
    )  # fmt: skip
    record = StreamRecord("B", "segmentation", {"dice": 0.6}, rows)
    found = results(StreamResult.of(record, source="A", method="recommended", rate="none"))
    (row,), (before,) = quality_rows(again(found)), quality_rows(found)
    assert row.correlation == before.correlation == pytest.approx(1.0)
    assert row.review == pytest.approx(1 / 3)
    assert by_target(again(found)).notes == by_target(found).notes


def test_volumes_are_scored_and_their_slices_keep_what_was_decided():
    slices = tuple(CaseRecord(f"s{i}", "B", {}, 0.1, volume="v", decision="accepted", quality=0.5) for i in range(3))
    volume = CaseRecord("v", "B", {"dice": 0.8}, None)
    record = StreamRecord("B", "segmentation", {"dice": 0.8}, slices, volumes=(volume,))
    found = results(StreamResult.of(record, source="A", method="recommended", rate="none"))
    (made,) = again(found).streams
    assert [case.metrics for case in made.scored] == [{"dice": 0.8}]
    assert [case.decision for case in made.cases] == ["accepted"] * 3


def test_what_is_always_the_same_stands_once():
    """The cases of a target, which its streams share, and a column of one value, such as the unit of distances."""
    document = to_columns(one_target(), ("dice",))
    assert [each["cases"] for each in document["streams"]] == [0, 1, 1, 1]  # at home others
    assert document["cases"] == [[f"case_{i}" for i in range(count)] for count in (2, 8)]
    assert document["streams"][0]["facts"]["unit"] == {"always": "px"}
    assert document["streams"][0]["scores"]["dice"] == [0.9, 0.92]


def test_a_score_that_is_not_defined_stays_so():
    (made,) = again(results(stream("source", "none", [0.5, float("nan")]))).streams
    assert sorted(str(case.metrics["dice"]) for case in made.cases) == ["0.5", "nan"]


def test_cases_of_several_sites_stay_apart():
    long = stream("tent", "fixed", [0.5, 0.6])
    mixed = replace(long, cases=(long.cases[0], replace(long.cases[1], site="C", case=long.cases[0].case)))
    (made,) = again(Results({}, PROVENANCE, (mixed,))).streams
    assert {case.site: case.metrics["dice"] for case in made.cases} == {"B": 0.5, "C": 0.6}
    assert len({case.case for case in made.cases}) == 2
