"""The DICOM node: from a scanner's C-STORE to a segmentation at its destination, once, whatever happens between."""

import json
import logging
import shutil
import subprocess
import threading
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("pynetdicom", reason="a DICOM node needs pynetdicom: pip install 'dltta[dicom]'")

from pydicom import dcmread
from pynetdicom import AE, AllStoragePresentationContexts, evt
from pynetdicom.sop_class import CTImageStorage, EnhancedCTImageStorage, Verification

import streams
from dicoms import write_enhanced, write_series
from dltta.cli.node import Listening
from dltta.client import Client, ServiceError
from dltta.models.io.opening import ModelSource
from dltta.serving.node import Node, NodeSettings, OwnShard, RemoteService
from dltta.serving.outbox import Peer, parse_destination
from dltta.serving.shard import Shard, ShardSettings
from dltta.serving.site_rule import SiteRule

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

    def __init__(self, port=0, tls=None):
        self.received = []
        entity = AE(ae_title="ARCHIVE")
        for context in AllStoragePresentationContexts:
            entity.add_supported_context(context.abstract_syntax)
        handlers = [(evt.EVT_C_STORE, self.take)]
        self.server = entity.start_server(("127.0.0.1", port), block=False, evt_handlers=handlers, ssl_context=tls)
        self.place = f"ARCHIVE@127.0.0.1:{self.server.server_address[1]}"

    def take(self, event):
        self.received.append(event.dataset)
        return 0x0000


@pytest.fixture
def archive():
    archive = Archive()
    yield archive
    archive.server.shutdown()


def make_node(tmp_path, model, destinations=(), *, backend=None, sending=None, **changes):
    root = tmp_path / "state"
    shard = Shard(ShardSettings(root.resolve(), {"model": ModelSource(str(model))}, streams.settings(guard=False)))
    settings = replace(NodeSettings(root, port=0, quiet=0.0), **changes)
    places = [parse_destination(place, "DLTTA", sending) for place in destinations]
    return Node(settings, backend or OwnShard(shard, "model"), places)


def send(port, files, title="SCANNER", release=True, tls=None):
    """Statuses of C-STORE for each file."""
    entity = AE(ae_title=title)
    entity.add_requested_context(CTImageStorage)
    entity.add_requested_context(EnhancedCTImageStorage)
    association = entity.associate("127.0.0.1", port, ae_title="DLTTA", tls_args=tls and (tls.context, "127.0.0.1"))
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


def test_a_multi_frame_file_is_a_series_too(tmp_path, model, archive):
    volume = np.random.default_rng(0).integers(0, 255, (SLICES, 32, 32)).astype(np.int16)
    file = write_enhanced(tmp_path / "whole.dcm", volume, order=[2, 0, 3, 1])
    node = make_node(tmp_path, model, [archive.place], capture=True)
    port = node.start()
    assert send(port, [file]) == [0]
    settled(node)
    assert node.work() == 1
    node.stop()
    segmentation, _ = sorted(archive.received, key=lambda found: found.Modality, reverse=True)
    (referred,) = segmentation.ReferencedSeriesSequence[0].ReferencedInstanceSequence
    assert referred.ReferencedSOPInstanceUID == dcmread(file).SOPInstanceUID


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


class KilledError(BaseException):
    """The process is gone; nothing catches it."""


def killed(*args, **kwargs):
    raise KilledError


def killed_after(function):
    def end(*args, **kwargs):
        function(*args, **kwargs)
        raise KilledError

    return end


STEPS = {
    "received": ("dltta.serving.node.Node._predict", killed),
    "predicted": ("dltta.serving.outbox.Outbox.put", killed),
    "in the outbox": ("dltta.serving.node.write_atomically", killed),
    "marked as done": ("dltta.serving.inbound.Inbound.forget", killed),
    "forgotten": ("dltta.serving.outbox.Outbox.flush", killed),
    "sent": ("dltta.serving.outbox.Peer.send", killed_after(Peer.send)),
}


