"""The built-in methods with a state of their own under the guard: accepted as without it, rejected without a trace."""

import copy
import math

import pytest
import torch

import networks
from dltta import Adapter, Fixed, GuardedAdapter, Limits, SourceGuard
from dltta.models.parts.denoiser import Denoiser
from dltta.models.parts.normalizer import ImageNormalizer
from dltta.objectives import DTTA, VPTTA, GraTa, InTEnt
from dltta.quality.decision import Outcome, Reason
from networks import stream, trained

IMAGES = stream((1, 1, 8, 8), 5)
LOOSE = SourceGuard(Limits(rate=math.inf, drift=math.inf, max_change=math.inf, collapse=0))


def dtta():
    torch.manual_seed(5)
    return DTTA(trained(Denoiser(2, 3, (3, 4)), seed=6), ImageNormalizer(2, 1, width=3))


METHODS = {
    "grata": GraTa,
    "vptta": lambda: VPTTA(fraction=0.4, capacity=3, neighbors=2, largest=5),
    "dtta": dtta,
}


def guarded(name, guard=LOOSE):
    return GuardedAdapter(trained(networks.Segmenter()), METHODS[name](), Fixed(0.1), guard=guard)


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("name", METHODS)
def test_accepted_updates_are_those_without_a_guard(name):
    ours, plain = guarded(name), Adapter(trained(networks.Segmenter()), METHODS[name](), Fixed(0.1))
    for x in IMAGES:
        step = ours.step(x)
        assert step.decision.outcome == Outcome.ACCEPTED
        assert torch.equal(step.logits, plain(x))


@pytest.mark.parametrize("name", METHODS)
def test_a_rejected_update_leaves_no_trace_in_the_method(name):
    ours = guarded(name)
    ours.step(IMAGES[0])
    before = copy.deepcopy(ours.objective.state_dict())
    parameters = {key: value.detach().clone() for key, value in ours.adapted_parameters().items()}
    ours.guard = SourceGuard(Limits(rate=1e-9))  # objects to every update, to no state
    step = ours.step(IMAGES[1])
    assert (step.decision.outcome, step.decision.reason) == (Outcome.KEPT, Reason.RATE)
    assert same(ours.objective.state_dict(), before)
    assert same({key: value.detach() for key, value in ours.adapted_parameters().items()}, parameters)


@pytest.mark.parametrize("name", METHODS)
def test_a_guarded_stream_resumes_bit_for_bit(name):
    whole = guarded(name)
    expected = [whole(x) for x in IMAGES]
    first, second = guarded(name), guarded(name)
    for x in IMAGES[:2]:
        first.step(x)
    second.load_state_dict(first.state_dict())
    assert same([second(x) for x in IMAGES[2:]], expected[2:])


def test_mixtures_under_the_guard_are_those_without_it():
    model = trained(networks.Segmenter())
    ours, plain = GuardedAdapter(model, InTEnt(), guard=LOOSE), Adapter(model, InTEnt())
    for x in IMAGES:
        assert torch.equal(ours(x), plain(x))
