"""Programs that others wrote: dcmtk sends and receives, Orthanc keeps, dicom3tools judges, highdicom opens."""

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pynetdicom", reason="a DICOM node needs pynetdicom: pip install 'dltta[dicom]'")
pytest.importorskip("highdicom", reason="DICOM is not installed: pip install 'dltta[dicom]'")

import highdicom
from pydicom import dcmread
from test_node import contexts, make_certificates, make_node, settled
from test_node import send as send_files

import streams
from dicoms import AXIAL, tilted, write_enhanced, write_series
from dltta.data.formats.dicom import read_series, write_segmentation
from killed_node import STEPS

pytestmark = pytest.mark.long
SAGITTAL = (0.0, 1.0, 0.0, 0.0, 0.0, -1.0)


def dcmtk(name):
    """A program of dcmtk's; pynetdicom brings others of the same names into the environment."""
    ours = {Path(sys.prefix, "bin").resolve(), Path(sys.executable).parent.resolve()}
    places = [place for place in os.get_exec_path() if Path(place).resolve() not in ours]
    return shutil.which(name, path=os.pathsep.join(places))


def program(name, package):
    return pytest.mark.skipif(dcmtk(name) is None, reason=f"{name} is not here: apt-get install {package}")


def asymmetric(shape):
    """A corner that looks different from every side."""
    labels = np.zeros(shape, np.uint8)
    labels[1:3, 1:6, 1:4] = 1
    labels[1, 1:3, 1:9] = 2
    return labels


def several(folder, volume, **options):
    return write_series(folder / "series", volume, **options)


def one(folder, volume, **options):
    return [write_enhanced(folder / "whole.dcm", volume, order=[3, 0, 4, 1, 2], **options)]


@pytest.fixture(params=[AXIAL, SAGITTAL, tilted()], ids=["axial", "sagittal", "oblique"])
def directions(request):
    return request.param


@pytest.fixture(params=[several, one], ids=["slices", "multi-frame"])
def written(request, directions, tmp_path):
    """A series, class values on its grid, and their DICOM segmentation."""
    volume = np.random.default_rng(0).integers(0, 255, (5, 12, 16)).astype(np.int16)
    files = request.param(tmp_path, volume, directions=directions, StudyDate="20260101", StudyTime="120000")
    image = read_series(files)
    labels = asymmetric(image.array.shape[1:])
    write_segmentation(tmp_path / "seg.dcm", labels, image.geometry, ("background", "a", "b"))
    return labels, image, tmp_path / "seg.dcm"


@program("dciodvfy", "dicom3tools")
def test_every_segmentation_is_valid_for_dciodvfy(written):
    assert errors_of(written[2].read_bytes(), written[2].parent) == []


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
    port = free_port()
    (tmp_path / "archive").mkdir()
    archive = subprocess.Popen([dcmtk("storescp"), "-od", str(tmp_path / "archive"), "--fork", str(port)])
    try:
        node = make_node(tmp_path, streams.save_model(tmp_path / "model"), [f"ANY@127.0.0.1:{port}"])
        listening = node.start()
        echo = [dcmtk("echoscu"), "-aec", "DLTTA", "127.0.0.1", str(listening)]
        assert subprocess.run(echo).returncode == 0
        send = [dcmtk("storescu"), "-aec", "DLTTA", "127.0.0.1", str(listening), *map(str, files)]
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


# Orthanc as the archive


