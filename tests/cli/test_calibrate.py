"""`dltta calibrate`, as a user types it, and what `dltta adapt` makes of it."""

import csv
import json
import pickle

import pytest

from dltta.data.phantom import folder as phantom_folder
from dltta.data.phantom import phantom
from dltta.data.preprocessing import Preprocessing
from dltta.evaluation import runners
from dltta.models.io.checkpoint import Checkpoint, save_checkpoint
from dltta.models.nets.architecture import Architecture
from networks import trained
from streams import lines, save_model, typed, write_site

pytestmark = pytest.mark.usefixtures("short_rehearsal", "no_power_cut")


@pytest.fixture
def dltta(monkeypatch, capsys):
    return lambda *arguments: typed(monkeypatch, capsys, *arguments)


@pytest.mark.long
def test_a_model_folder_is_rehearsed_in_place_and_every_prediction_has_an_expected_quality(dltta, tmp_path):
    model, site = save_model(tmp_path / "model"), write_site(tmp_path / "site")
    code, out, err = dltta("calibrate", "-m", model, "-i", site)
    assert (code, "rehearse 9/9" in err) == (0, True)
    assert "batches of 1: source, batch" in out
    assert (model / "rehearsal.json").is_file()
    assert not (model / "rehearsal.parts").exists()
    arguments = ("adapt", "-m", model, "-i", site / "imagesTr", "-o")
    code, out, err = dltta(*arguments, tmp_path / "out")
    assert (code, "not rehearsed" in err) == (0, False)
    entries = lines(tmp_path / "out")[1:]
    assert all(0 <= entry["quality_low"] <= entry["quality"] <= entry["quality_high"] <= 1 for entry in entries)
    flagged = sum(entry["review"] for entry in entries)
    assert ("none to review" in out) == (flagged == 0)
    edited = json.loads((model / "rehearsal.json").read_text())
    for effort in edited["batch_sizes"]["1"].values():
        effort["review_below"] = 2.0  # all of them
    (model / "rehearsal.json").write_text(json.dumps(edited))
    assert dltta(*arguments, tmp_path / "all", "--effort", "low")[0] == 0
    code, out, _ = dltta(*arguments, tmp_path / "again", "--fail-on-review")
    assert (code, "6 to review" in out) == (3, True)


@pytest.mark.long
def test_a_stopped_stream_of_a_rehearsed_model_goes_on_as_if_it_had_never_stopped(dltta, tmp_path):
    model, site = save_model(tmp_path / "model"), write_site(tmp_path / "site")
    assert dltta("calibrate", "-m", model, "-i", site, "-o", tmp_path / "known")[0] == 0
    assert not (model / "rehearsal.json").exists()
    arguments = ("adapt", "-m", model, "--calibration", tmp_path / "known", "-i", site / "imagesTr", "-o")
    assert dltta(*arguments, tmp_path / "whole")[0] == 0
    last = sorted((site / "imagesTr").iterdir())[3:]
    away = tmp_path / "away"
    away.mkdir()
    for path in last:
        path.rename(away / path.name)
    assert dltta(*arguments, tmp_path / "parts")[0] == 0
    for path in away.iterdir():
        path.rename(site / "imagesTr" / path.name)
    assert dltta(*arguments, tmp_path / "parts", "--resume")[0] == 0

    def kept(folder):
        told = [
            {key: entry.get(key) for key in ("case", "candidate", "quality", "state_sha256")} for entry in lines(folder)
        ]
        return told, [path.read_bytes() for path in sorted(folder.glob("*.png"))]

    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")


