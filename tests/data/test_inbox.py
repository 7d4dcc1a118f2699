import hashlib
import os
import shutil
import threading
from dataclasses import replace

import nibabel as nib
import numpy as np
import pydicom
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from dicoms import write_dicom, write_series
from dltta.data.formats import dicom
from dltta.data.inbox import Incoming, digest, find_incoming, read_incoming, watch_incoming
from dltta.errors import DataError, SettingError

GREY = np.arange(12, dtype=np.uint8).reshape(3, 4)


def png(path, array=GREY):
    path.parent.mkdir(parents=True, exist_ok=True)
    Pillow.fromarray(array).save(path)
    return path


def nifti(path, array, affine=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.diag([1.0, 2.0, 3.0, 1.0]) if affine is None else affine), path)
    return path


def names(cases):
    return [case.name for case in cases]


def problem(path, name):
    """The sentence for one case, which reading and hashing raise too."""
    [case] = [case for case in find_incoming(path) if case.name == name]
    for call in (read_incoming, digest):
        with pytest.raises(DataError) as caught:
            call(case)
        assert str(caught.value) == case.problem
    assert "\n" not in case.problem
    assert "; " in case.problem
    return case.problem


# finding


def test_a_folder_of_all_formats_is_listed_by_name(tmp_path):
    png(tmp_path / "c.png")
    tifffile.imwrite(tmp_path / "b.tiff", GREY)
    nifti(tmp_path / "a_0000.nii.gz", np.zeros((2, 3, 4), np.float32))
    nifti(tmp_path / "a_0001.nii.gz", np.ones((2, 3, 4), np.float32))
    write_series(tmp_path / "scan7", np.zeros((3, 4, 5), np.int16))
    write_dicom(tmp_path / "xray.dcm", np.zeros((4, 5), np.uint16))
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "a_probabilities.nii.gz").write_bytes(b"")
    found = find_incoming(tmp_path)
    assert [(c.name, c.kind, len(c.files)) for c in found] == [
        ("a", "nifti", 2), ("b", "tiff", 1), ("c", "png", 1), ("scan7", "dicom", 3), ("xray", "dicom", 1),
    ]  # fmt: skip
    assert [file.name for file in found[0].files] == ["a_0000.nii.gz", "a_0001.nii.gz"]
    assert all(case.problem is None for case in found)
    assert [read_incoming(case).array.shape for case in found] == [
        (2, 2, 3, 4), (1, 3, 4), (1, 3, 4), (1, 5, 4, 3), (1, 4, 5),
    ]  # fmt: skip


def test_order_by_time_is_that_of_the_newest_file_then_the_name(tmp_path):
    for name, second in (("a_0000", 1), ("a_0001", 50), ("b_0000", 20), ("c_0000", 50)):
        png(tmp_path / f"{name}.png")
        os.utime(tmp_path / f"{name}.png", (second, second))
    assert names(find_incoming(tmp_path)) == ["a", "b", "c"]
    assert names(find_incoming(tmp_path, order="time")) == ["b", "a", "c"]
    assert find_incoming(tmp_path)[0].modified == 50


def test_a_single_file_is_one_case_whatever_lies_beside_it(tmp_path):
    png(tmp_path / "a_0000.png")
    png(tmp_path / "a_0001.png")
    [case] = find_incoming(tmp_path / "a_0000.png")
    assert (case.name, case.files) == ("a", (tmp_path / "a_0000.png",))
    assert names(find_incoming(tmp_path / "a_0001.png")) == ["a_0001"]
    [slice_] = find_incoming(
        write_series(tmp_path / "s", np.zeros((2, 3, 4), np.int16), names=["IM_0000", "IM_0001"])[0]
    )
    assert (slice_.name, slice_.kind) == ("IM_0000", "dicom")
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(DataError, match="neither DICOM nor one of .nii"):
        find_incoming(tmp_path / "a.jpg")


