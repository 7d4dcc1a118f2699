"""EATA: which predictions count and how much, what holds the network near the source, and one step written out."""

import math

import pytest
import torch
from torch import nn

import behaviors
import networks
import slow
from dltta import Adapter, Fixed
from dltta.core.objectives.eata import EATA
from dltta.errors import NothingToAdaptError, SettingError, StateError
from dltta.models.fisher import fisher
from dltta.models.statistics import Running
from networks import decisive, stream, trained

CERTAIN, TURNED = [0.0, math.log(99)], [math.log(99), 0.0]  # probabilities (0.01, 0.99) and (0.99, 0.01)
UNSURE = [0.0, math.log(9)]  # (0.1, 0.9)
H = -(0.01 * math.log(0.01) + 0.99 * math.log(0.99))  # 0.0560 nats
E0 = 0.4 * math.log(2)  # 0.2773 nats; UNSURE has 0.3251


class Rows(nn.Module):
    """Logits are the images, turned around by normalization's scale if it moves."""

    def __init__(self, channels=2):
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        nn.init.constant_(self.norm.weight, 2.0)

    def forward(self, x):
        return x * self.norm.weight / 2 + self.norm.bias


def prepared(**settings):
    objective, model = EATA(**settings), Rows()
    objective.prepare(model)
    return objective, model


def loss(objective, model, *rows):
    x = torch.tensor(rows)
    return objective(model, x, model(x))


# by hand


def test_certain_predictions_are_weighed_by_how_certain_they_are_by_hand():
    objective, model = prepared()
    assert abs(H - 0.0560015) < 1e-7
    assert loss(objective, model, CERTAIN, UNSURE).item() == pytest.approx(math.exp(E0 - H) * H, abs=1e-6)
    assert math.exp(E0 - H) * H == pytest.approx(0.069870, abs=1e-6)


def test_a_prediction_like_the_earlier_ones_is_redundant_by_hand():
    objective, model = prepared()
    loss(objective, model, CERTAIN)  # the first batch is not compared
    torch.testing.assert_close(objective.state_dict()["mean"], torch.tensor([0.01, 0.99]))
    assert not loss(objective, model, CERTAIN, UNSURE).requires_grad  # cosine 1
    found = loss(objective, model, TURNED, CERTAIN)  # cosine 0.0198 / 0.9802 = 0.0202
    assert found.item() == pytest.approx(math.exp(E0 - H) * H, abs=1e-6)
    torch.testing.assert_close(objective.state_dict()["mean"], torch.tensor([0.9 * 0.01 + 0.099, 0.9 * 0.99 + 0.001]))


@pytest.mark.parametrize(("limit", "counts"), [(0.0201, False), (0.0203, True)])
def test_the_limit_of_redundancy_is_a_cosine(limit, counts):
    objective, model = prepared(redundancy=limit)
    loss(objective, model, CERTAIN)
    assert loss(objective, model, TURNED).requires_grad == counts


def test_positions_of_dense_predictions_are_not_compared_unless_asked():
    x = torch.tensor([CERTAIN, CERTAIN]).T[None]  # (1, 2, 2 positions)
    for settings, counts in (({}, True), ({"redundancy": 0.4}, False)):
        objective = EATA(**settings)
        objective.prepare(Rows())
        logits = x.clone().requires_grad_()
        objective(Rows(), x, logits)
        assert objective(Rows(), x, logits).requires_grad == counts


def test_what_does_not_count_leaves_the_running_mean_alone():
    objective, model = prepared()
    assert not loss(objective, model, UNSURE).requires_grad
    assert objective.state_dict() == {"mean": None}


def test_the_fisher_information_holds_each_parameter_by_hand():
    importance = {"norm.weight": torch.tensor([3.0, 0.0]), "norm.bias": torch.tensor([0.5, 1.0])}
    objective, model = prepared(fisher=importance, anti_forgetting=10.0)
    free, same = prepared()
    with torch.no_grad():
        for each in (model, same):
            each.norm.weight += torch.tensor([0.1, 0.2])
            each.norm.bias += torch.tensor([0.2, -0.1])
    held, plain = loss(objective, model, CERTAIN), loss(free, same, CERTAIN)
    assert (held - plain).item() == pytest.approx(10 * (3 * 0.01 + 0.5 * 0.04 + 1 * 0.01), abs=1e-5)
    slope = [torch.autograd.grad(each, m.norm.bias)[0] for each, m in ((held, model), (plain, same))]
    torch.testing.assert_close(slope[0] - slope[1], torch.tensor([20 * 0.5 * 0.2, -20 * 1 * 0.1]))


