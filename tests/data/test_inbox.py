import hashlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

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
from dltta.data.inbox import Incoming, digest, find_incoming, read_incoming
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
    with pytest.raises(DataError, match="no images, found 2 .jpg, 1 without ending; give"):
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
    if stem.startswith((".", "~")) or stem.endswith("_probabilities"):
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
    write_dicom(tmp_path / "p" / "report.dcm", GREY, Rows=None, SOPClassUID="1.2.840.10008.5.1.4.1.1.88.11")
    write_dicom(tmp_path / "DICOMDIR", GREY)
    found = find_incoming(tmp_path)
    assert [(c.name, len(c.files)) for c in found] == [("p", 2)]
    assert str(found.ignored) == "ignored: 3 DICOM without an image"


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


def test_a_case_is_a_value(tmp_path):
    case = find_incoming(png(tmp_path / "a.png"))[0]
    assert case == replace(case)
    assert isinstance(case, Incoming)
    assert len({case, replace(case)}) == 1


# nothing is left out silently


def test_what_is_no_image_is_counted_by_kind(tmp_path):
    png(tmp_path / "a.png")
    for name in ("x.jpg", "y.JPG", "notes.txt", "README", ".DS_Store", "Thumbs.db", "b.png.part", "~c.png", "d.tmp"):
        (tmp_path / name).write_bytes(b"text")
    (tmp_path / "odd.sec\x1bret").write_bytes(b"text")
    (tmp_path / "e_probabilities.npz").write_bytes(b"")
    (tmp_path / "f_probabilities.nii.gz").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    png(tmp_path / "below" / "deep" / "g.png")
    png(tmp_path / "below" / "h.png")
    found = find_incoming(tmp_path)
    assert names(found) == ["a"]
    assert found.ignored.kinds == {
        ".jpg": 2, ".txt": 1, "without ending": 1, "hidden": 1, ".db": 1, "unfinished": 3, "with an unusual ending": 1,
        ".npz": 1, "probabilities": 1, "pipe or device": 1, "folder in a sub-folder": 1, ".png in a sub-folder": 1,
    }  # fmt: skip
    assert str(found.ignored).startswith("ignored: 3 unfinished, 2 .jpg, 1 ")
    assert str(found.ignored).isprintable()


def test_nothing_ignored_is_false_and_says_nothing(tmp_path):
    found = find_incoming(png(tmp_path / "a.png"))
    assert not found.ignored
    assert str(found.ignored) == "ignored: nothing"
    assert not find_incoming(tmp_path).ignored
    (tmp_path / "b.jpg").touch()
    assert find_incoming(tmp_path).ignored


@pytest.mark.parametrize(("name", "says"), [("scan", ".png"), ("scan.dat", ".png"), ("v.gz", ".nii or .nii.gz")])
def test_an_image_under_another_name_is_a_problem_not_ignored(tmp_path, name, says):
    if name == "v.gz":
        nifti(tmp_path / "v.nii.gz", np.zeros((2, 3, 4), np.float32)).rename(tmp_path / name)
    else:
        png(tmp_path / "a.png").rename(tmp_path / name)
    png(tmp_path / "fine.png")
    assert f"let its name end in {says}" in problem(tmp_path, name)


# damaged slices


def cut(content):
    return content[: len(content) - 8]


def cut_header(content):
    return content[200:]


DAMAGES = {
    "cut": cut,
    "cut in the header": lambda content: content[:300],
    "cut in the preamble": lambda content: content[:50],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "zeros after the preamble": lambda content: content[:132] + bytes(len(content) - 132),
    "without its start": cut_header,
    "noise": lambda content: np.random.default_rng(0).bytes(len(content)),
    "an error page": lambda content: b"<html>404 not found</html>",
}
NAMINGS = {
    "dcm": [f"slice{n}.dcm" for n in range(5)],
    "bare": [f"IM{n:04d}" for n in range(5)],
    "identifiers": [f"1.2.840.99.{n}.{10**n}" for n in range(5)],
    "numbered": [f"scan.{n:03d}" for n in range(5)],
    "own ending": [f"scan{n}.mag" for n in range(5)],
}


@pytest.mark.parametrize("naming", NAMINGS)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("place", [0, 2, 4], ids=["first", "middle", "last"])
def test_a_damaged_slice_fails_its_whole_series(tmp_path, place, damage, naming):
    files = write_series(tmp_path / "in" / "p", np.ones((5, 4, 6), np.int16), names=NAMINGS[naming])
    png(tmp_path / "in" / "fine.png")
    files[place].write_bytes(DAMAGES[damage](files[place].read_bytes()))
    found = find_incoming(tmp_path / "in")
    assert names(found) == ["fine", "p"]
    assert files[place].name in problem(tmp_path / "in", "p")
    assert found[0].problem is None


@pytest.mark.parametrize("place", [0, 1])
def test_a_series_of_two_is_not_predicted_from_one(tmp_path, place):
    files = write_series(tmp_path / "in" / "p", np.ones((2, 4, 6), np.int16))
    whole = files[place].read_bytes()
    for length in range(0, len(whole), 61):
        files[place].write_bytes(whole[:length])
        assert all(case.problem for case in find_incoming(tmp_path / "in"))


def test_every_truncation_of_the_last_slice_is_a_problem(tmp_path):
    files = write_series(tmp_path / "in" / "p", np.ones((3, 4, 6), np.int16))
    whole = files[-1].read_bytes()
    for length in range(len(whole)):
        files[-1].write_bytes(whole[:length])
        [case] = find_incoming(tmp_path / "in")
        assert case.problem, length
    files[-1].write_bytes(whole)
    [case] = find_incoming(tmp_path / "in")
    assert case.problem is None


