"""The guarded adapter: what it does with the guard's decisions, and what that costs."""

import copy
import math
from collections import Counter

import pytest
import torch
from torch import nn

import networks
from dltta import Adapter, Fixed, GuardedAdapter, Limits, MemoryBank, Proportional, SourceGuard
from dltta.config import make_guard
from dltta.core import adapted as adapted_module
from dltta.core.snapshot import Snapshot
from dltta.errors import InputError, NonFiniteError
from dltta.models.calibration import LayerSamples, OODScore
from dltta.models.normalization import BATCH_STATISTICS
from dltta.models.statistics import Running
from dltta.objectives import PTBN, Tent
from dltta.quality.decision import Decision, Outcome, Reason
from dltta.quality.guard import Objection, Review
from dltta.training.calibration import calibrate
from networks import stream, trained

IMAGES = stream((1, 1, 8, 8), 6)
SOURCE_IMAGES = [x[0] for x in stream((1, 1, 8, 8), 24, seed=3)]
LOOSE = SourceGuard(Limits(rate=1e9, drift=1e9, max_change=1e9, collapse=0))
CONSTANT = torch.full((1, 1, 8, 8), 0.7)


def guarded(guard, rate=0.1, objective=None, **options):
    return GuardedAdapter(trained(networks.Segmenter()), objective or Tent(), Fixed(rate), guard=guard, **options)


def plain(rate=0.1, **options):
    return Adapter(trained(networks.Segmenter()), Tent(), Fixed(rate), **options)


def source_logits(model, x):
    with torch.no_grad():
        return model(x)


class Objector:
    """Objects to every state but the one whose parameters are the source's, or to all; looks at constant images."""

    def __init__(self, to_all=False):
        self.to_all = to_all

    def before(self, signals):
        return SourceGuard().before(signals)

    def after(self, signals):
        objects = self.to_all or signals.drift > 0
        return Review(Objection(Reason.DRIFT, "no") if objects else None, {"drift": signals.drift})


class OnlyEarlier(Objector):
    """Objects to the update and to the state before it."""

    def __init__(self):
        self.drifts = []

    def after(self, signals):
        self.drifts.append(signals.drift)
        return Review(Objection(Reason.DRIFT, "no") if len(self.drifts) < 3 else None, {})


# accepted


def test_an_accepted_update_is_the_unguarded_one():
    ours, theirs = guarded(LOOSE), plain()
    for x in IMAGES:
        step = ours.step(x)
        assert (step.decision.outcome, step.decision.reason) == (Outcome.ACCEPTED, None)
        assert torch.equal(step.logits, theirs(x))


def test_statistics_that_go_on_do_not_notice_the_guard():
    model = trained(networks.Segmenter())
    ours = GuardedAdapter(model, Tent(Running(0.5)), Fixed(0.5), guard=LOOSE)
    theirs = Adapter(model, Tent(Running(0.5)), Fixed(0.5))
    for x in IMAGES:
        assert torch.equal(ours(x), theirs(x))


class Curious(SourceGuard):
    """Looks through every candidate again, and at flipped images."""

    def after(self, signals):
        for candidate in (signals.adapted, signals.unadapted):
            assert torch.equal(candidate._network(candidate._images), candidate.logits)
            assert candidate._network(candidate._images.flip(2)).grad_fn is None
        assert not torch.equal(signals.adapted.prediction, signals.unadapted.prediction)
        return Review(None, {})


@pytest.mark.parametrize("statistics", [BATCH_STATISTICS, Running(0.5)])
def test_candidates_are_the_models_of_their_predictions_and_further_passes_leave_no_trace(statistics):
    model = trained(networks.Segmenter())
    ours = GuardedAdapter(model, Tent(statistics), Fixed(0.5), guard=Curious())
    theirs = Adapter(model, Tent(statistics), Fixed(0.5))
    for x in IMAGES:
        step = ours.step(x)
        assert step.decision.outcome == Outcome.ACCEPTED
        assert torch.equal(step.logits, theirs(x))


