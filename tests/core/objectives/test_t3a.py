"""T3A: supports, pruning and prototypes by hand, and against plain loops."""

import math

import pytest
import torch
from torch import nn

import networks
from dltta import Adapter
from dltta.errors import NothingToAdaptError, SettingError
from dltta.objectives import T3A
from dltta.testing import check_objective
from networks import stream, trained


class Plain(nn.Module):
    """Two features in, two classes out; the head's rows are the axes."""

    def __init__(self, bias=(0.0, 0.0)):
        super().__init__()
        self.features = nn.Identity()
        self.head = nn.Linear(2, 2)
        with torch.no_grad():
            self.head.weight.copy_(torch.eye(2))
            self.head.bias.copy_(torch.tensor(bias))

    def forward(self, x):
        return self.head(self.features(x))


def test_the_first_prediction_by_hand():
    """Supports (1,0) of class 0 and (0,1) of class 1; (3,4) joins class 1: directions (1,0) and (0.6,1.8)/√3.6."""
    given = Adapter(Plain(), T3A()).step(torch.tensor([[3.0, 4.0]])).logits
    length = math.sqrt(0.6**2 + 1.8**2)
    expected = [3.0, (3 * 0.6 + 4 * 1.8) / length]
    assert given[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_the_least_certain_support_leaves_its_class_for_good():
    """Entropy falls with the distance of the logits: (0,5) is the most certain of class 1, then (0,2), then (0,1)."""
    adapter = Adapter(Plain(), T3A(supports=2))
    adapter.step(torch.tensor([[0.0, 2.0]]))
    adapter.step(torch.tensor([[0.0, 5.0]]))
    state = adapter.objective.state_dict()
    assert state["features"].tolist() == [[1, 0], [0, 2], [0, 5]]
    assert state["labels"].tolist() == [0, 1, 1]
    expected = [math.log(1 + math.exp(-d)) + d * math.exp(-d) / (1 + math.exp(-d)) for d in (1, 2, 5)]
    assert state["entropies"].tolist() == pytest.approx(expected, abs=1e-6)


def test_labels_and_entropies_are_those_of_the_original_layer_with_its_bias():
    adapter = Adapter(Plain(bias=(3.0, 0.0)), T3A())
    adapter.step(torch.tensor([[0.0, 1.0]]))  # logits (3, 1): class 0
    assert adapter.objective.state_dict()["labels"].tolist() == [0, 0, 0]  # the row (0,1) too is seen as class 0
    assert adapter.objective.prototypes()[1].tolist() == [0, 0]  # nothing supports class 1


def slow(head, batches, supports, pixels=None):
    """Per class a list of (entropy, feature); the logits of every batch of (features, chosen rows)."""
    weight, bias = head.weight.detach().double().flatten(1), head.bias.detach().double()
    held = {c: [] for c in range(len(weight))}

    def join(feature):
        logits = weight @ feature + bias
        p = [math.exp(v - logits.max()) for v in logits.tolist()]
        p = [v / sum(p) for v in p]
        h = -sum(v * math.log(v) for v in p if v > 0)
        held[p.index(max(p))].append((h, feature))

    for row in weight:
        join(row)
    given = []
    for features, chosen in batches:
        for row in chosen:
            join(features[row])
        for c in held:
            held[c] = sorted(held[c], key=lambda pair: pair[0])[:supports]
        directions = []
        for c in held:
            total = sum((f / f.norm() for _, f in held[c]), torch.zeros(weight.shape[1]).double())
            directions.append(total / max(total.norm().item(), 1e-12))
        given.append(torch.stack([torch.stack([f @ d for d in directions]) for f in features]))
    return given


@pytest.mark.parametrize("supports", [1, 3, 100])
def test_a_stream_of_single_labels_is_that_of_a_slow_loop(supports):
    model = trained(networks.Classifier(), seed=5)
    images = stream((4, 1, 8, 8), 4)
    adapter = Adapter(model, T3A(supports=supports), layout="given")
    with torch.no_grad():
        features = [model.encoder(x).mean((2, 3)).double() for x in images]
    expected = slow(model.head, [(f, range(len(f))) for f in features], supports)
    for x, wanted in zip(images, expected, strict=True):
        assert torch.allclose(adapter.step(x).logits.double(), wanted, atol=1e-5)


@pytest.mark.parametrize("axes", [2, 3])
def test_a_dense_stream_is_that_of_a_slow_loop(axes):
    model = trained(networks.Segmenter(axes=axes), seed=6)
    images = stream((2, 1, *(4,) * axes), 2)
    adapter = Adapter(model, T3A(supports=5, pixels=3, seed=7), layout="given")
    batches, seen = [], 0
    for x in images:
        with torch.no_grad():
            maps = model.up(model.bottleneck(model.encoder(x))).double()
        rows = maps.movedim(1, -1).reshape(-1, maps.shape[1])
        positions = len(rows) // len(x)
        chosen = []
        for number in range(len(x)):
            generator = torch.Generator().manual_seed(7 + 1_000_003 * (seen + number))
            drawn = sorted(torch.randperm(positions, generator=generator)[:3].tolist())
            chosen += [row + number * positions for row in drawn]
        seen += len(x)
        batches.append((rows, chosen))
    for x, wanted in zip(images, slow(model.head, batches, 5), strict=True):
        given = adapter.step(x).logits.double()
        assert torch.allclose(given.movedim(1, -1).reshape(wanted.shape), wanted, atol=1e-5)


def test_a_sigmoid_is_the_difference_of_two_prototypes():
    model = Plain()
    model.head = nn.Linear(2, 1)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[2.0, 0.0]]))
        model.head.bias.zero_()
    given = Adapter(model, T3A()).step(torch.tensor([[0.0, 1.0]])).logits  # 0: the first class of two that are equal
    lengths = math.sqrt(2)  # class 0: (-1,0) + (0,1); class 1: (1,0)
    assert given.tolist() == [[pytest.approx(0 - 1 / lengths, abs=1e-6)]]