def test_four_digits_are_part_of_the_name_where_no_file_is_channel_zero(tmp_path):
    for number in (1, 2, 3):
        png(tmp_path / f"frame_{number:04d}.png")
    assert names(find_incoming(tmp_path)) == ["frame_0001", "frame_0002", "frame_0003"]
    assert all(case.problem is None for case in find_incoming(tmp_path))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["a_0000.png", "a_0002.png"], "channel 0001 of this case is missing"),
        (["a_0001.png", "b_0000.png"], "channel 0000 of this case is missing"),
        (["a_0000.png", "a_0001.tif"], "another ending than a_0000.png"),
        (["a.png", "a.tif"], "a.tif is another case of the same name"),
        (["a.png", "a_0000.png"], "a_0000.png is another case of the same name"),
        (["a_0000.png", "a_0000.tif"], "a_0000.tif is another case of the same name"),
        (["A.png", "a.png"], "a.png is another case of the same name"),
    ],
)
def test_files_that_are_no_case_are_that_cases_problem(tmp_path, files, says):
    for file in files:
        (tmp_path / file).write_bytes(b"")
    png(tmp_path / "fine_0000.png")
    first = find_incoming(tmp_path)[0].name
    assert says in problem(tmp_path, first)
    assert [case.problem for case in find_incoming(tmp_path) if case.name == "fine"] == [None]


def test_a_site_folder_gives_its_test_images_else_its_training_images(tmp_path):
    png(tmp_path / "imagesTr" / "train_0000.png")
    png(tmp_path / "labelsTr" / "train.png")
    (tmp_path / "dataset.json").write_text("{}")
    assert names(find_incoming(tmp_path)) == ["train"]
    (tmp_path / "imagesTs").mkdir()
    assert names(find_incoming(tmp_path)) == ["train"]
    png(tmp_path / "imagesTs" / "test_0000.png")
    assert names(find_incoming(tmp_path)) == ["test"]


def test_a_folder_without_images_of_its_own_may_have_them_in_images(tmp_path):
    png(tmp_path / "images" / "cell.png")
    (tmp_path / "labels.csv").write_text("image,label\n")
    assert names(find_incoming(tmp_path)) == ["cell"]


def test_a_folder_without_images_says_what_is_there(tmp_path):
    with pytest.raises(DataError, match="the folder is empty; give PNG"):
        find_incoming(tmp_path)
    for name in ("a.jpg", "b.jpg", "README"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "more").mkdir()
    with pytest.raises(DataError, match="no images, found 2 .jpg, 1 file without ending, 1 folders; give"):
        find_incoming(tmp_path)
    with pytest.raises(DataError, match="no such file or folder"):
        find_incoming(tmp_path / "nowhere")


def test_links_may_lead_within_the_folder_but_not_out_of_it(tmp_path):
    secret = png(tmp_path / "secret" / "s.png")
    folder = tmp_path / "in"
    png(folder / "real.png")
    (folder / "inside.png").symlink_to("real.png")
    (folder / "outside.png").symlink_to(secret)
    (folder / "nowhere.png").symlink_to("gone.png")
    series = write_series(tmp_path / "other", np.zeros((2, 3, 4), np.int16))[0].parent
    (folder / "scan").symlink_to(series)
    assert "leads out of the folder" in problem(folder, "outside")
    assert "leads nowhere" in problem(folder, "nowhere")
    assert "leads out of the folder" in problem(folder, "scan")
    assert [case.name for case in find_incoming(folder) if case.problem is None] == ["inside", "real"]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "images").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match="leads out of"):
        find_incoming(tmp_path / "site")


@pytest.mark.parametrize("name", ["a\nb", "a..b", "a\\b", "a\x1b[31mb", "a\u202eb", "a\udcffb"])
def test_names_that_could_trick_a_terminal_or_a_path_are_refused(tmp_path, name):
    png(tmp_path / f"{name}.png")
    png(tmp_path / "a_b.png")
    fine, refused = sorted(find_incoming(tmp_path), key=lambda case: case.problem is not None)
    assert (fine.name, fine.problem) == ("a_b", None)
    assert refused.name.isprintable()
    assert refused.name not in (name, "a_b")
    assert "rename it" in problem(tmp_path, refused.name)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stem=st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=40))
def test_any_name_gives_one_safe_name_or_nothing(tmp_path, stem):
    shutil.rmtree(tmp_path / "in", ignore_errors=True)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"{stem}.png").write_bytes(b"")
    if stem.startswith(".") or stem.endswith("_probabilities"):
        return
    [case] = find_incoming(tmp_path / "in")
    assert not set(case.name) & set("/\\\n\r\0\x1b")
    assert ".." not in case.name
    if case.problem is None:
        assert case.name in (stem, stem.removesuffix("_0000"))


# DICOM


