"""The DICOM node: from a scanner's C-STORE to a segmentation at its destination, once, whatever happens between."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pynetdicom", reason="a DICOM node needs pynetdicom: pip install 'dltta[dicom]'")

from pydicom import dcmread
from pynetdicom import AE, AllStoragePresentationContexts, evt
from pynetdicom.sop_class import CTImageStorage, Verification

import streams
from dicoms import write_series
from dltta.errors import DataError, SettingError
from dltta.models.io.opening import ModelSource
from dltta.serving.inbound import Inbound, site_name
from dltta.serving.node import Node, NodeSettings, OwnShard
from dltta.serving.outbox import Outbox, SendError, parse_destination
from dltta.serving.shard import Shard, ShardSettings

SLICES = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return streams.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def series(tmp_path):
    volume = np.random.default_rng(0).integers(0, 255, (SLICES, 32, 32)).astype(np.int16)
    return write_series(tmp_path / "series", volume, StationName="CT1", ProtocolName="head", Manufacturer="Acme")


class Archive:
    """A DICOM node that takes everything, and counts."""

    def __init__(self):
        self.received = []
        entity = AE(ae_title="ARCHIVE")
        for context in AllStoragePresentationContexts:
            entity.add_supported_context(context.abstract_syntax)
        self.server = entity.start_server(("127.0.0.1", 0), block=False, evt_handlers=[(evt.EVT_C_STORE, self.take)])
        self.place = f"ARCHIVE@127.0.0.1:{self.server.server_address[1]}"

    def take(self, event):
        self.received.append(event.dataset)
        return 0x0000


@pytest.fixture
def archive():
    archive = Archive()
    yield archive
    archive.server.shutdown()


def make_node(tmp_path, model, destinations=(), **changes):
    root = tmp_path / "state"
    shard = Shard(ShardSettings(root.resolve(), {"model": ModelSource(str(model))}, streams.settings(guard=False)))
    settings = replace(NodeSettings(root, port=0, quiet=0.0), **changes)
    return Node(settings, OwnShard(shard, "model"), [parse_destination(place, "DLTTA") for place in destinations])


def send(port, files, title="SCANNER", release=True):
    """Statuses of C-STORE for each file."""
    entity = AE(ae_title=title)
    entity.add_requested_context(CTImageStorage)
    association = entity.associate("127.0.0.1", port, ae_title="DLTTA")
    if not association.is_established:
        return None
    found = [association.send_c_store(dcmread(file)).Status for file in files]
    (association.release if release else association.abort)()
    return found


def settled(node):
    """All associations have ended."""
    while any(coming.associations for coming in node.inbound._coming.values()):
        threading.Event().wait(0.01)


def test_a_series_becomes_one_segmentation_at_its_destination(tmp_path, model, series, archive):
    node = make_node(tmp_path, model, [archive.place])
    port = node.start()
    assert send(port, series) == [0] * SLICES
    settled(node)
    assert node.work() == 1
    node.stop()
    (found,) = archive.received
    assert found.Modality == "SEG"
    first = dcmread(series[0])
    assert (found.StudyInstanceUID, found.PatientID) == (first.StudyInstanceUID, first.PatientID)
    assert list((tmp_path / "state" / "arriving").iterdir()) == []
    assert list((tmp_path / "state" / "outbox").iterdir()) == []


def test_a_study_that_is_sent_again_is_predicted_and_sent_on_once(tmp_path, model, series, archive):
    node = make_node(tmp_path, model, [archive.place])
    port = node.start()
    for _ in range(2):
        send(port, series)
        settled(node)
        node.work()
    node.stop()
    assert len(archive.received) == 1
    (log,) = (tmp_path / "state").glob("keys/*/stream/stream.jsonl")
    assert len(log.read_text().splitlines()) == 2  # the start and one case


def test_a_node_killed_after_receiving_goes_on_where_it_was(tmp_path, model, series, archive):
    node = make_node(tmp_path, model, [archive.place])
    port = node.start()
    send(port, series)
    settled(node)
    node.stop()  # and everything in memory is gone
    again = make_node(tmp_path, model, [archive.place])
    assert again.work() == 1
    assert len(archive.received) == 1


def test_a_segmentation_waits_for_a_destination_that_is_away(tmp_path, model, series):
    gone = Archive()
    place = gone.place
    gone.server.shutdown()
    node = make_node(tmp_path, model, [place])
    port = node.start()
    send(port, series)
    settled(node)
    node.work()
    node.stop()
    assert len(node.outbox.waiting()) == 1
    restarted = make_node(tmp_path, model, [place])
    (waiting,) = restarted.outbox.waiting()
    assert dcmread(waiting[0]).Modality == "SEG"


def test_another_patients_slice_is_refused_and_the_series_goes_on(tmp_path, model, series):
    stranger = dcmread(series[1])
    stranger.PatientID = "someone else"
    stranger.SOPInstanceUID = stranger.file_meta.MediaStorageSOPInstanceUID = "1.2.3.9"
    stranger.save_as(tmp_path / "stranger.dcm")
    node = make_node(tmp_path, model)
    port = node.start()
    assert send(port, [series[0], tmp_path / "stranger.dcm", *series[1:]]) == [0, 0xA900, 0, 0, 0]
    settled(node)
    assert node.work() == 1
    node.stop()


def test_a_full_disk_is_told_to_the_sender(tmp_path, model, series, monkeypatch):
    node = make_node(tmp_path, model)
    port = node.start()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dltta.serving.inbound.write_atomically", full)
    assert send(port, series[:1]) == [0xA700]
    monkeypatch.undo()
    assert send(port, series) == [0] * SLICES
    node.stop()


def test_a_series_whose_sender_dropped_waits_for_the_quiet_time(tmp_path, model, series):
    node = make_node(tmp_path, model, quiet=3600.0)
    port = node.start()
    send(port, series[:2], release=False)
    settled(node)
    assert node.work() == 0
    assert len(list((tmp_path / "state" / "arriving").glob("*/*.dcm"))) == 2
    node.stop()


def test_echo_is_answered_and_strangers_are_not(tmp_path, model, series):
    node = make_node(tmp_path, model, peers=("SCANNER@127.0.0.1", "FAR@10.0.0.9"))
    port = node.start()
    entity = AE(ae_title="SCANNER")
    entity.add_requested_context(Verification)
    association = entity.associate("127.0.0.1", port, ae_title="DLTTA")
    assert association.send_c_echo().Status == 0
    association.release()
    assert send(port, series[:1], title="STRANGER") is None
    assert send(port, series[:1], title="FAR") == [0x0124]  # the right name at the wrong address
    node.stop()


def test_sites_follow_a_rule_on_the_header(series):
    header = dcmread(series[0])
    assert site_name(header, "{Manufacturer}/{StationName}/{ProtocolName}") == "Acme/CT1/head"
    assert site_name(header, "{InstitutionName}-{StationName}") == "unknown-CT1"


def test_expected_counts_complete_a_series_at_once(tmp_path, series):
    inbound = Inbound(tmp_path / "state", quiet=3600.0)
    for number, file in enumerate(series):
        dataset = dcmread(file)
        dataset.NumberOfSeriesRelatedInstances = SLICES
        assert list(inbound.complete()) == []
        inbound.take(dataset, file.read_bytes(), 1)
        assert len(list(inbound.complete())) == (number == SLICES - 1)


def test_a_slice_that_comes_twice_with_other_pixels_is_refused(tmp_path, series):
    inbound = Inbound(tmp_path / "state")
    inbound.take(dcmread(series[0]), b"one", 1)
    inbound.take(dcmread(series[0]), b"one", 1)
    with pytest.raises(DataError, match="other content"):
        inbound.take(dcmread(series[0]), b"two", 1)


# sending


class Stubborn:
    """A destination that refuses so often."""

    def __init__(self, name, refusals):
        self.name, self.refusals, self.taken = name, refusals, []

    def send(self, file: Path):
        if self.refusals:
            self.refusals -= 1
            raise SendError("busy")
        self.taken.append(file.read_bytes())


def test_the_outbox_tries_each_destination_until_it_has_everything(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dltta.serving.outbox.time.monotonic", lambda: now[0])
    first, second = Stubborn("first", 0), Stubborn("second", 2)
    outbox = Outbox(tmp_path, [first, second])
    outbox.put("1.2.3", b"content")
    assert outbox.flush() == (1, ["second: busy; tried again in 1 s"])
    assert outbox.flush() == (0, [])  # not yet
    now[0] = 1.0
    assert outbox.flush() == (0, ["second: busy; tried again in 2 s"])
    now[0] = 3.0
    assert Outbox(tmp_path, [first, second]).flush() == (1, [])  # also after a restart
    assert (first.taken, second.taken) == ([b"content"], [b"content"])
    assert list(outbox.folder.iterdir()) == []


@pytest.mark.parametrize("text", ["", "ARCHIVE", "ARCHIVE@host", "@host:1", "A@host:port", "x" * 17 + "@h:1"])
def test_a_destination_says_how_it_is_written(text):
    with pytest.raises(SettingError, match="AET@HOST:PORT"):
        parse_destination(text, "DLTTA")


def test_a_capture_says_the_quality_and_shows_the_slice_with_most_of_the_organ(tmp_path, model, series, archive):
    from dltta.serving.capture import words

    node = make_node(tmp_path, model, [archive.place], capture=True)
    port = node.start()
    send(port, series)
    settled(node)
    node.work()
    node.stop()
    kinds = sorted(found.Modality for found in archive.received)
    assert kinds == ["OT", "SEG"]
    (capture,) = [found for found in archive.received if found.Modality == "OT"]
    assert capture.SamplesPerPixel == 3
    assert words({"quality": 0.914, "quality_low": 0.8, "quality_high": 0.95, "review": True, "decision": "kept"}) == (
        "expected quality 0.91 (90 %: 0.80 to 0.95)  REVIEW\nkept"
    )
    assert len(set(capture.PixelData)) > 2


def test_two_nodes_do_not_share_what_they_predicted(tmp_path, model, series):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        node = make_node(tmp_path / name, model)
        port = node.start()
        send(port, series)
        settled(node)
        assert node.work() == 1
        node.stop()
    shutil.rmtree(tmp_path / "a")
