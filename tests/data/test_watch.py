"""A folder in which images arrive, with a clock that moves only when somebody sleeps."""

import os
import shutil
import threading

import nibabel as nib
import numpy as np
import pytest
import tifffile
from PIL import Image as Pillow

from dicoms import write_dicom, write_series
from dltta.data.formats import format as registry
from dltta.data.formats.format import complete
from dltta.data.watch import watch_incoming
from dltta.errors import DataError

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4)
NOISE = np.random.default_rng(0).integers(1, 255, (64, 64), dtype=np.uint8)


def png(path, array=GREY):
    path.parent.mkdir(parents=True, exist_ok=True)
    Pillow.fromarray(array).save(path)
    return path


class Clock:
    """Time that passes only when somebody sleeps, and what happens at which second."""

    def __init__(self, **events):
        self.now = 0.0
        self.events = {float(name.removeprefix("at_")): event for name, event in events.items()}

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert self.now < 1000, "watched for too long"
        self.now += seconds
        for moment in sorted(self.events):
            if moment <= self.now:
                self.events.pop(moment)()


def watched(folder, clock, **options):
    """(second, name) of every case of a watch."""
    return [(clock.now, case.name) for case in watch_incoming(folder, clock=clock, sleep=clock.sleep, **options)]


def test_a_case_is_taken_when_it_stands_still_and_the_watch_ends_when_nothing_comes(tmp_path):
    png(tmp_path / "a.png")
    clock = Clock(at_3=lambda: png(tmp_path / "b.png"))
    assert watched(tmp_path, clock, idle=5) == [(1, "a"), (4, "b")]
    assert clock.now == 9


