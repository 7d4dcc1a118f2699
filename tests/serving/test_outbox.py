"""Predictions on their way: to every destination, until it has them, over restarts."""

import base64
import http.server
import json
import shutil
import threading
from pathlib import Path

import pytest

pytest.importorskip("pynetdicom", reason="a DICOM node needs pynetdicom: pip install 'dltta[dicom]'")
pytest.importorskip("dicomweb_client", reason="STOW-RS needs dicomweb-client: pip install 'dltta[dicom]'")

import numpy as np
from pynetdicom import AE, evt
from pynetdicom.sop_class import ComputedRadiographyImageStorage
from test_node import contexts, make_certificates

from dicoms import write_dicom
from dltta.errors import SettingError
from dltta.serving.outbox import Outbox, Peer, SendError, Web, parse_destination


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


def test_tries_come_less_and_less_often_but_never_end(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dltta.serving.outbox.time.monotonic", lambda: now[0])
    outbox = Outbox(tmp_path, [Stubborn("away", 1000)])
    outbox.put("1.2.3", b"content")
    pauses = []
    while len(pauses) < 12:
        (problem,) = outbox.flush()[1]
        pauses.append(float(problem.rpartition(" in ")[2].removesuffix(" s")))
        now[0] += pauses[-1]
    assert pauses == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]


# how destinations are written


@pytest.mark.parametrize(
    "text",
    [
        "", "ARCHIVE", "ARCHIVE@host", "@host:1", "A@host:port", "x" * 17 + "@h:1", "A@host:0", "A@host:65536", " @h:1",
        "A\\B@h:1", "Ä@h:1", "http://", "http://:80/dicom-web", "http://host:port/dicom-web", "http://host:99999/x",
    ],
)  # fmt: skip
def test_a_destination_says_how_it_is_written(text):
    with pytest.raises(SettingError, match="AET@HOST:PORT"):
        parse_destination(text, "DLTTA")


def test_destinations_are_read_as_they_are_meant():
    assert parse_destination("PACS 1@10.0.0.7:104", "DLTTA") == Peer(
        "PACS 1@10.0.0.7:104", "PACS 1", "10.0.0.7", 104, "DLTTA"
    )
    assert parse_destination("A@[::1]:104", "DLTTA").host == "::1"
    assert parse_destination("https://host:8042/dicom-web", "DLTTA") == Web("https://host:8042/dicom-web")
    secret = parse_destination("http://me:p%40ss@[::1]:8042/dicom-web", "DLTTA")
    assert (secret.name, secret.login) == ("http://[::1]:8042/dicom-web", ("me", "p@ss"))  # the name is logged
    assert "p@ss" not in repr(secret)


# C-STORE, to a peer on loopback


@pytest.fixture
def image(tmp_path):
    return write_dicom(tmp_path / "image.dcm", np.zeros((4, 4), np.uint16))


def peer(status, close=False):
    """A node that answers so, and its address."""
    entity = AE(ae_title="ARCHIVE")
    entity.add_supported_context(ComputedRadiographyImageStorage)

    def take(event):
        if close:
            event.assoc.abort()
        return status

    server = entity.start_server(("127.0.0.1", 0), block=False, evt_handlers=[(evt.EVT_C_STORE, take)])
    return server, parse_destination(f"ARCHIVE@127.0.0.1:{server.server_address[1]}", "DLTTA")


@pytest.mark.parametrize("status", [0x0000, 0xB000, 0xB006, 0xB007])
def test_what_is_stored_with_a_warning_is_stored(image, status):
    server, destination = peer(status)
    destination.send(image)
    server.shutdown()


@pytest.mark.parametrize(
    ("status", "close", "words"), [(0xA700, False, "0xa700"), (0x0110, False, "0x0110"), (0, True, "connection broke")]
)
def test_a_peer_that_refuses_or_hangs_up_has_it_not(image, status, close, words):
    server, destination = peer(status, close)
    with pytest.raises(SendError, match=words):
        destination.send(image)
    server.shutdown()


