"""Decisions: from those about images to one about the batch, and codes that can be counted."""

import json
from collections import Counter
from itertools import pairwise

from dltta.quality.decision import SEVERITY, Decision, Outcome, Reason, combine, of_batch

ACCEPTED = Decision(Outcome.ACCEPTED)
IN_DISTRIBUTION = Decision(Outcome.IN_DISTRIBUTION, Reason.IN_DISTRIBUTION, "as ever", {"ood_score": 0.5})
KEPT = Decision(Outcome.KEPT, Reason.CHANGE, "too much", {"change": 0.3})
SOURCE = Decision(Outcome.SOURCE, Reason.CONSTANT_IMAGE, "constant")


def test_the_decision_about_a_batch_is_the_most_severe_of_its_images():
    mixed = of_batch([ACCEPTED, SOURCE, KEPT, SOURCE])
    assert (mixed.outcome, mixed.reason, mixed.detail) == (SOURCE.outcome, SOURCE.reason, "2 of 4 images: constant")
    assert [mixed.of(i) for i in range(4)] == [ACCEPTED, SOURCE, KEPT, SOURCE]
    assert of_batch([ACCEPTED, IN_DISTRIBUTION]).signals == {"ood_score": 0.5}


def test_a_batch_of_one_has_the_decision_of_its_image():
    assert of_batch([KEPT]) == KEPT
    assert KEPT.of(0) is KEPT


def test_a_batch_without_objection_has_none():
    batch = of_batch([ACCEPTED, ACCEPTED])
    assert (batch.outcome, batch.reason, batch.detail) == (Outcome.ACCEPTED, None, None)


def test_parts_of_an_image_are_combined_without_keeping_each():
    joined = combine([KEPT, ACCEPTED, KEPT], "parts")
    assert (joined.outcome, joined.detail, joined.images) == (Outcome.KEPT, "2 of 3 parts: too much", ())


def test_parts_of_an_image_have_the_mean_of_their_ood_scores():
    scored = [Decision(Outcome.ACCEPTED, ood_score=score) for score in (1.0, None, 4.0)]
    assert combine(scored, "parts").ood_score == 2.5
    assert combine([ACCEPTED, KEPT], "parts").ood_score is None


def test_severity_rises_from_accepted_to_the_source_model():
    assert [str(outcome) for outcome in SEVERITY] == ["accepted", "in-distribution", "kept", "rolled-back", "source"]
    for less, more in pairwise(SEVERITY):
        assert combine([Decision(more), Decision(less)]).outcome == more
    assert [outcome for outcome in Outcome if outcome.by_source] == [Outcome.IN_DISTRIBUTION, Outcome.SOURCE]


def test_codes_are_text_in_a_log_and_can_be_counted():
    line = json.loads(json.dumps({"decision": SOURCE.outcome, "reason": SOURCE.reason}))
    assert line == {"decision": "source", "reason": "constant-image"}
    assert Counter(each.reason for each in (SOURCE, KEPT, SOURCE)) == {"constant-image": 2, "change": 1}
    assert len(set(Reason)) == len({reason.value for reason in Reason}) == 12
