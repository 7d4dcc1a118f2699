import json
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image as Pillow

from dltta.data.case import Place
from dltta.data.sites import open_site, read_description
from dltta.errors import DataError

REAL = os.environ.get("DLTTA_DATA")


def describe(folder: Path, **changes: object) -> Path:
    content = {"channel_names": {"0": "grey"}, "labels": {"background": 0, "nucleus": 1}, "file_ending": ".png"}
    content |= changes
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in content.items() if value is not None}
    (folder / "dataset.json").write_text(json.dumps(kept))
    return folder


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".nii.gz"):
        nib.save(nib.Nifti1Image(array, np.diag([0.5, 0.6, 3.0, 1.0])), path)
    elif path.suffix == ".tif":
        tifffile.imwrite(path, array)
    else:
        Pillow.fromarray(array).save(path)


def grey(value: int, shape: tuple[int, ...] = (4, 6)) -> np.ndarray:
    return np.full(shape, value, np.uint8)


def site(folder: Path, cases: tuple[str, ...] = ("b", "a"), ending: str = ".png", **changes: object) -> Path:
    """A segmentation site; the images of the n-th case have value 10 n, its label is 1 in the first row."""
    describe(folder, file_ending=ending, **changes)
    shape = (4, 6, 3) if ending == ".nii.gz" else (4, 6)
    for n, case in enumerate(cases):
        label = grey(0, shape)
        label[0] = 1
        save(folder / "imagesTr" / f"{case}_0000{ending}", grey(10 * n, shape))
        save(folder / "labelsTr" / f"{case}{ending}", label)
    return folder


def classified(folder: Path, rows: str, images: tuple[str, ...] = ("x.png", "y.png"), **changes: object) -> Path:
    describe(folder, task="classification", labels={"benign": 0, "malignant": 1}, **changes)
    for n, name in enumerate(images):
        save(folder / "images" / name, grey(n))
    (folder / "labels.csv").write_text("image,label\n" + rows)
    return folder


@pytest.mark.parametrize("ending", [".png", ".tif", ".nii.gz"])
def test_a_segmentation_site_gives_its_cases_in_order_of_their_names(tmp_path, ending):
    opened = open_site(site(tmp_path / "berlin", ending=ending))
    assert (opened.site, opened.task, opened.classes, len(opened)) == (
        "berlin",
        "segmentation",
        ("background", "nucleus"),
        2,
    )
    case = opened[0]
    assert (case.name, case.site, case.group) == ("a", "berlin", "a")
    assert case.image.dtype == torch.float32
    assert case.label is not None
    assert case.label.dtype == torch.int64
    assert case.image.shape[1:] == case.label.shape
    assert case.image.unique().tolist() == [10]
    assert case.label[0].unique().tolist() == [1]
    assert case.label[1:].unique().tolist() == [0]
    assert case.spacing == (pytest.approx((0.5, 0.6, 3.0)) if ending == ".nii.gz" else None)
    assert [c.name for c in opened] == ["a", "b"]


def test_channels_come_from_one_rgb_file_or_from_one_file_each(tmp_path):
    rgb = {"channel_names": {"0": "R", "1": "G", "2": "B"}}
    one = site(tmp_path / "one", ("a",), **rgb)
    save(one / "imagesTr" / "a_0000.png", np.dstack([grey(1), grey(2), grey(3)]))
    each = site(tmp_path / "each", ("a",), **rgb)
    for channel in range(3):
        save(each / "imagesTr" / f"a_000{channel}.png", grey(channel + 1))
    for folder in (one, each):
        assert open_site(folder)[0].image[:, 0, 0].tolist() == [1, 2, 3]


def test_classes_are_ordered_by_value_not_by_place(tmp_path):
    folder = site(tmp_path / "s", ("a",), labels={"tumor": 2, "background": 0, "organ": 1})
    assert open_site(folder).classes == ("background", "organ", "tumor")


def test_test_cases_have_labels_where_labels_ts_does(tmp_path):
    folder = site(tmp_path / "s")
    save(folder / "imagesTs" / "t_0000.png", grey(7))
    assert open_site(folder, split="test")[0].label is None
    save(folder / "labelsTs" / "t.png", grey(1))
    label = open_site(folder, split="test")[0].label
    assert label is not None
    assert label.unique().tolist() == [1]


