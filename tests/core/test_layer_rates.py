"""Rates for each parameter: LAW's accumulation and scaling, PALM's sensitivity, by hand and against plain loops."""

import math

import pytest
import torch
from torch import nn

import networks
import slow
from dltta import Adapter
from dltta.core.layer_rates import LAW, PALM, gradients
from dltta.core.rates import Signals
from dltta.errors import SettingError
from dltta.objectives import Tent
from dltta.testing import check_rate
from networks import stream, trained


class Scales(nn.Module):
    """Logits (a x, b y) of images (x, y)."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor([2.0]))
        self.b = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x):
        return torch.cat([self.a * x[:, :1], self.b * x[:, 1:]], 1)


def signals(model, x):
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Signals(None, 0.0, dict(parameters), parameters, model, x, model(x).detach())


def test_law_by_hand():
    """At (1, 0) the logits are (2, 0), class 0, p = σ(2): ∂NLL/∂a = −(1 − p) · 1, ∂/∂b = (1 − p) · 0 = 0."""
    model, rate = Scales(), LAW(0.1)
    g = 1 / (1 + math.exp(2))
    assert rate(signals(model, torch.tensor([[1.0, 0.0]]))) == pytest.approx([0.1 * g / (g + 1e-8), 0.0], abs=1e-9)
    # at (0, 3): logits (0, 3), class 1, ∂/∂b = −(1 − σ(3)) · 3
    h = 3 / (1 + math.exp(3))
    assert rate.sums == {"a": pytest.approx(g * g, rel=1e-5), "b": 0.0}
    v = rate(signals(model, torch.tensor([[0.0, 3.0]])))
    assert rate.sums == {"a": pytest.approx(g * g, rel=1e-5), "b": pytest.approx(h * h, rel=1e-5)}
    assert v == pytest.approx([0.0, 0.1] if h > g else [0.1, 0.0], abs=1e-6)
    third = rate(signals(model, torch.tensor([[0.0, 3.0]])))
    assert rate.sums["b"] == pytest.approx(2 * h * h, rel=1e-5)  # they add up and never fade
    assert third == pytest.approx([0.0, 0.1], abs=1e-6)


def test_laws_exponent_by_hand():
    model, rate = Scales(), LAW(1.0, tau=0.5)
    model.c = nn.Parameter(torch.ones(1))  # the loss does not reach it
    rate.sums = {"a": 1.0, "b": 4.0, "c": 25.0}  # v = 1, 2, 5: (v − 1) / 4 = 0, 1/4, 1
    assert rate(signals(model, torch.zeros(1, 2))) == pytest.approx([0.0, 0.5, 1.0], abs=1e-6)


def test_a_single_parameter_has_none_to_be_compared_with():
    model = nn.Linear(2, 2, bias=False)
    assert LAW(0.1)(signals(model, torch.tensor([[1.0, 0.0]]))) == [0.1]


def test_palm_is_finite_where_probabilities_round_to_zero():
    """At logits (2000, 0) and T = 1 the second probability is 0 in float32; g_a = 2 · 1 − 1 times 1000."""
    model = Scales()
    rate = PALM(0.1, temperature=1.0, limit=1e4)
    assert rate(signals(model, torch.tensor([[1000.0, 0.0]]))) == pytest.approx([0.1, 0.1])
    assert rate.usual["a"].item() == pytest.approx(0.5 * 2 * 1000)


def test_palm_by_hand():
    """T = 1, logits (2, 0): −Σ log p has ∂/∂z_c = 2 p_c − 1, so g_a = 2σ(2) − 1 = tanh 1 and s = 2 tanh 1; g_b = 0."""
    model, rate = Scales(), PALM(0.1, temperature=1.0, limit=10.0, decay=0.5)
    x = torch.tensor([[1.0, 0.0]])
    # s̄ = s/2: |s − s̄| / s̄ = 1; of b: 1e-8 / 1e-8 = 1
    assert rate(signals(model, x)) == pytest.approx([0.1, 0.1], rel=1e-5)
    assert rate.usual["a"].item() == pytest.approx(math.tanh(1), rel=1e-5)
    # s̄ = 3/4 s: a third
    assert rate(signals(model, x)) == pytest.approx([0.1 / 3, 0.1], rel=1e-5)


def test_palm_leaves_alone_what_is_above_its_limit_and_does_not_go_on_at_an_old_rate():
    model, rate = Scales(), PALM(0.1, temperature=1.0, limit=0.5)
    assert rate(signals(model, torch.tensor([[1.0, 0.0]]))) == [0.0, pytest.approx(0.1)]  # tanh 1 = 0.76
    found = rate(signals(model, torch.tensor([[0.1, 0.0]])))  # tanh 0.1 · 0.1: selected
    assert found[0] == pytest.approx(0.1, rel=1e-4)
    assert rate(signals(model, torch.tensor([[1.0, 0.0]])))[0] == 0.0


def test_palms_limit_is_of_the_sum_of_absolute_values():
    """Logits W (1, 1) with rows (3, 3) and (0, 0): each number of W has |g| = tanh 3, of which four sum to 3.98."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 3.0], [0.0, 0.0]]))
    x = torch.ones(1, 2)
    assert PALM(0.1, temperature=1.0, limit=3.97)(signals(model, x)) == [0.0]  # 4 tanh 3 = 3.9802
    assert PALM(0.1, temperature=1.0, limit=3.99)(signals(model, x)) == [pytest.approx(0.1)]