@pytest.mark.parametrize("rate", [1e-5, 0.5])
def test_every_move_is_compared_with_the_unadapted_prediction_that_the_flips_needed(rate):
    """However small: of a network whose layers amplify, a hundred-thousandth of its length can be points."""
    seen = []

    class Comparing(SourceGuard):
        def before(self, signals):
            seen.append(signals.unadapted.prediction)
            return super().before(signals)

        def after(self, signals):
            assert signals.unadapted.prediction is seen[-1]
            assert signals.drift > 0.001 or rate < 0.5
            return Review(None, {})

    ours = guarded(Comparing(), rate=rate)
    for x in IMAGES:
        ours.step(x)
    assert len(seen) == len(IMAGES)


# images that are not let through


def test_an_image_too_far_out_is_predicted_by_the_source_parameters_and_teaches_nothing():
    model = trained(networks.Segmenter())
    guard = SourceGuard(Limits(ood_score=10.0), calibrate(model, SOURCE_IMAGES))
    memory = MemoryBank(neighbors=1, ready="neighbors")
    ours = GuardedAdapter(model, Tent(), Fixed(0.1), memory=memory, guard=guard)
    ours.step(IMAGES[0])
    before, held = copy.deepcopy(ours.model.state_dict()), len(ours.memory)
    step = ours.step(IMAGES[1] + 100)
    assert (step.decision.outcome, step.decision.reason) == (Outcome.KEPT, Reason.OOD_SCORE)
    assert step.updates == ()
    assert len(ours.memory) == held == 1
    assert all(torch.equal(value, before[name]) for name, value in ours.model.state_dict().items())
    torch.testing.assert_close(step.logits, Adapter(model, PTBN()).step(IMAGES[1] + 100).logits)


def test_every_image_has_the_ood_score_that_the_guard_looked_at():
    model = trained(networks.Segmenter())
    calibration = calibrate(model, SOURCE_IMAGES)
    guard = SourceGuard(Limits(ood_score=1e6), calibration)
    ours = GuardedAdapter(model, Tent(), Fixed(0.1), guard=guard)
    near, far = ours.step(IMAGES[0]).decision, ours.step(IMAGES[1] + 100).decision
    samples = LayerSamples()
    with samples.watching(model.eval()), torch.no_grad():
        model(IMAGES[1] + 100)
    assert far.ood_score == pytest.approx(OODScore(calibration)(samples.stacked()).median().item())
    assert 0 < near.ood_score < far.ood_score
    unknown = GuardedAdapter(model, Tent(), Fixed(0.1), guard=SourceGuard())
    assert unknown.step(IMAGES[0]).decision.ood_score is None


def test_images_too_far_out_are_normalized_with_the_others_and_the_others_without_them():
    model = trained(networks.Segmenter())
    calibration = calibrate(model, SOURCE_IMAGES)
    batch = torch.cat(IMAGES[:3])
    batch[1] += 100
    step = GuardedAdapter(model, PTBN(), guard=SourceGuard(Limits(ood_score=10.0), calibration)).step(batch)
    assert [step.decision.of(i).outcome for i in range(3)] == [Outcome.ACCEPTED, Outcome.KEPT, Outcome.ACCEPTED]
    torch.testing.assert_close(step.logits[1], Adapter(model, PTBN()).step(batch).logits[1])
    torch.testing.assert_close(step.logits[[0, 2]], Adapter(model, PTBN()).step(batch[[0, 2]]).logits)


def test_a_constant_image_is_predicted_by_the_source_model_and_not_remembered():
    model = trained(networks.Segmenter())
    memory = MemoryBank(capacity=4, neighbors=2)
    ours = GuardedAdapter(model, Tent(), Proportional(0.1), memory=memory, guard=SourceGuard())
    before = ours.state_dict()
    step = ours.step(CONSTANT)
    assert step.decision == Decision(Outcome.SOURCE, Reason.CONSTANT_IMAGE, "the image is constant")
    assert step.updates == ()
    assert len(ours.memory) == 0
    assert all(torch.equal(v, before[k]) for k, v in ours.state_dict().items() if k != "_extra_state")
    torch.testing.assert_close(step.logits, source_logits(model, CONSTANT))


