"""SAR: the way up, what counts before and after it, the return from a collapse, and steps written out."""

import math

import pytest
import torch
from torch import nn

import behaviors
import networks
import slow
from dltta import Adapter, Fixed
from dltta.core.objectives.sar import SAR, ascent
from dltta.errors import NothingToAdaptError, SettingError
from dltta.models.normalization import affine_parameters
from dltta.models.statistics import Running
from networks import decisive, stream, trained

E0 = 0.4 * math.log(2)
ONE = torch.ones(1, 1)


def share(z):
    return 1 / (1 + math.exp(-z))


def h(z):
    """Entropy of the logits (0, z)."""
    return -share(z) * math.log(share(z)) - share(-z) * math.log(share(-z))


def slope(z):
    """Its derivative."""
    return -z * share(z) * share(-z)


class Slope(nn.Module):
    """Logits (0, w x) for each number x; w is the scale of a normalization layer."""

    def __init__(self, w):
        super().__init__()
        self.norm1 = nn.GroupNorm(1, 1)
        nn.init.constant_(self.norm1.weight, w)

    def forward(self, x):
        return torch.cat([0 * x, x * self.norm1.weight + 0 * self.norm1.bias], 1)


def adapter(w, *, momentum=0.0, **settings):
    optimizer = behaviors.OPTIMIZERS["momentum"] if momentum else torch.optim.SGD
    settings = {"recovery": 0.0, **settings}
    return Adapter(Slope(w), SAR(**settings), Fixed(0.5), predict="before", optimizer=optimizer)


# by hand


def test_the_gradient_is_that_of_the_worst_place_nearby_by_hand():
    ours = adapter(4.0)
    step = ours.step(ONE)  # dH/dw < 0 at 4, so the worst place is 3.95
    assert slope(3.95) == pytest.approx(-0.073210, abs=1e-6)
    assert step.loss == pytest.approx(h(3.95), abs=1e-6)
    assert ours.model.norm1.weight.item() == pytest.approx(4 + 0.5 * 0.073210, abs=1e-6)


def test_the_way_up_has_the_length_of_the_radius_over_all_parameters():
    up = ascent([torch.tensor([3.0, 0.0]), None, torch.tensor([[4.0]])], 0.05)
    torch.testing.assert_close(up[0], torch.tensor([0.03, 0.0]))
    torch.testing.assert_close(up[2], torch.tensor([[0.04]]))
    assert up[1] is None
    assert ascent([torch.zeros(2)], 0.05)[0].tolist() == [0.0, 0.0]


def test_only_certain_predictions_count_by_hand():
    assert h(3.95) < E0 < h(1.5)
    ours = adapter(1.0)
    step = ours.step(torch.tensor([[4.0], [1.5]]))  # of 4 x and 1.5 x only the first; the worst place is w = 0.95
    assert step.loss == pytest.approx(h(3.8), abs=1e-6)
    assert ours.model.norm1.weight.item() == pytest.approx(1 - 0.5 * 4 * slope(3.8), abs=1e-5)


def test_what_is_no_longer_certain_up_there_does_not_count_by_hand():
    assert h(2.48) < E0 < h(2.43)
    ours = adapter(2.48)
    step = ours.step(ONE)
    assert step.rate == 0.0
    assert ours.model.norm1.weight.item() == pytest.approx(2.48)
    assert ours.objective.state_dict()["mean"] is None
    both = adapter(2.48)
    both.step(torch.tensor([[1.0], [2.0]]))  # 2 x is certain at 2.43 too
    assert both.model.norm1.weight.item() == pytest.approx(2.48 - 0.5 * 2 * slope(4.86), abs=1e-5)


def test_the_running_mean_of_the_loss_by_hand():
    ours = adapter(4.0)
    first = ours.step(ONE).loss
    second = ours.step(2 * ONE).loss
    assert ours.objective.state_dict()["mean"] == pytest.approx(0.9 * first + 0.1 * second)


