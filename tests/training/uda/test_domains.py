"""What a method is given: source pairs, target images without labels, the frame that resumes and records."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

from dltta.data.case import Mapped, without_label
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError, SettingError, StateError
from dltta.models.io.checkpoint import load_checkpoint
from dltta.training import TrainingSettings
from dltta.training.examples import Examples
from dltta.training.fit import Plan
from dltta.training.uda import UDATraining
from dltta.training.uda.domains import Images, Mixed, read_domains
from dltta.training.uda.training import frozen
from frames import Stop, frame, same, stop_at, untrained
from sites import Blobs, Locked


class Pull(nn.Module):
    """A learner with state beyond its weights: it counts its steps."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.register_buffer("steps", torch.tensor(0))
        self.optimizer = torch.optim.SGD(network.parameters(), lr=1e-2)

    def step(self, batch, generator, progress):
        source, label, target = batch
        noise = torch.rand(1, generator=generator).item()
        loss = nn.functional.cross_entropy(self.network(source), label) + noise * self.network(target).square().mean()
        self.optimizer.zero_grad()
        (loss * (1 - progress)).backward()
        self.optimizer.step()
        self.steps += 1
        return {"loss": loss.item(), "progress": progress}


@dataclass(frozen=True)
class TwoStages:
    """The smallest method with two stages, the second on the network of the first."""

    weight: float = 1.0
    name: ClassVar[str] = "two"

    def train(self, training):
        network = training.network()
        plan = Plan("first", 2, 2, 1e-2, training.settings.seed)
        training.learn(Pull(network), training.domains.mixed, plan, score=lambda: training.score(network))
        second = Pull(network)
        training.learn(second, training.domains.mixed, Plan("second", 2, 2, 1e-2, training.settings.seed))
        return training.checkpoint(network, counted=int(second.steps))


def test_target_labels_cannot_be_read_through_the_frame(tmp_path):
    site = Locked(Blobs(site="there"))
    with pytest.raises(AssertionError, match="label was read"):
        _ = site[0].label
    assert object.__getattribute__(Mapped(site, without_label)[0], "label") is None
    assert torch.equal(Mapped(site, without_label)[0].image, Blobs()[0].image)
    checkpoint = frame(tmp_path, TwoStages(), targets=[site]).run()
    assert checkpoint.record["uda"]["target_images"] == 8


def test_the_frame_hands_no_labeled_target_to_a_method(tmp_path):
    given = frame(tmp_path, TwoStages(), targets=[Blobs(site="there")])
    assert all(site[i].label is None for site in given.targets for i in range(len(site)))


def test_validation_is_on_source_patients_only():
    settings = TrainingSettings(validation=0.25)
    domains = read_domains([Blobs()], [Blobs(site="there", count=6)], Preprocessing(), settings)
    assert domains.counts == {"cases": 8, "training": 6, "validation": 2}
    assert len(domains.target) == 6


def test_an_epoch_shows_every_image_of_the_larger_side_once_and_new_couples_each_time():
    source = Examples([(torch.full((1,), float(i)), torch.tensor(i)) for i in range(3)])
    target = Images([torch.full((1,), 10.0 + i) for i in range(7)])
    mixed = Mixed(source, target)

    def couples(epoch):
        mixed.epoch = epoch
        return [(int(label), int(image)) for _, label, image in (mixed[i] for i in range(len(mixed)))]

    first = couples(1)
    assert len(first) == 7
    assert sorted(image for _, image in first) == [*range(10, 17)]
    assert {label for label, _ in first} == {0, 1, 2}
    assert set(first) != set(couples(2))
    assert first == couples(1)


def test_the_record_names_method_targets_and_settings(tmp_path):
    rows = []
    record = frame(tmp_path, TwoStages(weight=0.5), log=rows.append).run().record
    assert record["uda"] == {"method": "two", "weight": 0.5, "targets": ["there"], "target_images": 3}
    assert (record["sites"], record["counted"]) == (["here"], 4)  # two batches in each of two epochs
    stages = ["first", "first", "second", "second"]
    assert [(row["stage"], row["epoch"]) for row in record["history"]] == list(zip(stages, [1, 2, 1, 2], strict=True))
    assert [row["stage"] for row in rows] == stages
    assert 0 <= record["history"][0]["score"] <= 1
    assert record["history"][1]["progress"] == pytest.approx((2 / 4 + 3 / 4) / 2)


@pytest.mark.parametrize("moment", [("first", 2, 1), ("second", 1, 1), ("second", 2, 2)])
def test_a_killed_training_resumes_to_the_same_bits(tmp_path, moment):
    whole = frame(tmp_path / "whole", TwoStages()).run()
    with pytest.raises(Stop):
        frame(tmp_path / "killed", TwoStages(), report=stop_at(*moment)).run()
    seen = []
    resumed = frame(
        tmp_path / "killed", TwoStages(), resume=True, report=lambda plan, *at: seen.append((plan, *at))
    ).run()
    assert (seen[0][0].stage, seen[0][1]) == moment[:2]  # no finished epoch is done again
    assert same(whole.model, resumed.model)
    assert [row["loss"] for row in resumed.record["history"]] == [row["loss"] for row in whole.record["history"]]
    assert resumed.record["counted"] == 4
    assert not list((tmp_path / "killed").glob("resume*"))


def test_resuming_with_another_setting_or_target_is_refused(tmp_path):
    frame(tmp_path, TwoStages()).run()
    ran = []
    frame(tmp_path, TwoStages(), resume=True, report=lambda *at: ran.append(1)).run()
    assert not ran
    with pytest.raises(StateError, match="other settings"):
        frame(tmp_path, TwoStages(weight=2.0), resume=True).run()
    with pytest.raises(StateError, match="other settings"):
        frame(tmp_path, TwoStages(), targets=[Blobs(site="elsewhere", count=3)], resume=True).run()


def test_sites_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(SettingError, match="give --source and --target sites"):
        UDATraining(TwoStages(), [Blobs()], [], *[None] * 5)
    with pytest.raises(DataError, match="classification"):
        frame(tmp_path, TwoStages(), targets=[Blobs("classification")]).run()


def test_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SettingError, match="two trains in one process; start it without torchrun"):
        frame(tmp_path, TwoStages()).run()


def test_a_source_training_can_begin_with_given_weights(tmp_path):
    training = frame(tmp_path, TwoStages(), learning_rate=1e-12, epochs=1)
    start = training.network()
    nn.init.constant_(start.final_conv.bias, 3.0)
    began = training.train_source([Blobs(count=4)], "source", start)
    assert torch.allclose(began.model.final_conv.bias, torch.tensor(3.0))
    training.resume = True
    with pytest.raises(StateError, match="other settings"):
        training.train_source([Blobs(count=4)], "source", training.network())
    assert load_checkpoint(tmp_path / "source").record["finished"]


def test_a_source_model_of_another_kind_is_refused(tmp_path):
    other = untrained()
    for changed, words in ((replace(other, preprocessing=Preprocessing("zscore")), "zscore"), (untrained(3), "3")):
        with pytest.raises(SettingError, match=f"the source model is .*{words}.*, not"):
            frame(tmp_path, TwoStages(), source=changed)


def test_frozen_modules_pass_gradients_on_and_keep_none():
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    with frozen(second):
        second(first(torch.ones(1, 2))).sum().backward()
    assert first.weight.grad is not None
    assert second.weight.grad is None
    assert second.weight.requires_grad