def test_the_others_of_a_batch_are_adapted_to_as_if_a_refused_image_were_not_there():
    model = trained(networks.Classifier())
    images = stream((4, 1, 8, 8), 1)[0]
    images[2] = 0.7
    memory = MemoryBank(capacity=8, neighbors=2)
    ours = GuardedAdapter(model, Tent(), Fixed(0.1), memory=memory, guard=LOOSE)
    step = ours.step(images)
    torch.testing.assert_close(step.logits[[0, 1, 3]], Adapter(model, Tent(), Fixed(0.1))(images[[0, 1, 3]]))
    torch.testing.assert_close(step.logits[2], source_logits(model, images)[2])
    assert (step.decision.outcome, step.decision.detail) == (Outcome.SOURCE, "1 of 4 images: the image is constant")
    accepted = Outcome.ACCEPTED
    assert [step.decision.of(i).outcome for i in range(4)] == [accepted, accepted, Outcome.SOURCE, accepted]
    assert len(ours.memory) == 3


def test_a_batch_that_ends_at_the_source_model_is_predicted_by_it_whole():
    model = trained(networks.Classifier())
    images = stream((4, 1, 8, 8), 1)[0]
    images[2] = 0.7
    step = GuardedAdapter(model, Tent(), Fixed(0.1), guard=Objector(to_all=True)).step(images)
    assert [step.decision.of(i).outcome for i in range(4)] == [Outcome.SOURCE] * 4
    drift, constant = Reason.DRIFT, Reason.CONSTANT_IMAGE
    assert [step.decision.of(i).reason for i in range(4)] == [drift, drift, constant, drift]
    torch.testing.assert_close(step.logits, source_logits(model, images))


def test_images_of_the_source_are_left_to_the_source_model():
    model = trained(networks.Segmenter())
    guard = make_guard(calibrate(model, SOURCE_IMAGES), "tent")
    x = SOURCE_IMAGES[12][None]
    step = GuardedAdapter(model, Tent(), Fixed(0.1), guard=guard).step(x)
    assert step.decision.outcome == Outcome.IN_DISTRIBUTION
    torch.testing.assert_close(step.logits, source_logits(model, x))


def test_methods_without_a_loss_are_guarded_too():
    model = trained(networks.Segmenter())
    assert GuardedAdapter(model, PTBN(), guard=SourceGuard()).step(CONSTANT).decision.outcome == Outcome.SOURCE
    assert GuardedAdapter(model, PTBN(), guard=LOOSE).step(IMAGES[0]).decision.outcome == Outcome.ACCEPTED


# fallbacks


def test_an_update_that_is_objected_to_leaves_no_trace():
    strict = SourceGuard(Limits(max_change=1e-9))
    ours = guarded(strict, rate=1.0, optimizer=lambda p: torch.optim.SGD(p, momentum=0.9))
    before = copy.deepcopy(ours.state_dict())
    unmoved = plain(rate=0.0)
    for x in IMAGES[:2]:
        step = ours.step(x)
        assert (step.decision.outcome, step.decision.reason) == (Outcome.KEPT, Reason.CHANGE)
        assert "of the prediction changed, limit 1e-09" in step.decision.detail
        assert torch.equal(step.logits, unmoved(x))
        assert len(step.updates) == 1  # what was tried is told
    after = ours.state_dict()
    parameters = [name for name in before if name.startswith("model.")]
    assert parameters
    assert all(torch.equal(before[name], after[name]) for name in parameters)
    assert after["_extra_state"]["optimizer"]["state"] == {}


class Broken(Tent):
    """The loss is no number."""

    def __call__(self, model, x, logits):
        return super().__call__(model, x, logits) * math.nan


def test_a_loss_that_is_no_number_is_not_followed_and_the_image_is_predicted():
    step = guarded(SourceGuard(), objective=Broken()).step(IMAGES[0])
    assert (step.decision.outcome, step.decision.reason) == (Outcome.KEPT, Reason.NON_FINITE)
    assert step.decision.detail == "the loss is nan"
    assert step.updates == ()
    assert torch.equal(step.logits, plain(rate=0.0)(IMAGES[0]))


