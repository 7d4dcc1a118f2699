"""Predictions as files, read back with nibabel, Pillow, tifffile and pydicom alone."""

import os
import resource
import signal
from contextlib import contextmanager
from pathlib import Path

import nibabel as nib
import numpy as np
import pydicom
import pytest
import tifffile
import torch
from PIL import Image as Pillow

from dicoms import write_series
from dltta.data.inbox import find_incoming, read_incoming
from dltta.data.outputs import write_prediction, write_probabilities
from dltta.errors import DataError

OBLIQUE = nib.affines.from_matvec(
    np.array([[0.5, -0.2, 0.4], [0.3, 0.7, -0.6], [-0.1, 0.4, 2.6]]), [-90.5, 12.25, -72.0]
)
CLASSES = ("background", "organ", "lesion")


def incoming(folder):
    """The only case of a folder, and its geometry."""
    [case] = find_incoming(folder)
    return case, read_incoming(case).geometry


def oblique(path):
    """An anisotropic, oblique scan whose two forms differ, with slope, units and a description."""
    path.parent.mkdir(parents=True, exist_ok=True)
    volume = nib.Nifti1Image(np.arange(120, dtype=np.int16).reshape(4, 5, 6), OBLIQUE)
    volume.set_qform(nib.affines.from_matvec(np.diag([1.0, 2.0, 3.0]), [1, 2, 3]), code=1)
    volume.set_sform(OBLIQUE, code=4)
    volume.header.set_xyzt_units("mm", "sec")
    volume.header.set_slope_inter(0.5, -3)
    volume.header["descrip"] = b"T2 of the pelvis"
    volume.header["cal_max"] = 500
    nib.save(volume, path)


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_a_nifti_prediction_has_the_affine_forms_units_and_description_of_its_image(tmp_path, ending):
    oblique(tmp_path / "in" / f"a_0000{ending}")
    case, geometry = incoming(tmp_path / "in")
    labels = np.random.default_rng(0).integers(0, 3, (4, 5, 6))
    path = write_prediction(tmp_path / "out", case, labels, geometry, CLASSES)
    assert path == tmp_path / "out" / f"a{ending}"
    image, found = nib.load(tmp_path / "in" / f"a_0000{ending}"), nib.load(path)
    assert found.get_data_dtype() == np.uint8
    assert np.array_equal(np.asarray(found.dataobj), labels)
    assert np.array_equal(found.affine, image.affine)
    for form in ("qform", "sform"):
        expected, code = getattr(image.header, f"get_{form}")(coded=True)
        form_found, found_code = getattr(found.header, f"get_{form}")(coded=True)
        assert found_code == code
        assert np.array_equal(form_found, expected)
    for field in ("pixdim", "xyzt_units", "descrip", "qform_code", "sform_code", "dim"):
        assert np.array_equal(found.header[field], image.header[field]), field
    assert found.header["cal_max"] == 0


@pytest.mark.parametrize(
    ("ending", "written"), [(".png", ".png"), (".PNG", ".png"), (".tif", ".tif"), (".tiff", ".tiff")]
)
def test_a_2d_image_is_predicted_in_its_format_and_size(tmp_path, ending, written):
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / f"a{ending}"
    if written == ".png":
        Pillow.fromarray(np.zeros((3, 5, 3), np.uint8)).save(file, format="PNG")
    else:
        tifffile.imwrite(file, np.full((3, 5), 40000, np.uint16))
    case, geometry = incoming(tmp_path / "in")
    labels = np.arange(15).reshape(3, 5) % 3
    path = write_prediction(tmp_path / "out", case, torch.from_numpy(labels), geometry, CLASSES)
    assert path.name == f"a{written}"
    found = np.asarray(Pillow.open(path)) if written == ".png" else tifffile.imread(path)
    assert found.dtype == np.uint8
    assert np.array_equal(found, labels)


def test_more_than_256_classes_take_16_bits(tmp_path):
    (tmp_path / "in").mkdir()
    Pillow.fromarray(np.zeros((1, 3), np.uint8)).save(tmp_path / "in" / "a.png")
    case, geometry = incoming(tmp_path / "in")
    classes = tuple(map(str, range(301)))
    path = write_prediction(tmp_path / "out", case, np.array([[0, 256, 300]]), geometry, classes)
    assert np.asarray(Pillow.open(path)).tolist() == [[0, 256, 300]]
    with pytest.raises(DataError, match="class value 300 has no name among 300"):
        write_prediction(tmp_path, case, np.array([[0, 256, 300]]), geometry, classes[:300])


