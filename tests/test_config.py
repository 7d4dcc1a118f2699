import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from dltta import Exponential, Fixed, GuardedAdapter, Proportional
from dltta.config import (
    TrainConfig,
    build,
    default_architecture,
    default_preprocessing,
    make_adapter,
    make_objective,
    make_rate,
    make_uda,
    open_dataset,
    open_target,
    read_toml,
)
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError, SettingError
from dltta.evaluation.experiment import Experiment
from dltta.models.statistics import Running
from dltta.quality.candidates import Plan
from dltta.quality.choosing import ChoosingAdapter
from dltta.recipes import Recipe, paper, recommended
from dltta.training import TrainingSettings
from methods import LayerWise, Prototypes
from networks import stream
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


def test_an_adapter_has_what_its_recipe_says():
    adapter = make_adapter(segmenter(), paper())
    assert (adapter.memory.capacity, adapter.memory.neighbors, adapter.memory.ready) == (20, 8, "full")
    assert (adapter.rate, adapter.steps, adapter.mode) == (Proportional(1e-3), 1, "continual")
    assert type(adapter._optimizer) is torch.optim.SGD
    (group,) = adapter._optimizer.param_groups
    assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.0, 0.0, False)  # Eq. (2) and no more
    adapter = make_adapter(classifier(), paper())
    assert (adapter.memory.capacity, adapter.memory.neighbors, adapter.rate) == (800, 12, Proportional(3e-4))
    other = Recipe("tent", "dynamic", optimizer="adam", steps=2, mode="image-specific", batch_size=16, pool=4)
    adapter = make_adapter(classifier(), replace(other, ready="neighbors", distance="cosine", alpha=0.5))
    assert (adapter.memory.capacity, adapter.memory.pool, adapter.memory.distance) == (64, 4, "cosine")
    assert (adapter.memory.ready, adapter.rate, adapter.steps) == ("neighbors", Proportional(0.5), 2)
    assert (type(adapter._optimizer), adapter.mode) == (torch.optim.Adam, "image-specific")


def test_a_fixed_rate_needs_no_memory_and_methods_without_a_loss_no_rate():
    assert make_adapter(segmenter(), paper("tent", "fixed")).memory is None
    for method in ("source", "ptbn"):
        adapter = make_adapter(segmenter(), paper(method))
        assert (adapter.rate, adapter.memory, adapter.steps) == (None, None, 0)


def test_the_recommended_recipe_of_a_model_that_did_not_rehearse_mixes_as_intent_does():
    adapter = make_adapter(segmenter(), recommended())
    assert isinstance(adapter, ChoosingAdapter)
    assert adapter.plan == Plan(("source", "batch", "blended"))
    step = adapter.step(torch.rand(1, 1, 8, 12))
    assert (step.decision.candidate, step.decision.expected) == ("entropy", None)


def test_shrinkage_statistics_of_a_model_without_calibration_are_refused():
    with pytest.raises(SettingError, match="shrinkage statistics need a calibrated model"):
        make_adapter(segmenter(), Recipe(statistics="shrinkage"))


# classes of one's own, by name


def test_a_method_of_ones_own_by_name_gets_the_statistics_if_it_takes_them():
    statistics = Running(0.5)
    assert make_objective("methods:MeanTeacher", segmenter(), statistics).statistics is statistics
    assert isinstance(make_objective("methods:Prototypes", segmenter(), statistics), Prototypes)


def test_a_method_can_be_named_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text("from dltta.objectives import Tent\nclass Mine(Tent):\n    pass\n")
    assert type(make_objective(f"{tmp_path / 'mine.py'}:Mine", segmenter())).__name__ == "Mine"


def test_a_rate_of_ones_own_by_name_gets_alpha_if_it_takes_it():
    assert make_rate("methods:GradientNorm", 0.25).alpha == 0.25
    assert isinstance(make_rate("methods:LayerWise", 0.25), LayerWise)


@pytest.mark.parametrize("guard", [False, True])
@pytest.mark.parametrize("rate", ["methods:GradientNorm", "methods:LayerWise", "dynamic"])
def test_a_recipe_of_ones_own_classes_runs(guard, rate):
    recipe = Recipe("methods:MeanTeacher", rate, alpha=0.2, statistics="running", guard=guard)
    adapter = make_adapter(segmenter(), recipe)
    assert isinstance(adapter, GuardedAdapter) == guard
    assert adapter.objective.statistics == Running()
    step = adapter.step(stream((1, 1, 8, 8), 1)[0])
    assert step.logits.isfinite().all()
    assert step.rate > 0
    assert adapter.memory is None or rate == "dynamic"


@pytest.mark.parametrize("guard", [False, True])
def test_a_recipe_of_ones_own_method_without_a_loss_runs(guard):
    adapter = make_adapter(classifier(), Recipe("methods:Prototypes", guard=guard))
    assert (adapter.rate, adapter.memory) == (None, None)
    assert adapter.step(stream((3, 1, 8, 8), 1)[0]).updates == ()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere.at.all:Method", "there is no module 'nowhere'; write package.module"),
        ("methods:Meanteacher", "methods has no function or class 'Meanteacher'; there are .*MeanTeacher"),
        ("methods:Needy", "methods:Needy needs the argument 'temperature'; give it a default"),
        ("methods:NoMethod", r"methods:NoMethod has no prepare\(model\), which every method needs"),
        ("missing.py:Method", "there is no file missing.py"),
        ("tnet", "there is no method 'tnet'; did you mean 'tent'"),
    ],
)
def test_a_method_that_cannot_be_used_is_refused_in_one_line(spec, words):
    with pytest.raises(SettingError, match=words) as found:
        make_adapter(segmenter(), Recipe(spec))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nowhere.at.all:Rate", "there is no module 'nowhere'"),
        ("methods:Rate", "has no function or class 'Rate'"),
        ("methods:Needy", "needs the argument 'temperature'"),
        ("methods:no_rate", "methods:no_rate gives a float, which cannot be called"),
        ("dynamc", "there is no rate 'dynamc'; did you mean 'dynamic'"),
    ],
)
def test_a_rate_that_cannot_be_used_is_refused_in_one_line(spec, words):
    with pytest.raises(SettingError, match=words) as found:
        make_adapter(segmenter(), Recipe("tent", spec))
    assert "\n" not in str(found.value)


def test_a_module_that_lacks_what_it_imports_says_so(tmp_path, monkeypatch):
    (tmp_path / "unfinished.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingError, match="unfinished raised ModuleNotFoundError.*nowhere_to_be_found"):
        make_objective("unfinished:Method", segmenter())


def test_rates_by_name():
    assert make_rate("fixed", 0.1) == Fixed(0.1)
    assert make_rate("dynamic", 0.1) == Proportional(0.1)
    assert make_rate("exponential", 0.1) == Exponential(0.1)
    assert make_rate("relative", 0.1).alpha == 0.1
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
    assert open_dataset("phantom:oct:cirrus:3:7:96x32")[0].image.shape == (1, 96, 32)
    for bad in ("phantom:oct:cirrus", "phantom:oct:cirrus:many", "phantom:oct:cirrus:3:7:small"):
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
