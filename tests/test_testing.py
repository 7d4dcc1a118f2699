"""The contract checks accept what keeps the contract, also from outside the package, and refuse what breaks it."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import networks
from dltta import Adapter, Exponential, Fixed, MemoryBank, Proportional
from dltta.objectives import PTBN, Source, Tent
from dltta.testing import check_objective, check_rate

X = torch.rand(3, 1, 8, 8)


class Sharpness:
    """An objective from outside: makes the largest probability larger by moving the head's bias."""

    def prepare(self, model):
        return [model.head.bias]

    def __call__(self, model, x, logits):
        return -logits.softmax(1).amax(1).mean()


class Saturating:
    """A rate from outside: grows with the discrepancy up to a ceiling."""

    needs_memory = True

    def __call__(self, discrepancy):
        return 0.01 if discrepancy is None else 0.1 * discrepancy / (1 + discrepancy)


def test_an_objective_and_a_rate_from_outside_plug_in():
    check_objective(Sharpness(), networks.trained(networks.Segmenter()), X)
    check_rate(Saturating())
    adapter = Adapter(networks.Segmenter(), Sharpness(), Saturating(), memory=MemoryBank(capacity=2, neighbors=1))
    steps = [adapter.step(x) for x in networks.stream((1, 1, 8, 8), 4)]
    assert steps[-1].rate == pytest.approx(0.1 * steps[-1].discrepancy / (1 + steps[-1].discrepancy))
    assert set(adapter.adapted_parameters()) == {"head.bias"}


@pytest.mark.parametrize("objective", [Source(), PTBN(), Tent()])
@pytest.mark.parametrize("network", [networks.Segmenter, networks.Classifier])
def test_built_in_objectives_keep_the_contract(objective, network):
    check_objective(objective, networks.trained(network()), X)


@pytest.mark.parametrize("rate", [Fixed(1e-3), Proportional(1e-3), Exponential(1e-3, initial=1e-4)])
def test_built_in_rates_keep_the_contract(rate):
    check_rate(rate)


class Foreign(Sharpness):
    def prepare(self, model):
        return [nn.Parameter(torch.zeros(3))]


class Repeated(Sharpness):
    def prepare(self, model):
        return [model.head.bias, model.head.bias]


class Unrelated(Sharpness):
    def __call__(self, model, x, logits):
        return (model.head.bias * 0).sum()


class PerImage(Sharpness):
    def __call__(self, model, x, logits):
        return -logits.softmax(1).amax(1).mean((1, 2))


class Writing(Sharpness):
    def __call__(self, model, x, logits):
        x.zero_()
        return super().__call__(model, x, logits)


class Moody(Sharpness):
    def __call__(self, model, x, logits):
        return super().__call__(model, x, logits) * torch.rand(())


class Meddling(Sharpness):
    def __call__(self, model, x, logits):
        model.encoder[1].num_batches_tracked += 1
        return super().__call__(model, x, logits)


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (Foreign, "parameters of the network it was given"),
        (Repeated, "each parameter once"),
        (Unrelated, "depend on at least one parameter"),
        (PerImage, "one number per batch"),
        (Writing, "must not write into the images|same loss"),
        (Moody, "same loss"),
        (Meddling, "only the parameters it names"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_objectives_that_break_the_contract_are_caught(objective, words):
    with pytest.raises((AssertionError, RuntimeError), match=words):
        check_objective(objective(), networks.trained(networks.Segmenter()), X.clone())


class Forgetful:
    """Remembers earlier images but cannot be saved."""

    def __init__(self):
        self.total = 0.0

    def __call__(self, discrepancy):
        self.total += discrepancy or 0.0
        return self.total


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (lambda d: -1.0, "negative"),
        (lambda d: float("nan"), "finite"),
        (lambda d: torch.tensor(1.0), "must be a float"),
        (Forgetful(), "needs state_dict"),
    ],
)
def test_rates_that_break_the_contract_are_caught(rate, words):
    with pytest.raises(AssertionError, match=words):
        check_rate(rate)


def test_what_the_docs_show_keeps_the_contract():
    scope = {"__name__": "docs"}
    for page in ("write-objective.md", "write-rate.md"):
        text = (Path(__file__).parent.parent / "docs" / page).read_text()
        for code in re.findall(r"```python run\n(.*?)```", text, re.DOTALL):
            exec(code, scope)
    model = networks.trained(networks.Segmenter())
    check_objective(scope["MeanTeacher"](), model, X)
    adapter = Adapter(model, scope["MeanTeacher"](), scope["Clipped"](alpha=0.5, length=1e-3))
    step = adapter.step(X)
    with torch.no_grad():
        assert torch.equal(step.logits, adapter.objective.teacher(X))
    assert 0 < step.rate < 0.5  # clipped
    memory = MemoryBank(capacity=1, neighbors=1)
    adapter = Adapter(model, scope["Margin"](), scope["Careful"](alpha=0.5), memory=memory)
    assert adapter.step(X[:1]).rate == 0.0  # nothing to compare with
    step = adapter.step(X[1:2])
    assert step.rate == 0.25 * step.discrepancy > 0