def test_text_beside_a_series_is_ignored_and_damage_of_one_series_is_not_that_of_another_folder(tmp_path):
    write_series(tmp_path / "p", np.ones((3, 4, 6), np.int16), names=["IM1", "IM2", "IM3"])
    damaged = write_series(tmp_path / "q", np.ones((3, 4, 6), np.int16))
    (tmp_path / "p" / "README").write_text("how this was scanned")
    (tmp_path / "p" / "protocol.xml").write_bytes(b"\0\1\2")
    damaged[0].write_bytes(b"")
    p, q = find_incoming(tmp_path)
    assert (p.problem, len(p.files)) == (None, 3)
    assert q.problem is not None
    assert find_incoming(tmp_path).ignored.kinds == {"without ending": 1, ".xml": 1}


def test_a_cut_slice_is_a_problem_of_its_own_series_among_several(tmp_path):
    write_dicom(tmp_path / "in" / "xray.dcm", GREY)
    cut_off = write_dicom(tmp_path / "in" / "other.dcm", GREY)
    cut_off.write_bytes(cut(cut_off.read_bytes()))
    (tmp_path / "in" / "third.dcm").touch()
    found = {case.name: case.problem for case in find_incoming(tmp_path / "in")}
    assert found["xray"] is None
    assert "third.dcm: cannot be read as DICOM" in found["third"]
    assert "ends before its image does" in found["other"]


def test_a_slice_that_lost_its_place_is_its_series_problem(tmp_path):
    write_series(
        tmp_path / "in" / "p",
        np.ones((4, 4, 6), np.int16),
        each=lambda number: {"ImagePositionPatient": None} if number == 3 else {},
    )
    assert "with and without a place in one series" in problem(tmp_path / "in", "p")


def test_a_compressed_slice_that_is_cut_is_a_problem(tmp_path):
    files = write_series(tmp_path / "in" / "p", np.random.default_rng(0).integers(0, 99, (3, 16, 16)).astype(np.int16))
    for file in files:
        dataset = pydicom.dcmread(file)
        dataset.compress(pydicom.uid.RLELossless)
        dataset.save_as(file)
    [case] = find_incoming(tmp_path / "in")
    assert case.problem is None
    whole = files[1].read_bytes()
    for length in (len(whole) - 1, len(whole) - 9, len(whole) - 300):
        files[1].write_bytes(whole[:length])
        assert "slice001.dcm: ends before its image does" in problem(tmp_path / "in", "p")


# entries that cannot be followed


def test_links_in_circles_are_one_line_each_and_the_rest_goes_on(tmp_path):
    png(tmp_path / "fine.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "there").symlink_to("back")
    (tmp_path / "back").symlink_to("there")
    (tmp_path / "itself").symlink_to(".")
    (tmp_path / "above").symlink_to("..")
    for name in ("loop", "there", "back"):
        assert "a link that leads in a circle; remove it" in problem(tmp_path, name)
    assert "leads out of the folder" in problem(tmp_path, "above")
    assert [case.name for case in find_incoming(tmp_path) if case.problem is None] == ["fine"]


def test_a_channel_that_is_a_broken_link_fails_its_case(tmp_path):
    png(tmp_path / "a_0000.png")
    (tmp_path / "a_0001.png").symlink_to("a_0001.png")
    assert "a_0001.png: a link that leads in a circle" in problem(tmp_path, "a")


def test_a_slice_that_is_a_broken_link_fails_its_series(tmp_path):
    files = write_series(tmp_path / "in" / "p", np.ones((3, 4, 6), np.int16))
    files[2].unlink()
    files[2].symlink_to("nowhere")
    assert "slice002.dcm: a link that leads nowhere" in problem(tmp_path / "in", "p")


@pytest.fixture
def open_folder():
    """A folder that anybody may enter, while the test is nobody in particular."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    root = os.geteuid() == 0
    yield folder, lambda: os.seteuid(65534) if root else None
    if root:
        os.seteuid(0)
    for place in folder.rglob("*"):
        if not place.is_symlink():
            place.chmod(0o755)
    shutil.rmtree(folder)


def test_what_may_not_be_read_is_one_line_each_and_the_rest_goes_on(open_folder):
    folder, become_nobody = open_folder
    png(folder / "fine.png")
    png(folder / "secret.png").chmod(0)
    write_dicom(folder / "scan", GREY).chmod(0)
    write_series(folder / "locked", np.ones((3, 4, 6), np.int16))
    (folder / "locked").chmod(0)
    write_series(folder / "names only", np.ones((3, 4, 6), np.int16))
    (folder / "names only").chmod(0o744)
    become_nobody()
    found = {case.name: case for case in find_incoming(folder)}
    assert found["fine"].problem is None
    assert read_incoming(found["fine"]).array.shape == (1, 3, 4)
    assert "scan: cannot be read (Permission denied)" in found["scan"].problem
    assert "locked: cannot be listed (Permission denied)" in found["locked"].problem
    assert any(name.startswith("names only") and "Permission denied" in case.problem for name, case in found.items())
    with pytest.raises(DataError, match="secret.png: cannot be read as PNG"):
        read_incoming(found["secret"])


def test_a_folder_that_goes_while_it_is_looked_at_is_no_case(tmp_path):
    png(tmp_path / "a.png")
    (tmp_path / "gone").mkdir()

    class Vanishing(type(tmp_path)):
        """A folder in which `gone` goes as soon as it is listed."""

        def iterdir(self):
            listed = list(super().iterdir())
            shutil.rmtree(tmp_path / "gone", ignore_errors=True)
            return iter(listed)

    assert names(find_incoming(Vanishing(tmp_path))) == ["a"]
