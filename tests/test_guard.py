"""The guard: what it objects to, and what the adapter then does."""

import copy
import math

import pytest
import torch

import networks
from dltta import Adapter, Fixed, Limits, MemoryBank, Proportional, SourceGuard
from dltta.errors import InputError, NonFiniteError, SettingError
from dltta.guard import Evidence, beyond, entropy, marginal
from dltta.objectives import Tent
from networks import stream, trained

IMAGES = stream((1, 1, 8, 8), 6)


def binary(*foreground):
    """A prediction (1, 2, N) with these probabilities of class 1."""
    values = torch.tensor(foreground)
    return torch.stack([1 - values, values])[None]


def evidence(answer, unmoved=None, source=None, drift=0.0, rate=1e-3):
    return Evidence(answer, answer if unmoved is None else unmoved, answer if source is None else source, drift, rate)


def test_marginal_and_entropy_by_hand():
    prediction = torch.cat([binary(0.2, 0.4), binary(0.6, 0.8)])
    assert marginal(prediction).tolist() == pytest.approx([0.5, 0.5])
    assert entropy(torch.tensor([0.5, 0.5])) == pytest.approx(math.log(2))
    assert entropy(torch.tensor([1.0, 0.0])) == 0


def test_beyond_is_the_distance_in_log_odds_of_the_worst_class():
    shares = [(0.5, 0.9), (0.1, 0.5)]
    assert beyond(torch.tensor([0.7, 0.3]), shares) == 0
    assert beyond(torch.tensor([0.95, 0.05]), shares) == pytest.approx(math.log(19) - math.log(9), rel=1e-5)
    assert beyond(torch.tensor([0.95, 0.05]), None) == 0


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (evidence(binary(0.1, 0.9)), None),
        (evidence(binary(0.1, 0.9), rate=2.0), "rate 2 above 1"),
        (evidence(binary(0.1, 0.9), drift=0.6), "parameters moved by 0.6 of their length"),
        (evidence(binary(0.1, 0.9), unmoved=binary(0.9, 0.1)), "answer moved by"),
        (evidence(binary(0.99, 0.98), source=binary(0.3, 0.2)), "a class takes a share"),
        (evidence(binary(0.001, 0.002), source=binary(0.2, 0.4)), "a class takes a share"),
    ],
)
def test_objections(found, reason):
    guard = SourceGuard(Limits(shares=((0.4, 0.9), (0.1, 0.6))))
    answer = guard.object(found)
    assert answer is None if reason is None else answer.startswith(reason)


def test_a_share_that_the_source_network_misses_even_more_is_not_objected_to():
    guard = SourceGuard(Limits(shares=((0.4, 0.9), (0.1, 0.6))))
    assert guard.object(evidence(binary(0.02, 0.02), source=binary(1e-5, 1e-5))) is None


def test_collapse_is_seen_without_calibration():
    reason = SourceGuard().object(evidence(binary(0.01, 0.01), source=binary(0.3, 0.4)))
    assert reason.startswith("entropy of the mean answer")


def test_limits_come_from_source_images():
    limits = Limits.calibrated({"jitter": 0.3, "shares": [[0.5, 0.9], [0.1, 0.5]]})
    assert limits.divergence == 0.3
    assert limits.shares == ((0.5, 0.9), (0.1, 0.5))
    assert Limits.calibrated({"jitter": 0.0, "shares": [[0, 1]]}).divergence == 0.01


def test_impossible_limits_are_refused():
    with pytest.raises(SettingError, match="drift must be positive"):
        Limits(drift=0)


def adapter(guard, rate=0.1, **options):
    return Adapter(trained(networks.Segmenter()), Tent(), Fixed(rate), guard=guard, **options)


def test_an_accepted_update_is_the_unguarded_one():
    loose = SourceGuard(Limits(rate=1e9, drift=1e9, divergence=1e9, collapse=0))
    guarded, plain = adapter(loose), adapter(None)
    for x in IMAGES:
        step = guarded.step(x)
        assert step.ruling.verdict == "accepted"
        assert torch.equal(step.logits, plain(x))