def save(path):
    """An image of the format that the name says, without zeros at its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".nii" in path.name:
        nib.save(nib.Nifti1Image(NOISE[..., None], np.eye(4)), path)
    elif path.suffix == ".tif":
        tifffile.imwrite(path, NOISE)
    elif path.suffix == ".dcm":
        write_dicom(path, NOISE)
    else:
        Pillow.fromarray(NOISE).save(path)
    return path


def paused(path, *moments, last=5):
    """A folder and a clock: a file arrives there in parts, at these seconds, and its time does not tell."""
    content = save(path.parent / "elsewhere" / path.name).read_bytes()
    parts = np.array_split(np.frombuffer(content, np.uint8), len(moments))
    path = path.parent / "in" / path.name
    path.parent.mkdir()

    def go_on():
        with path.open("ab") as file:
            file.write(parts.pop(0).tobytes())
        os.utime(path, (last, last))

    return path.parent, Clock(**{f"at_{moment}": go_on for moment in moments})


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.nii", "a.nii.gz"])
def test_a_copy_that_pauses_is_waited_for_and_taken_when_it_is_complete(tmp_path, name):
    folder, clock = paused(tmp_path / name, 1, 40, 290)
    assert watched(folder, clock, idle=60, settle=10) == [(291, "a")]


def test_a_dicom_copy_that_pauses_is_waited_for_and_then_settles(tmp_path):
    folder, clock = paused(tmp_path / "a.dcm", 1, 40, 290)
    found = list(watch_incoming(folder, idle=60, settle=10, clock=clock, sleep=clock.sleep))
    assert [(case.name, case.problem) for case in found] == [("a", None)]
    assert clock.now == 290 + 10 + 60


def test_a_slice_whose_copy_pauses_is_waited_for(tmp_path):
    files = write_series(tmp_path / "elsewhere", np.ones((3, 8, 8), np.int16), names=["IM1", "IM2", "IM3"])
    folder = tmp_path / "in" / "p"
    folder.mkdir(parents=True)
    for file in files[:2]:
        shutil.copy(file, folder)
    content = files[2].read_bytes()
    clock = Clock(
        at_2=lambda: (folder / "IM3").write_bytes(content[:60]),
        at_50=lambda: (folder / "IM3").write_bytes(content[:700]),
        at_99=lambda: (folder / "IM3").write_bytes(content),
    )
    found = [
        (clock.now, len(case.files), case.problem)
        for case in watch_incoming(tmp_path / "in", settle=10, idle=60, clock=clock, sleep=clock.sleep)
    ]
    assert found == [(109, 3, None)]


def test_space_that_is_not_filled_yet_is_waited_for(tmp_path):
    content = save(tmp_path / "elsewhere" / "a.png").read_bytes()
    path = tmp_path / "in" / "a.png"
    path.parent.mkdir()
    path.write_bytes(bytes(len(content)))
    clock = Clock(at_100=lambda: path.write_bytes(content))
    assert watched(path.parent, clock, idle=60) == [(101, "a")]


@pytest.mark.parametrize("name", ["a.nii", "a.tif"])
def test_an_end_of_zeros_may_be_space_that_is_not_filled_yet_so_the_file_must_settle(tmp_path, name):
    content = save(tmp_path / "elsewhere" / name).read_bytes()
    path = tmp_path / "in" / name
    path.parent.mkdir()
    if name == "a.tif":  # pixels last
        tifffile.imwrite(path, NOISE * 0)
        content = path.read_bytes()
    path.write_bytes(content[: len(content) - 4096] + bytes(4096))
    assert complete(path) is None
    assert watched(path.parent, Clock(), settle=7, idle=20) == [(7, "a")]


def test_a_file_that_stays_incomplete_is_given_as_it_is_and_again_when_it_changes(tmp_path):
    content = save(tmp_path / "elsewhere" / "a.png").read_bytes()
    path = tmp_path / "in" / "a.png"
    path.parent.mkdir()
    path.write_bytes(content[:900])
    clock = Clock(at_200=lambda: path.write_bytes(content[:950]), at_400=lambda: path.write_bytes(content))
    assert watched(path.parent, clock, stalled=100, idle=300) == [(100, "a"), (300, "a"), (401, "a")]


def test_a_case_that_could_not_be_read_is_given_again_when_it_changes(tmp_path):
    path = png(tmp_path / "a.png")
    clock = Clock(at_9=lambda: os.utime(path, (7, 7)), at_20=lambda: os.utime(path, (8, 8)))
    watch = watch_incoming(tmp_path, idle=30, clock=clock, sleep=clock.sleep)
    taken = []
    for case in watch:
        taken.append(clock.now)
        if len(taken) == 1:
            watch.retry(case)
    assert taken == [1, 10]


def test_a_case_with_a_problem_is_given_again_when_that_is_repaired(tmp_path):
    png(tmp_path / "a_0000.png")
    png(tmp_path / "a_0002.png")
    clock = Clock(at_50=lambda: png(tmp_path / "a_0001.png"))
    found = list(watch_incoming(tmp_path, settle=5, idle=60, clock=clock, sleep=clock.sleep))
    assert [(case.name, case.problem is None) for case in found] == [("a", False), ("a", True)]


def test_a_format_that_cannot_tell_must_settle(tmp_path, monkeypatch):
    class Plain:
        name, endings = "Plain", (".plain",)

        def begins(self, start):
            return start[:2] == b"PL"

        read_geometry = read_pixels = read_classes = write_classes = None

    monkeypatch.setattr(registry, "_registered", [Plain()])
    (tmp_path / "a.plain").write_bytes(b"PL" * 400)
    assert watched(tmp_path, Clock(), settle=7, idle=20) == [(7, "a")]


@pytest.mark.parametrize("name", ["a.png.part", "a.png.tmp", "~a.png", ".a.png", "a.png~", "A.PNG.FilePart"])
def test_a_temporary_name_is_ignored_until_it_is_renamed(tmp_path, name):
    before = png(tmp_path / "elsewhere" / "a.png").rename(tmp_path / name)
    shutil.rmtree(tmp_path / "elsewhere")
    clock = Clock(at_9=lambda: before.rename(tmp_path / "a.png"))
    watch = watch_incoming(tmp_path, idle=20, clock=clock, sleep=clock.sleep)
    assert [(clock.now, case.name) for case in watch] == [(10, "a")]


def test_a_watch_says_what_it_ignores(tmp_path):
    png(tmp_path / "a.png")
    (tmp_path / "b.jpg").touch()
    clock = Clock(at_3=lambda: (tmp_path / "c.jpg").touch())
    watch = watch_incoming(tmp_path, idle=9, clock=clock, sleep=clock.sleep)
    assert next(watch).name == "a"
    assert str(watch.ignored) == "ignored: 1 .jpg"
    assert list(watch) == []
    assert str(watch.ignored) == "ignored: 2 .jpg"


def test_links_in_circles_do_not_end_a_watch(tmp_path):
    clock = Clock(
        at_1=lambda: (tmp_path / "loop.png").symlink_to("loop.png"),
        at_2=lambda: (tmp_path / "folder").symlink_to("folder"),
        at_3=lambda: png(tmp_path / "a.png"),
    )
    found = list(watch_incoming(tmp_path, idle=20, settle=2, clock=clock, sleep=clock.sleep))
    assert {(case.name, case.problem is None) for case in found} == {("loop", False), ("folder", False), ("a", True)}


def test_a_drive_that_is_away_for_a_while_does_not_end_a_watch(tmp_path):
    folder = tmp_path / "in"
    png(folder / "a.png")

    def return_with_another():
        (tmp_path / "away").rename(folder)
        png(folder / "b.png")

    clock = Clock(at_3=lambda: folder.rename(tmp_path / "away"), at_60=return_with_another)
    assert watched(folder, clock, idle=100) == [(1, "a"), (61, "b")]


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.nii", "a.nii.gz"])
def test_no_truncation_is_complete(tmp_path, name):
    content = save(tmp_path / name).read_bytes()
    assert complete(tmp_path / name) is True
    for length in range(0, len(content), 31):
        (tmp_path / name).write_bytes(content[:length])
        assert complete(tmp_path / name) is False, length


def test_what_is_no_image_is_not_waited_for(tmp_path):
    for name in ("a.png", "a.tif", "a.nii", "a.nii.gz"):
        (tmp_path / name).write_text("this is a text" * 99)
        assert complete(tmp_path / name) is None


def test_nothing_is_given_up_that_may_still_become_whole(tmp_path):
    png(tmp_path / "a_0000.png")
    assert watched(tmp_path, Clock(), settle=9, idle=2) == [(9, "a")]


def test_a_file_rewritten_in_place_has_another_time(tmp_path):
    path = png(tmp_path / "a.png")
    clock = Clock(at_1=lambda: os.utime(path, (5, 5)), at_2=lambda: os.utime(path, (6, 6)))
    assert watched(tmp_path, clock, idle=5) == [(3, "a")]


def test_series_and_numbered_channels_wait_for_more_files(tmp_path):
    pixels = np.zeros((3, 4, 5), np.int16)
    written = write_series(tmp_path / "elsewhere", pixels)
    folder = tmp_path / "in" / "p"
    folder.mkdir(parents=True)
    png(tmp_path / "in" / "c_0000.png")
    clock = Clock(
        at_1=lambda: shutil.copy(written[0], folder),
        at_5=lambda: shutil.copy(written[1], folder),
        at_6=lambda: png(tmp_path / "in" / "c_0001.png"),
        at_9=lambda: shutil.copy(written[2], folder),
    )
    found = []
    for case in watch_incoming(tmp_path / "in", settle=7, idle=20, clock=clock, sleep=clock.sleep):
        found.append((clock.now, case.name, len(case.files), case.problem))
    assert found == [(13, "c", 2, None), (16, "p", 3, None)]


def test_what_was_there_is_taken_in_order_and_each_once(tmp_path):
    for name, second in (("a", 30), ("b", 10), ("c", 20)):
        os.utime(png(tmp_path / f"{name}.png"), (second, second))
    assert watched(tmp_path, Clock(), idle=3, order="time") == [(1, "b"), (1, "c"), (1, "a")]
    assert watched(tmp_path, Clock(), idle=3, seen=("a", "c")) == [(1, "b")]


def test_a_file_named_stop_ends_the_watch_before_the_next_case(tmp_path):
    for name in "abc":
        png(tmp_path / f"{name}.png")
    taken = []
    clock = Clock()
    for case in watch_incoming(tmp_path, clock=clock, sleep=clock.sleep):
        taken.append(case.name)
        if case.name == "b":
            (tmp_path / "STOP").touch()
    assert taken == ["a", "b"]
    with pytest.raises(DataError, match="a file named STOP, which ends watching; remove it"):
        watch_incoming(tmp_path)


def test_a_file_that_goes_before_it_is_taken_is_not_missed(tmp_path):
    for name in "ab":
        png(tmp_path / f"{name}.png")
    clock = Clock(at_7=lambda: png(tmp_path / "b.png"))
    taken = []
    for case in watch_incoming(tmp_path, idle=10, clock=clock, sleep=clock.sleep):
        taken.append((clock.now, case.name))
        if case.name == "a":
            (tmp_path / "b.png").unlink()
    assert taken == [(1, "a"), (8, "b")]


def test_a_file_that_comes_after_its_case_was_taken_is_a_problem(tmp_path):
    png(tmp_path / "c_0000.png")
    clock = Clock(at_9=lambda: png(tmp_path / "c_0001.png"))
    found = list(watch_incoming(tmp_path, settle=2, idle=12, clock=clock, sleep=clock.sleep))
    assert [(case.name, len(case.files)) for case in found] == [("c", 1), ("c", 2)]
    assert found[0].problem is None
    assert "c_0001.png: arrived after its case was taken" in found[1].problem


def test_processed_files_may_be_moved_away(tmp_path):
    png(tmp_path / "a.png")
    clock = Clock(at_3=lambda: (tmp_path / "a.png").unlink())
    assert watched(tmp_path, clock, idle=9) == [(1, "a")]


def test_an_empty_folder_can_be_watched_and_a_missing_one_cannot(tmp_path):
    assert watched(tmp_path, Clock(), idle=2) == []
    with pytest.raises(DataError, match="no such file or folder"):
        watch_incoming(tmp_path / "nowhere")
    with pytest.raises(DataError, match="watch a folder"):
        watch_incoming(png(tmp_path / "a.png"))


def test_a_folder_that_goes_for_good_is_one_line(tmp_path):
    folder = tmp_path / "in"
    png(folder / "a.png")
    clock = Clock(at_3=lambda: shutil.rmtree(folder))
    watch = watch_incoming(folder, stalled=50, clock=clock, sleep=clock.sleep)
    assert next(watch).name == "a"
    with pytest.raises(DataError, match="cannot be listed"):
        next(watch)
    assert clock.now == 52


def test_closing_wakes_a_watch_that_sleeps(tmp_path):
    watch = watch_incoming(tmp_path, poll=3600)
    found = []
    thread = threading.Thread(target=lambda: found.extend(watch))
    thread.start()
    watch.close()
    thread.join(10)
    assert not thread.is_alive()
    assert found == []
