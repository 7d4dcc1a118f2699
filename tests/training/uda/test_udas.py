"""Output-space adaptation: who learns what, in which direction, at which size."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dltta.errors import LayerNotFoundError, SettingError
from dltta.models.nets.discriminators import OutputDiscriminator
from dltta.training.task import TaskLoss
from dltta.training.uda.domains import Images
from dltta.training.uda.udas import (
    UDAS,
    OutputAlignment,
    Outputs,
    adversarial_loss,
    collect_statistics,
    discriminator_loss,
)
from frames import Stop, frame, same, stop_at, untrained
from networks import Segmenter
from sites import Blobs

SURE, WRONG = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))  # cross-entropy of a logit of 2, right and wrong


def test_the_discriminator_learns_source_from_target_and_the_network_to_be_taken_for_the_source():
    source, target = torch.full((1, 1, 2, 2), 2.0), torch.full((1, 1, 2, 2), -2.0)
    assert discriminator_loss(source, target).item() == pytest.approx(SURE, abs=1e-6)
    assert discriminator_loss(target, source).item() == pytest.approx(WRONG, abs=1e-6)
    assert discriminator_loss(source, source).item() == pytest.approx((SURE + WRONG) / 2, abs=1e-6)
    assert adversarial_loss(source).item() == pytest.approx(SURE, abs=1e-6)
    assert adversarial_loss(target).item() == pytest.approx(WRONG, abs=1e-6)


def learner(levels="multi", axes=2, **settings):
    torch.manual_seed(0)
    network = Segmenter(axes=axes, classes=2)
    sample = torch.zeros(1, 1, *[16] * axes)
    outputs = Outputs(network, "bottleneck" if levels == "multi" else None, 2, sample)
    judges = nn.ModuleList(OutputDiscriminator(axes, 2, [16] * axes, width=4) for _ in outputs.levels)
    return OutputAlignment(UDAS(levels=levels, **settings), 1e-2, TaskLoss("ce"), outputs, judges)


def batch(axes=2):
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randn(2, 1, *[16] * axes, generator=generator) for _ in range(2))
    return source, (source[:, 0] > 0).long(), target + 2


@pytest.mark.parametrize("axes", [2, 3])
def test_the_networks_gradient_is_of_the_weighted_sum_of_four_losses(axes, monkeypatch):
    ours, (source, label, target) = learner(axes=axes), batch(axes)
    monkeypatch.setattr(ours.optimizer, "step", lambda: None)
    ours.train()
    ours._segment(source, label, target)
    found = {name: parameter.grad.clone() for name, parameter in ours.outputs.named_parameters()}
    ours.optimizer.zero_grad()
    total = torch.zeros(())
    main, auxiliary = ours.discriminators
    for weight, logits in zip((1.0, 0.1), ours.outputs(source), strict=True):
        total = total + weight * F.cross_entropy(logits, label)
    for weight, judge, logits in zip((1e-3, 2e-4), (main, auxiliary), ours.outputs(target), strict=True):
        total = total - weight * F.logsigmoid(judge(logits.softmax(1))).mean()
    total.backward()
    for name, parameter in ours.outputs.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-7), name


def test_each_side_gets_only_its_own_gradients():
    ours, (source, label, target) = learner(), batch()
    ours.train()
    _, of_source, of_target = ours._segment(source, label, target)
    assert all(parameter.grad is None for parameter in ours.discriminators.parameters())
    assert all(parameter.grad is not None for parameter in ours.outputs.parameters())
    before = [parameter.clone() for parameter in ours.outputs.parameters()]
    ours.optimizer.zero_grad()
    ours._judge(of_source, of_target)
    assert all(parameter.grad is None for parameter in ours.outputs.parameters())
    assert all(map(torch.equal, before, ours.outputs.parameters()))
    assert all(parameter.grad.any() for judge in ours.discriminators for parameter in judge.parameters())


def test_losses_move_as_they_should():
    ours, (source, label, target) = learner("single", adversarial=1.0, discriminator_rate=1e-2), batch()
    ours.train()
    _, of_source, of_target = ours._segment(source, label, target)
    losses = [ours._judge(of_source, of_target) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]
    judge = ours.discriminators[0]
    assert judge(of_source[0]).mean() > 0 > judge(of_target[0]).mean()  # positive says source
    fooling = [ours._segment(source, label, target)[0]["adversarial"] for _ in range(15)]
    assert fooling[-1] < 0.8 * fooling[0]


def test_both_rates_fall_polynomially():
    ours = learner("single", discriminator_rate=1e-4)
    ours.train()
    ours.step(batch(), torch.Generator(), 0.75)
    assert ours.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.25**0.9)
    assert ours.judging.param_groups[0]["lr"] == pytest.approx(1e-4 * 0.25**0.9)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((64, 64), (2, 2)), ((512, 1024), (16, 32)), ((8, 8), (1, 1)), ((5, 96), (1, 3)), ((64, 64, 16), (2, 2, 1))],
)
def test_no_image_shrinks_to_nothing(size, expected):
    judge = OutputDiscriminator(len(size), 3, size, width=2)
    assert judge(torch.zeros(1, 3, *size)).shape == (1, 1, *expected)


def test_the_discriminator_is_the_published_one():
    judge = OutputDiscriminator(2, 19, (512, 1024))
    convolutions = [layer for layer in judge.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [64, 128, 256, 512, 1]
    assert {(layer.kernel_size, layer.stride, layer.padding) for layer in convolutions} == {((4, 4), (2, 2), (1, 1))}


def test_stored_statistics_come_from_the_target_alone():
    layer = nn.BatchNorm2d(1)
    layer(torch.randn(8, 1, 4, 4) + 100)
    images = [torch.full((1, 2, 2), float(value)) for value in (1, 3, 5, 9)]
    collect_statistics(nn.Sequential(layer), Images(images), 2, torch.device("cpu"))
    assert layer.running_mean.item() == pytest.approx(4.5)
    assert layer.running_var.item() == pytest.approx((8 / 7 + 32 / 7) / 2)  # of 8 values each, unbiased
    assert layer.momentum == 0.1
    assert not layer.training


@pytest.mark.parametrize(("axes", "levels"), [(2, "multi"), (3, "multi"), (2, "single")])
def test_the_checkpoint_is_a_plain_network(tmp_path, axes, levels):
    source = untrained(axes)
    method = UDAS(epochs=1, width=2, levels=levels)
    checkpoint = frame(tmp_path, method, axes=axes, source=source).run()
    assert checkpoint.model.state_dict().keys() == source.model.state_dict().keys()
    assert same(source.model, untrained(axes).model)  # the given one is unchanged
    assert not same(checkpoint.model, source.model)
    assert checkpoint.record["history"][0].keys() >= {"task", "adversarial", "discriminator", "score", "seconds"}
    assert checkpoint.record["uda"]["levels"] == levels
    state = checkpoint.model.state_dict()
    assert {int(state[name]) for name in state if name.endswith("num_batches_tracked")} == {2}  # three target images


def test_a_killed_training_resumes_to_the_same_bits(tmp_path):
    method = UDAS(epochs=3, width=2)
    whole = frame(tmp_path / "whole", method, source=untrained()).run()
    with pytest.raises(Stop):
        frame(tmp_path / "killed", method, source=untrained(), report=stop_at("udas", 3, 1)).run()
    resumed = frame(tmp_path / "killed", method, source=untrained(), resume=True).run()
    assert same(whole.model, resumed.model)


def test_the_source_network_is_trained_first_when_none_is_given(tmp_path):
    checkpoint = frame(tmp_path, UDAS(epochs=1, width=2)).run()
    assert (tmp_path / "source" / "model.json").is_file()
    assert "source" not in checkpoint.record["fingerprint"]


def test_mistakes_are_named(tmp_path):
    with pytest.raises(SettingError, match="levels of udas must be"):
        UDAS(levels="three")
    with pytest.raises(LayerNotFoundError, match="no layer 'upcat_9'; did you mean"):
        frame(tmp_path, UDAS(layer="upcat_9"), source=untrained()).run()
    sites = [Blobs("classification", site="there")]
    training = frame(tmp_path, UDAS(), targets=sites, source=untrained())
    training.sites = sites
    with pytest.raises(SettingError, match="use uda-swav"):
        training.run()