PLUGINS = [
    *Path("/usr/share/orthanc/plugins").glob("libOrthancDicomWeb.so"),
    *Path("/usr/lib").glob("*/orthanc/libOrthancDicomWeb.so"),
]
needs_orthanc = pytest.mark.skipif(
    shutil.which("Orthanc") is None or not PLUGINS,
    reason="Orthanc with DICOMweb is not here: apt-get install orthanc orthanc-dicomweb",
)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Orthanc:
    """Orthanc in a folder of its own, for this machine only."""

    def __init__(self, folder):
        self.folder, self.http, self.dicom = folder, free_port(), free_port()
        folder.mkdir()
        settings = {
            "StorageDirectory": str(folder / "storage"), "IndexDirectory": str(folder / "storage"),
            "HttpPort": self.http, "RemoteAccessAllowed": False, "AuthenticationEnabled": False,
            "DicomPort": self.dicom, "DicomAet": "ARCHIVE", "DicomAlwaysAllowStore": True,
            "DicomAlwaysAllowFind": True, "Plugins": [str(PLUGINS[0])],
            "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
        }  # fmt: skip
        (folder / "orthanc.json").write_text(json.dumps(settings))
        self.web = f"http://127.0.0.1:{self.http}/dicom-web"
        self.peer = f"ARCHIVE@127.0.0.1:{self.dicom}"

    def start(self):
        with (self.folder / "log").open("w") as log:
            self.process = subprocess.Popen(["Orthanc", self.folder / "orthanc.json"], stdout=log, stderr=log)
        wait_until(self._answers)

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def _answers(self):
        assert self.process.poll() is None, (self.folder / "log").read_text()
        try:
            return self.get("/system")
        except urllib.error.URLError:
            return None

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http}{path}", timeout=30) as answer:
            return answer.read()

    def instances(self):
        """Everything that it holds, as files."""
        return [self.get(f"/instances/{each}/file") for each in json.loads(self.get("/instances"))]

    def find(self, **keys):
        """What findscu finds, a data set each."""
        found = self.folder / "found"
        shutil.rmtree(found, ignore_errors=True)
        found.mkdir()
        wanted = [part for name, value in keys.items() for part in ("-k", f"{name}={value}")]
        command = [dcmtk("findscu"), "-S", "-aec", "ARCHIVE", *wanted, "-X", "-od", found, "127.0.0.1", str(self.dicom)]
        subprocess.run(command, check=True, timeout=60)
        return [dcmread(file, force=True) for file in sorted(found.iterdir())]


