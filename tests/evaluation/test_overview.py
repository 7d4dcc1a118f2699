"""`dltta inspect`: what each method would do to a network, found by one step with each."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from bundles import make_bundle
from commands import typed
from dltta.data.preprocessing import Preprocessing
from dltta.evaluation.card import missing_parts
from dltta.evaluation.overview import check_method, overview
from dltta.models.encoder import shared_parameters
from dltta.models.io.checkpoint import Checkpoint, Reconstructions, Rotation, save_checkpoint
from dltta.models.io.opening import open_checkpoint, open_model
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.autoencoders import UNET_LEVELS, AutoEncoders
from dltta.models.parts.rotation import RotationHead
from dltta.recipes import Method


@pytest.fixture
def dltta(monkeypatch, capsys):
    return lambda *arguments: typed(monkeypatch, capsys, *arguments)


def checkpoint(size=(32, 32)):
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    model = architecture.build(seed=3).eval()
    shared = tuple(shared_parameters(model, "down_4", torch.rand(1, 1, 32, 32)))
    return Checkpoint(
        model,
        architecture,
        "segmentation",
        ("background", "a", "b"),
        Preprocessing(size=size),
        rotation=Rotation(RotationHead(64, 8), "down_4", shared),
        reconstructions=Reconstructions(AutoEncoders({"image": (1, 32, 32)}, width=8), UNET_LEVELS, (4, 8, 16)),
    )


def own_code(folder, body):
    (folder / "own.py").write_text(f"from networks import *\nfrom torch import nn\ndef net(): return {body}\n")
    return f"{folder / 'own.py'}:net"


def checks(seen):
    return {check.method: check for check in seen.methods}


def test_a_checkpoint_with_all_parts_works_with_every_method():
    source = checkpoint()
    seen = overview(open_checkpoint(source, "net"))
    found = checks(seen)
    assert tuple(found) == tuple(Method)
    assert [str(name) for name, check in found.items() if not check.works] == ["dtta", "ttt++"]  # not trained here
    assert "train it with `--with dtta`" in found["dtta"].reason
    assert "train it with `--with ttt++`" in found["ttt++"].reason
    assert (found["t3a"].tensors, found["t3a"].statistics) == (0, 0)
    assert found["t3a"].changes == "the last layer, without a gradient"
    assert found["rotta"].tensors == found["note"].tensors == 36
    assert found["cotta"].share == 1
    assert found["source"].statistics == 0
    assert found["ptbn"].statistics == found["tent"].statistics == 18
    norms = [layer for layer in source.model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    assert (found["tent"].tensors, found["tent"].parameters) == (36, sum(2 * layer.num_features for layer in norms))
    assert found["tent"].share == found["tent"].parameters / sum(p.numel() for p in source.model.parameters())
    named = dict(source.model.named_parameters())
    assert found["ttt"].parameters == sum(named[name].numel() for name in source.rotation.shared)
    adaptors = (64 + 64) + (64 * 64 + 64) + (64 + 1) + sum(c * c + c for c in (4, 8, 16))
    assert found["atta"].parameters == found["atta"].added == adaptors


def test_what_is_missing_is_said_in_words(tmp_path):
    seen = overview(open_model(own_code(tmp_path, "nn.Conv2d(1, 2, 1)"), untrained=True))
    assert seen.network.feature_layer is None
    found = checks(seen)
    assert [method for method, check in found.items() if check.works] == ["source", "cotta"]
    assert "no layer normalizes by statistics of the training set" in found["ptbn"].reason
    assert "no normalization layer with scale and shift" in found["tent"].reason
    assert "has no rotation head, which TTT needs" in found["ttt"].reason
    assert "has no auto-encoders, which ATTA needs" in found["atta"].reason


def test_what_only_a_step_shows_is_found(tmp_path):
    """One value per channel at the bottleneck has no statistics; the constructor cannot know."""
    found = checks(overview(open_model(own_code(tmp_path, "Segmenter()"), untrained=True), (2, 2)))
    assert not found["tent"].works
    assert re.search(r"an image of 2x2: layer 'bottleneck.1' gets a single value", found["tent"].reason)


def test_a_method_for_another_task_is_not_to_be_trained(tmp_path):
    opened = open_model(own_code(tmp_path, "Classifier()"), untrained=True)
    seen = overview(opened, (8, 8))
    assert checks(seen)["dtta"].reason == "DTTA is for segmentation, and this model is for classification"
    assert missing_parts(opened)[-1] == "parts that only dltta train adds: ttt, atta, ttt++, --prefill"


def test_what_a_checkpoint_lacks_is_named_with_the_option_that_trains_it():
    found = missing_parts(open_checkpoint(checkpoint(), "net"))
    assert "projection head: ttt++ (dltta train --with ttt++)" in found
    assert "image normalizer and denoiser: dtta (dltta train --with dtta)" in found
    assert not any("rotation head" in part or "auto-encoders" in part for part in found)


def test_methods_that_learn_from_a_memory_are_tried_with_an_update(tmp_path):
    """Views of a signal cannot be made, which shows in RoTTA's update and not before."""
    layers = nn.Conv1d(1, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(64, 2)
    opened = replace(open_model(own_code(tmp_path, "Classifier()"), untrained=True), model=nn.Sequential(*layers))
    found = {name: check_method(opened, name, torch.rand(1, 1, 16)) for name in ("tent", "note", "rotta")}
    assert found["tent"].works
    assert found["note"].works
    assert "views are made of 2-D images and volumes" in found["rotta"].reason


def test_the_network_is_left_as_it_was(tmp_path):
    opened = open_checkpoint(checkpoint(), "net")
    before = {name: tensor.clone() for name, tensor in opened.model.state_dict().items()}
    overview(opened)
    assert all(torch.equal(tensor, before[name]) for name, tensor in opened.model.state_dict().items())
    assert not opened.model.training


class TestCommand:
    def test_tables_fit_80_columns(self, dltta, tmp_path, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        save_checkpoint(tmp_path / "net", checkpoint())
        code, out, _ = dltta("inspect", tmp_path / "net")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 80
        assert re.search(r"conv_0.conv_0.conv +Conv2d +4x32x32 +40\n", out)
        assert re.search(r"BatchNorm2d +18 +18 +18", out)
        assert re.search(r"tent +36 +736 +\d+\.\d\d%", out)
        assert re.search(r"t3a +0 +0 +0 +changes the last layer, without a", out)
        assert "default feature layer: down_4, keys of 64x2x2" in out
        assert "18 ReLU" in out

    def test_json_has_everything(self, dltta, tmp_path):
        make_bundle(tmp_path / "b")
        code, out, _ = dltta("inspect", tmp_path / "b", "--json")
        assert code == 0
        shown = json.loads(out)
        assert (shown["kind"], shown["task"], shown["window"]["patch"]) == ("bundle", "segmentation", [16, 16, 16])
        assert shown["network"]["input"] == [1, 16, 16, 16]
        assert shown["network"]["memory"]["images"] == 20
        assert set(shown["methods"]) == set(Method)
        assert shown["methods"]["ttt"]["works"] is False

    def test_a_size_nobody_knows_is_said_to_be_assumed(self, dltta, tmp_path):
        save_checkpoint(tmp_path / "net", checkpoint(size=None))
        assert "1x128x128, an assumed size" in dltta("inspect", tmp_path / "net")[1]
        assert "tried with 1x48x64, gives 3x48x64" in dltta("inspect", tmp_path / "net", "--size", "48x64")[1]

    def test_options_for_code(self, dltta, tmp_path):
        spec = own_code(tmp_path, "Classifier(channels=3)")
        torch.save({"a": torch.ones(1)}, tmp_path / "w.pt")
        options = ["--classes", "a,b,c", "--channels", "3", "--size", "32x32", "--task", "classification"]
        code, out, _ = dltta("inspect", spec, *options)
        assert code == 0
        assert "classification of a, b, c" in out
        code, _, err = dltta("inspect", spec, "--weights", tmp_path / "w.pt")
        assert code == 2
        assert "does not fit the network" in err

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (
                ["nowhere"],
                "nowhere is not a model: give a folder with model.json, a MONAI bundle, a result folder of nnU-Net",
            ),
            (["nowhere:f"], "there is no module 'nowhere'"),
            (["nowhere:f", "--size", "big"], "is not a size"),
            ([], "Missing argument"),
        ],
    )
    def test_mistakes_are_one_line(self, dltta, arguments, words):
        code, _, err = dltta("inspect", *arguments)
        assert code == 2
        assert words in err
        assert len(err.strip().splitlines()) == 1

    def test_help_shows_an_example(self, dltta):
        assert "dltta inspect models/a" in dltta("inspect", "--help")[1].split("Examples")[1]