def test_a_dicom_series_is_predicted_as_a_segmentation(tmp_path):
    write_series(tmp_path / "in" / "p7", np.zeros((3, 4, 5), np.int16))
    case, geometry = incoming(tmp_path / "in")
    labels = np.zeros((5, 4, 3), int)
    labels[1, 2, 0] = 2
    path = write_prediction(tmp_path / "out", case, labels, geometry, CLASSES)
    assert path == tmp_path / "out" / "p7.dcm"
    found = pydicom.dcmread(path)
    assert found.NumberOfFrames == 1
    assert np.argwhere(found.pixel_array.reshape(4, 5)).tolist() == [[2, 1]]  # row 2, column 1
    assert find_incoming(tmp_path / "in") == [case]


def test_predictions_below_the_input_are_not_taken_for_images(tmp_path):
    write_series(tmp_path / "p7", np.zeros((3, 4, 5), np.int16))
    oblique(tmp_path / "v.nii.gz")
    found = find_incoming(tmp_path)
    for case in found:
        geometry = read_incoming(case).geometry
        write_prediction(tmp_path / "predictions", case, np.ones(geometry.shape, int), geometry, CLASSES)
        write_probabilities(tmp_path / "predictions", case, np.ones((2, *geometry.shape)), geometry)
    assert find_incoming(tmp_path) == found


def test_predictions_do_not_go_where_images_come_from(tmp_path):
    oblique(tmp_path / "a_0000.nii.gz")
    before = (tmp_path / "a_0000.nii.gz").read_bytes()
    case, geometry = incoming(tmp_path)
    (tmp_path / "link").symlink_to(".")
    for folder in (tmp_path, tmp_path / "link"):
        with pytest.raises(DataError, match="images come from this folder; choose another"):
            write_prediction(folder, case, np.zeros((4, 5, 6), int), geometry, CLASSES)
        with pytest.raises(DataError, match="images come from this folder; choose another"):
            write_probabilities(folder, case, np.zeros((2, 4, 5, 6)), geometry)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a_0000.nii.gz", "link"]
    assert (tmp_path / "a_0000.nii.gz").read_bytes() == before


# probabilities


def test_probabilities_of_a_volume_are_a_4d_file_on_its_grid(tmp_path):
    oblique(tmp_path / "in" / "a.nii.gz")
    case, geometry = incoming(tmp_path / "in")
    values = np.random.default_rng(0).random((3, 4, 5, 6))
    path = write_probabilities(tmp_path / "out", case, values, geometry)
    assert path == tmp_path / "out" / "a_probabilities.nii.gz"
    found = nib.load(path)
    assert found.shape == (4, 5, 6, 3)
    assert found.get_data_dtype() == np.float32
    assert np.array_equal(found.affine, nib.load(case.files[0]).affine)
    for value in range(3):
        assert np.array_equal(np.asarray(found.dataobj)[..., value], values[value].astype(np.float32))


def test_a_flat_nifti_keeps_its_place_for_the_third_axis(tmp_path):
    (tmp_path / "in").mkdir()
    nib.save(nib.Nifti1Image(np.zeros((4, 5), np.float32), np.diag([2.0, 3.0, 1.0, 1.0])), tmp_path / "in" / "a.nii")
    case, geometry = incoming(tmp_path / "in")
    values = np.random.default_rng(0).random((2, 4, 5)).astype(np.float32)
    found = nib.load(write_probabilities(tmp_path, case, values, geometry))
    assert found.shape == (4, 5, 1, 2)
    assert np.array_equal(np.asarray(found.dataobj)[:, :, 0, 1], values[1])
    assert nib.load(write_prediction(tmp_path, case, np.ones((4, 5), int), geometry, CLASSES)).shape == (4, 5)


