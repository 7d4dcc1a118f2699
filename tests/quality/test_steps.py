"""Steps along one gradient: against the adapter that takes the same step, and what they leave behind."""

import copy

import pytest
import torch

from dltta.core.adapter import Adapter
from dltta.core.objectives import Tent
from dltta.core.rates import Fixed
from dltta.models.statistics import AvailableStatistics
from dltta.quality.candidates import Arms
from dltta.quality.steps import Steps
from networks import Segmenter, trained

IMAGES = torch.rand(3, 2, 1, 8, 12, generator=torch.Generator().manual_seed(0))


def steps(model=None):
    return Steps(copy.deepcopy(model or trained(Segmenter())).requires_grad_(False), Tent(AvailableStatistics()))


@pytest.mark.parametrize("kind", ["batch", "instance", "group"])
@pytest.mark.parametrize("size", [0.03, 0.1])
def test_a_step_is_the_first_of_adam_from_the_source(kind, size):
    model = trained(Segmenter(kind=kind))
    found = steps(model)
    for x in IMAGES:  # each from the source, whatever came before
        found.begin(x)
        adam = Adapter(model, Tent(AvailableStatistics()), Fixed(size), optimizer=torch.optim.Adam, layout="given")
        assert torch.allclose(found.logits(x, size), adam.step(x).logits, atol=1e-5)


def test_the_pass_before_the_step_is_that_of_the_arm_it_begins_from():
    arms = Arms(trained(Segmenter()), ("source", "batch", "tent:0.03"))
    given = arms.all_logits(("source", "batch", "tent:0.03"), IMAGES[0])
    assert torch.allclose(given["batch"], arms.logits("batch", IMAGES[0]), atol=1e-6)
    assert not torch.allclose(given["tent:0.03"], given["batch"], atol=1e-4)
    without = Arms(trained(Segmenter(kind="instance")), ("source", "tent:0.03"))
    given = without.all_logits(("source", "tent:0.03"), IMAGES[0])
    assert torch.allclose(given["source"], without.logits("source", IMAGES[0]), atol=1e-6)


def test_a_larger_step_lowers_the_entropy_further_and_none_changes_nothing():
    found = steps()
    before = found.begin(IMAGES[0])
    assert torch.equal(found.logits(IMAGES[0], 0.0), before)

    def entropy(logits):
        return -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean().item()

    after = [entropy(found.logits(IMAGES[0], size)) for size in (0.01, 0.03)]
    assert entropy(before) > after[0] > after[1]
    assert found.loss == pytest.approx(entropy(before), abs=1e-6)


def test_steps_leave_the_parameters_and_the_other_arms_as_they_were():
    model = trained(Segmenter())
    arms = Arms(model, ("source", "batch", "tent:0.1"))
    source = arms.logits("source", IMAGES[0])
    arms.all_logits(("source", "batch", "tent:0.1"), IMAGES[1])
    assert torch.equal(arms.logits("source", IMAGES[0]), source)
    wanted = dict(model.named_parameters())
    assert all(torch.equal(part, wanted[name]) for name, part in arms.source.named_parameters())