def test_a_node_killed_after_every_single_step_delivers_one_segmentation(tmp_path, model, series, archive, monkeypatch):
    node = make_node(tmp_path, model, [archive.place])
    port = node.start()
    assert send(port, series) == [0] * SLICES
    settled(node)
    node.stop()
    for place, dies in STEPS.values():
        monkeypatch.setattr(place, dies)
        dying = make_node(tmp_path, model, [archive.place])
        with pytest.raises(KilledError):
            dying.work()
        dying.backend._shard.close()  # the kernel releases the locks of a process that is gone
        monkeypatch.undo()
    last = make_node(tmp_path, model, [archive.place])
    last.work()
    assert len({bytes(found.PixelData) + found.SOPInstanceUID.encode() for found in archive.received}) == 1
    assert last.outbox.waiting() == []
    assert list((tmp_path / "state" / "arriving").iterdir()) == []
    (log,) = (tmp_path / "state").glob("keys/*/stream/stream.jsonl")
    cases = [line for line in map(json.loads, log.read_text().splitlines()) if "sequence" in line]
    assert len(cases) == 1  # the model learned from it once


def test_a_segmentation_waits_for_a_destination_that_is_away_over_restarts(tmp_path, model, series):
    gone = Archive()
    port = gone.server.server_address[1]
    gone.server.shutdown()
    node = make_node(tmp_path, model, [gone.place])
    listening = node.start()
    send(listening, series)
    settled(node)
    node.work()
    node.stop()
    for _ in range(2):
        restarted = make_node(tmp_path, model, [gone.place])
        restarted.work()
        assert len(restarted.outbox.waiting()) == 1
    back = Archive(port)
    for _ in range(2):
        make_node(tmp_path, model, [back.place]).work()
    back.server.shutdown()
    assert [found.Modality for found in back.received] == ["SEG"]


def test_each_of_several_destinations_gets_it_once_though_one_is_away(tmp_path, model, series, archive):
    gone = Archive()
    gone.server.shutdown()
    node = make_node(tmp_path, model, [archive.place, gone.place])
    port = node.start()
    send(port, series)
    settled(node)
    node.work()
    node.stop()
    again = make_node(tmp_path, model, [archive.place, gone.place])
    again.work()
    assert len(archive.received) == 1
    assert [label for _, _, label in again.outbox.waiting()] == [list(again.outbox.destinations)[1]]


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


def test_a_series_waits_until_the_disk_has_room_for_its_prediction(
    tmp_path, model, series, archive, monkeypatch, caplog
):
    now = [0.0]
    monkeypatch.setattr("dltta.serving.outbox.time.monotonic", lambda: now[0])
    node = make_node(tmp_path, model, [archive.place])
    port = node.start()
    send(port, series)
    settled(node)
    node.stop()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "dltta.node"):
        patch.setattr("dltta.serving.outbox.write_atomically", full)
        assert [node.work(), node.work()] == [0, 0]
    assert len([line for line in caplog.messages if "No space left" in line]) == 1  # the second time it was not due
    assert len(list((tmp_path / "state" / "arriving").glob("*/*.dcm"))) == SLICES
    now[0] = 1.0
    assert node.work() == 1
    assert len(archive.received) == 1


def test_half_a_series_from_a_sender_that_dropped_is_predicted_whole_when_it_is_sent_again(
    tmp_path, model, series, archive
):
    node = make_node(tmp_path, model, [archive.place])
    port = node.start()
    for files, release in ((series[:2], False), (series, True), (series, True), (series[:2], True)):
        assert send(port, files, release=release) == [0] * len(files)
        settled(node)
        node.work()
    node.stop()
    whole = {dcmread(file).SOPInstanceUID for file in series}
    referred = [
        {each.ReferencedSOPInstanceUID for each in found.ReferencedSeriesSequence[0].ReferencedInstanceSequence}
        for found in archive.received
    ]
    assert [len(each) for each in referred] == [2, SLICES]
    assert referred[1] == whole


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


# TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """For loopback: ours, signed by itself, and a stranger's; each a certificate and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here: apt-get install openssl")
    folder = tmp_path_factory.mktemp("tls")
    make_certificates(folder, "ours", "strange")
    return folder