def test_an_update_that_is_objected_to_leaves_no_trace():
    strict = SourceGuard(Limits(divergence=1e-9))
    guarded = adapter(strict, rate=1.0, optimizer=lambda p: torch.optim.SGD(p, momentum=0.9))
    before = copy.deepcopy(guarded.state_dict())
    unmoved = adapter(None, rate=0.0)
    for x in IMAGES[:2]:
        step = guarded.step(x)
        assert step.ruling.verdict == "skipped"
        assert step.ruling.reason.startswith("answer moved by")
        assert torch.equal(step.logits, unmoved(x))
    after = guarded.state_dict()
    parameters = [name for name in before if name.startswith("model.")]
    assert parameters
    assert all(torch.equal(before[name], after[name]) for name in parameters)
    assert after["_extra_state"]["optimizer"]["state"] == {}


def test_a_loss_that_is_no_number_is_skipped_and_answered():
    class Broken(Tent):
        def __call__(self, model, x, logits):
            return super().__call__(model, x, logits) * math.nan

    guarded = Adapter(trained(networks.Segmenter()), Broken(), Fixed(0.1), guard=SourceGuard())
    step = guarded.step(IMAGES[0])
    assert step.ruling.verdict == "skipped"
    assert "loss is nan" in step.ruling.reason
    assert step.logits.isfinite().all()


def test_a_constant_image_is_answered_by_the_source_and_not_remembered():
    model = trained(networks.Segmenter())
    memory = MemoryBank(capacity=4, neighbors=2)
    guarded = Adapter(model, Tent(), Proportional(0.1), memory=memory, guard=SourceGuard())
    x = torch.full((1, 1, 8, 8), 0.7)
    step = guarded.step(x)
    assert (step.ruling.verdict, step.ruling.reason) == ("source", "1 of 1 images are constant")
    assert len(guarded.memory) == 0
    with torch.no_grad():
        torch.testing.assert_close(step.logits, model(x))


class Objector:
    """Objects to every state but the one whose parameters are the source's, or to all."""

    def __init__(self, to_all=False):
        self.to_all = to_all

    def refuse(self, x):
        return None

    def object(self, evidence):
        return "no" if self.to_all or evidence.drift > 0 else None

    def signals(self, evidence):
        return {"drift": evidence.drift}


def test_a_state_that_became_bad_is_rolled_back():
    guarded = adapter(SourceGuard(Limits(divergence=1e9)))
    guarded.step(IMAGES[0])
    guarded.guard = Objector()
    step = guarded.step(IMAGES[1])
    assert step.ruling.verdict == "rolled back"
    assert step.ruling.signals["drift"] > 0
    assert torch.equal(step.logits, adapter(None, rate=0.0)(IMAGES[1]))


def test_at_last_the_source_network_answers():
    model = trained(networks.Segmenter())
    step = adapter(Objector(to_all=True)).step(IMAGES[0])
    assert step.ruling.verdict == "source"
    with torch.no_grad():
        torch.testing.assert_close(step.logits, model(IMAGES[0]))


def test_a_guarded_stream_resumes_bit_for_bit_through_a_rollback():
    def make():
        return adapter(SourceGuard(Limits(divergence=0.02)), optimizer=lambda p: torch.optim.SGD(p, momentum=0.9))

    whole = make()
    expected = [whole.step(x) for x in IMAGES]
    verdicts = {step.ruling.verdict for step in expected}
    assert len(verdicts) > 1, verdicts
    for stop in range(1, len(IMAGES)):
        first = make()
        for x in IMAGES[:stop]:
            first.step(x)
        second = make()
        second.load_state_dict(first.state_dict())
        found = [second.step(x) for x in IMAGES[stop:]]
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(found, expected[stop:], strict=True))
        assert [a.ruling for a in found] == [b.ruling for b in expected[stop:]]


def test_reading_an_answer_changes_nothing():
    guarded = adapter(None)
    guarded.step(IMAGES[0])
    before = guarded.state_dict()
    first = guarded.answer(IMAGES[1])
    assert torch.equal(first, guarded.answer(IMAGES[1]))
    after = guarded.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "_extra_state")


def test_an_image_that_the_source_network_cannot_take_is_an_input_error():
    adapter = Adapter(trained(networks.Segmenter()), Tent(), Fixed(1e-3), guard=SourceGuard())
    with pytest.raises(InputError, match=r"scan: the network cannot take images of shape \(2, 8, 8\)"):
        adapter.step(torch.rand(1, 2, 8, 8), case="scan")


def test_a_source_answer_that_is_not_a_number_is_never_given():
    model = trained(networks.Segmenter())
    model.head.weight.data[0] = torch.inf
    adapter = Adapter(model, Tent(), Fixed(1e-3), guard=SourceGuard())
    with pytest.raises(NonFiniteError, match="scan: the prediction has NaN"):
        adapter.step(IMAGES[0], case="scan")
