"""Source training: it learns, stops and resumes exactly, and leaves a checkpoint that every method can use."""

import copy
import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.config import make_adapter, make_objective
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError, SettingError, StateError
from dltta.models.calibration import LayerSamples
from dltta.models.encoder import encode
from dltta.models.io.checkpoint import Rotation, load_checkpoint
from dltta.models.io.fingerprint import fingerprint
from dltta.models.io.opening import open_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.models.normalization import use_test_statistics
from dltta.models.parts.rotation import RotationHead
from dltta.recipes import paper
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.fit import Plan, Ranks, Supervised, supervised
from dltta.training.source import TaskTraining
from dltta.training.task import TaskLoss
from sites import Blobs


def training(folder, *, site=None, resume=False, report=lambda *at: None, log=lambda row: None, **settings):
    site = site or Blobs()
    name, options = ("unet", {"width": 4}) if site.task == "segmentation" else ("densenet_small", {"width": 8})
    if site.task == "classification":
        options["growth"] = 8
    defaults = {"epochs": 3, "batch_size": 2, "validation": 0.25, "autoencoder_epochs": 2, "autoencoder_width": 8}
    defaults |= {"denoiser_epochs": 2, "denoiser_widths": (4, 8)}
    return SourceTraining(
        [site],
        Architecture(name, site.axes, 1, 2, options),
        Preprocessing(),
        TrainingSettings(**{**defaults, **settings}),
        folder,
        torch.device("cpu"),
        resume,
        report,
        log,
    )


def weights(folder):
    return [tensor for part in load_checkpoint(folder).modules() for tensor in part.state_dict().values()]


def same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.long
def test_a_segmenter_learns(tmp_path):
    checkpoint = training(tmp_path, epochs=15, batch_size=2, learning_rate=5e-3, loss="ce+dice").run()
    assert checkpoint.record["score"] > 0.85
    history = checkpoint.record["history"]
    assert history[-1]["task"] < 0.5 * history[0]["task"]


@pytest.mark.long
def test_a_classifier_learns(tmp_path):
    site = Blobs("classification", count=24)
    checkpoint = training(tmp_path, site=site, epochs=10, batch_size=6, learning_rate=3e-3, loss="ce").run()
    assert checkpoint.record["score"] >= 0.9


@pytest.mark.parametrize(("keep", "kept"), [("best", 2), ("last", 4)])
def test_the_last_epoch_is_kept_if_asked(tmp_path, monkeypatch, keep, kept):
    monkeypatch.setattr(SourceTraining, "_score", Mock(side_effect=[0.3, 0.9, 0.5, 0.4]))
    checkpoint = training(tmp_path, epochs=4, keep=keep).run()
    assert checkpoint.record["epoch"] == kept
    assert same(weights(tmp_path), weights(tmp_path / "last")) == (keep == "last")