# one step written out


def slow_fisher(forward, weights, names, batches):
    totals = {name: torch.zeros_like(weights[name]) for name in names}
    for x in batches:
        moving = {name: weights[name].clone().requires_grad_(True) for name in names}
        rows = slow.rows(forward({**weights, **moving}, x.double()))
        terms = [-torch.log(slow.shares(row).max()) for row in rows]
        (sum(terms) / len(terms)).backward()
        for name in names:
            totals[name] += moving[name].grad ** 2
    return {name: total / len(batches) for name, total in totals.items()}


def slow_eata(forward, weights, names, images, importance, *, rate, margin, redundancy, beta):
    """Logits after each step, and how many predictions counted."""
    source, mean, given, counted = dict(weights), None, [], []
    for x in images:
        x = x.double()
        moving = {name: weights[name].clone().requires_grad_(True) for name in names}
        kept = []
        for row in slow.rows(forward({**weights, **moving}, x)):
            h, p = slow.uncertainty(row), slow.shares(row).detach()
            limit = slow.limit(margin, row)
            alike = 0.0 if mean is None else abs(sum(p * mean) / math.sqrt(sum(p * p) * sum(mean * mean)))
            if h.item() < limit and alike < redundancy:
                kept.append((h, math.exp(limit - h.item()), p))
        counted.append(len(kept))
        if kept:
            average = sum(p for _, _, p in kept) / len(kept)
            mean = average if mean is None else 0.9 * mean + 0.1 * average
            loss = sum(weight * h for h, weight, _ in kept) / len(kept)
            for name in names:
                loss = loss + beta * (importance[name] * (moving[name] - source[name]) ** 2).sum()
            loss.backward()
            weights = {**weights, **{name: weights[name] - rate * moving[name].grad for name in names}}
        given.append(forward(weights, x))
    return given, counted


CASES = {
    "classes": (networks.Classifier, slow.classifier, ("encoder.1.weight", "encoder.1.bias"), (6, 1, 8, 8), 0.75, 0.7),
    "2-D": (networks.Segmenter, slow.segmenter, slow.NORMS, (2, 1, 8, 8), 0.5, 0.6),
    "3-D": (lambda: networks.Segmenter(3), slow.segmenter, slow.NORMS, (1, 1, 4, 4, 8), 0.5, 2.0),
}
RATE = 0.01
COUNTED = {"classes": [4, 5, 6], "2-D": [108, 32, 24], "3-D": [80, 104, 72]}  # of 6, 128 and 128 predictions


@pytest.mark.parametrize("case", CASES)
def test_a_stream_equals_its_slow_reference(case):
    build, forward, names, shape, margin, redundancy = CASES[case]
    images, source = stream(shape, 3, seed=4), stream(shape, 2, seed=7)
    model = decisive(trained(build()), torch.cat(images))
    importance = fisher(model, torch.cat(source), batch_size=shape[0])
    expected = slow_fisher(forward, slow.weights_of(model), names, source)
    assert list(importance) == list(names)
    for name in names:
        torch.testing.assert_close(importance[name].double(), expected[name], rtol=1e-4, atol=1e-6)
    settings = {"margin": margin, "redundancy": redundancy, "fisher": importance, "anti_forgetting": 5.0}
    adapter = Adapter(model.double(), EATA(**settings), Fixed(RATE))
    given, counted = slow_eata(
        forward,
        slow.weights_of(model),
        names,
        images,
        {name: part.double() for name, part in importance.items()},
        rate=RATE,
        margin=margin,
        redundancy=redundancy,
        beta=5.0,
    )
    assert counted == COUNTED[case]
    for x, logits in zip(images, given, strict=True):
        torch.testing.assert_close(adapter(x), logits, rtol=1e-5, atol=1e-5)
    assert importance[names[0]].max() > 1e-3  # the term is felt
    without = Adapter(model, EATA(margin=margin, redundancy=redundancy), Fixed(RATE))
    assert not torch.allclose([without(x) for x in images][-1], given[-1], atol=1e-5)