def test_series_are_named_by_their_folders_and_never_by_a_header(tmp_path):
    first, second = (np.full((3, 4, 5), value, np.int16) for value in (1, 2))
    write_series(tmp_path / "p1", first, names=["z", "a.dcm", "m.IMA"])
    write_series(tmp_path / "p2", second)
    write_dicom(tmp_path / "p3" / "00000001.dcm", GREY)
    found = find_incoming(tmp_path)
    assert names(found) == ["p1", "p2", "p3"]
    assert not any("secret" in repr(case).lower() for case in found)
    assert [read_incoming(case).array.mean() for case in found[:2]] == [1, 2]


def test_a_folder_that_is_a_series_has_its_own_name(tmp_path):
    write_series(tmp_path / "scan9", np.zeros((3, 4, 5), np.int16))
    assert [(c.name, len(c.files)) for c in find_incoming(tmp_path / "scan9")] == [("scan9", 3)]


def test_images_without_a_place_are_cases_of_their_own_even_in_one_series(tmp_path):
    series = pydicom.uid.generate_uid()
    for name in ("left.dcm", "right.dcm"):
        write_dicom(tmp_path / name, GREY, SeriesInstanceUID=series)
        write_dicom(tmp_path / "knee" / name, GREY, SeriesInstanceUID=series)
    assert names(find_incoming(tmp_path)) == ["knee_left", "knee_right", "left", "right"]


def test_two_series_in_one_folder_are_a_problem(tmp_path):
    write_series(tmp_path / "in" / "p", np.zeros((3, 4, 5), np.int16))
    write_series(tmp_path / "in" / "p", np.zeros((2, 4, 5), np.int16), names=["x", "y"])
    assert "2 DICOM series of 3 and 2 files; put each" in problem(tmp_path / "in", "p")


def test_an_unreadable_slice_is_its_series_problem_not_a_shorter_volume(tmp_path):
    write_series(tmp_path / "in" / "p", np.zeros((3, 4, 5), np.int16))
    (tmp_path / "in" / "p" / "slice003.dcm").write_text("cut off")
    assert "slice003.dcm: cannot be read as DICOM" in problem(tmp_path / "in", "p")
    (tmp_path / "in" / "alone.dcm").write_text("cut off")
    assert "alone.dcm: cannot be read as DICOM" in problem(tmp_path / "in", "alone")


def test_what_is_no_image_of_the_patient_is_ignored(tmp_path):
    write_series(tmp_path / "p", np.zeros((2, 4, 5), np.int16))
    write_dicom(tmp_path / "p" / "seg.dcm", GREY, SOPClassUID="1.2.840.10008.5.1.4.1.1.66.4")
    write_dicom(tmp_path / "p" / "report.dcm", GREY, Rows=None)
    write_dicom(tmp_path / "DICOMDIR", GREY)
    assert [(c.name, len(c.files)) for c in find_incoming(tmp_path)] == [("p", 2)]


def test_a_sub_folder_that_goes_is_no_case_and_one_that_cannot_be_listed_is_a_problem(tmp_path, monkeypatch):
    png(tmp_path / "a.png")
    (tmp_path / "locked").mkdir()
    listed = type(tmp_path).iterdir

    def iterdir(folder):
        if folder == tmp_path:
            (tmp_path / "gone").mkdir(exist_ok=True)
        if folder.name == "gone":
            folder.rmdir()
        if folder.name == "locked":
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(type(tmp_path), "iterdir", iterdir)
    a, locked = find_incoming(tmp_path)
    assert (a.name, a.problem) == ("a", None)
    assert (locked.name, "cannot be listed (Permission denied)" in locked.problem) == ("locked", True)


def test_dicom_without_the_extra_says_how_to_install_it(tmp_path, monkeypatch):
    write_dicom(tmp_path / "a.dcm", GREY)
    dicom._library.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "pydicom", None)
    with pytest.raises(SettingError, match="pip install"):
        find_incoming(tmp_path)
    dicom._library.cache_clear()


# digests and reading


def test_a_digest_is_that_of_the_content_whatever_the_name(tmp_path):
    one, same = png(tmp_path / "a.png"), png(tmp_path / "b.png")
    other = png(tmp_path / "c.png", GREY + 1)
    a, b, c = map(digest, find_incoming(tmp_path))
    assert a == hashlib.sha256(one.read_bytes()).hexdigest()
    assert (same.read_bytes() == one.read_bytes(), a == b) == (True, True)
    assert a != c
    assert other.exists()


