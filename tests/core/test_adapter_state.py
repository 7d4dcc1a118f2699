"""Stopping, resuming and resetting are bit-exact."""

import io

import pytest
import torch

from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.errors import StateError
from dltta.objectives import PTBN, Tent
from networks import Segmenter, stream, trained


class Halving:
    """A rate with a memory of its own: each image gets half the rate of the one before."""

    def __init__(self):
        self.value = 0.5

    def __call__(self, discrepancy):
        self.value /= 2
        return self.value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


KINDS = {
    "sgd": {"rate": Proportional(0.5), "optimizer": torch.optim.SGD},
    "momentum": {"rate": Proportional(0.5), "optimizer": lambda p: torch.optim.SGD(p, momentum=0.9)},
    "adam": {"rate": Proportional(0.05), "optimizer": torch.optim.Adam},
    "image-specific adam": {"rate": Fixed(0.05), "optimizer": torch.optim.Adam, "mode": "image-specific", "steps": 2},
    "rate with state": {"rate": Halving()},
    "half memory": {
        "rate": Proportional(0.5),
        "memory": MemoryBank(capacity=4, neighbors=2, dtype=torch.float16),
    },
}


def make(kind, layer=None):
    options = dict(KINDS[kind])
    rate = options.pop("rate")
    options.setdefault("memory", MemoryBank(layer, capacity=4, neighbors=2))
    return Adapter(trained(Segmenter()), Tent(), rate, **options)


def run(adapter, images):
    steps = [adapter.step(x) for x in images]
    return [(step.logits, step.loss, step.discrepancy, step.rate) for step in steps]


def identical(one, other):
    return all(torch.equal(a[0], b[0]) and a[1:] == b[1:] for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [0, 2, 6])
def test_a_resumed_stream_is_bit_identical_to_an_uninterrupted_one(kind, stop):
    images = stream((1, 1, 8, 8), 10)
    whole = run(make(kind), images)
    stopped = make(kind)
    run(stopped, images[:stop])
    file = io.BytesIO()
    torch.save(stopped.state_dict(), file)
    file.seek(0)
    resumed = make(kind)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.batches_seen == stop
    assert identical(run(resumed, images[stop:]), whole[stop:])
    assert resumed.batches_seen == 10


@pytest.mark.parametrize("kind", KINDS)
def test_reset_is_bit_exact(kind):
    images = stream((1, 1, 8, 8), 7)
    adapter = make(kind)
    before = {name: value.clone() for name, value in adapter.model.state_dict().items()}
    first = run(adapter, images)
    adapter.reset()
    after = adapter.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (adapter.batches_seen, len(adapter.memory)) == (0, 0)
    assert identical(run(adapter, images), first)


def test_the_saved_state_is_a_snapshot():
    images = stream((1, 1, 8, 8), 8)
    adapter = make("adam")
    run(adapter, images[:5])
    saved = adapter.state_dict()
    expected = run(adapter, images[5:])
    adapter.load_state_dict(saved)
    assert identical(run(adapter, images[5:]), expected)


def test_a_memory_that_was_given_filled_is_where_reset_returns():
    filled = make("sgd")
    run(filled, stream((1, 1, 8, 8), 4))
    adapter = Adapter(trained(Segmenter()), Tent(), Proportional(0.5), memory=filled.memory)
    images = stream((1, 1, 8, 8), 3, seed=5)
    first = run(adapter, images)
    assert first[0][2] is not None  # ready at the first image
    adapter.reset()
    assert identical(run(adapter, images), first)


def test_a_state_of_another_method_is_refused():
    with pytest.raises(StateError, match=r"moves 0 parameters, this adapter 4"):
        make("sgd").load_state_dict(Adapter(trained(Segmenter()), PTBN()).state_dict())


def test_a_state_without_memory_is_refused_where_there_is_one():
    with pytest.raises(StateError, match="has a memory, the other has none"):
        make("sgd").load_state_dict(Adapter(trained(Segmenter()), Tent(), Fixed(0.1)).state_dict())


def test_converting_the_adapter_takes_optimizer_and_memory_along():
    adapter = make("adam")
    run(adapter, stream((1, 1, 8, 8), 5))
    adapter.double()
    assert {state["exp_avg"].dtype for state in adapter._optimizer.state.values()} == {torch.float64}
    step = adapter.step(stream((1, 1, 8, 8), 1)[0])
    assert step.logits.dtype == torch.float64
    assert step.discrepancy is not None
    assert adapter.memory.to(torch.device("meta"))._keys.device.type == "meta"