@pytest.mark.parametrize(
    ("changes", "name", "group"),
    [
        ({}, "NORMAL129_s0", "NORMAL129"),
        ({}, "scan_7_slice012", "scan_7"),
        ({}, "plain", "plain"),
        ({}, "_s1", "_s1"),
        ({"group_pattern": r"(p\d+)_.*"}, "p12_left_s1", "p12"),
        ({"group_pattern": r"(p\d+)_.*"}, "other_s1", "other_s1"),
        ({"groups": {"x_s1": "patient 3"}}, "x_s1", "patient 3"),
    ],
)
def test_groups_follow_the_mapping_then_the_pattern_then_the_name(tmp_path, changes, name, group):
    opened = open_site(site(tmp_path / "s", (name,), **changes))
    assert opened[0].group == group
    assert opened.groups == (group,)


def test_volumes_are_taken_slice_by_slice_across_their_widest_spacing(tmp_path):
    folder = site(tmp_path / "s", ("v",), ".nii.gz")
    volume = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)
    save(folder / "imagesTr" / "v_0000.nii.gz", volume)
    save(folder / "labelsTr" / "v.nii.gz", (volume > 40).astype(np.uint8))
    opened = open_site(folder, slices=True)
    assert len(opened) == 3
    assert opened.names == ("v_slice000", "v_slice001", "v_slice002")
    case = opened[2]
    assert (case.name, case.group) == ("v_slice002", "v")
    assert np.array_equal(case.image[0], volume[:, :, 2])
    assert case.label is not None
    assert np.array_equal(case.label, volume[:, :, 2] > 40)
    assert case.spacing == pytest.approx((0.5, 0.6))
    assert case.place is not None
    assert (case.place.volume, case.place.position, case.place.count, case.place.axis) == ("v", 2, 3, 2)
    whole = open_site(folder)[0]
    assert whole.place is None
    assert case.place.thickness == whole.spacing[2]

    sagittal = nib.Nifti1Image(volume, np.diag([4.0, 0.5, 0.5, 1.0]))
    nib.save(sagittal, folder / "imagesTr" / "v_0000.nii.gz")
    nib.save(nib.Nifti1Image(volume * 0, sagittal.affine), folder / "labelsTr" / "v.nii.gz")
    opened = open_site(folder, slices=True)
    assert len(opened) == 4
    assert np.array_equal(opened[1].image[0], volume[1])
    assert opened[1].spacing == pytest.approx((0.5, 0.5))
    assert opened[1].place == Place("v", 1, 4, 0, pytest.approx(4.0))


def test_pictures_have_no_slices(tmp_path):
    with pytest.raises(DataError, match="slices are taken from volumes"):
        open_site(site(tmp_path / "s"), slices=True)


def test_a_listed_classification_site(tmp_path):
    opened = open_site(classified(tmp_path / "s", "y.png,benign\nx.png,malignant\n"))
    assert (opened.task, opened.classes) == ("classification", ("benign", "malignant"))
    assert {case.name: int(case.label) for case in opened if case.label is not None} == {"y": 0, "x": 1}
    assert opened[0].label is not None
    assert opened[0].label.shape == ()
    assert opened[0].label.dtype == torch.int64


def test_a_table_may_have_a_byte_order_mark_spaces_and_groups(tmp_path):
    folder = classified(tmp_path / "s", "")
    text = "\ufeffimage, label ,group\nx.png, benign,patient 1\ny.png,benign,patient 1\n"
    (folder / "labels.csv").write_text(text, encoding="utf-8")
    assert [(case.name, case.group) for case in open_site(folder)] == [("x", "patient 1"), ("y", "patient 1")]


def test_class_folders_need_no_description(tmp_path):
    for n, name in enumerate(("cat/1.png", "cat/2.png", "ant/3.png")):
        save(tmp_path / "s" / name, grey(n))
    opened = open_site(tmp_path / "s")
    assert opened.classes == ("ant", "cat")
    assert [(case.name, int(case.label)) for case in opened if case.label is not None] == [("3", 0), ("1", 1), ("2", 1)]
    describe(tmp_path / "s", task="classification", labels={"cat": 0, "ant": 1, "bee": 2})
    opened = open_site(tmp_path / "s")
    assert opened.classes == ("cat", "ant", "bee")
    assert [int(case.label) for case in opened if case.label is not None] == [0, 0, 1]


