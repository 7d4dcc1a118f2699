import json
import os
import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image as Pillow

from dltta.data.cards import card, cards
from dltta.data.check import check_published, check_site
from dltta.data.sites import parse_description
from dltta.errors import DataError

REAL = os.environ.get("DLTTA_DATA")
DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def make(folder: Path, cases: int = 3, **changes: object) -> Path:
    content = {
        "channel_names": {"0": "T2"},
        "labels": {"background": 0, "cord": 1},
        "numTraining": cases,
        "file_ending": ".nii.gz",
    }
    for sub in ("imagesTr", "labelsTr"):
        (folder / sub).mkdir(parents=True)
    (folder / "dataset.json").write_text(json.dumps(content | changes))
    for n in range(cases):
        write(folder / "imagesTr" / f"c{n}_0000.nii.gz", np.full((3, 4, 5), n, np.int16))
        write(folder / "labelsTr" / f"c{n}.nii.gz", np.ones((3, 4, 5), np.uint8))
    return folder


def write(path: Path, array: np.ndarray, spacing: float = 1.0, origin: float = 0.0) -> None:
    affine = np.diag([1.0, 1.0, spacing, 1.0])
    affine[0, 3] = origin
    nib.save(nib.Nifti1Image(array, affine), path)


def only(problems: list) -> str:
    assert len(problems) == 1, [str(problem) for problem in problems]
    line = str(problems[0])
    assert "\n" not in line
    return line


def test_a_sound_site_has_no_problems_and_progress_reaches_the_end(tmp_path):
    seen = []
    assert check_site(make(tmp_path / "s"), progress=lambda done, total: seen.append((done, total))) == []
    assert seen == [(n, 6) for n in range(1, 7)]


@pytest.mark.parametrize(
    ("array", "place", "says"),
    [
        (np.ones((3, 4, 6), np.uint8), {}, "labelsTr/c1.nii.gz: size (3, 4, 6) instead of (3, 4, 5) in c1_0000.nii.gz"),
        (np.ones((3, 4, 5), np.uint8), {"spacing": 2.0}, "spacing 1 x 1 x 2 mm instead of 1 x 1 x 1 mm"),
        (np.ones((3, 4, 5), np.uint8), {"origin": 5.0}, "orientation or origin differ by up to 5 mm"),
        (np.full((3, 4, 5), 7, np.uint8), {}, "label value 7 out of range 0..1; correct the mask"),
        (np.full((3, 4, 5), 0.5, np.float32), {}, "a mask holds whole class values"),
    ],
)
def test_a_label_that_does_not_fit_is_one_line(tmp_path, array, place, says):
    folder = make(tmp_path / "s")
    write(folder / "labelsTr" / "c1.nii.gz", array, **place)
    assert says in only(check_site(folder))


def test_unreadable_images_are_found_by_header_or_by_pixels(tmp_path):
    folder = make(tmp_path / "s")
    (folder / "imagesTr" / "c0_0000.nii.gz").write_text("text")
    noise = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    write(folder / "imagesTr" / "c1_0000.nii.gz", noise)
    whole = (folder / "imagesTr" / "c1_0000.nii.gz").read_bytes()
    (folder / "imagesTr" / "c1_0000.nii.gz").write_bytes(whole[:-60])
    noise[0, 0, 0] = np.nan
    write(folder / "imagesTr" / "c2_0000.nii.gz", noise)
    lines = [str(problem) for problem in check_site(folder)]
    assert len(lines) == 3
    assert "c0_0000.nii.gz: cannot be read as NIfTI" in lines[0]
    assert "c1_0000.nii.gz: cannot be read as NIfTI" in lines[1]
    assert "c2_0000.nii.gz: 1 of 60 values are NaN" in lines[2]


def test_every_problem_is_reported_not_only_the_first(tmp_path):
    folder = make(tmp_path / "s", 4)
    (folder / "labelsTr" / "c0.nii.gz").unlink()
    write(folder / "labelsTr" / "z.nii.gz", np.ones((3, 4, 5), np.uint8))
    write(folder / "imagesTr" / "C1_0000.nii.gz", np.ones((3, 4, 5), np.int16))
    write(folder / "labelsTr" / "C1.nii.gz", np.ones((3, 4, 5), np.uint8))
    write(folder / "labelsTr" / "c3.nii.gz", np.full((3, 4, 5), 2, np.uint8))
    lines = "\n".join(str(problem) for problem in check_site(folder))
    for says in (
        "c0.nii.gz: label missing",
        "z.nii.gz: label without an image",
        "one name: C1 and c1",
        "label value 2",
    ):
        assert says in lines
    assert lines.count("\n") == 3


def test_the_description_is_checked_against_the_disk(tmp_path):
    assert "numTraining 5, found 3 cases" in only(check_site(make(tmp_path / "number", numTraining=5)))
    assert "groups name 'c9', which is no case" in only(check_site(make(tmp_path / "groups", groups={"c9": "p"})))
    assert "finds no group" in only(check_site(make(tmp_path / "pattern", group_pattern="q(.*)")))
    two = make(tmp_path / "channels", 1, channel_names={"0": "a", "1": "b"})
    assert "1 channels, dataset.json names 2" in only(check_site(two))
    (tmp_path / "bad").mkdir()
    assert "dataset.json: missing" in only(check_site(tmp_path / "bad"))
    assert "no such folder" in only(check_site(tmp_path / "nowhere"))


def test_unlabeled_test_cases_are_no_problem_but_are_read(tmp_path):
    folder = make(tmp_path / "s")
    (folder / "imagesTs").mkdir()
    write(folder / "imagesTs" / "t_0000.nii.gz", np.zeros((3, 4, 5, 2), np.int16))
    assert "4-D NIfTI" in only(check_site(folder))


def test_a_classification_site_is_read_too(tmp_path):
    (tmp_path / "images").mkdir()
    content = {"task": "classification", "channel_names": {"0": "g"}, "labels": {"a": 0, "b": 1}, "file_ending": ".png"}
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    (tmp_path / "labels.csv").write_text("image,label\nx.png,a\ny.png,b\n")
    for name in ("x.png", "y.png"):
        Pillow.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "images" / name)
    assert check_site(tmp_path) == []
    Pillow.fromarray(np.zeros((4, 4, 3), np.uint8)).save(tmp_path / "images" / "y.png")
    assert "3 channels, dataset.json names 1" in only(check_site(tmp_path))


def test_cards_are_complete_and_shown_in_the_documentation():
    shown = DOCS.read_text(encoding="utf-8")
    assert list(cards()) == ["oct", "camelyon17", "prostate"]
    for name in cards():
        assert card(name).markdown() in shown
    with pytest.raises(DataError, match="did you mean 'prostate'"):
        card("prostata")


def test_the_documented_descriptions_can_be_used():
    blocks = re.findall(r"```json\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        assert len(parse_description(DOCS, json.loads(block)).classes) >= 2


def test_an_unknown_published_data_set_is_refused(tmp_path):
    with pytest.raises(DataError, match="no data set 'mnist'; use one of oct, camelyon17, prostate"):
        check_published("mnist", tmp_path)


@pytest.mark.skipif(REAL is None, reason="DLTTA_DATA is not set")
@pytest.mark.parametrize("name", ["oct_layers/optovue_a", "spinal_cord/ceitec_siemens3t", "wbc_types/cellavision"])
def test_real_sites_have_no_problems(name):
    folder = Path(REAL or "") / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not there")
    assert check_site(folder) == []
