"""What every method must do along a stream, whatever it minimizes: resumed, rolled back, on any network, guarded."""

import copy
import tempfile
from pathlib import Path

import pytest
import torch

import networks
from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.core.rates import Relative
from dltta.errors import NonFiniteError
from dltta.models.statistics import InstanceStatistics, Running
from dltta.quality.decision import Outcome, Reason
from dltta.quality.guard import Limits, Objection, Review, SourceGuard
from dltta.quality.guarded import GuardedAdapter
from dltta.serving.state import StateFolder
from dltta.testing import check_objective
from networks import decisive, stream, trained


class Layered(torch.nn.Module):
    """Layer normalization over channels, positions last."""

    def __init__(self, classes=3):
        super().__init__()
        self.first, self.norm1 = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.LayerNorm(4)
        self.head = torch.nn.Conv2d(4, classes, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.norm1(self.first(x).movedim(1, -1)).movedim(-1, 1)))


NETWORKS = {
    "2-D batch": (networks.Segmenter, (2, 1, 8, 8)),
    "2-D one image, not square": (networks.Segmenter, (1, 1, 8, 12)),
    "2-D sigmoid": (lambda: networks.Segmenter(classes=1), (2, 1, 8, 8)),
    "2-D instance": (lambda: networks.Segmenter(kind="instance"), (2, 1, 8, 8)),
    "2-D group": (lambda: networks.Segmenter(kind="group"), (1, 1, 8, 8)),
    "2-D layer": (Layered, (1, 1, 8, 8)),
    "3-D batch": (lambda: networks.Segmenter(3), (1, 1, 8, 8, 4)),
    "3-D instance": (lambda: networks.Segmenter(3, kind="instance"), (2, 1, 4, 8, 8)),
    "classes batch": (networks.Classifier, (3, 1, 8, 8)),
    "classes group": (lambda: networks.Classifier(kind="group"), (1, 1, 8, 8)),
    "classes sigmoid": (lambda: networks.Classifier(classes=1), (2, 1, 8, 8)),
    "classes color": (lambda: networks.Classifier(channels=3), (2, 3, 8, 8)),
}
RATE = 0.005
OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9),
    "adam": torch.optim.Adam,
}


class ByLength:
    """Every parameter at its own rate, by the length of its gradient; none where the loss does not reach."""

    per_parameter = True

    def __call__(self, signals):
        return [RATE * signals.gradient[n].norm().item() if n in signals.gradient else 0.0 for n in signals.parameters]


def network(name):
    """A network that is certain of some predictions and not of others."""
    build, shape = NETWORKS[name]
    return decisive(trained(build()), torch.cat(stream(shape, 5, seed=4)))


def state(part):
    """Everything that an adapter or an objective remembers, copied, in one list; not how many batches."""
    return _leaves(copy.deepcopy(dict(part.state_dict())))


def _leaves(value):
    if isinstance(value, dict):
        return [leaf for key in value if key != "batches_seen" for leaf in _leaves(value[key])]
    if isinstance(value, list | tuple):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def same(one, other):
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


def check_networks(objective, name):
    check_objective(objective, network(name), stream(NETWORKS[name][1], 1, seed=4)[0])


def check_resumes(objective, name, **options):
    """Stopped at every point and loaded into another adapter, a stream goes on bit for bit."""
    shape = NETWORKS[name][1]
    images = stream(shape, 5, seed=4)

    def make():
        return Adapter(network(name), objective, Fixed(RATE), **options)

    whole = make()
    expected = [whole(x) for x in images]
    ends = state(whole)
    assert not same(ends, state(make()))
    for stop in range(len(images)):
        first, second = make(), make()
        for x in images[:stop]:
            first.step(x)
        second.step(images[-1])  # something to overwrite
        second.load_state_dict(first.state_dict())
        assert same([second(x) for x in images[stop:]], expected[stop:])
        assert same(state(second), ends)
    _check_disk(make, images, expected)
    whole.reset()
    assert same([whole(x) for x in images], expected)