def test_images_are_read_when_asked_for(tmp_path):
    folder = site(tmp_path / "s")
    (folder / "imagesTr" / "a_0000.png").write_bytes(b"broken")
    opened = open_site(folder)
    assert opened[1].name == "b"
    with pytest.raises(DataError, match="a_0000.png: cannot be read as PNG"):
        opened[0]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"channel_names": None, "channel_name": {"0": "a"}}, "key 'channel_names' missing, found 'channel_name'"),
        ({"channel_names": None, "modality": {"0": "a"}}, "key 'channel_names' missing, found 'modality'"),
        ({"labels": None}, "key 'labels' missing; `dltta help sites`"),
        ({"file_ending": "png"}, "file_ending 'png'; use one of .nii"),
        ({"file_ending": ".jpg"}, "file_ending '.jpg'; use one of"),
        ({"task": "detection"}, "task 'detection'; use"),
        ({"labels": {"background": 0, "whole": [1, 2], "core": 2}}, r"label 'whole' is a region \[1, 2\]"),
        ({"labels": {"background": 0, "tumor": 2}}, r"without gaps, found \[0, 2\]"),
        ({"labels": {"organ": 1, "tumor": 2}}, r"without gaps, found \[1, 2\]"),
        ({"labels": {"0": "background", "1": "tumor"}}, "values to names as in nnU-Net 1; turn them round"),
        ({"labels": {"background": 0, "ignore": 1}}, "ignore label is not supported"),
        ({"channel_names": {"1": "a"}}, "channel_names must be"),
        ({"group_pattern": "("}, "group_pattern '\\(' is no regular expression"),
        ({"groups": ["a"]}, "groups must map cases to patients"),
    ],
)
def test_a_malformed_description_is_one_line_with_the_right_spelling(tmp_path, changes, says):
    with pytest.raises(DataError, match=says) as caught:
        read_description(describe(tmp_path / "s", **changes))
    assert str(caught.value).startswith(str(tmp_path / "s" / "dataset.json"))
    assert "\n" not in str(caught.value)


def test_a_description_that_is_no_json_or_missing(tmp_path):
    folder = site(tmp_path / "s")
    (folder / "dataset.json").write_text("{'labels': 1}")
    with pytest.raises(DataError, match="not valid JSON"):
        open_site(folder)
    (folder / "dataset.json").unlink()
    with pytest.raises(DataError, match="dataset.json: missing; write one"):
        open_site(folder)
    with pytest.raises(DataError, match="no such folder"):
        open_site(tmp_path / "nowhere")


def broken_sites(folder: Path) -> dict[str, tuple[Path, str]]:
    """Sites whose names do not fit together, each with what must be said."""
    broken = {}
    missing = site(folder / "missing")
    (missing / "labelsTr" / "a.png").unlink()
    broken["missing label"] = (missing, r"labelsTr/a.png: label missing; add it")
    extra = site(folder / "extra")
    save(extra / "labelsTr" / "c.png", grey(0))
    broken["label without image"] = (extra, r"labelsTr/c.png: label without an image; add imagesTr/c_0000.png")
    twin = site(folder / "twin")
    save(twin / "imagesTr" / "a_0000.tif", grey(0))
    broken["same name, other ending"] = (twin, r"a_0000.tif: two cases of one name: a_0000.png is there too")
    cased = site(folder / "cased", ("Case", "case"))
    broken["same name, other case"] = (cased, "two cases of one name: Case and case")
    foreign = site(folder / "foreign")
    save(foreign / "imagesTr" / "z_0000.tif", grey(0))
    broken["foreign"] = (foreign, r"z_0000.tif: file_ending is .png")
    jpeg = site(folder / "jpeg")
    save(jpeg / "imagesTr" / "z_0000.jpg", grey(0))
    broken["jpeg"] = (jpeg, r"z_0000.jpg: unsupported ending")
    bare = site(folder / "bare")
    save(bare / "imagesTr" / "z.png", grey(0))
    broken["no channel number"] = (bare, r"z.png: no channel number; name it z_0000.png")
    channel = site(folder / "channel", channel_names={"0": "a", "1": "b", "2": "c"})
    save(channel / "imagesTr" / "a_0002.png", grey(0))
    broken["channel missing"] = (channel, r"channels \[0, 2\] of 'a', dataset.json names 3")
    broken["empty"] = (describe(folder / "empty"), "imagesTr: missing; put the images there")
    (describe(folder / "hollow") / "imagesTr").mkdir()
    broken["no cases"] = (folder / "hollow", "no train cases")
    broken["unknown class"] = (
        classified(folder / "unknown", "x.png,benigne\ny.png,benign\n"),
        "class 'benigne' of 'x.png' is not in dataset.json; did you mean 'benign'",
    )
    broken["unlisted"] = (classified(folder / "unlisted", "x.png,benign\n"), r"images/y.png: label missing; add a row")
    broken["no such image"] = (
        classified(folder / "gone", "x.png,benign\ny.png,benign\n../x.png,benign\n"),
        r"image '../x.png' is not in images/",
    )
    broken["listed twice"] = (
        classified(folder / "twice", "x.png,benign\ny.png,benign\nx.png,malignant\n"),
        "image 'x.png' is listed 2 times",
    )
    columns = classified(folder / "columns", "")
    (columns / "labels.csv").write_text("file;class\nx.png;benign\n")
    broken["columns"] = (columns, "columns file;class; the first line must be image,label")
    return broken