def nll(weights, x, forward):
    rows = slow.rows(forward(weights, x))
    return -sum(torch.log(slow.shares(row).max()) for row in rows) / len(rows)


def uniform(weights, x, forward, temperature):
    rows = slow.rows(forward(weights, x))
    return -sum(torch.log(slow.shares(row / temperature)).sum() for row in rows) / len(rows)


CASES = [
    (networks.Segmenter(), slow.segmenter, (1, 1, 4, 4)),
    (networks.Segmenter(axes=3), slow.segmenter, (1, 1, 4, 4, 4)),
    (networks.Segmenter(classes=1), slow.segmenter, (2, 1, 4, 4)),
    (networks.Classifier(), slow.classifier, (3, 1, 4, 4)),
]


def slow_stream(model, images, forward, rule):
    """Tent with a rate for every parameter: the rates and parameters of each step."""
    weights = slow.weights_of(model)
    names = [name for name in slow.NORMS if name in weights]
    memory = {}
    for x in images:
        x = x.double()
        moving = {name: weights[name].clone().requires_grad_(True) for name in names}
        rates = rule(memory, {**weights, **moving}, moving, x, forward)
        rows = slow.rows(forward({**weights, **moving}, x))
        entropy = sum(slow.uncertainty(row) for row in rows) / len(rows)
        parts = torch.autograd.grad(entropy, list(moving.values()))
        for name, part, rate in zip(names, parts, rates, strict=True):
            weights[name] = weights[name] - rate * part
        yield rates, {name: weights[name] for name in names}


def slow_law(memory, weights, moving, x, forward):
    parts = torch.autograd.grad(nll(weights, x, forward), list(moving.values()))
    for name, part in zip(moving, parts, strict=True):
        memory[name] = memory.get(name, 0) + part**2
    v = [math.sqrt(memory[name].mean().item()) for name in moving]
    return [0.5 * ((each - min(v)) / (max(v) - min(v) + 1e-8)) ** 0.6 for each in v]


def slow_palm(memory, weights, moving, x, forward):
    parts = torch.autograd.grad(uniform(weights, x, forward, 2.0), list(moving.values()))
    rates = []
    for (name, value), part in zip(moving.items(), parts, strict=True):
        if sum(abs(v) for v in part.flatten().tolist()) > 1.5:
            rates.append(0.0)
            continue
        s = (value.detach() * part).abs()
        memory[name] = 0.3 * memory.get(name, torch.zeros_like(s)) + 0.7 * s
        rates.append(0.5 * (((s - memory[name]).abs() + 1e-8) / (memory[name] + 1e-8)).mean().item())
    return rates


@pytest.mark.parametrize(("model", "forward", "shape"), CASES)
@pytest.mark.parametrize(
    ("rate", "rule"), [(LAW(0.5, tau=0.6), slow_law), (PALM(0.5, temperature=2.0, limit=1.5, decay=0.3), slow_palm)]
)
def test_a_stream_is_that_of_a_slow_loop(model, forward, shape, rate, rule):
    model, images = trained(model, seed=4), stream(shape, 4)
    adapter = Adapter(model, Tent(), rate, layout="given")
    seen = set()
    for x, (rates, wanted) in zip(images, slow_stream(model, images, forward, rule), strict=True):
        adapter.step(x)
        seen |= {round(each, 6) for each in rates}
        for name, parameter in adapter.adapted_parameters().items():
            assert torch.allclose(parameter.double(), wanted[name], atol=1e-5)
    assert len(seen) > 1  # layers really differ


def test_both_keep_the_contract_and_resume():
    check_rate(LAW(0.1))
    check_rate(PALM(0.1, limit=100.0))
    images = stream((1, 1, 8, 8), 6)
    for rate in (LAW(0.5), PALM(0.5, limit=50.0)):
        one = Adapter(trained(networks.Segmenter()), Tent(), rate)
        for x in images[:3]:
            one.step(x)
        other = Adapter(trained(networks.Segmenter()), Tent(), rate)
        other.load_state_dict(one.state_dict())
        for x in images[3:]:
            assert torch.equal(one.step(x).logits, other.step(x).logits)


def test_the_pass_that_they_take_changes_nothing():
    model = trained(networks.Segmenter())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = gradients(signals(model.requires_grad_(True), stream((1, 1, 8, 8), 1)[0]), lambda logits: logits.mean())
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_impossible_settings():
    for make in (lambda: LAW(-1), lambda: LAW(0.1, tau=0), lambda: PALM(0.1, decay=1.0), lambda: PALM(0.1, limit=0)):
        with pytest.raises(SettingError):
            make()