@pytest.mark.parametrize(
    ("recovery", "returns"), [(h(3.95) / math.log(2) + 1e-4, True), (h(3.95) / math.log(2) - 1e-4, False)]
)
def test_a_running_mean_below_the_limit_brings_the_source_back(recovery, returns):
    ours = adapter(4.0, momentum=0.9, recovery=recovery)
    ours.step(ONE)
    assert (ours.model.norm1.weight.item() == 4.0) == returns
    assert (ours.objective.state_dict()["mean"] is None) == returns
    assert (not ours.get_extra_state()["optimizer"]["state"]) == returns  # no momentum is left


def test_the_limit_is_the_authors_at_a_thousand_classes():
    objective = SAR()
    objective._track(0.3, torch.zeros(1, 1000))
    assert objective.state_dict()["limit"] == pytest.approx(0.2)
    assert not objective.collapsed()
    for loss in (0.1, 0.1, 0.1, 0.1, 0.1, 0.1):
        objective._track(loss, torch.zeros(1, 1000))
    assert not objective.collapsed()  # 0.1 + 0.2 · 0.9⁶ = 0.2063
    objective._track(0.1, torch.zeros(1, 1000))
    assert objective.collapsed()  # 0.1957


def test_no_step_without_a_certain_prediction_not_even_by_momentum():
    ours = adapter(4.0, momentum=0.9)
    ours.step(ONE)
    before = behaviors.state(ours)
    step = ours.step(ONE / 4)
    assert (step.loss, step.rate) == (0.0, 0.0)
    assert behaviors.same(behaviors.state(ours), before)


# which layers move