def test_probabilities_of_2d_images_and_series_are_arrays_as_nnunet_names_them(tmp_path):
    (tmp_path / "in").mkdir()
    Pillow.fromarray(np.zeros((3, 5), np.uint8)).save(tmp_path / "in" / "a.png")
    write_series(tmp_path / "in" / "b", np.zeros((3, 4, 5), np.int16))
    for case in find_incoming(tmp_path / "in"):
        geometry = read_incoming(case).geometry
        values = torch.rand(2, *geometry.shape)
        path = write_probabilities(tmp_path / "out", case, values, geometry)
        assert path.name == f"{case.name}_probabilities.npz"
        with np.load(path, allow_pickle=False) as found:
            assert list(found) == ["probabilities"]
            assert np.array_equal(found["probabilities"], values.numpy())
        before = path.read_bytes()
        assert write_probabilities(tmp_path / "out", case, values, geometry).read_bytes() == before
        with pytest.raises(DataError, match="have their image's size"):
            write_probabilities(tmp_path / "out", case, values[:, 1:], geometry)


# whole or not at all


@contextmanager
def full_disk(size: int):
    """No file may grow beyond so many bytes, as on a disk that fills up while writing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def kinds(folder):
    """One case of every format, large enough to fill a small disk."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    Pillow.fromarray(np.zeros((64, 64), np.uint8)).save(folder / "png.png")
    tifffile.imwrite(folder / "tiff.tif", np.zeros((64, 64), np.uint8))
    nib.save(nib.Nifti1Image(np.zeros((16, 16, 16), np.uint8), np.eye(4)), folder / "zipped.nii.gz")
    nib.save(nib.Nifti1Image(np.zeros((16, 16, 16), np.uint8), np.eye(4)), folder / "plain.nii")
    write_series(folder / "series", np.zeros((4, 32, 32), np.int16))
    for case in find_incoming(folder):
        geometry = read_incoming(case).geometry
        yield case, geometry, rng.integers(0, 3, geometry.shape)


def test_a_full_disk_is_one_line_and_leaves_the_old_prediction_and_nothing_else(tmp_path):
    for case, geometry, labels in kinds(tmp_path / "in"):
        out = tmp_path / "out" / case.name
        path = write_prediction(out, case, labels, geometry, CLASSES)
        before = path.read_bytes()
        assert len(before) > 300
        with full_disk(300):
            with pytest.raises(DataError, match="cannot be written .*; free space") as caught:
                write_prediction(out, case, 2 - labels, geometry, CLASSES)
            with pytest.raises(DataError, match="cannot be written .*; free space"):
                write_probabilities(out, case, np.random.default_rng(0).random((2, *geometry.shape)), geometry)
        assert "\n" not in str(caught.value)
        assert path.read_bytes() == before
        assert [file.name for file in out.iterdir()] == [path.name]


def test_an_output_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "out").write_text("a file where the folder should be")
    for case, geometry, labels in kinds(tmp_path / "in"):
        with pytest.raises(DataError, match="cannot be written"):
            write_prediction(tmp_path / "out", case, labels, geometry, CLASSES)


def test_a_read_only_folder_is_one_line(tmp_path):
    place = Path("/proc/self") if os.geteuid() == 0 else tmp_path / "locked"  # root may write anywhere else
    place.mkdir(mode=0o500, exist_ok=True)
    for case, geometry, labels in kinds(tmp_path / "in"):
        with pytest.raises(DataError, match="cannot be written"):
            write_prediction(place, case, labels, geometry, CLASSES)


def test_a_process_killed_at_any_byte_leaves_the_old_prediction_whole(tmp_path):
    (tmp_path / "in").mkdir()
    nib.save(nib.Nifti1Image(np.zeros((64, 64, 32), np.uint8), np.eye(4)), tmp_path / "in" / "a.nii.gz")
    case, geometry = incoming(tmp_path / "in")
    labels = np.random.default_rng(0).integers(0, 3, geometry.shape)
    size = len(write_prediction(tmp_path / "whole", case, labels, geometry, CLASSES).read_bytes())
    old = write_prediction(tmp_path / "out", case, labels * 0, geometry, CLASSES).read_bytes()
    for limit in range(1, size, size // 12):
        child = os.fork()
        if not child:
            try:  # the kernel ends a process that writes further than it may
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                write_prediction(tmp_path / "out", case, labels, geometry, CLASSES)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGXFSZ
        [left, kept] = sorted((tmp_path / "out").iterdir())
        assert (kept.name, kept.read_bytes()) == ("a.nii.gz", old)
        assert left.name.startswith(".")
        assert left.name.endswith(".part")
        left.unlink()
