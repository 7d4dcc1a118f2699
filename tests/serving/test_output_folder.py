"""Nothing is written through a symbolic link, and what was learned is for the owner alone."""

import os
import stat
from contextlib import nullcontext

import pytest

from dltta.data.inbox import find_incoming
from dltta.errors import SettingError, StateError
from dltta.files import open_atomically
from dltta.serving.verification import verify
from streams import classifier, left, lines, run, save_model, segmenter, write_images

pytestmark = pytest.mark.usefixtures("no_power_cut")


WORDS = "symbolic link, which is never followed|cannot be read"


@pytest.fixture
def images(tmp_path):
    return write_images(tmp_path / "in", 4)


@pytest.fixture
def victim(tmp_path):
    """A file of somebody else that links lead to."""
    (tmp_path / "victim").write_bytes(b"mine")
    return tmp_path / "victim"


@pytest.mark.parametrize(
    "name", ["stream.jsonl", "state/head", "state/lock", "state/stream.json", "state/versions/000003.safetensors"]
)
@pytest.mark.parametrize("resume", [False, True])
def test_a_link_in_the_place_of_a_file_is_not_followed(images, tmp_path, victim, name, resume):
    output, cases = tmp_path / "out", find_incoming(images)
    if resume:
        run(segmenter(), cases[:2], output)
    place = output / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(victim)
    replaced = name == "state/versions/000003.safetensors" or (name == "state/stream.json" and not resume)
    with nullcontext() if replaced else pytest.raises(StateError, match=WORDS):
        run(segmenter(), cases, output, resume=resume)
    assert place.is_symlink() != replaced
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("make", [segmenter, classifier])
def test_a_link_in_the_place_of_a_prediction_is_replaced_or_refused(images, tmp_path, victim, make):
    output, cases = tmp_path / "out", find_incoming(images)
    name = "case_3.png" if make is segmenter else "predictions.csv"
    given = {} if make is segmenter else {"batch_size": 2}

    def plant(line):
        (output / name).unlink(missing_ok=True)
        (output / name).symlink_to(victim)

    with nullcontext() if make is segmenter else pytest.raises(StateError, match="symbolic link, which is never"):
        run(make(), cases, output, tick=plant, **given)
    assert victim.read_bytes() == b"mine"
    assert len(lines(output)) > 1


@pytest.mark.parametrize("name", ["state", "state/versions", "state/memory"])
@pytest.mark.parametrize("late", [False, True])
def test_a_link_in_the_place_of_a_folder_is_refused(images, tmp_path, name, late):
    output, cases = tmp_path / "out", find_incoming(images)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place = output / name

    def plant(line=None):
        if place.is_symlink():
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            place.rename(tmp_path / "before")
        place.symlink_to(elsewhere)

    if not late:
        plant()
    with pytest.raises(StateError, match=r"symbolic link, which is never followed|cannot be|was altered|is missing"):
        run(segmenter(), cases, output, tick=plant)
    assert list(elsewhere.iterdir()) == []


def test_an_output_folder_that_becomes_a_link_gets_nothing(images, tmp_path):
    output, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    elsewhere.mkdir()

    def plant(line):
        if not output.is_symlink():
            output.rename(tmp_path / "before")
            output.symlink_to(elsewhere)

    with pytest.raises(StateError, match="it is a symbolic link, which is never followed"):
        run(segmenter(), images, output, tick=plant)
    assert list(elsewhere.iterdir()) == []


def test_an_output_folder_that_is_a_link_from_the_start_is_the_users_choice(images, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    assert run(segmenter(), images, tmp_path / "out").predicted == 4
    assert (tmp_path / "disk" / "case_0.png").is_file()


def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path, victim):
    (tmp_path / f".new.{os.getpid()}.part").symlink_to(victim)
    with open_atomically(tmp_path / "new") as file:
        file.write(b"content")
    assert (victim.read_bytes(), (tmp_path / "new").read_bytes()) == (b"mine", b"content")
    assert not (tmp_path / "new").is_symlink()


@pytest.mark.parametrize("make", [segmenter, classifier])
def test_state_and_log_are_for_the_owner_alone(images, tmp_path, make):
    before = os.umask(0)
    try:
        run(make(), images, tmp_path / "out", **({"batch_size": 2} if make is classifier else {}))
    finally:
        os.umask(before)
    private = [tmp_path / "out" / "stream.jsonl", tmp_path / "out" / "state", *(tmp_path / "out" / "state").rglob("*")]
    modes = {stat.S_IMODE(path.stat().st_mode) for path in private if path.is_file()}
    folders = {stat.S_IMODE(path.stat().st_mode) for path in private if path.is_dir()}
    assert (modes, folders) == ({0o600}, {0o700})
    assert len(left(tmp_path / "out")) > 8


@pytest.mark.parametrize("inside", ["predictions", "state", "new/deeper"])
def test_a_stream_does_not_grow_within_another(images, tmp_path, inside):
    run(segmenter(), images, tmp_path / "out")
    with pytest.raises(SettingError, match="lies in the stream of"):
        run(segmenter(), images, tmp_path / "out" / inside)
    assert verify(tmp_path / "out") == []


@pytest.mark.parametrize("inside", [".", "predictions"])
def test_a_stream_does_not_grow_within_a_model(images, tmp_path, inside):
    model = save_model(tmp_path / "model")
    with pytest.raises(SettingError, match="lies in the model"):
        run(segmenter(), images, model / inside)
    assert not (model / inside / "state").exists()