# Fisher information


def test_fisher_information_of_batches_of_one_by_hand():
    """Logits (b1, b2 + ln 3) for any image: the gradient of −ln p2 is (p1, −p1) with p1 = 1/4."""

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(1, 2)

        def forward(self, x):
            return self.norm.bias + torch.tensor([0.0, math.log(3)]).expand(len(x), 2) + 0 * self.norm.weight

    model = Constant()
    found = fisher(model, torch.randn(3, 1, 4, 4), batch_size=1)
    torch.testing.assert_close(found["norm.bias"], torch.tensor([1 / 16, 1 / 16]))
    assert found["norm.weight"].tolist() == [0.0, 0.0]
    assert model.norm.bias.grad is None
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_fisher_information_leaves_the_network_and_its_statistics_as_they_were():
    model = trained(networks.Segmenter())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        found = fisher(model, torch.randn(3, 1, 8, 8))
    assert set(found) == set(slow.NORMS)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert fisher(nn.Conv2d(1, 2, 1), torch.randn(3, 1, 8, 8)) == {}


def test_fisher_information_of_another_network_is_refused():
    importance = fisher(trained(networks.Segmenter()), torch.randn(2, 1, 8, 8))
    with pytest.raises(StateError, match=r"belongs to another network: 'bottleneck.1.weight' of shape \(6,\)"):
        Adapter(trained(networks.Classifier()), EATA(fisher=importance), Fixed(0.1))


def test_without_fisher_information_it_says_so():
    assert "without its anti-forgetting term" in EATA().notice
    assert EATA(anti_forgetting=0).notice is None
    assert EATA(fisher={"norm.weight": torch.ones(2)}).notice is None


# along a stream


def make(**settings):
    return EATA(**{"margin": 1.5, "redundancy": 2.0, **settings})


@pytest.mark.parametrize("name", behaviors.NETWORKS)
def test_on_any_network(name):
    behaviors.check_networks(make(), name)


@pytest.mark.parametrize("optimizer", behaviors.OPTIMIZERS)
@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_resumes_bit_for_bit(name, optimizer):
    behaviors.check_resumes(make(margin=0.6, redundancy=0.97), name, optimizer=behaviors.OPTIMIZERS[optimizer])


@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_rolled_back_guarded_and_under_every_rate(name):
    behaviors.check_rolled_back(make(), name)
    behaviors.check_guarded(make(), name)
    behaviors.check_rates(make(), name)


def test_other_statistics():
    behaviors.check_statistics(make)
    behaviors.check_resumes(make(statistics=Running(0.3)), "2-D batch")


def test_no_step_where_nothing_counts():
    adapter = Adapter(
        trained(networks.Segmenter()), EATA(margin=1e-6), Fixed(0.1), optimizer=behaviors.OPTIMIZERS["adam"]
    )
    before = behaviors.state(adapter)
    step = adapter.step(torch.randn(1, 1, 8, 8))
    assert (step.loss, step.rate) == (0.0, 0.0)
    assert behaviors.same(behaviors.state(adapter), before)


def test_converting_the_adapter_takes_what_it_knows_along():
    importance = fisher(trained(networks.Segmenter()), torch.randn(2, 1, 8, 8))
    adapter = Adapter(trained(networks.Segmenter()), make(fisher=importance), Fixed(0.1))
    images = stream((1, 1, 8, 8), 2)
    adapter.step(images[0])
    adapter.to(torch.float64)
    assert adapter(images[1]).dtype == torch.float64


def test_settings_and_networks_that_cannot_be_used_are_refused():
    for settings in ({"margin": 0.0}, {"redundancy": 0.0}, {"anti_forgetting": -1.0}, {"momentum": 1.0}):
        with pytest.raises(SettingError):
            EATA(**settings)
    with pytest.raises(NothingToAdaptError, match="EATA finds nothing to adapt in Conv2d: it has no normalization"):
        Adapter(nn.Conv2d(1, 2, 1), EATA(), Fixed(0.1))
