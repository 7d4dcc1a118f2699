"""Predictions on their way to other systems: kept until each destination has them, over restarts.

A process that is killed between the destination's answer and the removal of the mark sends the object again: the same
bytes under the same UID, so an archive has it once.

STATE/outbox/NAME.dcm           what is to be sent; NAME is its SOP instance UID
STATE/outbox/NAME.DESTINATION   to be sent there; removed when it was
"""

import hashlib
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from dltta.errors import SettingError
from dltta.files import PRIVATE, PRIVATE_FOLDER, make_folder, write_atomically
from dltta.serving.journal import on_disk

NEEDS_DICOM = "a DICOM node needs pynetdicom; install it: pip install 'dltta[dicom]'"
LONGEST_WAIT = 300.0  # seconds between two tries
PATIENCE = 30  # seconds for an answer of a destination
STORED = (0x0000, 0xB000, 0xB006, 0xB007)  # the last three with a warning: elements were changed or left out


class Destination(Protocol):
    """Somebody who takes DICOM objects."""

    @property
    def name(self) -> str:
        """As it was written on the command line."""
        ...

    def send(self, file: Path) -> None:
        """Raises `SendError` if it was not taken."""
        ...


class SendError(Exception):
    """The destination cannot be reached, or refuses."""


@dataclass(frozen=True)
class Certificates:
    """What a node shows to others, and whom it trusts; without `trusted` those that the machine trusts."""

    context: ssl.SSLContext
    certificate: Path
    key: Path
    trusted: Path | None = None


@dataclass(frozen=True)
class Peer:
    """A DICOM node that takes C-STORE: AET@HOST:PORT."""

    name: str
    title: str
    host: str
    port: int
    own_title: str
    tls: Certificates | None = None

    def send(self, file: Path) -> None:
        from pydicom import dcmread
        from pynetdicom import AE

        dataset = dcmread(file)
        entity = AE(ae_title=self.own_title)
        entity.add_requested_context(dataset.SOPClassUID, dataset.file_meta.TransferSyntaxUID)
        entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = PATIENCE
        tls: Any = None if self.tls is None else (self.tls.context, self.host)
        try:
            association = entity.associate(self.host, self.port, ae_title=self.title, tls_args=tls)
        except OSError as error:  # no such host
            raise SendError(error.strerror or str(error)) from error
        if not association.is_established:
            raise SendError("no association")
        try:
            status = association.send_c_store(dataset)
        except (ValueError, RuntimeError) as error:  # no common transfer syntax; the peer hung up
            raise SendError(str(error)) from error
        finally:
            association.release()
        if not status or status.get("Status") not in STORED:
            raise SendError(f"status {status.Status:#06x}" if status else "the connection broke")


@dataclass(frozen=True)
class Web:
    """A DICOMweb server that takes STOW-RS: an http or https address."""

    name: str  # without user and password
    login: tuple[str, str] | None = field(default=None, repr=False)
    tls: Certificates | None = None

    def send(self, file: Path) -> None:
        import requests
        from dicomweb_client.api import DICOMwebClient
        from pydicom import dcmread

        client = DICOMwebClient(self.name, session=_session(self.login, self.tls), timeout=PATIENCE)
        client.set_http_retry_params(retry=False)  # the outbox does that, and meanwhile others are served
        try:
            answer = client.store_instances([dcmread(file)])
        except (requests.RequestException, OSError) as error:
            raise SendError(str(error)) from error
        if failed := answer.get("FailedSOPSequence"):
            raise SendError(f"refused, reason {failed[0].get('FailureReason', 0):#06x}")


def _session(login: tuple[str, str] | None, tls: Certificates | None) -> Any:
    """Of requests; with its every request our certificates, which variables of the environment would replace."""
    import requests

    session: Any = requests.Session()
    session.auth = login
    if tls is not None:
        trusted = True if tls.trusted is None else str(tls.trusted)
        session.request = partial(session.request, cert=(str(tls.certificate), str(tls.key)), verify=trusted)
    return session


