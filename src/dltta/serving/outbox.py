"""Predictions on their way to other systems: kept until each destination has them, over restarts.

STATE/outbox/NAME.dcm           what is to be sent; NAME is its SOP instance UID
STATE/outbox/NAME.DESTINATION   to be sent there; removed when it was
"""

import hashlib
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from dltta.errors import SettingError
from dltta.files import PRIVATE, PRIVATE_FOLDER, make_folder, write_atomically
from dltta.serving.journal import on_disk

NEEDS_DICOM = "a DICOM node needs pynetdicom; install it: pip install 'dltta[dicom]'"
LONGEST_WAIT = 300.0  # seconds between two tries


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
class Peer:
    """A DICOM node that takes C-STORE: AET@HOST:PORT."""

    name: str
    title: str
    host: str
    port: int
    own_title: str
    tls: ssl.SSLContext | None = None

    def send(self, file: Path) -> None:
        from pydicom import dcmread
        from pynetdicom import AE

        dataset = dcmread(file)
        entity = AE(ae_title=self.own_title)
        entity.add_requested_context(dataset.SOPClassUID, dataset.file_meta.TransferSyntaxUID)
        entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = 30
        tls: Any = None if self.tls is None else (self.tls, self.host)
        association = entity.associate(self.host, self.port, ae_title=self.title, tls_args=tls)
        if not association.is_established:
            raise SendError("no association")
        try:
            status = association.send_c_store(dataset)
        except ValueError as error:
            raise SendError(str(error)) from error
        finally:
            association.release()
        if not status or status.Status != 0x0000:
            raise SendError(f"status {status.Status:#06x}" if status else "the connection broke")


@dataclass(frozen=True)
class Web:
    """A DICOMweb server that takes STOW-RS: an http or https address."""

    name: str

    def send(self, file: Path) -> None:
        import requests
        from dicomweb_client.api import DICOMwebClient
        from pydicom import dcmread

        parts = urlsplit(self.name)
        plain = f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
        session = requests.Session()
        if parts.username:
            session.auth = (parts.username, parts.password or "")
        try:
            DICOMwebClient(plain, session=session).store_instances([dcmread(file)])
        except (requests.RequestException, OSError) as error:
            raise SendError(str(error)) from error


def parse_destination(text: str, own_title: str, tls: ssl.SSLContext | None = None) -> Destination:
    """`AET@HOST:PORT`, or the address of a DICOMweb server."""
    if text.startswith(("http://", "https://")):
        return Web(text)
    title, at, place = text.partition("@")
    host, colon, port = place.rpartition(":")
    if not (title and at and host and colon and port.isdigit()) or len(title) > 16:
        raise SettingError(f"{text!r} is no destination; write AET@HOST:PORT, or http://HOST/dicom-web")
    return Peer(text, title, host, int(port), own_title, tls)


class Outbox:
    """What waits to be sent. One thread calls `flush`."""

    def __init__(self, root: Path, destinations: Sequence[Destination]) -> None:
        self.folder = root / "outbox"
        self.destinations = {_label(each.name): each for each in destinations}
        self._next: dict[Path, tuple[float, float]] = {}  # mark: when to try again, and how long to wait after that
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
            due, pause = self._next.get(mark, (0.0, 1.0))
            if time.monotonic() < due:
                continue
            try:
                self.destinations[label].send(file)
            except (SendError, OSError) as error:
                self._next[mark] = time.monotonic() + pause, min(2 * pause, LONGEST_WAIT)
                problems.append(f"{self.destinations[label].name}: {error}; tried again in {pause:.0f} s")
                continue
            mark.unlink()
            self._next.pop(mark, None)
            delivered += 1
            if not any(other.stem == file.stem and other != file for other in self.folder.iterdir()):
                file.unlink(missing_ok=True)
        return delivered, problems


def _label(name: str) -> str:
    """Of a destination, safe in a file name."""
    return "to" + hashlib.sha256(name.encode()).hexdigest()[:12]
