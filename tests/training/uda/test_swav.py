"""UDA-SwAV: balanced codes, each view predicts the code of the other, and what the pre-trained network is good for."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn

from dltta.data.phantom import phantom
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError, SettingError
from dltta.models.nets.architecture import Architecture
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.task import validation_score
from dltta.training.uda import UDATraining, swav
from dltta.training.uda.lars import LARS
from dltta.training.uda.swav import (
    PHANTOM,
    Clusters,
    Pretraining,
    Queue,
    SwAV,
    WholeBatches,
    cosine,
    sinkhorn,
    swapped_loss,
    trunk,
)
from frames import Stop, same, stop_at
from sites import Blobs, Locked

SMALL = {"epochs": 2, "batch_size": 4, "prototypes": 3, "features": 8, "hidden": 8, "optimizer": "sgd"}
SMALL |= {"learning_rate": 0.05, "small_views": 2, "small_size": 0.5}


# ---- codes


def reference_codes(scores, epsilon, iterations):
    """Algorithm 1 of Caron et al., one element at a time."""
    q = np.exp(scores.astype(np.float64) / epsilon).T  # (K, B)
    q /= q.sum()
    prototypes, images = q.shape
    for _ in range(iterations):
        for k in range(prototypes):
            q[k] = q[k] / q[k].sum() / prototypes
        for b in range(images):
            q[:, b] = q[:, b] / q[:, b].sum() / images
    return (q * images).T


@pytest.mark.parametrize("iterations", [1, 3])
def test_codes_agree_with_loops(iterations):
    scores = torch.randn(7, 4).clamp(-1, 1)
    codes = sinkhorn(scores, 0.05, iterations)
    np.testing.assert_allclose(codes.numpy(), reference_codes(scores.numpy(), 0.05, iterations), atol=1e-5)


def test_every_image_is_assigned_once_and_all_prototypes_are_used_alike():
    scores = torch.rand(40, 5)
    scores[:, 0] += 1.0  # every image is most like the first prototype
    codes = sinkhorn(scores, 0.25, 50)
    assert torch.allclose(codes.sum(dim=1), torch.ones(40), atol=1e-5)
    assert torch.allclose(codes.sum(dim=0), torch.full((5,), 8.0), rtol=1e-3)
    plain = torch.softmax(scores / 0.25, dim=1)
    assert plain.sum(dim=0)[0] > 24  # without balance the first would have had most of them


def test_three_iterations_at_the_published_sharpness_use_all_prototypes():
    scores = torch.nn.functional.normalize(torch.randn(64, 16), dim=1) @ torch.randn(16, 8) / 4
    scores[:, 0] += 0.6
    codes = sinkhorn(scores, 0.05, 3)
    shares = codes.sum(dim=0) / 64
    assert shares.max() < 0.25
    assert torch.softmax(scores / 0.05, dim=1).sum(dim=0).max() / 64 > 0.6


def test_codes_of_extreme_scores_are_numbers_and_have_no_gradient():
    scores = torch.tensor([[1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]], requires_grad=True)
    codes = sinkhorn(scores * 100, 1e-3, 3)
    assert torch.isfinite(codes).all()
    assert not codes.requires_grad


# ---- swapped prediction


def test_swapped_loss_by_hand():
    scores = [torch.tensor([[0.0, 0.1]]), torch.tensor([[0.2, 0.0]])]
    codes = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.25, 0.75]])]
    # temperature 0.1: views 1 and 0 predict the codes of views 0 and 1
    predicts_first = -math.log(math.exp(2) / (math.exp(2) + 1))
    total = math.exp(0) + math.exp(1)
    predicts_second = -(0.25 * math.log(1 / total) + 0.75 * math.log(math.exp(1) / total))
    assert swapped_loss(scores, codes, 0.1).item() == pytest.approx((predicts_first + predicts_second) / 2, rel=1e-5)


def test_no_view_predicts_its_own_code_and_small_views_predict_both():
    codes = [torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])]
    certain, wrong = torch.tensor([[9.0, -9.0]]), torch.tensor([[-9.0, 9.0]])
    assert swapped_loss([wrong, certain], codes, 1.0) < 1e-3  # each says what the other's code is
    assert swapped_loss([certain, wrong], codes, 1.0) > 17  # each says what its own code is
    small = swapped_loss([wrong, certain, certain], codes, 1.0).item()
    assert small == pytest.approx((0 + 0 + 0 + 18) / 4, abs=1e-3)  # right for the first code, wrong for the second


def clusters(seed=0):
    torch.manual_seed(seed)
    return Clusters(nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16, 6)), 6, 8, 8, 3)


def settings(**changed):
    return SwAV(**{**SMALL, **changed})


def learner(**changed):
    return Pretraining(settings(**changed), clusters())


def batch(seed=1):
    return torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(seed))


def step(pretraining, progress=0.0, seed=1):
    pretraining.train()
    return pretraining.step(list(batch(seed)), torch.Generator().manual_seed(seed), progress)


def test_a_step_uses_balanced_codes_of_the_large_views(monkeypatch):
    given = []

    def watch(scores, codes, temperature):
        given.append((scores, codes))
        return swapped_loss(scores, codes, temperature)

    monkeypatch.setattr(swav, "swapped_loss", watch)
    step(learner(sinkhorn=60, epsilon=0.2))
    scores, codes = given[0]
    assert (len(scores), len(codes)) == (4, 2)  # two large and two small views
    for own, code in zip(scores, codes, strict=False):
        assert torch.allclose(code.sum(dim=0), torch.full((3,), 4 / 3), rtol=1e-2)  # a softmax is not balanced
        expected = reference_codes(own.detach().numpy(), 0.2, 60)
        np.testing.assert_allclose(code.numpy(), expected, atol=1e-4)


def test_large_views_have_the_images_size_and_small_ones_a_share_of_it():
    large, small = settings(small_size=0.43).kinds((96, 60))
    assert (large.count, large.size, large.scale) == (2, (96, 60), (0.14, 1.0))
    assert (small.count, small.size) == (2, (41, 26))
    assert [kind.size for kind in settings(small_views=0).kinds((96, 60))] == [(96, 60)]


# ---- what is learned


def test_prototypes_are_frozen_in_the_first_epoch_and_move_in_the_second():
    pretraining = learner()
    step(pretraining)
    before = pretraining.clusters.prototypes.weight.clone()
    trunk_before = pretraining.clusters.trunk[2].weight.clone()
    step(pretraining, progress=0.4999)  # of two epochs
    assert torch.allclose(pretraining.clusters.prototypes.weight, before, atol=1e-7)
    assert not torch.equal(pretraining.clusters.trunk[2].weight, trunk_before)
    step(pretraining, progress=0.5)
    assert not torch.allclose(pretraining.clusters.prototypes.weight, before, atol=1e-5)


@pytest.mark.parametrize("epochs", [3, 7, 49, 400])
def test_the_second_epoch_begins_where_it_should(epochs):
    pretraining = learner(epochs=epochs)
    step(pretraining)
    before = pretraining.clusters.prototypes.weight.clone()
    step(pretraining, progress=(1 + 0 / 5) / epochs)
    assert not torch.equal(pretraining.clusters.prototypes.weight, before)


def test_prototypes_are_of_unit_length_when_images_are_compared_with_them(monkeypatch):
    pretraining = learner()
    lengths = []
    pretraining.clusters.prototypes.register_forward_pre_hook(
        lambda module, _: lengths.append(module.weight.norm(dim=1).tolist())
    )
    for progress in (0.0, 0.5, 0.75):
        step(pretraining, progress)
    assert np.allclose(lengths, 1.0, atol=1e-6)


def test_features_lie_on_the_unit_sphere():
    features, scores = clusters()(batch())
    assert torch.allclose(features.norm(dim=1), torch.ones(4), atol=1e-6)
    assert scores.shape == (4, 3)


def test_the_rate_falls_as_a_cosine():
    assert cosine(0.0, 2.0, 0.002) == pytest.approx(2.0)
    assert cosine(0.5, 2.0, 0.0) == pytest.approx(1.0)
    assert cosine(1.0, 2.0, 0.002) == pytest.approx(0.002)
    pretraining = learner(learning_rate=0.5)
    step(pretraining, progress=1 / 3)
    assert pretraining.optimizer.param_groups[0]["lr"] == pytest.approx(0.0005 + 0.4995 * 0.75)
    assert settings(learning_rate=None, batch_size=672).first_rate == pytest.approx(0.7875)  # as published


def test_steps_on_the_same_views_lower_their_loss_whatever_the_start():
    """Networks, images and views of eight seeds, 40 small steps. Of 24 seeds the share left was 0.01 to 0.56."""
    left = []
    for seed in range(8):
        pretraining = Pretraining(settings(learning_rate=0.02, frozen_epochs=0, epochs=1), clusters(seed))
        losses = [step(pretraining, seed=seed)["swav"] for _ in range(41)]  # the last is after 40 steps
        left.append(losses[-1] / losses[0])
    assert max(left) < 0.8
    assert np.mean(left) < 0.5


# ---- the queue


def test_the_queue_forgets_the_oldest_first():
    queue = Queue(3)
    queue.push(torch.tensor([[[1.0]], [[10.0]]]))
    assert not queue.full
    queue.push(torch.tensor([[[2.0], [3.0]], [[20.0], [30.0]]]))
    assert queue.full
    assert queue.features.flatten(1).tolist() == [[2, 3, 1], [20, 30, 10]]
    queue.push(torch.tensor([[[4.0]], [[40.0]]]))
    assert queue.features.flatten(1).tolist() == [[4, 2, 3], [40, 20, 30]]
    assert not Queue(0).full


def test_a_full_queue_balances_the_codes_from_its_epoch_on():
    pretraining = learner(queue=5, queue_epoch=1, epsilon=0.3)
    scores = [torch.rand(4, 3), torch.rand(4, 3)]
    without_queue = [sinkhorn(own, 0.3, 3) for own in scores]

    def equal(one, other):
        return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(one, other, strict=True))

    assert equal(pretraining.codes(scores, past=True), without_queue)  # nothing there yet
    pretraining.queue.push(nn.functional.normalize(torch.randn(2, 5, 8), dim=2))
    assert equal(pretraining.codes(scores, past=False), without_queue)
    together = pretraining.codes(scores, past=True)
    assert not equal(together, without_queue)
    for own, past, code in zip(scores, pretraining.queue.features, together, strict=True):
        everything = np.concatenate([own.numpy(), (past @ pretraining.clusters.prototypes.weight.T).detach().numpy()])
        np.testing.assert_allclose(code.numpy(), reference_codes(everything, 0.3, 3)[:4], atol=1e-5)


def test_a_step_uses_the_queue_only_from_its_epoch_on_and_then_puts_its_images_in_front(monkeypatch):
    pretraining, past = learner(queue=6, queue_epoch=1), []
    codes = pretraining.codes
    monkeypatch.setattr(pretraining, "codes", lambda scores, past: asked(past) or codes(scores, past=past))

    def asked(flag):
        past.append(flag)

    step(pretraining)
    first = pretraining.queue.features.clone()
    assert first.shape == (2, 4, 8)
    step(pretraining, progress=0.5, seed=2)
    assert past == [False, True]
    assert torch.equal(pretraining.queue.features[:, 4:], first[:, :2])
    assert torch.allclose(pretraining.queue.features.norm(dim=2), torch.ones(2, 6), atol=1e-6)


# ---- the optimizer and the examples


def test_lars_by_hand():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    zero = nn.Parameter(torch.zeros(1))
    optimizer = LARS([weight, zero], lr=2.0, momentum=0.5, weight_decay=0.1, trust=0.01)
    weight.grad, zero.grad = torch.tensor([0.0, 2.0]), torch.tensor([0.25])
    optimizer.step()
    # ‖w‖ = 5, ‖g‖ = 2: ratio 0.01 · 5 / (2 + 0.5) = 0.02; g + 0.1 w = (0.3, 2.4); step 2 · 0.02 · that
    assert torch.allclose(weight, torch.tensor([3.0 - 0.012, 4.0 - 0.096]))
    assert zero.item() == -0.5  # the plain rate
    weight.grad, zero.grad = torch.zeros(2), None
    before = weight.detach().clone()
    optimizer.step()
    momentum = 0.5 * torch.tensor([0.006, 0.048]) + 0.1 * before  # a zero gradient has the plain rate
    assert torch.allclose(weight, before - 2 * momentum)


def test_epochs_have_whole_batches_and_leave_out_other_images_each_time():
    images = WholeBatches([torch.full((1, 2, 2), float(i)) for i in range(11)], 4, seed=0)
    assert len(images) == 8

    def shown(epoch):
        images.epoch = epoch
        return [int(images[i][0, 0, 0]) for i in range(len(images))]

    assert len(set(shown(1))) == 8
    assert shown(1) != shown(2)
    assert shown(1) == shown(1)
    assert set().union(*(shown(epoch) for epoch in range(1, 9))) == set(range(11))
    assert len(WholeBatches([torch.zeros(1, 2, 2)] * 3, 4, seed=0)) == 3
    with pytest.raises(DataError, match="give --size"):
        WholeBatches([torch.zeros(1, 2, 2), torch.zeros(1, 2, 3)], 2, seed=0)


def test_the_trunk_is_the_network_up_to_its_last_layer():
    network = Architecture("densenet_small", 2, 1, 2, {"width": 8, "growth": 8}).build(seed=0).eval()
    features = trunk(network)(torch.rand(2, 1, 32, 32))
    x = torch.rand(2, 1, 32, 32)
    assert torch.allclose(network.class_layers.out(trunk(network)(x)), network(x), atol=1e-6)
    assert features.shape == (2, network.class_layers.out.in_features)
    assert {id(p) for p in trunk(network).parameters()} < {id(p) for p in network.parameters()}
    with pytest.raises(SettingError, match="takes a DenseNet, not a Linear"):
        trunk(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"prototypes": 0}, "prototypes of uda-swav must be at least 1"),
        ({"epsilon": 0.0}, "epsilon of uda-swav must be positive"),
        ({"small_scale": (0.5, 0.2)}, "small_scale of uda-swav must rise"),
        ({"optimizer": "adam"}, "'lars' or 'sgd'"),
    ],
)
def test_impossible_settings(changed, words):
    with pytest.raises(SettingError, match=words):
        SwAV(**changed)


# ---- the method


def of_one_size(**changed):
    """Views that a DenseNet can halve five times."""
    return settings(small_size=1.0, **changed)


def frame(folder, method, *, site=None, resume=False, report=lambda *at: None, log=lambda row: None, **training):
    site = site or Blobs("classification", count=8, size=32)
    small = {"width": 4, "growth": 2, "blocks": (1, 1, 1, 1)}
    name, options = ("unet", {"width": 2}) if site.task == "segmentation" else ("densenet121", small)
    return UDATraining(
        method,
        [site],
        [Locked(replace(site, site="there", count=6))],
        Architecture(name, site.axes, 1, 2, options),
        Preprocessing(),
        TrainingSettings(**{"epochs": 2, "batch_size": 4, "validation": 0.25, **training}),
        folder,
        torch.device("cpu"),
        resume,
        report,
        log,
    )


@dataclass(frozen=True)
class Brighter(Blobs):
    """A site that can be told from the other by its light."""

    def __getitem__(self, index):
        case = super().__getitem__(index)
        return replace(case, image=case.image + 100)


def test_a_classifier_begins_with_what_was_learned_from_both_sites(tmp_path, monkeypatch):
    seen, rows = [], []
    step = Pretraining.step

    def watch(self, batch, *rest):
        seen.append([bool(image.mean() > 50) for image in batch])
        return step(self, batch, *rest)

    monkeypatch.setattr(Pretraining, "step", watch)
    training = frame(tmp_path, of_one_size(), log=rows.append, learning_rate=1e-12)
    training.targets = [Locked(Brighter("classification", count=6, size=32, site="there"))]
    checkpoint = training.run()
    assert [len(batch) for batch in seen] == [4] * 6  # two epochs of three batches
    assert [sum(map(sum, epoch)) for epoch in (seen[:3], seen[3:])] == [6, 6]  # all of the target, six of the source
    stages = [row["stage"] for row in checkpoint.record["history"]]
    assert stages == ["swav", "swav", "task", "task"] == [row["stage"] for row in rows]
    new = training.network()
    moved = checkpoint.model.features.conv0.weight - new.features.conv0.weight
    assert moved.abs().max() > 1e-3  # fine-tuning at no rate leaves what pre-training learned
    assert torch.allclose(checkpoint.model.class_layers.out.weight, new.class_layers.out.weight, atol=1e-6)


@pytest.mark.parametrize("moment", [("swav", 1, 2), ("swav", 2, 1), ("task", 2, 1)])
def test_a_killed_training_resumes_to_the_same_bits(tmp_path, moment):
    method = of_one_size(queue=6, queue_epoch=1)  # the queue decides the second epoch
    whole = frame(tmp_path / "whole", method).run()
    with pytest.raises(Stop):
        frame(tmp_path / "killed", method, report=stop_at(*moment)).run()
    resumed = frame(tmp_path / "killed", method, resume=True).run()
    assert same(whole.model, resumed.model)
    for one, other in zip(whole.record["history"], resumed.record["history"], strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_views_too_small_for_the_network_are_refused(tmp_path):
    with pytest.raises(SettingError, match="would have 16 pixels on a side, less than 32"):
        frame(tmp_path, settings(small_size=0.5)).run()


def test_only_classifiers_of_images_are_pre_trained(tmp_path):
    with pytest.raises(SettingError, match="classification of 2-D images, not for segmentation in 2-D"):
        frame(tmp_path, of_one_size(), site=Blobs()).run()


@pytest.mark.slow
def test_it_is_better_at_another_hospital_than_no_adaptation(tmp_path):
    """The same tissue, other dyes; both networks get the same supervised training."""
    gains, method = [], SwAV(**{**PHANTOM, "epochs": 20})  # fewer images than it is for, so more epochs
    for seed in (0, 1, 2):
        source_site = phantom("histology", "hospital_0", 240, seed=seed)
        target_site = phantom("histology", "hospital_2", 160, seed=1000 + seed)
        common = Architecture("densenet_small", 2, 3, 2), Preprocessing(), TrainingSettings(
            epochs=8, batch_size=16, validation=0.125, seed=seed
        )  # fmt: skip
        device = torch.device("cpu")
        source = SourceTraining([source_site], *common, tmp_path / f"source_{seed}", device).run()
        adapted = UDATraining(method, [source_site], [Locked(target_site)], *common, tmp_path / f"{seed}", device).run()
        pairs = [(target_site[i].image, target_site[i].label) for i in range(len(target_site))]
        before, after = (validation_score(found.model, pairs, "classification", 2) for found in (source, adapted))
        print(f"seed {seed}: {before:.3f} -> {after:.3f}")
        losses = [row["swav"] for row in adapted.record["history"] if row["stage"] == "swav"]
        assert losses[-1] < math.log(20) - 0.05  # clusters are told apart
        gains.append(after - before)
    assert np.mean(gains) > 0.05