def parse_destination(text: str, own_title: str, tls: Certificates | None = None) -> Destination:
    """`AET@HOST:PORT`, or the address of a DICOMweb server, with `user:password@` before the host if it asks."""
    found = _web(text, tls) if text.startswith(("http://", "https://")) else _peer(text, own_title, tls)
    if found is None:
        raise SettingError(f"{text!r} is no destination; write AET@HOST:PORT, or http://HOST/dicom-web")
    return found


def _web(text: str, tls: Certificates | None) -> Web | None:
    parts = urlsplit(text)
    place = parts.netloc.rpartition("@")[2]
    port = place.rpartition(":")[2] if ":" in place.rpartition("]")[2] else "80"
    if not parts.hostname or not _is_port(port):
        return None
    login = None if parts.username is None else (unquote(parts.username), unquote(parts.password or ""))
    return Web(parts._replace(netloc=place).geturl(), login, tls)


def _peer(text: str, own_title: str, tls: Certificates | None) -> Peer | None:
    title, _, place = text.partition("@")
    host, _, port = place.rpartition(":")
    if not (valid_title(title) and host and _is_port(port)):
        return None
    return Peer(text, title, host.strip("[]"), int(port), own_title, tls)


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536


def valid_title(text: str) -> bool:
    """Whether it can be the title of an application entity: 1 to 16 ASCII characters, none of them special."""
    return bool(text.strip()) and len(text) <= 16 and text.isascii() and text.isprintable() and "\\" not in text


class Retries:
    """When is something tried again? At once, then after 1, 2, 4 … seconds, at most `LONGEST_WAIT`."""

    def __init__(self) -> None:
        self._next: dict[object, tuple[float, float]] = {}  # when, and how long to wait after that

    def due(self, what: object) -> bool:
        return time.monotonic() >= self._next.get(what, (0.0, 0.0))[0]

    def failed(self, what: object) -> float:
        """How many seconds it waits."""
        pause = self._next.get(what, (0.0, 1.0))[1]
        self._next[what] = time.monotonic() + pause, min(2 * pause, LONGEST_WAIT)
        return pause

    def succeeded(self, what: object) -> None:
        self._next.pop(what, None)


class Outbox:
    """What waits to be sent. One thread calls `flush`."""

    def __init__(self, root: Path, destinations: Sequence[Destination]) -> None:
        self.folder = root / "outbox"
        self.destinations = {_label(each.name): each for each in destinations}
        self._retries = Retries()
        with on_disk(self.folder):
            make_folder(self.folder, mode=PRIVATE_FOLDER)

    def put(self, name: str, content: bytes) -> None:
        """Send this object to every destination; on return that survives a crash."""
        with on_disk(self.folder):
            write_atomically(self.folder / f"{name}.dcm", content, mode=PRIVATE)
            for label in self.destinations:
                write_atomically(self.folder / f"{name}.{label}", b"", mode=PRIVATE)

    def waiting(self) -> list[tuple[Path, Path, str]]:
        """Object, mark and destination of everything that is not delivered."""
        found = []
        for mark in sorted(self.folder.iterdir()):
            label = mark.suffix.removeprefix(".")
            if label in self.destinations and not mark.name.startswith("."):
                found.append((mark.with_suffix(".dcm"), mark, label))
        return found

    def flush(self) -> tuple[int, list[str]]:
        """Try everything whose time has come: how many were delivered, and one sentence for each that was not."""
        delivered, problems = 0, []
        for file, mark, label in self.waiting():
            if not self._retries.due(mark):
                continue
            try:
                self.destinations[label].send(file)
            except (SendError, OSError) as error:
                pause = self._retries.failed(mark)
                problems.append(f"{self.destinations[label].name}: {error}; tried again in {pause:.0f} s")
                continue
            mark.unlink()
            self._retries.succeeded(mark)
            delivered += 1
            if not any(other.stem == file.stem and other != file for other in self.folder.iterdir()):
                file.unlink(missing_ok=True)
        return delivered, problems


def _label(name: str) -> str:
    """Of a destination, safe in a file name."""
    return "to" + hashlib.sha256(name.encode()).hexdigest()[:12]