def test_a_state_that_became_bad_is_rolled_back():
    ours = guarded(LOOSE)
    ours.step(IMAGES[0])
    ours.guard = Objector()
    step = ours.step(IMAGES[1])
    assert step.decision.outcome == Outcome.ROLLED_BACK
    assert step.decision.signals["drift"] > 0
    assert torch.equal(step.logits, plain(rate=0.0)(IMAGES[1]))


def test_the_last_accepted_state_comes_before_the_source():
    """Two accepted updates: the state between them is the last that was accepted as a beginning."""
    ours = guarded(LOOSE)
    for x in IMAGES[:2]:
        ours.step(x)
    after_one = plain()
    after_one.step(IMAGES[0])
    ours.guard = OnlyEarlier()
    step = ours.step(IMAGES[2])
    assert step.decision.outcome == Outcome.ROLLED_BACK
    update, before, accepted = ours.guard.drifts
    assert update > before > accepted > 0
    assert torch.equal(step.logits, after_one.predict(IMAGES[2]))


def test_after_reset_the_last_accepted_state_is_the_source():
    ours = guarded(LOOSE)
    for x in IMAGES[:3]:
        ours.step(x)
    ours.reset()
    ours.guard = OnlyEarlier()
    step = ours.step(IMAGES[2])
    assert step.decision.outcome == Outcome.ROLLED_BACK
    assert torch.equal(step.logits, plain(rate=0.0)(IMAGES[2]))


def test_at_last_the_source_model_predicts():
    ours = guarded(Objector(to_all=True))
    step = ours.step(IMAGES[0])
    assert step.decision.outcome == Outcome.SOURCE
    torch.testing.assert_close(step.logits, source_logits(trained(networks.Segmenter()), IMAGES[0]))


def test_image_specific_steps_have_nothing_but_the_source_to_fall_back_to():
    ours = guarded(Objector(), mode="image-specific")
    for x in IMAGES[:2]:
        step = ours.step(x)
        assert step.decision.outcome == Outcome.KEPT
        assert torch.equal(step.logits, plain(rate=0.0)(x))


@pytest.mark.parametrize("statistics", [BATCH_STATISTICS, Running(0.5)])
def test_a_guarded_stream_resumes_bit_for_bit_through_a_rollback(statistics):
    def make():
        guard = SourceGuard(Limits(max_change=0.05))
        momentum = {"optimizer": lambda p: torch.optim.SGD(p, momentum=0.9)}
        return guarded(guard, objective=Tent(statistics), **momentum)

    whole = make()
    expected = [whole.step(x) for x in IMAGES]
    assert len({step.decision.outcome for step in expected}) > 1
    for stop in range(1, len(IMAGES)):
        first, second = make(), make()
        for x in IMAGES[:stop]:
            first.step(x)
        second.load_state_dict(first.state_dict())
        found = [second.step(x) for x in IMAGES[stop:]]
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(found, expected[stop:], strict=True))
        assert [a.decision for a in found] == [b.decision for b in expected[stop:]]


@pytest.mark.parametrize("guard", [LOOSE, Objector(), SourceGuard(Limits(max_change=0.05))])
def test_reset_goes_back_to_the_beginning_with_all_that_the_guard_keeps(guard):
    ours = guarded(guard, objective=Tent(Running(0.5)))
    first = [ours.step(x) for x in IMAGES]
    ours.reset()
    second = [ours.step(x) for x in IMAGES]
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(first, second, strict=True))
    assert [a.decision for a in first] == [b.decision for b in second]


@pytest.mark.parametrize("statistics", [BATCH_STATISTICS, Running(0.5)])
def test_a_guarded_adapter_can_be_converted_in_the_middle_of_a_stream(statistics):
    ours = guarded(LOOSE, objective=Tent(statistics))
    ours.step(IMAGES[0])
    ours.double()
    ours.guard = SourceGuard(Limits(drift=1e-9))
    step = ours.step(IMAGES[1])
    assert step.logits.dtype == torch.float64
    assert step.decision.outcome == Outcome.ROLLED_BACK
    fresh = Adapter(trained(networks.Segmenter()).double(), Tent(statistics), Fixed(0.0))
    torch.testing.assert_close(step.logits, fresh(IMAGES[1]))


