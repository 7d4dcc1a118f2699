"""Unpaired translation: what the four networks minimize, what the pools keep, what the checkpoint does."""

import pytest
import torch
from torch import nn

from dltta.errors import DataError, SettingError
from dltta.models.io.checkpoint import load_checkpoint
from dltta.training.uda.cyclegan import CycleGAN, Networks, Pool, Translation, discriminator_loss, distance, real_loss
from frames import Stop, frame, same, stop_at, untrained
from sites import Blobs

SMALL = {"width": 2, "blocks": 1, "discriminator_width": 2}


def test_least_squares_by_hand():
    assert real_loss(torch.tensor([0.5, 1.5])).item() == pytest.approx(0.25)
    assert discriminator_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.5, -0.5])).item() == pytest.approx(
        0.5 * (0.5 + 0.25)
    )
    assert discriminator_loss(torch.ones(3), torch.zeros(3)) == 0
    assert discriminator_loss(torch.zeros(3), torch.ones(3)) == 1
    assert distance(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0])).item() == pytest.approx(1.5)


class Times(nn.Module):
    """A generator, or a discriminator, of one number."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return self.factor * x


A, B, C, D = 0.7, 1.6, 0.3, -0.4  # to source, to target, at source, at target
S, T = 2.0, 0.5  # source and target images are of one color


def by_hand(settings):
    networks = Networks(Times(A), Times(B), Times(C), Times(D))
    return Translation(settings, networks, torch.zeros(1), torch.ones(1))


def colors():
    return torch.full((1, 1, 2, 2), S), torch.tensor([0]), torch.full((1, 1, 2, 2), T)


def generators_total(a, b, cycle=10.0, identity=5.0):
    adversarial = (C * a * T - 1) ** 2 + (D * b * S - 1) ** 2
    back = abs(a * b * T - T) + abs(a * b * S - S)
    unchanged = abs(a * S - S) + abs(b * T - T)
    return adversarial + cycle * back + identity * unchanged


def slope(function, at, step=1e-6):
    return (function(at + step) - function(at - step)) / (2 * step)


def test_generators_minimize_adversarial_cycle_and_identity_losses(monkeypatch):
    learner = by_hand(CycleGAN())
    monkeypatch.setattr(learner.generating, "step", lambda: None)
    losses, as_source, as_target = learner._translate(colors()[0], colors()[2])
    assert losses["adversarial"] == pytest.approx((C * A * T - 1) ** 2 + (D * B * S - 1) ** 2)
    assert losses["cycle"] == pytest.approx((A * B - 1) * (S + T))
    assert losses["identity"] == pytest.approx(0.3 * S + 0.6 * T)
    to_source, to_target = learner.networks.generators
    assert to_source.factor.grad.item() == pytest.approx(slope(lambda a: generators_total(a, B), A), rel=1e-4)
    assert to_target.factor.grad.item() == pytest.approx(slope(lambda b: generators_total(A, b), B), rel=1e-4)
    assert (as_source == A * T).all()
    assert (as_target == B * S).all()


def test_discriminators_learn_real_from_translated(monkeypatch):
    learner = by_hand(CycleGAN(pool=0))
    monkeypatch.setattr(learner.generating, "step", lambda: None)
    monkeypatch.setattr(learner.judging, "step", lambda: None)
    found = learner.step(colors(), torch.Generator(), 0.0)["discriminator"]

    def at_source(c):
        return 0.5 * ((c * S - 1) ** 2 + (c * A * T) ** 2)

    def at_target(d):
        return 0.5 * ((d * T - 1) ** 2 + (d * B * S) ** 2)

    assert found == pytest.approx((at_source(C) + at_target(D)) / 2)
    one, other = learner.networks.discriminators
    assert one.factor.grad.item() == pytest.approx(slope(at_source, C), rel=1e-4)
    assert other.factor.grad.item() == pytest.approx(slope(at_target, D), rel=1e-4)


def test_each_side_gets_only_its_own_gradients():
    learner = by_hand(CycleGAN())
    source, _, target = colors()
    _, as_source, as_target = learner._translate(source, target)
    assert all(network.factor.grad is None for network in learner.networks.discriminators)
    assert all(network.factor.grad is not None for network in learner.networks.generators)
    learner.generating.zero_grad()
    learner._judge((source, target), (as_source, as_target))
    assert all(network.factor.grad is None for network in learner.networks.generators)
    assert all(network.factor.grad is not None for network in learner.networks.discriminators)


def test_the_rate_is_constant_and_then_falls_to_zero():
    learner = by_hand(CycleGAN(learning_rate=1e-3))
    for progress, rate in ((0.0, 1e-3), (0.5, 1e-3), (0.75, 5e-4), (0.95, 1e-4)):
        learner.step(colors(), torch.Generator(), progress)
        for optimizer in (learner.generating, learner.judging):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def shown(pool, numbers, random):
    return [int(pool(torch.full((1, 1, 1, 1), float(number)), random)) for number in numbers]


def test_a_pool_shows_older_images_half_of_the_time_and_each_at_most_twice():
    random, pool = torch.Generator().manual_seed(0), Pool(50)
    assert shown(pool, range(50), random) == [*range(50)]
    later = shown(pool, range(50, 1050), random)
    new = sum(number == index for index, number in enumerate(later, start=50))
    assert 440 < new < 560  # 500 ± 4 sd of a fair coin
    older = [number for index, number in enumerate(later, start=50) if number != index]
    assert len(older) == len(set(older))  # what is shown has left the pool
    assert min(older) < 50 < max(older)
    assert len(pool.images) == 50


def test_a_pool_keeps_images_and_no_graph_and_comes_back_from_its_state():
    pool = Pool(2)
    pool(torch.ones(2, 1, 1, 1, requires_grad=True) * 3, torch.Generator())
    assert not any(image.requires_grad for image in pool.images)
    again = Pool(2)
    again.load_state_dict(pool.state_dict())
    assert shown(again, range(9), torch.Generator().manual_seed(3)) == shown(
        pool, range(9), torch.Generator().manual_seed(3)
    )
    assert shown(Pool(0), range(5), torch.Generator()) == [*range(5)]


@pytest.mark.long
def test_translated_images_learn_the_others_appearance_and_their_way_back(tmp_path):
    class Dark(Blobs):
        def __getitem__(self, index):
            case = super().__getitem__(index)
            case.image.mul_(-1)
            return case

    method = CycleGAN(epochs=25, learning_rate=2e-3, **{**SMALL, "width": 4, "discriminator_width": 8})
    checkpoint = frame(tmp_path, method, targets=[Dark(site="there", count=3)], source=untrained()).run()
    history = checkpoint.record["history"]
    assert history[-1]["cycle"] < 0.5 * history[0]["cycle"]
    assert history[-1]["identity"] < 0.5 * history[0]["identity"]
    bright, dark = Blobs(count=3), Dark(count=3)
    with torch.no_grad():
        translated = checkpoint.model.translate(torch.stack([dark[i].image for i in range(3)]))
    truth = torch.stack([bright[i].image for i in range(3)])
    assert abs(translated.mean() - truth.mean()) < 0.3 * abs(dark[0].image.mean() - truth.mean())


@pytest.mark.parametrize("axes", [2, 3])
def test_the_checkpoint_is_a_generator_in_front_of_the_source_network(tmp_path, axes):
    source = untrained(axes)
    checkpoint = frame(tmp_path, CycleGAN(epochs=1, batch_size=8, **SMALL), axes=axes, size=16, source=source).run()
    assert same(checkpoint.model.network, source.model)
    image = Blobs(axes=axes, size=16)[5].image[None]
    with torch.no_grad():
        logits = checkpoint.model(image)
        assert torch.equal(logits, source.model.eval()(checkpoint.model.translate(image)))
        assert torch.equal(logits, load_checkpoint(tmp_path).model(image))
    assert checkpoint.record["history"][0].keys() >= {"adversarial", "cycle", "identity", "discriminator", "seconds"}
    assert checkpoint.architecture.options["network"] == {"name": "unet", "options": {"width": 2}}


def test_a_killed_training_resumes_to_the_same_bits(tmp_path):
    method = CycleGAN(epochs=3, pool=2, **SMALL)  # the pool overflows in the first epoch
    whole = frame(tmp_path / "whole", method, source=untrained()).run()
    with pytest.raises(Stop):
        frame(tmp_path / "killed", method, source=untrained(), report=stop_at("cyclegan", 3, 1)).run()
    resumed = frame(tmp_path / "killed", method, source=untrained(), resume=True).run()
    assert same(whole.model, resumed.model)
    rows = zip(whole.record["history"], resumed.record["history"], strict=True)
    assert all(one["discriminator"] == other["discriminator"] for one, other in rows)


def test_examples_are_parts_of_the_images_with_their_intensities_as_they_are(tmp_path):
    training = frame(tmp_path, CycleGAN(epochs=1, crop=(16, 99), **SMALL), source=untrained())
    training.run()
    examples = training.method._examples(training)
    examples.epoch = 1
    image, _, target = examples[0]
    assert image.shape == target.shape == (1, 16, 32)  # a crop is never larger than the image
    everything = torch.cat([case.flatten() for case in training.domains.target.images])
    assert torch.isin(target, everything).all()


def test_mistakes_are_named(tmp_path):
    with pytest.raises(SettingError, match="height and width of a slice"):
        CycleGAN(crop=(8, 8, 8))
    with pytest.raises(SettingError, match="epochs of cyclegan must be at least 1"):
        CycleGAN(epochs=0)
    with pytest.raises(DataError, match="too small to be told apart by patches"):
        frame(tmp_path, CycleGAN(crop=(4, 16), **SMALL), source=untrained()).run()
