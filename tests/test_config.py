import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from dltta import Exponential, Fixed, Proportional
from dltta.config import (
    TrainConfig,
    build,
    default_architecture,
    default_preprocessing,
    make_adapter,
    make_rate,
    make_uda,
    open_dataset,
    open_target,
    read_toml,
)
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError, SettingError
from dltta.evaluation.experiment import Experiment
from dltta.recipes import paper
from dltta.training import TrainingSettings
from streams import classifier, segmenter

CONFIGS = Path(__file__).parent.parent / "configs"


def test_a_wrong_key_fails_with_the_right_spelling():
    with pytest.raises(SettingError, match=r"no key in \[training\] 'epoch'; did you mean 'epochs'"):
        build(TrainingSettings, {"epoch": 3}, "[training]")
    with pytest.raises(SettingError, match="no key in file.toml 'site'; did you mean 'sites'"):
        build(TrainConfig, {"site": []}, "file.toml")


def test_values_of_the_wrong_type_or_choice_fail():
    with pytest.raises(SettingError, match=r"epochs in \[training\] must be int, got 'ten'"):
        build(TrainingSettings, {"epochs": "ten"}, "[training]")
    with pytest.raises(SettingError, match="must be int, got True"):
        build(TrainingSettings, {"epochs": True}, "[training]")
    with pytest.raises(SettingError, match=r"loss in \[training\] must be one of ce, ce\+dice, got 'dice'"):
        build(TrainingSettings, {"loss": "dice"}, "[training]")
    with pytest.raises(SettingError, match="lacks the key 'source'"):
        build(Experiment, {"targets": ["a"], "output": "o"}, "file.toml")


def test_a_table_becomes_settings():
    settings = build(TrainingSettings, {"epochs": 3, "learning_rate": 1, "with": ["ttt"], "patch": [8, 8]}, "x")
    assert (settings.epochs, settings.learning_rate, settings.with_, settings.patch) == (3, 1, ("ttt",), (8, 8))


def test_files_that_are_not_toml(tmp_path):
    with pytest.raises(SettingError, match="cannot read"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(SettingError, match="is not TOML"):
        read_toml(tmp_path / "bad.toml")


def test_the_papers_settings_fill_what_was_not_given():
    segmentation = paper().resolved("segmentation", calibrated=False)
    assert (segmentation.alpha, segmentation.batch_size) == (1e-3, 1)
    bank = make_adapter(segmenter(), segmentation).memory
    assert (bank.capacity, bank.neighbors) == (20, 8)
    classification = paper().resolved("classification", calibrated=False)
    assert (classification.alpha, classification.batch_size) == (3e-4, 200)
    bank = make_adapter(classifier(), classification).memory
    assert (bank.capacity, bank.neighbors) == (800, 12)
    assert make_adapter(classifier(), paper().changed(batch_size=16)).memory.capacity == 64


def test_rates_by_name():
    assert make_rate("fixed", 0.1) == Fixed(0.1)
    assert make_rate("dynamic", 0.1) == Proportional(0.1)
    assert make_rate("exponential", 0.1) == Exponential(0.1)
    with pytest.raises(SettingError, match="no rate 'dynamc'; did you mean 'dynamic'"):
        make_rate("dynamc", 0.1)


def test_phantom_sites_by_name():
    dataset = open_dataset("phantom:oct:cirrus:3:7")
    assert (len(dataset), dataset.site) == (3, "cirrus")
    assert not torch.equal(dataset[0].image, open_dataset("phantom:oct:cirrus:3")[0].image)
    assert default_preprocessing(dataset) == Preprocessing()
    assert default_architecture(dataset).as_json() == {
        "name": "unet", "spatial_dims": 2, "in_channels": 1, "classes": 9, "options": {},
    }  # fmt: skip
    for bad in ("phantom:oct:cirrus", "phantom:oct:cirrus:many"):
        with pytest.raises(SettingError, match="is not phantom:TASK:SITE:COUNT"):
            open_dataset(bad)
    with pytest.raises(DataError, match="there is no folder"):
        open_dataset("no/such/folder")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("train/*.toml")), ids=lambda path: path.stem)
def test_every_training_configuration_can_be_built_and_opens_with_its_command(path):
    setup = build(TrainConfig, read_toml(path), path.name)
    build(TrainingSettings, setup.training, "[training]")
    assert path.read_text().startswith(f"# dltta train configs/train/{path.name}\n")
    if setup.uda is not None:
        assert make_uda(setup.uda, setup.uda_settings).name == setup.uda


def test_a_target_needs_no_labels(tmp_path):
    (tmp_path / "imagesTs").mkdir()
    Pillow.fromarray(np.full((4, 6), 7, np.uint8)).save(tmp_path / "imagesTs" / "a_0000.png")
    labels = {"background": 0, "blob": 1}
    description = {"channel_names": {"0": "grey"}, "labels": labels, "file_ending": ".png"}
    (tmp_path / "dataset.json").write_text(json.dumps(description))
    with pytest.raises(DataError, match="imagesTr"):
        open_dataset(str(tmp_path))
    target = open_target(str(tmp_path))
    assert (len(target), target[0].label) == (1, None)
    assert torch.equal(target[0].image, torch.full((1, 4, 6), 7.0))
    assert len(open_target("phantom:oct:cirrus:3")) == 3


def test_an_experiment_names_what_it_does_not_know():
    with pytest.raises(SettingError, match="no method 'tnet'; did you mean 'tent'"):
        Experiment(("a",), ("b",), "out", methods=("tnet",))
    with pytest.raises(SettingError, match="at least one source"):
        Experiment((), ("b",), "out")


def test_the_sum_over_positions_reaches_the_memory_and_decides_streams_that_have_one():
    recipe = replace(paper(), positions="sum").resolved("segmentation", calibrated=False)
    assert make_adapter(segmenter(), recipe).memory.positions == "sum"
    assert recipe.deciding()["positions"] == "sum"
    assert "positions" not in replace(recipe, rate="fixed").deciding()
    with pytest.raises(SettingError, match="positions"):
        replace(recipe, positions="max")
