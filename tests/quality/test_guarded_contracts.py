"""Methods from outside under the guard: what they remember is undone with the update."""

import math

import pytest
import torch

import networks
from dltta import Adapter, Fixed, GuardedAdapter, Limits, SourceGuard
from dltta.quality.decision import Outcome, Reason
from dltta.quality.guard import Objection, Review
from methods import LayerWise, MeanTeacher, Prototypes
from networks import stream, trained

IMAGES = stream((1, 1, 8, 8), 6)
LOOSE = SourceGuard(Limits(rate=math.inf, drift=math.inf, max_change=math.inf, collapse=0))


def teaching(guard, objective=None, rate=0.5):
    return GuardedAdapter(trained(networks.Segmenter()), objective or MeanTeacher(), Fixed(rate), guard=guard)


def remembered(adapter):
    teacher = adapter.objective.teacher.state_dict().values()
    return [*(value.clone() for value in teacher), adapter.objective.generator.get_state()]


def test_the_teacher_predicts_and_its_accepted_updates_are_those_without_a_guard():
    ours, plain = teaching(LOOSE), Adapter(trained(networks.Segmenter()), MeanTeacher(), Fixed(0.5))
    for x in IMAGES:
        step = ours.step(x)
        assert step.decision.outcome == Outcome.ACCEPTED
        assert torch.equal(step.logits, plain(x))


def test_a_rejected_update_rolls_the_teacher_back():
    ours = teaching(LOOSE)
    ours.step(IMAGES[0])
    before = remembered(ours)
    ours.guard = SourceGuard(Limits(rate=1e-9))  # objects to every update, to no state
    step = ours.step(IMAGES[1])
    assert (step.decision.outcome, step.decision.reason) == (Outcome.KEPT, Reason.RATE)
    assert all(map(torch.equal, remembered(ours), before))
    with torch.no_grad():
        assert torch.equal(step.logits, ours.objective.teacher(IMAGES[1]))


def test_a_teacher_that_is_no_number_is_rolled_back():
    class Failing(MeanTeacher):
        broken = False

        def after_update(self, model):
            super().after_update(model)
            if self.broken:
                next(self.teacher.parameters()).mul_(math.nan)

    ours = teaching(LOOSE, Failing())
    ours.step(IMAGES[0])
    before = remembered(ours)
    ours.objective.broken = True
    step = ours.step(IMAGES[1])
    assert (step.decision.outcome, step.decision.reason) == (Outcome.KEPT, Reason.NON_FINITE)
    assert step.logits.isfinite().all()
    assert all(map(torch.equal, remembered(ours), before))


def test_a_guarded_teacher_resumes_bit_for_bit():
    def make():
        return teaching(SourceGuard(Limits(rate=99, drift=0.1)), rate=2.0)

    whole = make()
    expected = [whole.step(x) for x in IMAGES]
    assert {step.decision.outcome for step in expected} == {Outcome.ACCEPTED, Outcome.KEPT, Outcome.ROLLED_BACK}
    for stop in range(1, len(IMAGES)):
        first, second = make(), make()
        for x in IMAGES[:stop]:
            first.step(x)
        second.load_state_dict(first.state_dict())
        found = [second.step(x) for x in IMAGES[stop:]]
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(found, expected[stop:], strict=True))
        assert [a.decision for a in found] == [b.decision for b in expected[stop:]]


class OnlyEarlier(SourceGuard):
    """Objects to the update and to the state before it."""

    asked = 0

    def after(self, signals):
        self.asked += 1
        return Review(Objection(Reason.DRIFT, "no") if self.asked < 3 else None, {})


def test_the_teacher_of_the_last_accepted_state_is_saved_with_the_stream():
    first, second = teaching(LOOSE), teaching(LOOSE)
    first.step(IMAGES[0])
    wanted = remembered(first)  # the state before the last update that was accepted
    first.step(IMAGES[1])
    second.load_state_dict(first.state_dict())
    steps = []
    for adapter in (first, second):
        adapter.guard = OnlyEarlier()
        steps.append(adapter.step(IMAGES[2]))
        assert all(map(torch.equal, remembered(adapter), wanted))
    assert [step.decision.outcome for step in steps] == [Outcome.ROLLED_BACK] * 2
    assert torch.equal(steps[0].logits, steps[1].logits)


def test_a_prediction_that_changes_without_any_parameter_moving_is_seen_by_the_guard():
    model, images = trained(networks.Classifier()), stream((4, 1, 8, 8), 3)
    step = GuardedAdapter(model, Prototypes(), guard=SourceGuard(Limits(max_probability_shift=1e-6))).step(images[0])
    assert step.decision.signals["drift"] == 0
    assert (step.decision.outcome, step.decision.reason) == (Outcome.SOURCE, Reason.CHANGE)
    with torch.no_grad():
        torch.testing.assert_close(step.logits, model(images[0]))


@pytest.mark.parametrize("guard", [LOOSE, SourceGuard(Limits(max_probability_shift=1e-6))])
def test_prototypes_under_the_guard_learn_only_from_what_is_accepted(guard):
    ours = GuardedAdapter(trained(networks.Classifier()), Prototypes(), guard=guard)
    for x in stream((4, 1, 8, 8), 3):
        ours.step(x)
    assert (ours.objective.sums is not None) == (guard is LOOSE)


def test_a_rate_for_each_parameter_under_the_guard():
    step = GuardedAdapter(trained(networks.Segmenter()), MeanTeacher(), LayerWise(), guard=LOOSE).step(IMAGES[0])
    assert step.decision.outcome == Outcome.ACCEPTED
    assert step.rate > 0