class Stages(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            parent = self
            *path, last = name.split("_")
            for part in path:
                if not hasattr(parent, part):
                    parent.add_module(part, nn.Module())
                parent = getattr(parent, part)
            parent.add_module(last, nn.BatchNorm2d(2))


@pytest.mark.parametrize(
    ("names", "stay"),
    [
        (["layer1_0_bn1", "layer3_bn", "layer4_0_bn1", "encoder_layer4_1_bn2"], [2, 3]),
        (
            ["blocks_1_norm1", "blocks_8_norm2", "blocks_9_norm1", "vit_blocks_10_norm2", "blocks_11_norm1", "norm"],
            [2, 3, 4, 5],
        ),
        (["features_norm0", "features_denseblock4_denselayer1_norm1", "features_norm5"], [1, 2]),
        (["down_norm", "encoder_norm", "layer40_bn", "blocks_90_norm1"], []),
    ],
)
def test_the_last_stage_of_known_families_stays(names, stay):
    model = Stages(names)
    moving = {id(parameter) for parameter in SAR().prepare(model)}
    for index, name in enumerate(names):
        layer = model.get_submodule(name.replace("_", "."))
        assert (id(layer.weight) in moving) == (index not in stay), name


def test_excluded_layers_are_a_choice():
    model = trained(networks.Segmenter())
    ours = Adapter(model, SAR(margin=2.0, excluded=("bottleneck.*",)), Fixed(0.1))
    assert list(ours.adapted_parameters()) == ["encoder.1.weight", "encoder.1.bias"]
    assert len(affine_parameters(model)) == 4
    with pytest.raises(NothingToAdaptError, match=r"all its normalization layers fit \*; exclude fewer"):
        Adapter(model, SAR(excluded=("*",)), Fixed(0.1))
    with pytest.raises(NothingToAdaptError, match="SAR finds nothing to adapt in Conv2d"):
        Adapter(nn.Conv2d(1, 2, 1), SAR(), Fixed(0.1))


# steps written out


def certain(forward, weights, x, margin, among=None):
    """(entropy, place) of the predictions that count."""
    rows = slow.rows(forward(weights, x))
    places = range(len(rows)) if among is None else among
    found = [(slow.uncertainty(rows[i]), i) for i in places]
    return [(value, i) for value, i in found if value.item() < slow.limit(margin, rows[0])]


def slow_sar(forward, weights, names, images, *, rate, margin, recovery, rho=0.05, momentum=0.9):
    """Logits before each step, with momentum; how many predictions counted, and at which steps it returned."""
    source, velocity, mean = dict(weights), {}, None
    given, counted, returned = [], [], []
    for number, x in enumerate(images):
        x = x.double()
        given.append(forward(weights, x))
        moving = {name: weights[name].clone().requires_grad_(True) for name in names}
        kept = certain(forward, {**weights, **moving}, x, margin)
        gradients = torch.autograd.grad(sum(value for value, _ in kept) / len(kept), list(moving.values()))
        length = math.sqrt(sum(float((part**2).sum()) for part in gradients))
        there = {
            name: (weights[name] + rho * part / length).requires_grad_(True)
            for name, part in zip(names, gradients, strict=True)
        }
        again = certain(forward, {**weights, **there}, x, margin, among=[i for _, i in kept])
        counted.append((len(kept), len(again)))
        loss = sum(value for value, _ in again) / len(again)
        parts = torch.autograd.grad(loss, list(there.values()))
        for name, part in zip(names, parts, strict=True):
            velocity[name] = momentum * velocity[name] + part if name in velocity else part
            weights = {**weights, name: weights[name] - rate * velocity[name]}
        mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
        if mean < slow.limit(recovery, slow.rows(given[-1])[0]):
            weights, velocity, mean = dict(source), {}, None
            returned.append(number)
    return given, counted, returned


CASES = {
    "classes": (networks.Classifier, slow.classifier, ("encoder.1.weight", "encoder.1.bias"), (6, 1, 8, 8), 0.75),
    "2-D": (networks.Segmenter, slow.segmenter, slow.NORMS, (2, 1, 8, 8), 0.5),
    "3-D": (lambda: networks.Segmenter(3), slow.segmenter, slow.NORMS, (1, 1, 4, 4, 8), 0.5),
    "2-D group": (
        lambda: networks.Segmenter(kind="group"),
        lambda weights, x: slow.segmenter(weights, x, "group"),
        slow.NORMS,
        (1, 1, 8, 8),
        0.5,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_equals_its_slow_reference(case):
    build, forward, names, shape, margin = CASES[case]
    images = stream(shape, 4, seed=4)
    model = decisive(trained(build()), torch.cat(images)).double()
    settings = {"margin": margin, "recovery": 0.13}
    ours = Adapter(model, SAR(**settings), Fixed(0.01), optimizer=behaviors.OPTIMIZERS["momentum"], predict="before")
    given, counted, returned = slow_sar(forward, slow.weights_of(model), names, images, rate=0.01, **settings)
    assert any(first != second for first, second in counted) or case == "classes"
    assert returned or case == "classes"
    for x, logits in zip(images, given, strict=True):
        torch.testing.assert_close(ours(x), logits, rtol=1e-5, atol=1e-5)


# along a stream


def make(**settings):
    return SAR(**{"margin": 1.5, "recovery": 0.0, **settings})


@pytest.mark.parametrize("name", behaviors.NETWORKS)
def test_on_any_network(name):
    behaviors.check_networks(make(), name)


@pytest.mark.parametrize("optimizer", behaviors.OPTIMIZERS)
@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_resumes_bit_for_bit(name, optimizer):
    behaviors.check_resumes(make(margin=0.8, recovery=0.05), name, optimizer=behaviors.OPTIMIZERS[optimizer])


@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_rolled_back_guarded_and_under_every_rate(name):
    behaviors.check_rolled_back(make(), name)
    behaviors.check_guarded(make(), name)
    behaviors.check_rates(make(), name)


def test_other_statistics():
    behaviors.check_statistics(make)
    behaviors.check_resumes(make(statistics=Running(0.3)), "2-D batch")


def test_settings_that_cannot_be_used_are_refused():
    for settings in ({"margin": 0.0}, {"radius": -1.0}, {"recovery": -1.0}, {"momentum": 1.0}):
        with pytest.raises(SettingError):
            SAR(**settings)
