"""mercure's contract: a folder of slices and task.json in, segmentations and result.json out."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("pydicom", reason="DICOM is not installed: pip install 'dltta[dicom]'")
pytest.importorskip("highdicom", reason="DICOM is not installed: pip install 'dltta[dicom]'")

from pydicom import dcmread

import streams
from dicoms import write_series
from dltta.errors import DataError, SettingError
from dltta.serving.mercure import run_task


def task(folder, model, **settings):
    """A folder as mercure lays it out: slices named SERIES#INSTANCE.dcm."""
    folder.mkdir(parents=True, exist_ok=True)
    volume = np.random.default_rng(len(list(folder.iterdir()))).integers(0, 255, (3, 32, 32)).astype(np.int16)
    for file in write_series(folder / "made", volume, StationName="CT1"):
        header = dcmread(file, stop_before_pixels=True)
        file.rename(folder / f"{header.SeriesInstanceUID}#{header.SOPInstanceUID}.dcm")
    (folder / "made").rmdir()
    chosen = {"model": str(model), "method": "tent", **settings}
    (folder / "task.json").write_text(json.dumps(described(chosen)))
    return folder


def described(settings):
    """A task as mercure writes it for one processing step."""
    return {
        "id": "5d1f", "info": {"action": "both", "uid": "1.2", "uid_type": "series", "applied_rule": "segment"},
        "target": {"target_name": ["archive"]}, "dispatch": {"target_name": ["archive"], "retries": None},
        "process": {
            "module_name": "dltta", "module_config": {"docker_tag": "dltta-mercure"}, "settings": settings,
            "retain_input_images": False, "output": None,
        },
        "study": {}, "nomad_info": None,
    }  # fmt: skip


@pytest.fixture
def model(tmp_path):
    return streams.save_model(tmp_path / "model")


@pytest.fixture
def leaving(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_every_series_gets_a_segmentation_of_its_study(tmp_path, model, leaving):
    arriving = task(tmp_path / "in", model, state=str(tmp_path / "state"), capture=True)
    result = run_task(arriving, leaving)
    ((uid, said),) = result["series"].items()
    assert said["sequence"] == 1
    found = dcmread(leaving / f"{uid}#seg.dcm")
    assert found.Modality == "SEG"
    assert found.StudyInstanceUID == dcmread(next(arriving.glob("*.dcm"))).StudyInstanceUID
    assert dcmread(leaving / f"{uid}#capture.dcm").Modality == "OT"


def test_state_goes_on_from_task_to_task_and_a_task_that_is_repeated_is_learned_from_once(tmp_path, model, leaving):
    for _ in range(2):
        run_task(
            task(tmp_path / "first", model, state=str(tmp_path / "state")) if _ == 0 else tmp_path / "first", leaving
        )
    result = run_task(task(tmp_path / "second", model, state=str(tmp_path / "state")), leaving)
    (said,) = result["series"].values()
    assert said["sequence"] == 2


def test_a_series_that_cannot_be_used_is_reported_and_notified(tmp_path, model, leaving):
    arriving = task(tmp_path / "in", model)
    broken = sorted(arriving.glob("*.dcm"))[0]
    broken.write_bytes(broken.read_bytes()[:400])
    result = run_task(arriving, leaving)
    (said,) = result["series"].values()
    assert "problem" in said
    assert "1 of 1" in result["__mercure_notification"]["text"]
    assert list(leaving.iterdir()) == []


def test_one_series_that_is_no_dicom_does_not_keep_the_others_back(tmp_path, model, leaving):
    arriving = task(tmp_path / "in", model)
    (arriving / "1.2.3#1.dcm").write_text("no DICOM")
    result = run_task(arriving, leaving)
    assert "cannot be read as DICOM" in result["series"].pop("1.2.3")["problem"]
    assert [said["sequence"] for said in result["series"].values()] == [1]
    assert "1 of 2" in result["__mercure_notification"]["text"]


def test_of_several_steps_the_first_is_ours(tmp_path, model, leaving):
    arriving = task(tmp_path / "in", model)
    whole = json.loads((arriving / "task.json").read_text())
    whole["process"] = [whole["process"], {"settings": {"of": "another module"}}]
    (arriving / "task.json").write_text(json.dumps(whole))
    assert len(run_task(arriving, leaving)["series"]) == 1


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (described({}), "name no model"),
        (described(None), "name no model"),
        (described({"model": "m", "speed": 1}), "no setting 'speed'"),
        ([], "name no model"),
        ({"process": []}, "name no model"),
    ],
)
def test_settings_that_cannot_be_used_are_named(tmp_path, model, leaving, written, said):
    arriving = task(tmp_path / "in", model)
    (arriving / "task.json").write_text(json.dumps(written))
    with pytest.raises(SettingError, match=said):
        run_task(arriving, leaving)


def test_a_folder_that_is_not_mercures_is_refused(tmp_path, leaving):
    with pytest.raises(DataError, match="task.json"):
        run_task(tmp_path, leaving)


@pytest.mark.long
def test_the_entry_point_reads_the_variables_and_says_one_line(tmp_path, model, leaving):
    arriving = task(tmp_path / "in", model)
    command = [sys.executable, "-m", "dltta.serving.mercure"]
    without = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MERCURE_IN_DIR": ""})
    assert (without.returncode, len(without.stderr.strip().splitlines())) == (2, 1)
    given = {"MERCURE_IN_DIR": str(arriving), "MERCURE_OUT_DIR": str(leaving)}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **given})
    assert done.returncode == 0, done.stderr
    assert json.loads((leaving / "result.json").read_text())["state_kept"] is False