def test_the_contract_is_kept_by_every_kind_of_network():
    for model, x in (
        (networks.Segmenter(), stream((3, 1, 8, 8), 1)[0]),
        (networks.Segmenter(axes=3, kind="group"), stream((2, 1, 4, 4, 4), 1)[0]),
        (networks.Segmenter(classes=1, kind="instance"), stream((3, 1, 8, 8), 1)[0]),
        (networks.Classifier(), stream((3, 1, 8, 8), 1)[0]),
    ):
        check_objective(T3A(pixels=8), trained(model), x)


def test_a_stream_resumes_bit_for_bit_at_every_point():
    for build, shape in ((networks.Segmenter, (2, 1, 8, 8)), (networks.Classifier, (3, 1, 8, 8))):
        images = stream(shape, 4)

        def make(build=build):
            return Adapter(trained(build()), T3A(supports=4, pixels=5))

        expected = [make()]
        expected = [expected[0](x) for x in images]
        for stop in range(len(images)):
            first, second = make(), make()
            for x in images[:stop]:
                first.step(x)
            second.step(images[-1])
            second.load_state_dict(first.state_dict())
            assert all(torch.equal(second(x), y) for x, y in zip(images[stop:], expected[stop:], strict=True))


def test_networks_without_such_a_layer_are_refused():
    with pytest.raises(NothingToAdaptError, match="T3A replaces the last linear layer or convolution of size 1"):
        Adapter(nn.Sequential(nn.Conv2d(1, 2, 3)), T3A())
    with pytest.raises(SettingError, match="'encoder.0' is neither"):
        Adapter(networks.Classifier(), T3A(layer="encoder.0"))
    behind = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.Softmax(1))
    with pytest.raises(SettingError, match="needs the layer that gives the logits, and '1' does not"):
        Adapter(behind, T3A()).step(torch.randn(1, 1, 2, 2))
    with pytest.raises(SettingError, match="supports and pixels must be at least 1"):
        T3A(supports=0)