@pytest.mark.parametrize(
    "kind",
    [
        "missing label",
        "label without image",
        "same name, other ending",
        "same name, other case",
        "foreign",
        "jpeg",
        "no channel number",
        "channel missing",
        "empty",
        "no cases",
        "unknown class",
        "unlisted",
        "no such image",
        "listed twice",
        "columns",
    ],
)
def test_names_that_do_not_fit_together_are_one_line_at_opening(tmp_path, kind):
    folder, says = broken_sites(tmp_path)[kind]
    with pytest.raises(DataError, match=says) as caught:
        open_site(folder)
    assert "\n" not in str(caught.value)


def test_labels_that_do_not_fit_their_image_are_refused(tmp_path):
    folder = site(tmp_path / "s", ("a",))
    save(folder / "labelsTr" / "a.png", grey(0, (6, 4)))
    with pytest.raises(DataError, match=r"labelsTr/a.png: size \(6, 4\) instead of \(4, 6\) in a_0000.png"):
        open_site(folder)[0]
    save(folder / "labelsTr" / "a.png", grey(2))
    with pytest.raises(DataError, match="label value 2 out of range 0..1"):
        open_site(folder)[0]
    folder = site(tmp_path / "n", ("a",), ".nii.gz")
    nib.save(nib.Nifti1Image(grey(0, (4, 6, 3)), np.diag([0.5, 0.6, 4.0, 1.0])), folder / "labelsTr" / "a.nii.gz")
    with pytest.raises(DataError, match="spacing 0.5 x 0.6 x 4 mm instead of 0.5 x 0.6 x 3 mm"):
        open_site(folder)[0]


def test_the_number_of_channels_must_be_the_described_one(tmp_path):
    folder = site(tmp_path / "s", ("a",))
    save(folder / "imagesTr" / "a_0000.png", np.dstack([grey(1)] * 3))
    with pytest.raises(DataError, match="3 channels, dataset.json names 1"):
        open_site(folder)[0]


@pytest.mark.skipif(REAL is None, reason="DLTTA_DATA is not set")
@pytest.mark.parametrize(
    ("name", "count", "shape", "groups"),
    [
        ("wbc_cells/jtsc", 300, (3, 128, 128), 300),
        ("oct_layers/cirrus", 36, (1, 128, 128), 6),
        ("spinal_cord/milan_siemens1p5t", 2, (1, 128, 128, 20), 2),
        ("wbc_types/cellavision", 97, (3, 128, 128), 97),
    ],
)
def test_real_sites_open(name, count, shape, groups):
    folder = Path(REAL or "") / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not there")
    opened = open_site(folder)
    assert len(opened) == count
    assert tuple(opened[0].image.shape) == shape
    assert len(set(opened.groups)) == groups
    assert opened[0].label is not None
    assert int(opened[0].label.max()) < len(opened.classes)