def make_certificates(folder, *names):
    for name in names:
        subprocess.run(
            [
                "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                "-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1",
                "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.pem",
            ],
            check=True, capture_output=True,
        )  # fmt: skip


def contexts(folder, name):
    return Listening(
        tls_cert=folder / f"{name}.pem", tls_key=folder / f"{name}.key", tls_ca=folder / "ours.pem"
    ).certificates()


def test_with_tls_series_and_segmentation_travel_encrypted_and_strangers_are_refused(
    tmp_path, model, series, certificates
):
    receiving, sending = contexts(certificates, "ours")
    archive = Archive(tls=contexts(certificates, "ours")[0])
    node = make_node(tmp_path, model, [archive.place], tls=receiving, sending=sending)
    port = node.start()
    assert send(port, series) is None  # not encrypted
    assert send(port, series, tls=contexts(certificates, "strange")[1]) is None  # a certificate that we do not know
    assert send(port, series, tls=sending) == [0] * SLICES
    settled(node)
    assert node.work() == 1
    node.stop()
    archive.server.shutdown()
    assert [found.Modality for found in archive.received] == ["SEG"]


def test_nothing_is_sent_to_an_archive_with_a_strangers_certificate(tmp_path, model, series, certificates):
    receiving, sending = contexts(certificates, "ours")
    strange = Archive(tls=contexts(certificates, "strange")[0])
    node = make_node(tmp_path, model, [strange.place], tls=receiving, sending=sending)
    port = node.start()
    send(port, series, tls=sending)
    settled(node)
    node.work()
    node.stop()
    strange.server.shutdown()
    assert strange.received == []
    assert len(node.outbox.waiting()) == 1


# a running service instead of a model of its own


@pytest.fixture
def service(tmp_path, model):
    """The address of a service on loopback, and its state folder."""
    pytest.importorskip("fastapi", reason="the service is not installed: pip install 'dltta[serve]'")
    uvicorn = pytest.importorskip("uvicorn", reason="the service is not installed: pip install 'dltta[serve]'")
    from test_http import ACCESS, InProcess

    from dltta.serving.http import make_app

    root = tmp_path / "service"
    cluster = InProcess(
        ShardSettings(root, {"model": ModelSource(str(model))}, streams.settings(guard=False)), shards=1
    )
    server = uvicorn.Server(uvicorn.Config(make_app(cluster, ACCESS), host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", root
    server.should_exit = True
    thread.join(30)


def test_a_node_predicts_with_a_service_and_a_service_that_refuses_it_loses_nothing(
    tmp_path, model, series, archive, service
):
    from test_http import OTHER, SUBMIT

    address, root = service
    rule = SiteRule("h/{StationName}")
    for token, dealt in ((OTHER, 0), (SUBMIT, 1)):
        node = make_node(
            tmp_path, model, [archive.place], rule=rule, backend=RemoteService(Client(address, token, patience=5))
        )
        port = node.start()
        send(port, series)
        settled(node)
        assert node.work() == dealt
        node.stop()
    (found,) = archive.received
    assert found.Modality == "SEG"
    (log,) = root.glob("keys/*/stream/stream.jsonl")
    (line,) = [line for line in map(json.loads, log.read_text().splitlines()) if "sequence" in line]
    assert line["request"].startswith(dcmread(series[0]).SeriesInstanceUID)
    assert not list((tmp_path / "state").glob("keys/*"))  # the node itself has no stream


def test_a_series_that_the_service_cannot_use_is_given_up_and_one_that_it_cannot_take_now_is_kept(
    tmp_path, model, series, archive
):
    class Service:
        status = 503

        def predict(self, *args, **kwargs):
            raise ServiceError(self.status, "no")

    client = Service()
    node = make_node(tmp_path, model, [archive.place], backend=RemoteService(client))
    port = node.start()
    send(port, series)
    settled(node)
    assert node.work() == 0
    assert len(list((tmp_path / "state" / "arriving").glob("*/*.dcm"))) == SLICES
    client.status = 422
    again = make_node(tmp_path, model, [archive.place], backend=RemoteService(client))
    assert again.work() == 1
    assert list((tmp_path / "state" / "arriving").iterdir()) == []
    node.stop()
