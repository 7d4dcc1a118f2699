"""Scripts that measure for the pages run on a small network: what is kept of their numbers is what they measure."""

import copy
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dltta.config import make_adapter, open_dataset
from dltta.evaluation.bench import run_experiment
from dltta.evaluation.experiment import Experiment
from dltta.models.io.checkpoint import load_checkpoint
from dltta.models.io.opening import open_model
from dltta.recipes import recipe_for
from dltta.training import TrainingSettings

FIGURES = Path(__file__).parents[2] / "docs" / "figures"
SOURCE, TARGET = "phantom:oct:spectralis:12:0:96x32", "phantom:oct:cirrus:3:1:96x32"


def load(name):
    spec = importlib.util.spec_from_file_location(f"measuring_{name}", FIGURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """As `dltta bench --work WORK/oct_layers` leaves it."""
    work = tmp_path_factory.mktemp("runs")
    settings = TrainingSettings(epochs=2, batch_size=2, validation=0.34)
    run_experiment(Experiment(
        (SOURCE,), (TARGET,), str(work / "look"), work=str(work / "oct_layers"), network_options={"width": 4},
        methods=("source",), examples=1, training=settings,
    ))  # fmt: skip
    return work


def dice_by_hand(logits, label, classes, smooth=None):
    """In points: the mean over the structures of the label; smoothed by so many positions, over all structures."""
    found, known = logits.argmax(0).numpy(), label.numpy()
    scores = []
    for c in range(1, classes):
        ours, truth = found == c, known == c
        extra = 0 if smooth is None else smooth[c - 1]
        if truth.any() or smooth is not None:
            both = np.logical_and(ours, truth).sum()
            scores.append(100 * (2 * both + extra) / (ours.sum() + truth.sum() + extra))
    return np.mean(scores)


@pytest.mark.long
def test_statistics_alone_at_home_and_at_the_target(runs, tmp_path, monkeypatch):
    why = load("why")
    (tmp_path / "results").mkdir()
    (tmp_path / "images").mkdir()
    monkeypatch.setattr(why, "DOCS", tmp_path)
    monkeypatch.setattr(why, "read_toml", lambda _: {"source": [SOURCE], "targets": [TARGET]})
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    why.main(runs, "", ["oct_layers"])
    (entry,) = json.loads((tmp_path / "results" / "why.json").read_text()).values()
    assert list(entry["sites"]) == ["source site", TARGET]
    assert (tmp_path / "images" / "why.png").stat().st_size > 10_000

    checkpoint = load_checkpoint(runs / "oct_layers" / "models" / "seed_0")
    stored = checkpoint.model.eval()
    batch = copy.deepcopy(stored)
    for layer in batch.modules():  # PyTorch's own way to normalize by what comes in
        if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
            layer.train()
    cases = [open_dataset(TARGET)[i] for i in range(3)]
    prepared = [checkpoint.preprocessing.case(case) for case in cases]
    for way, network in (("source", stored), ("instance", batch)):
        with torch.no_grad():
            scores = [dice_by_hand(network(c.image[None])[0], c.label, len(checkpoint.classes)) for c in prepared]
        assert entry["sites"][TARGET][way] == pytest.approx(np.mean(scores), abs=1e-3)
    assert entry["sites"][TARGET]["source"] != pytest.approx(entry["sites"][TARGET]["instance"], abs=1e-3)


@pytest.mark.long
def test_the_guard_less_one_rule(runs, tmp_path, monkeypatch):
    script = load("guard_rules")
    (tmp_path / "results").mkdir()
    (tmp_path / "guard.md").write_text(f"Before.\n{script.BEGIN}\nold\n{script.END}\nAfter.\n")
    rules = {rule: script.WITHOUT[rule] for rule in ("in-distribution", "change")}
    for name, value in {
        "DOCS": tmp_path,
        "METHODS": {"Tent": ("tent", "adam:5e-2")},
        "SITES": 1,
        "WITHOUT": rules,
    }.items():
        monkeypatch.setattr(script, name, value)
    model = runs / "oct_layers" / "models" / "seed_0"
    monkeypatch.setattr(sys, "argv", ["guard_rules.py", str(model), "phantom:oct:spectralis:8:777:96x32"])
    script.main()
    found = json.loads((tmp_path / "results" / "guard_rules.json").read_text())
    rows = {row["without"]: row["scores"] for row in found["rows"]}
    assert list(rows) == [None, "", "in-distribution", "change"]
    page = (tmp_path / "guard.md").read_text()
    assert page.startswith(f"Before.\n{script.BEGIN}\n|  | Tent: sites |")
    assert page.endswith(f" |\n{script.END}\nAfter.\n")
    assert f"| no guard | {np.mean([rows[None][site] for site in found['sites']]):.1f} | " in page

    opened = open_model(str(model))
    adapter = make_adapter(opened, recipe_for("tent", "adam:5e-2", statistics="batch", guard=False))
    prepare = load_checkpoint(model).preprocessing.case
    site = open_dataset("phantom:oct:spectralis:8:777:96x32")
    cases = [prepare(site[i]) for i in np.random.default_rng([0, *b"source"]).permutation(8)]  # the stream's order
    classes = len(opened.classes)
    smooth = [0.05 * np.mean([(c.label == value).sum() for c in cases]) for value in range(1, classes)]
    scores = [dice_by_hand(adapter.step(c.image[None]).logits[0], c.label, classes, smooth) for c in cases]
    assert rows[None]["source"] == pytest.approx(np.mean(scores), abs=1e-3)  # as rehearsal scores
    assert rows[None]["source"] != pytest.approx(rows[""]["source"], abs=1e-6)  # it decides something
