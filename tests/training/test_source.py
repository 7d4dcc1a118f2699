"""Source training: it learns, stops and resumes exactly, and leaves a checkpoint that every method can use."""

import json
import math
import os
import socket
import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from dltta import Adapter, Fixed
from dltta.config import make_objective
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError, SettingError, StateError
from dltta.models.io.checkpoint import load_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.training import SourceTraining, TrainingSettings
from sites import Blobs


def training(folder, *, site=None, resume=False, report=lambda *at: None, log=lambda row: None, **settings):
    site = site or Blobs()
    name, options = ("unet", {"width": 4}) if site.task == "segmentation" else ("densenet_small", {"width": 8})
    if site.task == "classification":
        options["growth"] = 8
    defaults = {"epochs": 3, "batch_size": 2, "validation": 0.25, "autoencoder_epochs": 2, "autoencoder_width": 8}
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
    checkpoint = load_checkpoint(folder)
    parts = [checkpoint.model]
    parts += [checkpoint.rotation.head] if checkpoint.rotation else []
    parts += [checkpoint.reconstructions.autoencoders] if checkpoint.reconstructions else []
    return [tensor for part in parts for tensor in part.state_dict().values()]


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


class Stop(Exception):
    pass


@pytest.mark.long
@pytest.mark.parametrize("moment", [("task", 2, 1), ("task", 1, 3), ("atta", 1, 2), ("atta", 2, 1)])
def test_a_killed_training_resumes_to_the_same_weights(tmp_path, moment):
    training(tmp_path / "whole", with_=("ttt", "atta")).run()

    def stop(plan, epoch, batch, batches, loss):
        if (plan.stage, epoch, batch) == moment:
            raise Stop

    with pytest.raises(Stop):
        training(tmp_path / "killed", with_=("ttt", "atta"), report=stop).run()
    resumed = training(tmp_path / "killed", with_=("ttt", "atta"), resume=True).run()
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))
    whole = load_checkpoint(tmp_path / "whole").record["history"]

    def strip(rows):
        return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]

    assert strip(resumed.record["history"]) == strip(whole)


def test_resuming_a_finished_training_gives_it_back_without_training(tmp_path):
    training(tmp_path, epochs=2).run()
    ran = []
    training(tmp_path, epochs=2, resume=True, report=lambda *at: ran.append(1)).run()
    assert not ran
    with pytest.raises(StateError, match="trained with other settings"):
        training(tmp_path, epochs=3, resume=True).run()


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
        objective = make_objective(method, checkpoint)
        rate = None if method in ("source", "ptbn") else Fixed(1e-3)
        assert len(Adapter(checkpoint.model, objective, rate).step(x).logits) == 2


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
    tasks = [row for row in checkpoint.record["history"] if row["stage"] == "task"]
    parts = [row for row in checkpoint.record["history"] if row["stage"] == "atta"]
    assert tasks[-1]["rotation"] < 0.5 * math.log(4)  # chance
    assert parts[-1]["validation"] < 0.5 * parts[-1]["initial"]


def test_methods_that_were_not_trained_for_say_how(tmp_path):
    training(tmp_path, epochs=1).run()
    checkpoint = load_checkpoint(tmp_path)
    for method in ("ttt", "atta"):
        with pytest.raises(SettingError, match=f"--with {method}"):
            make_objective(method, checkpoint)


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
        ({"augmentation": "heavy"}, "'none' or 'light'"),
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
        "--batch-size", "4", "--with", "ttt,atta", "--json",
    ]  # fmt: skip
    config = tmp_path / "small.toml"
    config.write_text("network_options = { width = 4 }\n[training]\nautoencoder_epochs = 1\nautoencoder_width = 8\n")
    command.insert(command.index("-i"), str(config))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["model"] == str(tmp_path / "model")
    checkpoint = load_checkpoint(tmp_path / "model")
    assert checkpoint.rotation is not None
    assert checkpoint.reconstructions is not None