def test_the_order_of_channels_counts_and_the_names_of_slices_do_not(tmp_path):
    for case, order in (("a", (0, 1)), ("b", (1, 0))):
        for channel, value in enumerate(order):
            png(tmp_path / "png" / f"{case}_{channel:04d}.png", GREY + value)
    a, b = map(digest, find_incoming(tmp_path / "png"))
    assert a != b
    by_hand = b"".join(hashlib.sha256((tmp_path / "png" / f"a_000{i}.png").read_bytes()).digest() for i in (0, 1))
    assert a == hashlib.sha256(by_hand).hexdigest()

    files = write_series(tmp_path / "dicom" / "p", np.arange(24, dtype=np.int16).reshape(2, 3, 4))
    [before] = find_incoming(tmp_path / "dicom")
    first = digest(before)
    files[0].rename(files[0].with_name("zzz"))
    [after] = find_incoming(tmp_path / "dicom")
    assert after.files != before.files
    assert digest(after) == first
    with pytest.raises(DataError, match="cannot be read"):
        digest(before)


def test_channels_must_lie_on_each_other(tmp_path):
    moved = np.diag([1.0, 2.0, 3.0, 1.0])
    moved[0, 3] = 5
    nifti(tmp_path / "a_0000.nii.gz", np.zeros((2, 3, 4), np.float32))
    nifti(tmp_path / "a_0001.nii.gz", np.ones((2, 3, 4), np.float32))
    nifti(tmp_path / "b_0000.nii.gz", np.zeros((2, 3, 4), np.float32))
    nifti(tmp_path / "b_0001.nii.gz", np.zeros((2, 3, 4), np.float32), moved)
    a, b = find_incoming(tmp_path)
    image = read_incoming(a)
    assert image.array[:, 0, 0, 0].tolist() == [0, 1]
    assert image.geometry.channels == 2
    with pytest.raises(DataError, match="origin differ by up to 5 mm"):
        read_incoming(b)


def test_malformed_files_are_found_and_refused_when_read(tmp_path):
    whole = png(tmp_path / "a.png", np.random.default_rng(0).integers(0, 255, (64, 64), dtype=np.uint8)).read_bytes()
    (tmp_path / "a.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "b.nii.gz").write_text("text")
    nifti(tmp_path / "c.nii", np.full((2, 2, 2), np.nan, np.float32))
    nifti(tmp_path / "d.nii", np.zeros((2, 2, 2, 2), np.float32))
    says = ["cannot be read as PNG", "cannot be read as NIfTI", "8 of 8 values are NaN", "4-D NIfTI"]
    for case, expected in zip(find_incoming(tmp_path), says, strict=True):
        with pytest.raises(DataError, match=expected):
            read_incoming(case)


# watching


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


def test_a_file_that_grows_is_left_alone_until_it_is_whole(tmp_path):
    path = tmp_path / "a.png"

    def grow():
        with path.open("ab") as file:
            file.write(b"more")

    clock = Clock(at_1=grow, at_2=grow, at_3=grow)
    assert watched(tmp_path, clock, idle=5) == [(4, "a")]


def test_a_file_that_grows_without_a_new_time_is_left_alone(tmp_path):
    path = tmp_path / "a.png"

    def grow():
        with path.open("ab") as file:
            file.write(b"more")
        os.utime(path, (5, 5))

    grow()
    assert watched(tmp_path, Clock(at_1=grow, at_2=grow), idle=5) == [(3, "a")]


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


def test_a_folder_that_goes_is_one_line(tmp_path):
    folder = tmp_path / "in"
    png(folder / "a.png")
    clock = Clock(at_3=lambda: shutil.rmtree(folder))
    watch = watch_incoming(folder, clock=clock, sleep=clock.sleep)
    assert next(watch).name == "a"
    with pytest.raises(DataError, match="cannot be listed"):
        next(watch)


def test_closing_wakes_a_watch_that_sleeps(tmp_path):
    watch = watch_incoming(tmp_path, poll=3600)
    found = []
    thread = threading.Thread(target=lambda: found.extend(watch))
    thread.start()
    watch.close()
    thread.join(10)
    assert not thread.is_alive()
    assert found == []


def test_a_case_is_a_value(tmp_path):
    case = find_incoming(png(tmp_path / "a.png"))[0]
    assert case == replace(case)
    assert isinstance(case, Incoming)
    assert len({case, replace(case)}) == 1
