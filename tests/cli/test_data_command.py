"""`dltta data check`, `dltta data phantom` and `dltta data card` as somebody types them."""

import json

import numpy as np
import pytest
from PIL import Image as Pillow

from dltta.cli.data import grouped
from dltta.data.sites import Problem
from streams import typed


@pytest.fixture
def dltta(monkeypatch, capsys):
    return lambda *arguments: typed(monkeypatch, capsys, *arguments)


@pytest.fixture
def site(tmp_path):
    """Six cases; the masks of all but the first have a value that is no class."""
    described = {"channel_names": {"0": "grey"}, "labels": {"background": 0, "cell": 1}, "file_ending": ".png"}
    (tmp_path / "dataset.json").write_text(json.dumps({**described, "numTraining": 6}))
    for folder in ("imagesTr", "labelsTr"):
        (tmp_path / folder).mkdir()
    for index in range(6):
        image = np.full((8, 9), 10 * index, np.uint8)
        Pillow.fromarray(image).save(tmp_path / "imagesTr" / f"case_{index}_0000.png")
        Pillow.fromarray(np.full((8, 9), 255 if index else 1, np.uint8)).save(
            tmp_path / "labelsTr" / f"case_{index}.png"
        )
    return tmp_path


def test_one_cause_over_many_files_is_told_once(dltta, site):
    code, out, _ = dltta("data", "check", site)
    assert code == 1
    first, more, total = out.splitlines()
    assert first.startswith(f"{site / 'labelsTr' / 'case_1.png'}: ")
    assert more == "  the same in 4 more: case_2.png, case_3.png, case_4.png …"
    assert total == "5 problems"
    assert len(json.loads(dltta("data", "check", site, "--json")[1])) == 5


def test_a_message_that_names_its_own_case_is_the_same_cause(tmp_path):
    problems = [
        Problem(tmp_path / f"case_{n}.png", f"size (8, 9) instead of (4, 4) in case_{n}_0000.png", "export it again")
        for n in (1, 2)
    ]
    other = Problem(tmp_path / "case_3.png", "size (8, 9) instead of (5, 5) in case_3_0000.png", "export it again")
    assert [*grouped([*problems, other])] == [str(problems[0]), "  the same in 1 more: case_2.png", str(other)]


def test_a_sound_site_is_told_so(dltta, site):
    for index in range(6):
        Pillow.fromarray(np.ones((8, 9), np.uint8)).save(site / "labelsTr" / f"case_{index}.png")
    assert dltta("data", "check", site)[:2] == (0, f"{site}: nothing is wrong\n")


def test_another_layout_is_checked_when_asked_for(dltta, tmp_path):
    code, out, _ = dltta("data", "check", tmp_path, "--as", "camelyon17")
    assert (code, "metadata.csv" in out) == (1, True)
    code, _, err = dltta("data", "check", tmp_path, "--as", "camelyon")
    assert (code, "'camelyon' is not one of 'own', 'oct', 'camelyon17', 'prostate'" in err) == (2, True)


def test_a_card_says_what_a_data_set_is(dltta):
    code, out, _ = dltta("data", "card", "oct")
    assert (code, out.startswith("### ")) == (0, True)


def test_synthetic_images_are_a_site_to_try_things_with(dltta, tmp_path):
    given = ("data", "phantom", "oct", "cirrus", "-o", tmp_path / "b", "-n", "2", "--size", "96x32")
    assert dltta(*given)[:2] == (0, f"{tmp_path / 'b'}: 2 synthetic cases of cirrus, oct segmentation\n")
    assert dltta("data", "check", tmp_path / "b")[:2] == (0, f"{tmp_path / 'b'}: nothing is wrong\n")
    assert {path.name for path in (tmp_path / "b" / "imagesTr").iterdir()} == {
        "cirrus_0000_0000.png",
        "cirrus_0001_0000.png",
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("oct", "cirus"), "there is no oct site 'cirus'; did you mean 'cirrus'?"),
        (("ct", "cirrus"), "'ct' is not one of 'oct', 'histology', 'prostate'"),
        (("oct", "cirrus", "--size", "8x8"), "size (8, 8) does not suit oct; give at least (96, 32)"),
        (("oct", "cirrus", "-n", "0"), "count is 0"),
        (("oct", "cirrus", "--seed", "-1"), "seed is -1; choose 0 or more"),
    ],
)
def test_a_wrong_word_about_synthetic_images_is_one_line(dltta, tmp_path, given, words):
    code, _, err = dltta("data", "phantom", *given, "-o", tmp_path / "b")
    assert (code, err.count("\n"), words in err) == (2, 1, True), err
    assert not list(tmp_path.iterdir())