@pytest.mark.long
def test_the_fields_way_of_training_learns_stops_and_resumes(tmp_path):
    """Augmentation, schedule, crops and mixed precision together; the weights as if it had never stopped."""
    field = {
        "epochs": 8, "learning_rate": 5e-3, "loss": "ce+dice", "augmentation": "field", "schedule": "polynomial",
        "keep": "last", "crop": (24, 24), "foreground": 0.5, "repeats": 2, "precision": "bfloat16",
        "with_": ("ttt", "atta"), "mirror": (0, 1), "rotation": 180.0,
    }  # fmt: skip
    whole = training(tmp_path / "whole", **field).run()
    assert whole.record["score"] > 0.8
    assert all(tensor.dtype != torch.bfloat16 for tensor in weights(tmp_path / "whole"))

    def stop(plan, epoch, *at):
        if (plan.stage, epoch) == ("ttt", 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training(tmp_path / "parts", report=stop, **field).run()
    training(tmp_path / "parts", resume=True, **field).run()
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_the_joint_network_sees_upright_images_only(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(SourceTraining, "_augment", lambda self, changes: made.append(changes))
    training(tmp_path, epochs=1, with_=("ttt",), augmentation="field", mirror=(0, 1)).run()
    read, task, ttt = made[:3]
    assert read == task
    assert task.rotation == 15.0
    assert ttt == task.upright()
    assert ttt.rotation == 0.0


def test_crops_for_training_leave_a_network_that_takes_whole_images(tmp_path):
    training(tmp_path / "crop", epochs=1, crop=(16, 16)).run()
    training(tmp_path / "patch", epochs=1, patch=(16, 16)).run()
    assert open_checkpoint(load_checkpoint(tmp_path / "crop"), "crop").window is None
    assert open_checkpoint(load_checkpoint(tmp_path / "patch"), "patch").window.patch == (16, 16)


def test_the_best_epoch_is_kept_and_the_last_beside_it(tmp_path):
    rows = []
    checkpoint = training(tmp_path, epochs=5, log=rows.append).run()
    scores = [row["score"] for row in rows]
    assert checkpoint.record["epoch"] == scores.index(max(scores)) + 1
    assert checkpoint.record["score"] == max(scores)
    assert load_checkpoint(tmp_path / "last").record["epoch"] == 5
    assert not (tmp_path / "resume.pt").exists()


def test_the_same_seed_gives_the_same_weights_and_another_does_not(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        training(tmp_path / name, epochs=2, seed=seed).run()
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not same(weights(tmp_path / "a"), weights(tmp_path / "c"))


# ---- the network of TTT++


def test_the_network_of_ttt_plus_has_its_head_and_the_moments_of_source_features(both):
    _, checkpoint = both
    start = checkpoint.for_method("ttt++")
    assert start is checkpoint.contrastive
    assert start.record["losses"] == ["task", "contrast"]
    assert fingerprint(start.model) not in (fingerprint(checkpoint.model), fingerprint(checkpoint.joint.model))
    history = [row for row in checkpoint.record["history"] if row["stage"] == "ttt++"]
    assert [math.isfinite(row["contrast"]) for row in history] == [True, True]
    adapter = make_adapter(open_checkpoint(checkpoint, "net"), paper("ttt++", "fixed"))
    step = adapter.step(Blobs()[0].image[None])
    assert set(adapter.adapted_parameters()) == set(start.contrast.shared)
    assert step.rate == 1e-4


def test_moments_are_those_of_single_source_images_by_a_slow_loop(both):
    """Every source image of the eight, normalized by itself; every position of the bottleneck is a sample."""
    start = both[1].contrastive
    model = copy.deepcopy(start.model)
    use_test_statistics(model)
    with torch.no_grad():
        maps = [encode(model, start.contrast.layer, Blobs()[i].image[None])[0].double() for i in range(8)]
    rows = [column for each in maps for column in each.flatten(1).T]
    mean = sum(rows) / len(rows)
    spread = sum(torch.outer(row - mean, row - mean) for row in rows) / (len(rows) - 1)
    assert torch.allclose(start.contrast.features.mean.double(), mean, atol=1e-5)
    assert torch.allclose(start.contrast.features.covariance.double(), spread, atol=1e-5)
    means = [each.flatten(1).mean(1) for each in maps]
    far = [sum(((other - first) ** 2).mean().item() for other in means) / 7 for first in means]
    found = start.contrast.features.mean_distance  # of the others from the first image, which is a held-out one
    assert any(found == pytest.approx(each, rel=1e-4) for each in far)
    assert start.contrast.projections.covariance_distance == 0  # of single images


# ---- the source model and the network of TTT


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A source model trained without anything else, and one with everything."""
    folder = tmp_path_factory.mktemp("both")
    plain = training(folder / "plain", epochs=2).run()
    return plain, training(folder / "all", epochs=2, with_=("ttt", "ttt++", "dtta", "atta", "memory")).run()


def test_the_source_model_is_the_same_bits_whatever_is_trained_beside_it(both):
    plain, checkpoint = both
    assert fingerprint(checkpoint.model) == fingerprint(plain.model)
    assert checkpoint.calibration.checksum() == plain.calibration.checksum()
    assert fingerprint(checkpoint.joint.model) != fingerprint(plain.model)


def test_networks_say_what_they_were_trained_with_and_which_epoch_was_best(both):
    _, checkpoint = both
    rows = checkpoint.record["history"]
    assert [(row["stage"], row["epoch"]) for row in rows] == [
        (stage, epoch) for stage in ("task", "ttt", "ttt++", "dtta", "denoiser", "atta") for epoch in (1, 2)
    ]
    for stage, found in (("task", checkpoint), ("ttt", checkpoint.joint)):
        assert found.record["losses"] == ["task", "rotation"][: 1 if stage == "task" else 2]
        assert [loss in row for row in rows if row["stage"] == stage for loss in ("task", "rotation")] == [
            True, stage == "ttt"
        ] * 2  # fmt: skip
        scores = [row["score"] for row in rows if row["stage"] == stage]
        assert found.record["epoch"] == scores.index(max(scores)) + 1
        assert found.record["finished"]


def test_rotation_belongs_to_the_second_network_and_auto_encoders_to_the_first(both):
    _, checkpoint = both
    assert (checkpoint.rotation, checkpoint.joint.reconstructions) == (None, None)
    assert checkpoint.joint.rotation is not None
    assert checkpoint.reconstructions is not None


def test_each_network_has_its_own_calibration_and_source_pairs(both):
    _, checkpoint = both
    images = [Blobs()[index].image[None] for index in range(8)]
    for network, other in ((checkpoint, checkpoint.joint), (checkpoint.joint, checkpoint)):
        samples = LayerSamples()
        with torch.no_grad(), samples.watching(network.model):
            predictions = torch.cat([network.model(image).softmax(1) for image in images]).flatten(1)
        distances = torch.cdist(network.pairs.predictions.float().flatten(1), predictions)  # (pairs, images)
        assert distances.min(1).values.max() < 0.01  # half precision
        assert distances.argmin(1).sort().values.tolist() == list(range(8))
        assert torch.cdist(other.pairs.predictions.float().flatten(1), predictions).min() > 0.01
        for name, (means, _) in samples.stacked().items():
            measured = network.calibration.layers[name][0]
            torch.testing.assert_close(measured[measured[:, 0].argsort()], means[means[:, 0].argsort()])


@pytest.mark.parametrize("method", ["source", "ptbn", "tent", "atta", "ttt"])
def test_each_method_adapts_the_network_that_it_starts_from(both, method):
    _, checkpoint = both
    expected = (checkpoint.joint if method == "ttt" else checkpoint).model.state_dict()
    for model in (checkpoint, open_checkpoint(checkpoint, "blobs")):
        found = make_adapter(model, paper(method)).model.state_dict()
        assert expected.keys() <= found.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_memory_begins_with_the_pairs_of_the_network_that_is_adapted(both):
    _, checkpoint = both
    for method, network in (("tent", checkpoint), ("ttt", checkpoint.joint)):
        recipe = replace(paper(method), prefill=True, ready="neighbors", neighbors=2)
        step = make_adapter(checkpoint, recipe).step(Blobs()[0].image[None])
        by_hand = MemoryBank(network.pairs.layer, capacity=20, neighbors=2, ready="neighbors")
        by_hand.push(network.pairs.features.float(), network.pairs.predictions.float())
        expected = Adapter(network.model, make_objective(method, network), Proportional(1e-3), memory=by_hand)
        assert step.discrepancy == expected.step(Blobs()[0].image[None]).discrepancy


def test_ttt_on_the_source_model_itself_is_refused(both):
    _, checkpoint = both
    with pytest.raises(SettingError, match=r"no rotation head, which TTT needs; take model.for_method\('ttt'\)"):
        make_objective("ttt", checkpoint)


def test_both_networks_start_alike_and_see_the_same_upright_images(tmp_path):
    """With a rate of nothing they stay where they started, and their statistics tell which images they saw."""
    found = training(tmp_path, epochs=2, learning_rate=1e-30, with_=("ttt",), validation=0.0).run()
    start = found.architecture.build(seed=0).state_dict()
    joint = found.joint.model.state_dict()
    for name, tensor in found.model.state_dict().items():
        torch.testing.assert_close(tensor, joint[name], atol=1e-6, rtol=0)
        assert "running" in name or "num_batches" in name or torch.allclose(tensor, start[name], atol=1e-20, rtol=0)
    assert not torch.allclose(joint["conv_0.conv_0.adn.N.running_mean"], torch.zeros(4), atol=1e-4)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d, lambda channels: nn.InstanceNorm2d(channels, track_running_stats=True)]
)
def test_rotated_images_never_touch_stored_statistics(norm):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), norm(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    joint = copy.deepcopy(plain)
    rotation = Rotation(RotationHead(4, 8), "2", ())
    images, labels = torch.rand(4, 1, 8, 8), torch.randint(2, (4, 8, 8))
    alone = TaskTraining(plain, TaskLoss("ce"), None).train()
    both = TaskTraining(joint, TaskLoss("ce"), rotation).train()
    for _ in range(2):
        alone(images, labels, torch.Generator().manual_seed(1))
        losses = both(images, labels, torch.Generator().manual_seed(1))
    stored = dict(plain.named_buffers())
    assert stored.keys() == dict(joint.named_buffers()).keys() == {f"1.{name}" for name in plain[1]._buffers}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in joint.named_buffers())
    assert stored["1.num_batches_tracked"] == (
        2 if norm is nn.BatchNorm2d else 0
    )  # instance normalization never counts
    assert stored["1.running_mean"].any()
    losses["rotation"].backward()
    assert joint[0].weight.grad.any()  # and yet the encoder learns from them


def test_task_and_rotation_count_alike_and_every_image_is_turned_at_random():
    """Both losses by hand from the same random turns; the step goes down their plain sum."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    head = RotationHead(4, 8)
    joint = TaskTraining(copy.deepcopy(model), TaskLoss("ce"), Rotation(copy.deepcopy(head), "1", ()))
    images, labels = torch.rand(8, 1, 6, 6), torch.randint(2, (8, 6, 6))
    turns = torch.randint(4, (8,), generator=torch.Generator().manual_seed(1)).tolist()
    assert len(set(turns)) > 2
    turned = torch.cat([torch.rot90(image[None], turn, (2, 3)) for image, turn in zip(images, turns, strict=True)])
    task = F.cross_entropy(model(images), labels)
    rotation = F.cross_entropy(head.layers(model[:2](turned).mean((2, 3))), torch.tensor(turns))
    (task + rotation).backward()
    learner = Supervised(joint, joint, torch.optim.SGD(joint.parameters(), lr=1.0), lambda progress: 1.0)
    losses = learner.step([images, labels], torch.Generator().manual_seed(1), 0.0)
    assert losses == {
        "task": pytest.approx(task.item(), rel=1e-5),
        "rotation": pytest.approx(rotation.item(), rel=1e-5),
    }
    for moved, parameter in zip(joint.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(moved.detach(), parameter.detach() - parameter.grad)


def test_source_training_minimizes_with_adam():
    learner = supervised(nn.Linear(2, 2), Plan("task", 1, 1, 3e-4, 0), Ranks())
    assert type(learner.optimizer) is torch.optim.Adam
    (group,) = learner.optimizer.param_groups
    assert (group["betas"], group["weight_decay"], group["amsgrad"]) == ((0.9, 0.999), 0, False)
    assert [learner.rate(progress) for progress in (0.0, 0.5, 0.99)] == [3e-4] * 3


@pytest.mark.parametrize(("task", "rate"), [("segmentation", 1e-3), ("classification", 3e-4)])
def test_the_default_rate_is_the_papers_for_the_task(tmp_path, task, rate):
    rates = set()

    def note(plan, *at):
        rates.add((plan.stage, plan.learning_rate))

    training(tmp_path, site=Blobs(task, size=32), epochs=1, with_=("ttt",), report=note).run()
    assert rates == {("task", rate), ("ttt", rate), ("calibration", 0.0)}


class Stop(Exception):
    pass


@pytest.mark.long
@pytest.mark.parametrize(
    "moment",
    [
        ("task", 2, 1), ("task", 1, 3), ("ttt", 1, 2), ("ttt", 3, 1), ("ttt++", 2, 1), ("dtta", 2, 2),
        ("denoiser", 1, 2), ("denoiser", 2, 1), ("atta", 1, 2), ("atta", 2, 1),
    ],
)  # fmt: skip
def test_a_killed_training_resumes_to_the_same_weights(tmp_path, moment):
    training(tmp_path / "whole", with_=("ttt", "ttt++", "dtta", "atta")).run()

    def stop(plan, epoch, batch, batches, loss):
        if (plan.stage, epoch, batch) == moment:
            raise Stop

    with pytest.raises(Stop):
        training(tmp_path / "killed", with_=("ttt", "ttt++", "dtta", "atta"), report=stop).run()
    resumed = training(tmp_path / "killed", with_=("ttt", "ttt++", "dtta", "atta"), resume=True).run()
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    whole = load_checkpoint(tmp_path / "whole")

    def strip(rows):
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    for one, other in (
        (resumed, whole),
        (resumed.joint, whole.joint),
        (resumed.normalized, whole.normalized),
        (resumed.contrastive, whole.contrastive),
    ):
        assert strip(one.record["history"]) == strip(other.record["history"])
        assert one.record["epoch"] == other.record["epoch"]
        assert one.calibration.checksum() == other.calibration.checksum()


def test_resuming_a_finished_training_gives_it_back_without_training(tmp_path):
    training(tmp_path, epochs=2).run()
    ran = []
    training(tmp_path, epochs=2, resume=True, report=lambda *at: ran.append(1)).run()
    assert not ran
    with pytest.raises(StateError, match="trained with other settings: epochs 2 instead of 3; train into another"):
        training(tmp_path, epochs=3, resume=True).run()


@pytest.mark.long
def test_what_is_added_to_a_finished_training_is_what_would_have_been_trained_with_it(tmp_path):
    whole = training(tmp_path / "whole", with_=("ttt", "atta")).run()
    training(tmp_path / "parts").run()
    training(tmp_path / "parts", resume=True, with_=("atta",)).run()

    def stop(plan, epoch, *at):
        if epoch == 2:
            raise KeyboardInterrupt

    stages = []
    with pytest.raises(KeyboardInterrupt):
        training(tmp_path / "parts", resume=True, with_=("ttt",), report=stop).run()
    added = training(
        tmp_path / "parts", resume=True, with_=("ttt",), report=lambda plan, *at: stages.append(plan.stage)
    ).run()
    assert set(stages) == {"ttt", "calibration"}
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    assert added.joint.calibration.checksum() == whole.joint.calibration.checksum()
    assert added.record["fingerprint"] == whole.record["fingerprint"]
    assert {row["stage"] for row in added.record["history"]} == {"task", "ttt", "atta"}
    again = training(tmp_path / "parts", resume=True, with_=("atta", "ttt"), report=Mock(side_effect=AssertionError))
    assert again.run().reconstructions is not None


@pytest.mark.parametrize(
    ("state", "reason"),
    [({"stage": "task"}, "another version"), ([1], "another version"), (None, "is damaged")],
)
def test_a_state_of_another_kind_is_said_in_one_line(tmp_path, state, reason):
    path = tmp_path / "resume.pt"
    path.write_bytes(b"no state") if state is None else torch.save(state, path)
    with pytest.raises(StateError, match=f"resume.pt .*{reason}.*; remove it"):
        training(tmp_path, resume=True).run()


def test_a_state_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    (tmp_path / "resume.pt").touch()
    monkeypatch.setattr(torch, "load", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(StateError, match=r"resume.pt cannot be read: Permission denied$"):
        training(tmp_path, resume=True).run()


def test_a_training_killed_before_its_first_epoch_was_noted_is_not_taken_for_finished(tmp_path):
    training(tmp_path / "whole").run()

    def stop(plan, epoch, batch, batches, loss):
        if epoch == 2:
            raise Stop

    with pytest.raises(Stop):
        training(tmp_path / "killed", report=stop).run()
    (tmp_path / "killed" / "resume.pt").unlink()  # a model is there, but nothing says how far it came
    training(tmp_path / "killed", resume=True).run()
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


def test_resuming_with_other_settings_names_the_difference(tmp_path):
    def stop(plan, epoch, batch, batches, loss):
        if epoch == 2:
            raise Stop

    with pytest.raises(Stop):
        training(tmp_path, report=stop).run()
    with pytest.raises(StateError, match="batch_size = 2, now 4"):
        training(tmp_path, batch_size=4, resume=True).run()


@pytest.mark.parametrize("site", [Blobs(), Blobs(axes=3, size=16, count=4), Blobs("classification", size=64)])
def test_every_method_adapts_what_training_left(tmp_path, site):
    training(tmp_path, site=site, epochs=1, with_=("ttt", "atta"), autoencoder_epochs=1, batch_size=2).run()
    checkpoint = load_checkpoint(tmp_path)
    x = torch.stack([site[i].image for i in range(2)])
    for method in ("source", "ptbn", "ttt", "tent", "atta"):
        start = checkpoint.for_method(method)
        rate = None if method in ("source", "ptbn") else Fixed(1e-3)
        assert len(Adapter(start.model, make_objective(method, start), rate).step(x).logits) == 2


@pytest.mark.long
def test_rotation_head_and_autoencoders_really_learn(tmp_path):
    checkpoint = training(
        tmp_path,
        site=Blobs(count=16),
        epochs=15,
        learning_rate=5e-3,
        with_=("ttt", "atta"),
        batch_size=4,
        autoencoder_epochs=8,
    ).run()
    joint = [row for row in checkpoint.record["history"] if row["stage"] == "ttt"]
    parts = [row for row in checkpoint.record["history"] if row["stage"] == "atta"]
    assert joint[-1]["rotation"] < 0.5 * math.log(4)  # chance
    assert parts[-1]["validation"] < 0.5 * parts[-1]["initial"]


def test_methods_that_were_not_trained_for_say_how(tmp_path):
    training(tmp_path, epochs=1).run()
    checkpoint = load_checkpoint(tmp_path)
    for method in ("ttt", "atta"):
        with pytest.raises(SettingError, match=f"--with {method}"):
            make_objective(method, checkpoint.for_method(method))


def test_without_validation_the_last_epoch_is_kept(tmp_path):
    checkpoint = training(tmp_path, epochs=2, validation=0.0).run()
    assert (checkpoint.record["epoch"], checkpoint.record["score"]) == (2, None)


def test_crops_of_volumes_train_and_validate_by_sliding_window(tmp_path):
    site = Blobs(axes=3, size=24, count=4)
    checkpoint = training(tmp_path, site=site, epochs=1, patch=(16, 16, 16)).run()
    assert 0 <= checkpoint.record["score"] <= 1


def test_a_case_without_label_is_named(tmp_path):
    class Unlabeled(Blobs):
        def __getitem__(self, index):
            from dataclasses import replace

            return replace(super().__getitem__(index), label=None if index == 3 else super().__getitem__(index).label)

    with pytest.raises(DataError, match="here/case_3 has no label"):
        training(tmp_path / "model", site=Unlabeled()).run()
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"validation": 1.0}, "validation must be a share"),
        ({"with_": ("tta",)}, "cannot train 'tta'"),
        ({"loss": "dice"}, "'ce' or"),
        ({"augmentation": "heavy"}, "'none' or 'light' or 'field'"),
        ({"foreground": 1.5}, "foreground must be a share"),
        ({"patch": (16, 16), "crop": (16, 16)}, "patch and crop exclude each other"),
    ],
)
def test_impossible_settings(settings, words):
    with pytest.raises(SettingError, match=words):
        TrainingSettings(**settings)


@pytest.mark.slow
def test_two_processes_train_one_model(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
        "-m", "dltta", "train", "-i", "phantom:oct:spectralis:8", "-o", str(tmp_path / "model"), "--epochs", "2",
        "--no-rehearse",
        "--batch-size", "4", "--with", "ttt,atta", "--json",
    ]  # fmt: skip
    config = tmp_path / "small.toml"
    config.write_text("network_options = { width = 4 }\n[training]\nautoencoder_epochs = 1\nautoencoder_width = 8\n")
    command.insert(command.index("-i"), str(config))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["model"] == str(tmp_path / "model")
    checkpoint = load_checkpoint(tmp_path / "model")
    assert checkpoint.joint.rotation is not None
    assert checkpoint.reconstructions is not None
