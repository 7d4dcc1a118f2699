"""The commands as a user types them."""

import json

import pytest

from dltta.models.io.checkpoint import load_checkpoint
from streams import typed

pytestmark = pytest.mark.usefixtures("short_rehearsal")
AWAY = ("--target", "phantom:oct:cirrus:4")


@pytest.fixture
def dltta(monkeypatch, capsys):
    return lambda *arguments: typed(monkeypatch, capsys, *arguments)


@pytest.fixture
def small(tmp_path):
    config = tmp_path / "small.toml"
    config.write_text(
        'sites = ["phantom:oct:spectralis:4"]\nnetwork_options = { width = 4 }\n'
        "[training]\nepochs = 1\nbatch_size = 2\nvalidation = 0.25\n"
    )
    return config


def test_version(dltta):
    from dltta import __version__

    assert dltta("--version")[1].strip() == __version__


def test_train_writes_a_model_and_says_how_good_it_is(dltta, small, tmp_path):
    code, out, _ = dltta("train", small, "-o", tmp_path / "model", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["metric"] == "dice"
    assert 0 <= found["score"] <= 1
    assert (tmp_path / "model" / "model.json").is_file()


def test_a_model_is_not_overwritten_by_accident(dltta, small, tmp_path):
    dltta("train", small, "-o", tmp_path / "model")
    code, _, err = dltta("train", small, "-o", tmp_path / "model")
    assert code == 2
    assert "already holds a model; add --resume" in err
    assert dltta("train", small, "-o", tmp_path / "model", "--resume")[0] == 0


@pytest.mark.long
def test_train_learns_with_a_target_and_resumes(dltta, small, tmp_path):
    arguments = ["train", small, "--uda", "udas", "--target", "phantom:oct:cirrus:3:1", "-o", tmp_path / "model"]
    arguments += ["--uda-setting", "epochs=1", "--uda-setting", "width=2", "--uda-setting", "levels=single"]
    code, out, err = dltta(*arguments, "--tensorboard", tmp_path / "log", "--json")
    assert code == 0, err
    assert json.loads(out)["metric"] == "dice"
    record = load_checkpoint(tmp_path / "model").record
    found = record["uda"]
    assert (found["method"], found["targets"], found["target_images"]) == ("udas", ["cirrus"], 3)
    assert (found["epochs"], found["levels"]) == (1, "single")
    assert any((tmp_path / "log").iterdir())
    assert dltta(*arguments)[0] == 2
    assert dltta(*arguments, "--resume")[0] == 0
    other = ["-o", tmp_path / "other", "--source-model", tmp_path / "model" / "source"]
    assert dltta(*arguments, *other)[0] == 0
    assert not (tmp_path / "other" / "source").exists()


def test_tensorboard_log(dltta, small, tmp_path):
    dltta("train", small, "-o", tmp_path / "model", "--tensorboard", tmp_path / "log")
    assert any(path.name.startswith("events") for path in (tmp_path / "log").iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["demo", "--task", "oc"], "Invalid value for '--task': 'oc' is not one of 'oct', 'histology'"),
        (["train"], "nothing to train"),
        (["train", "--epoch", "3"], "No such option: --epoch"),
        (["train", "--epochs", "few"], "Invalid value for '--epochs'"),
        (["trian"], "No such command 'trian'. Did you mean 'train'? Try --help.\n"),
        (["train", "-i", "nowhere", "-o", "model"], "there is no folder nowhere"),
        (["train", "missing.toml"], "cannot read missing.toml"),
        (["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--size", "12,4"], "is not a size"),
        (["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--with", "tent"], "cannot train 'tent'"),
        (["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--device", "gpu"], "device 'gpu' cannot be used"),
        (
            ["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--network", "vnet"],
            "'vnet' is not one of 'unet'",
        ),
        (["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--target", "phantom:oct:cirrus:4"], "add --uda"),
        (["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--uda-setting", "epochs=2"], "add --uda"),
        (["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--uda", "udas"], "say where they are with --target"),
        (
            ["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--uda", "udass"],
            "'udass' is not one of 'uda-st'",
        ),
        (
            ["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--uda", "udas", "--uda-setting", "epochs:2"],
            "'epochs:2' is not a setting; write NAME=VALUE",
        ),
        (
            ["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--uda", "udas", "--uda-setting", "levels=three"],
            "levels in [uda.udas] must be one of single, multi, got 'three'",
        ),
        (
            ["train", "-i", "phantom:oct:spectralis:4", "-o", "m", "--uda", "udas", *AWAY, "--with", "ttt"],
            "train a model for each",
        ),
    ],
)
def test_a_mistake_is_one_line_exit_code_2_and_no_file(dltta, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = dltta(*arguments)
    assert code == 2
    assert not out
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_wrong_config_key_fails_at_once_with_the_right_spelling(dltta, tmp_path):
    config = tmp_path / "wrong.toml"
    config.write_text("[training]\nepochss = 3\n")
    code, _, err = dltta("train", config, "-i", "phantom:oct:spectralis:4", "-o", tmp_path / "model")
    assert (code, "did you mean 'epochs'" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["oct", "histology", "prostate"])
def test_quick_demo_of_every_task(dltta, tmp_path, task):
    code, out, _ = dltta("demo", "--task", task, "--quick", "-o", tmp_path, "--json")
    assert code == 0
    found = json.loads(out)[0]
    results = json.loads((tmp_path / f"{task}-quick" / "results.json").read_text())
    kinds = {(s["method"], s["rate"]) for s in results["streams"]}
    assert len(kinds) == 8
    assert found["report"].endswith("report.html")
    assert found["story"][0].startswith("At home. ")
    changing = json.loads((tmp_path / f"{task}-quick" / "changing" / "results.json").read_text())
    assert {len({case["site"] for case in stream["cases"]}) for stream in changing["streams"]} == {2}


def test_two_comparisons_share_one_source_training(dltta, small, tmp_path):
    config = tmp_path / "bench.toml"
    config.write_text(
        'source = ["phantom:oct:spectralis:6"]\ntargets = ["phantom:oct:cirrus:2:1"]\nin_domain = "none"\n'
        "examples = 0\nnetwork_options = { width = 2 }\n[training]\nepochs = 1\nbatch_size = 2\n"
    )
    work = tmp_path / "work"
    assert dltta("bench", config, "--methods", "source", "--work", work, "-o", tmp_path / "one")[0] == 0
    weights = (work / "models" / "seed_0" / "model.safetensors").stat()
    assert dltta("bench", config, "--methods", "ptbn", "--work", work, "-o", tmp_path / "two")[0] == 0
    assert (work / "models" / "seed_0" / "model.safetensors").stat() == weights
    assert not (tmp_path / "two" / "models").exists()
    assert (tmp_path / "two" / "table.md").is_file()