def wait_until(what, seconds=120):
    """The first true value; the deadline only ends a test that would wait for ever."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)
    return found


@pytest.fixture
def orthanc(tmp_path):
    orthanc = Orthanc(tmp_path / "orthanc")
    orthanc.start()
    yield orthanc
    orthanc.stop()


def errors_of(content, folder):
    """What dciodvfy says."""
    (folder / "judged.dcm").write_bytes(content)
    found = subprocess.run(["dciodvfy", folder / "judged.dcm"], capture_output=True, text=True)
    return [line for line in (found.stdout + found.stderr).splitlines() if line.startswith("Error")]


class NodeProcess:
    """`dltta node` as somebody starts it; `killed_at` names the step at which it is killed."""

    def __init__(self, folder, port, model, place, killed_at="never"):
        script = Path(__file__).parents[1] / "killed_node.py"
        self.log = folder / f"{killed_at}.log"
        command = [
            sys.executable, script, killed_at, "node", "-m", model, "-o", folder / "state", "--method", "ptbn",
            "--port", port, "--to", place, "--quiet", "0.5",
        ]  # fmt: skip
        with self.log.open("w") as log:
            self.process = subprocess.Popen([str(each) for each in command], stdout=log, stderr=log)
        wait_until(lambda: self.said("listens on") or self.process.poll() is not None)

    def said(self, words):
        return self.log.read_text().count(words)

    def died(self):
        return self.process.wait(120)

    def stop(self):
        self.process.terminate()
        return self.process.wait(60)


@needs_orthanc
@program("storescu", "dcmtk")
def test_a_study_from_storescu_is_in_orthanc_once_though_the_node_is_killed_again_and_again(tmp_path, orthanc):
    volume = np.random.default_rng(0).integers(0, 255, (3, 32, 32)).astype(np.int16)
    files = write_series(tmp_path / "series", volume, StationName="CT1", StudyDate="20260101", StudyTime="120000")
    model, port = streams.save_model(tmp_path / "model"), free_port()
    send = [dcmtk("storescu"), "-aec", "DLTTA", "127.0.0.1", str(port), *map(str, files)]

    first, *others = STEPS
    node = NodeProcess(tmp_path, port, model, orthanc.web, first)
    assert subprocess.run(send).returncode == 0
    assert node.died() == -signal.SIGKILL
    for step in others:
        assert NodeProcess(tmp_path, port, model, orthanc.web, step).died() == -signal.SIGKILL
    node = NodeProcess(tmp_path, port, model, orthanc.web)
    wait_until(lambda: node.said('"predicted"') and node.said('"sent"'))  # in this order or the other
    wait_until(lambda: not any((tmp_path / "state" / "arriving").iterdir()))
    assert subprocess.run(send).returncode == 0  # and once more
    wait_until(lambda: node.said('"again"'))
    assert node.stop() == 0

    (content,) = orthanc.instances()
    found = dcmread(io.BytesIO(content))
    image = dcmread(files[0])
    assert (found.Modality, found.StudyInstanceUID) == ("SEG", image.StudyInstanceUID)
    (series,) = orthanc.find(
        QueryRetrieveLevel="SERIES", StudyInstanceUID=image.StudyInstanceUID, Modality="SEG", SeriesInstanceUID="",
        NumberOfSeriesRelatedInstances="",
    )  # fmt: skip
    assert (series.SeriesInstanceUID, series.NumberOfSeriesRelatedInstances) == (found.SeriesInstanceUID, 1)
    if shutil.which("dciodvfy"):
        assert errors_of(content, tmp_path) == []


@needs_orthanc
@program("storescu", "dcmtk")
def test_orthanc_gets_a_segmentation_and_a_capture_by_c_store_and_the_same_by_stow_adds_nothing(tmp_path, orthanc):
    volume = np.random.default_rng(0).integers(0, 255, (3, 32, 32)).astype(np.int16)
    files = write_series(tmp_path / "series", volume, StationName="CT1", StudyDate="20260101", StudyTime="120000")
    node = make_node(
        tmp_path, streams.save_model(tmp_path / "model"), [orthanc.peer, orthanc.web], capture=True, quiet=0.0
    )
    port = node.start()
    assert (
        subprocess.run([dcmtk("storescu"), "-aec", "DLTTA", "127.0.0.1", str(port), *map(str, files)]).returncode == 0
    )
    settled(node)
    wait_until(node.work)
    node.stop()
    assert node.outbox.waiting() == []
    contents = orthanc.instances()
    assert sorted(dcmread(io.BytesIO(content)).Modality for content in contents) == ["OT", "SEG"]
    if shutil.which("dciodvfy"):
        assert [errors_of(content, tmp_path) for content in contents] == [[], []]


@needs_orthanc
def test_orthanc_that_is_down_gets_it_when_it_is_up(tmp_path):
    volume = np.random.default_rng(0).integers(0, 255, (3, 32, 32)).astype(np.int16)
    files = write_series(tmp_path / "series", volume, StationName="CT1")
    orthanc, model = Orthanc(tmp_path / "orthanc"), streams.save_model(tmp_path / "model")
    places = [orthanc.web, orthanc.peer]
    node = make_node(tmp_path, model, places)
    port = node.start()
    assert set(send_files(port, files)) == {0}
    settled(node)
    assert node.work() == 1
    node.stop()
    assert len(node.outbox.waiting()) == 2
    orthanc.start()
    try:
        again = make_node(tmp_path, model, places)
        again.work()
        assert again.outbox.waiting() == []
        (content,) = orthanc.instances()
        assert dcmread(io.BytesIO(content)).Modality == "SEG"
    finally:
        orthanc.stop()


# TLS of dcmtk


@program("storescu", "dcmtk")
@program("openssl", "openssl")
def test_dcmtk_sends_over_tls_and_not_without_a_certificate(tmp_path):
    make_certificates(tmp_path, "ours", "strange")
    volume = np.random.default_rng(0).integers(0, 255, (3, 32, 32)).astype(np.int16)
    files = [str(file) for file in write_series(tmp_path / "series", volume)]
    node = make_node(tmp_path, streams.save_model(tmp_path / "model"), tls=contexts(tmp_path, "ours")[0])
    port = str(node.start())

    def code(name, *options):
        own = ["+tls", tmp_path / f"{name}.key", tmp_path / f"{name}.pem"]
        command = [dcmtk("storescu"), *own, *options, "-aec", "DLTTA", "127.0.0.1", port, *files]
        return subprocess.run(command, capture_output=True).returncode

    assert code("strange", "+cf", tmp_path / "ours.pem") != 0
    assert (
        subprocess.run([dcmtk("storescu"), "-aec", "DLTTA", "127.0.0.1", port, *files], capture_output=True).returncode
        != 0
    )
    assert list((tmp_path / "state" / "arriving").iterdir()) == []
    assert code("ours", "+cf", tmp_path / "ours.pem") == 0
    settled(node)
    assert node.work() == 1
    node.stop()