def test_a_peer_that_hangs_up_before_it_is_sent_has_it_not(image, monkeypatch):
    def gone(*args):
        raise RuntimeError("The association with a peer SCP must be established")

    server, destination = peer(0)
    monkeypatch.setattr("pynetdicom.association.Association.send_c_store", gone)
    with pytest.raises(SendError, match="must be established"):
        destination.send(image)
    server.shutdown()


@pytest.mark.parametrize(
    ("place", "words"), [("A@127.0.0.1:{}", "no association"), ("A@no-such-host.invalid:104", "not known|resolution")]
)
def test_a_peer_that_is_not_there_has_it_not(image, place, words):
    server, _ = peer(0)
    free = server.server_address[1]
    server.shutdown()
    with pytest.raises(SendError, match=words):
        parse_destination(place.format(free), "DLTTA").send(image)


# STOW-RS, to a server on loopback


class Server(http.server.ThreadingHTTPServer):
    """Takes STOW-RS from a user with the right password; `refuse` are failed instances, `status` what it answers."""

    def __init__(self, tls=None):
        super().__init__(("127.0.0.1", 0), Answer)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.status, self.refuse, self.bodies = 200, False, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def place(self, login="me:secret"):
        return f"http://{login}@127.0.0.1:{self.server_address[1]}/dicom-web"


class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        allowed = self.headers.get("Authorization") == f"Basic {base64.b64encode(b'me:secret').decode()}"
        self.send_response(self.server.status if allowed else 401)
        self.send_header("Content-Type", "application/dicom+json")
        self.end_headers()
        failed = {"00081198": {"vr": "SQ", "Value": [{"00081197": {"vr": "US", "Value": [0xA700]}}]}}
        self.wfile.write(json.dumps(failed if self.server.refuse else {}).encode())
        if allowed:
            self.server.bodies.append((self.path, body))

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = Server()
    yield server
    server.shutdown()
    server.server_close()


def test_stow_puts_the_instance_into_the_body(image, server):
    parse_destination(server.place(), "DLTTA").send(image)
    ((path, body),) = server.bodies
    assert path == "/dicom-web/studies"
    assert b"Content-Type: application/dicom" in body
    assert b"DICM" in body


def test_an_instance_that_the_server_lists_as_failed_is_not_delivered(image, server):
    server.status, server.refuse = 202, True
    with pytest.raises(SendError, match="0xa700"):
        parse_destination(server.place(), "DLTTA").send(image)


@pytest.mark.parametrize(("status", "login"), [(503, "me:secret"), (409, "me:secret"), (200, "me:wrong")])
def test_an_answer_that_is_an_error_is_not_delivered(image, server, status, login):
    server.status = status
    with pytest.raises(SendError, match=str(status if login == "me:secret" else 401)):
        parse_destination(server.place(login), "DLTTA").send(image)
    assert len(server.bodies) == (login == "me:secret")  # tried once: the outbox tries again, later


def test_a_server_that_is_not_there_or_does_not_answer_has_it_not(image, server, monkeypatch):
    silent = Server()
    monkeypatch.setattr("dltta.serving.outbox.PATIENCE", 0.2)
    silent.RequestHandlerClass = type("Silent", (Answer,), {"do_POST": lambda self: threading.Event().wait(2)})
    with pytest.raises(SendError, match="timed out"):
        parse_destination(silent.place(), "DLTTA").send(image)
    silent.shutdown()
    silent.server_close()
    with pytest.raises(SendError, match="refused"):
        parse_destination(silent.place(), "DLTTA").send(image)


def test_a_server_and_its_client_show_each_other_certificates_that_the_other_knows(image, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here: apt-get install openssl")
    make_certificates(tmp_path, "ours", "strange")
    server = Server(contexts(tmp_path, "ours")[0])
    place = server.place().replace("http://", "https://")
    with pytest.raises(SendError, match="certificate|SSL|aborted"):
        parse_destination(place, "DLTTA", contexts(tmp_path, "strange")[1]).send(image)
    with pytest.raises(SendError, match="certificate|SSL"):
        parse_destination(place, "DLTTA").send(image)  # the machine does not trust it
    assert server.bodies == []
    parse_destination(place, "DLTTA", contexts(tmp_path, "ours")[1]).send(image)
    assert len(server.bodies) == 1
    server.shutdown()
    server.server_close()
