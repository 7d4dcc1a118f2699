"""Programs that others wrote: dcmtk sends and receives, dicom3tools judges, highdicom opens."""

import shutil
import socket
import subprocess
import time

import numpy as np
import pytest

pytest.importorskip("pynetdicom", reason="a DICOM node needs pynetdicom: pip install 'dltta[dicom]'")
pytest.importorskip("highdicom", reason="DICOM is not installed: pip install 'dltta[dicom]'")

import highdicom
from pydicom import dcmread
from test_node import make_node, settled

import streams
from dicoms import AXIAL, tilted, write_series
from dltta.data.formats.dicom import read_series, write_segmentation

pytestmark = pytest.mark.long
SAGITTAL = (0.0, 1.0, 0.0, 0.0, 0.0, -1.0)


def program(name, package):
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not here: apt-get install {package}")


def asymmetric(shape):
    """A corner that looks different from every side."""
    labels = np.zeros(shape, np.uint8)
    labels[1:3, 1:6, 1:4] = 1
    labels[1, 1:3, 1:9] = 2
    return labels


@pytest.fixture(params=[AXIAL, SAGITTAL, tilted()], ids=["axial", "sagittal", "oblique"])
def written(request, tmp_path):
    """A series, class values on its grid, and their DICOM segmentation."""
    volume = np.random.default_rng(0).integers(0, 255, (5, 12, 16)).astype(np.int16)
    files = write_series(
        tmp_path / "series", volume, directions=request.param, StudyDate="20260101", StudyTime="120000"
    )
    image = read_series(files)
    labels = asymmetric(image.array.shape[1:])
    write_segmentation(tmp_path / "seg.dcm", labels, image.geometry, ("background", "a", "b"))
    return labels, image, tmp_path / "seg.dcm"


@program("dciodvfy", "dicom3tools")
def test_every_segmentation_is_valid_for_dciodvfy(written):
    found = subprocess.run(["dciodvfy", str(written[2])], capture_output=True, text=True)
    errors = [line for line in (found.stdout + found.stderr).splitlines() if line.startswith("Error")]
    assert errors == []


def test_highdicom_finds_each_segment_where_it_was(written):
    labels, image, path = written
    segmentation = highdicom.seg.segread(path)
    where = image.geometry.affine
    for frame, plane in zip(
        segmentation.PerFrameFunctionalGroupsSequence, segmentation.pixel_array.reshape(-1, 12, 16), strict=True
    ):
        number = frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        corner = np.array(frame.PlanePositionSequence[0].ImagePositionPatient, float) * (-1, -1, 1)  # LPS to RAS
        index = np.linalg.inv(where) @ np.append(corner, 1)
        assert index[:2] == pytest.approx([0, 0], abs=1e-3)
        expected = labels[..., round(index[2])] == number
        assert np.array_equal(plane.T > 0, expected)


@program("storescu", "dcmtk")
def test_dcmtk_sends_a_study_and_takes_the_segmentation(tmp_path):
    volume = np.random.default_rng(0).integers(0, 255, (3, 32, 32)).astype(np.int16)
    files = write_series(tmp_path / "series", volume, StationName="CT1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "archive").mkdir()
    archive = subprocess.Popen(["storescp", "-od", str(tmp_path / "archive"), "--fork", str(port)])
    try:
        node = make_node(tmp_path, streams.save_model(tmp_path / "model"), [f"ANY@127.0.0.1:{port}"])
        listening = node.start()
        echo = ["echoscu", "-aec", "DLTTA", "127.0.0.1", str(listening)]
        assert subprocess.run(echo).returncode == 0
        send = ["storescu", "-aec", "DLTTA", "127.0.0.1", str(listening), *map(str, files)]
        assert subprocess.run(send).returncode == 0
        settled(node)
        deadline = time.monotonic() + 120
        while not list((tmp_path / "archive").iterdir()) and time.monotonic() < deadline:
            node.work()
        node.stop()
        (found,) = (tmp_path / "archive").iterdir()
        assert dcmread(found).Modality == "SEG"
    finally:
        archive.terminate()
        archive.wait(30)