# errors


def test_a_prediction_changes_nothing():
    ours = guarded(LOOSE)
    ours.step(IMAGES[0])
    before = ours.state_dict()
    assert torch.equal(ours.predict(IMAGES[1]), ours.predict(IMAGES[1]))
    after = ours.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "_extra_state")


def test_an_image_that_the_source_model_cannot_take_is_an_input_error():
    with pytest.raises(InputError, match=r"scan: the network cannot take images of shape \(2, 8, 8\)"):
        guarded(SourceGuard()).step(torch.rand(1, 2, 8, 8), case="scan")


def test_a_prediction_of_the_source_model_that_is_no_number_is_never_given():
    model = trained(networks.Segmenter())
    model.head.weight.data[0] = torch.inf
    ours = GuardedAdapter(model, Tent(), Fixed(1e-3), guard=SourceGuard())
    with pytest.raises(NonFiniteError, match="scan: the prediction has NaN"):
        ours.step(IMAGES[0], case="scan")


# every reason, in a stream


def calibrated(model, **limits):
    return SourceGuard(Limits(**limits), calibrate(model, SOURCE_IMAGES))


class Bright(nn.Module):
    """Says class 1 of what is bright."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(1)
        self.head = nn.Conv2d(1, 2, 1)
        nn.init.constant_(self.head.weight[1], 3.0)
        nn.init.constant_(self.head.weight[0], -3.0)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.norm(x))


class OneClass:
    """Moves the bias towards class 1 everywhere."""

    def prepare(self, model):
        return [model.head.bias]

    def __call__(self, model, x, logits):
        return -logits.softmax(1)[:, 1].mean()


def collapsing(limits, rate):
    return GuardedAdapter(Bright(), OneClass(), Fixed(rate), guard=SourceGuard(limits))


def fires(reason):
    """An adapter and an image at which this reason fires."""
    model = trained(networks.Segmenter())
    anything = {"rate": math.inf, "drift": math.inf, "max_change": math.inf}
    match reason:
        case Reason.CONSTANT_IMAGE:
            return guarded(SourceGuard()), CONSTANT
        case Reason.IN_DISTRIBUTION:
            return guarded(calibrated(model, in_distribution=(5.0, 5.0))), SOURCE_IMAGES[0][None]
        case Reason.OOD_SCORE:
            return guarded(calibrated(model, ood_score=10.0)), IMAGES[0] + 100
        case Reason.ENTROPY:
            return guarded(SourceGuard(Limits(entropy=1e-6))), IMAGES[0]
        case Reason.FLIP_CONSISTENCY:
            return guarded(SourceGuard(Limits(source_consistency=1e6))), IMAGES[1]
        case Reason.RATE:
            return guarded(SourceGuard(), rate=2.0), IMAGES[0]
        case Reason.DRIFT:
            return guarded(SourceGuard(Limits(drift=1e-9))), IMAGES[0]
        case Reason.CHANGE:
            return guarded(SourceGuard(Limits(max_change=1e-9)), rate=0.9), IMAGES[0]
        case Reason.CLASS_SHARE:
            shares = ((0.4, 0.6), (0.4, 0.6))
            return collapsing(Limits(**anything, shares=shares, share_margin=1.0), 30.0), IMAGES[0]
        case Reason.COLLAPSE:
            return collapsing(Limits(**anything), 1000.0), IMAGES[0]
        case Reason.NON_FINITE:
            return guarded(SourceGuard(), objective=Broken()), IMAGES[0]


@pytest.mark.parametrize("reason", [each for each in Reason if each != Reason.QUALITY])
def test_every_reason_fires_and_can_be_counted(reason):
    ours, x = fires(reason)
    step = ours.step(x)
    assert step.decision.reason == reason, step.decision
    assert step.decision.detail
    assert step.decision.outcome != Outcome.ACCEPTED
    assert step.logits.isfinite().all()
    assert Counter([str(step.decision.reason)])[reason.value] == 1


# what it costs


class Counting(networks.Segmenter):
    """Remembers what it was asked: the parameters it had, the statistics it used and the images."""

    log: list = []  # shared by all copies: the adapter works on copies  # noqa: RUF012

    def forward(self, x):
        layer = self.encoder[1]
        parameters = tuple(tuple(p.detach().flatten().tolist()) for p in self.parameters())
        Counting.log.append((type(layer).__name__, parameters, tuple(x.flatten().tolist()), torch.is_grad_enabled()))
        return super().forward(x)


@pytest.fixture
def passes():
    Counting.log.clear()
    return Counting.log


CURIOUS = {"entropy": 1e9, "source_consistency": 1e-9, "consistency_override": 0.7}  # asks every question


@pytest.mark.parametrize(
    ("limits", "outcome", "count"),
    [
        ({"max_change": 1.0}, Outcome.ACCEPTED, 4),  # source, unadapted, before and after the update
        ({**CURIOUS, "max_change": 1.0}, Outcome.ACCEPTED, 4 + 1 + 4),  # instance; flips of source and unadapted
        ({**CURIOUS, "max_change": 1e-9}, Outcome.KEPT, 9 + 2 + 1),  # flips of the adapted; the state before
        ({"ood_score": 1e-3, "source_consistency": 1e-9}, Outcome.KEPT, 2 + 4),  # source, unadapted and their flips
        ({"in_distribution": (1e9, 1e9), **CURIOUS}, Outcome.IN_DISTRIBUTION, 1),
    ],
)
def test_no_image_goes_twice_through_the_same_model(passes, limits, outcome, count):
    model = trained(Counting())
    guard = SourceGuard(Limits(**limits), calibrate(model, SOURCE_IMAGES))
    ours = GuardedAdapter(model, Tent(), Fixed(0.9), guard=guard, layout="given")
    passes.clear()
    step = ours.step(IMAGES[0])
    assert step.decision.outcome == outcome, step.decision
    assert len(passes) == count
    again = 1 if step.updates and outcome == Outcome.KEPT else 0  # before the first update it is the unadapted model
    assert len(set(passes)) == len(passes) - again


def test_a_fallback_does_not_ask_the_unadapted_model_again(passes):
    ours = GuardedAdapter(trained(Counting()), Tent(), Fixed(0.9), guard=LOOSE, layout="given")
    ours.step(IMAGES[0])
    ours.guard = SourceGuard(Limits(rate=0.5, drift=math.inf, max_change=1.0, collapse=0))
    passes.clear()
    step = ours.step(IMAGES[1])
    assert (step.decision.outcome, step.decision.reason) == (Outcome.KEPT, Reason.RATE)
    assert len(passes) == 5  # source, unadapted, before and after the update, the state before
    assert len(set(passes)) == 5


def test_a_state_is_tried_once(passes):
    """The last accepted state of a fresh adapter is the source."""
    ours = GuardedAdapter(trained(Counting()), Tent(), Fixed(0.9), guard=Objector(to_all=True), layout="given")
    passes.clear()
    ours.step(IMAGES[0])
    assert len(passes) == 3 + 2  # source, before and after; the state before, the source's parameters
    passes.clear()
    specific = GuardedAdapter(
        trained(Counting()), Tent(), Fixed(0.9), guard=Objector(to_all=True), layout="given", mode="image-specific"
    )
    passes.clear()
    specific.step(IMAGES[0])
    assert len(passes) == 3 + 1


@pytest.mark.parametrize("guard", [LOOSE, SourceGuard(Limits(max_change=1e-9)), Objector(to_all=True), None])
def test_there_is_one_snapshot_per_step(monkeypatch, guard):
    made = []

    class Counted(Snapshot):
        def __init__(self, *args):
            made.append(self)
            super().__init__(*args)

    monkeypatch.setattr(adapted_module, "Snapshot", Counted)
    ours = plain() if guard is None else guarded(guard)
    made.clear()
    for number, x in enumerate(IMAGES, start=1):
        ours.step(x)
        assert len(made) == number