def _check_disk(make, images, expected):
    """The same through files, as after a kill."""
    first, second = make(), make()
    for x in images[:2]:
        first.step(x)
    with tempfile.TemporaryDirectory() as place:
        folder = StateFolder(Path(place))
        with folder.locked():
            folder.load(2, folder.save(2, first), second)
    assert same([second(x) for x in images[2:]], expected[2:])


def check_rolled_back(objective, name):
    """A step that fails after its update leaves all as it was, and the next step is that of a stream without it."""
    shape = NETWORKS[name][1]
    images = stream(shape, 3, seed=4)
    adapter = Adapter(network(name), objective, Fixed(RATE), optimizer=OPTIMIZERS["momentum"])
    calm = Adapter(network(name), objective, Fixed(RATE), optimizer=OPTIMIZERS["momentum"])
    for each in (adapter, calm):
        each.step(images[0])
    before = state(adapter)

    def broken(objective, logits):
        raise NonFiniteError("planned")

    adapter._predicted, works = broken, adapter._predicted
    with pytest.raises(NonFiniteError, match="scan: planned"):
        adapter.step(images[1], case="scan")
    adapter._predicted = works
    assert same(state(adapter), before)
    assert torch.equal(adapter(images[2]), calm(images[2]))


def check_rates(objective, name):
    """Fixed, dynamic, relative and one for each parameter; image-specific steps; other statistics."""
    shape = NETWORKS[name][1]
    images = stream(shape, 4, seed=4)
    for rate in (Fixed(RATE), Proportional(RATE), Relative(RATE), ByLength()):
        memory = MemoryBank(capacity=2 * shape[0], neighbors=1, ready="neighbors")
        adapter = Adapter(network(name), objective, rate, memory=memory)
        steps = [adapter.step(x) for x in images]
        assert all(step.logits.isfinite().all() for step in steps)
        assert any(step.rate > 0 for step in steps[1:])
    specific = Adapter(network(name), objective, Fixed(RATE), mode="image-specific")
    specific.step(images[0])
    assert torch.equal(specific(images[1]), Adapter(network(name), objective, Fixed(RATE))(images[1]))


def check_statistics(make):
    """Normalization by other statistics is used, and those that go on along the stream move once per batch."""
    images = stream((1, 1, 8, 8), 4, seed=4)
    single, running = (
        Adapter(network("2-D batch"), make(statistics=statistics), Fixed(0.0))
        for statistics in (InstanceStatistics(), Running(0.5))
    )
    assert not torch.allclose([single(x) for x in images][-1], [running(x) for x in images][-1])
    layer = running.model.encoder[1]
    start = layer.test_mean.clone()
    first = running.model.encoder[0](images[0]).mean((0, 2, 3)).detach()
    running.step(images[0])
    torch.testing.assert_close(layer.test_mean, start + 0.5 * (first - start))


class Objector:
    """Learns from every image and rejects every update."""

    def before(self, signals):
        return [None] * len(signals.images)

    def after(self, signals):
        return Review(Objection(Reason.DRIFT, "no") if signals.drift > 0 else None, {})


def check_guarded(objective, name):
    """Under a guard that accepts all it is the same; a rejected update leaves no trace in what is remembered."""
    shape = NETWORKS[name][1]
    loose = SourceGuard(Limits(rate=1e9, drift=1e9, max_change=1e9, max_probability_shift=1e9, collapse=0))
    plain = Adapter(network(name), objective, Fixed(RATE))
    accepting = GuardedAdapter(network(name), objective, Fixed(RATE), guard=loose)
    rejecting = GuardedAdapter(network(name), objective, Fixed(RATE), guard=Objector())
    start = state(rejecting.objective) if hasattr(objective, "state_dict") else []
    for x in stream(shape, 3, seed=4):
        step = accepting.step(x)
        assert step.decision.outcome is Outcome.ACCEPTED
        assert torch.equal(step.logits, plain(x))
        rejected = rejecting.step(x)
        assert rejected.decision.outcome is Outcome.KEPT
        assert rejected.updates[0].rate == RATE
    parameters = zip(rejecting.model.parameters(), network(name).parameters(), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in parameters)
    assert same(state(rejecting.objective) if start else [], start)