@pytest.mark.long
def test_a_rehearsed_classification_is_verified_and_scored_by_its_classes_alone(dltta, tmp_path):
    """The table also has the expected quality of each image, which is no class."""
    site, model = tmp_path / "site", tmp_path / "model"
    made = phantom("histology", "hospital_0", 24, size=(32, 32))
    phantom_folder.write_site(made, site)
    architecture = Architecture("densenet_small", 2, 3, 2, {})
    network = trained(architecture.build(seed=3))
    save_checkpoint(model, Checkpoint(network, architecture, made.task, made.classes, Preprocessing("scale", 255.0)))
    assert dltta("calibrate", "-m", model, "-i", site)[0] == 0
    assert dltta("adapt", "-m", model, "-i", site, "-o", tmp_path / "out", "--batch-size", "8")[0] == 0
    with (tmp_path / "out" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    expected = ["quality", "quality_low", "quality_high", "review"]
    assert [*rows[0]] == ["image", "prediction", *made.classes, *expected]
    code, out, _ = dltta("state", "verify", tmp_path / "out")
    assert (code, out) == (0, f"{tmp_path / 'out'}: the record is as it was written\n")
    right = [row["prediction"] == made.classes[made[index].label] for index, row in enumerate(rows)]
    for given in (tmp_path / "out", tmp_path / "out" / "predictions.csv"):
        code, out, err = dltta("evaluate", "-p", given, "-l", site / "labels.csv", "--json")
        assert (code, err.startswith("score 24/24 ")) == (0, True)
        assert json.loads(out)["metrics"]["accuracy"] == pytest.approx(sum(right) / len(right))


def test_images_without_labels_give_what_needs_none_and_it_is_said(dltta, tmp_path):
    model, site = save_model(tmp_path / "model"), write_site(tmp_path / "site", labeled=False)
    code, out, _ = dltta("calibrate", "-m", model, "-i", site, "-o", tmp_path / "known")
    assert (code, "calibrated without labels with 6 images" in out) == (0, True)
    code, _, err = dltta(
        "adapt", "-m", model, "--calibration", tmp_path / "known", "-i", site / "imagesTs", "-o", tmp_path / "out"
    )
    assert (code, "was not rehearsed with" in err) == (0, True)
    shrunken = ("--method", "ptbn", "--statistics", "shrinkage")
    given = ("adapt", "-m", model, "--calibration", tmp_path / "known", "-i", site / "imagesTs", *shrunken)
    assert dltta(*given, "-o", tmp_path / "shrunken")[0] == 0


def test_mistakes_are_one_line(dltta, tmp_path):
    model, site = save_model(tmp_path / "model"), write_site(tmp_path / "site")
    code, _, err = dltta("adapt", "-m", model, "--calibration", site, "-i", site / "imagesTr", "-o", tmp_path / "out")
    assert (code, "holds no calibration" in err) == (2, True)
    described = json.loads((site / "dataset.json").read_text())
    described["labels"] = {"background": 0, "a": 1}
    (site / "dataset.json").write_text(json.dumps(described))
    code, _, err = dltta("calibrate", "-m", model, "-i", site)
    assert (code, "has segmentation of 2 classes" in err) == (2, True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("place", "options"),
    [("Local", ("-j", "2")), ("Ray", ("--on", "ray")), ("Slurm", ("--on", "slurm", "--slurm", "cluster=local"))],
)
def test_streams_of_a_rehearsal_go_to_the_place_that_is_named_and_give_the_same_bytes(
    dltta, tmp_path, monkeypatch, place, options
):
    ran = []

    def run(self, tasks, *, threads, done, lost):
        """What its workers do, in this process, the last one first."""
        assert threads == 1
        for task in reversed(tasks):
            pickle.loads(pickle.dumps(task.call))()
            ran.append(type(self).__name__)
            done(task)

    monkeypatch.setattr(getattr(runners, place), "run", run)
    model, site = save_model(tmp_path / "model"), write_site(tmp_path / "site")
    arguments = ("calibrate", "-m", model, "-i", site, "--threads", "1", "-o")
    assert dltta(*arguments, tmp_path / "here")[0] == 0
    assert ran == []
    assert dltta(*arguments, tmp_path / "there", *options)[0] == 0
    assert ran == [place] * 9
    assert (tmp_path / "there" / "rehearsal.json").read_bytes() == (tmp_path / "here" / "rehearsal.json").read_bytes()
