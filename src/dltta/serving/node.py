"""`dltta node`: receives DICOM series, predicts each with its site's model, and sends the segmentation on.

scanner ── C-STORE ──► arriving/ ── complete ──► session of its site ──► outbox/ ── C-STORE or STOW-RS ──► archive

Every arrow ends on the disk, so a node that is killed anywhere goes on where it was: a slice is acknowledged when it is
written, a series goes when its segmentation is in the outbox, a segmentation goes when its destination has it. The
request's id follows from the UIDs of the series and its slices: a study that is sent again is predicted and sent on
once, a series to which slices were added is predicted once more.
"""

import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dltta.errors import DataError, SettingError, StateError
from dltta.files import PRIVATE, PRIVATE_FOLDER, make_folder, write_atomically
from dltta.serving.inbound import Arrived, Inbound, OtherPatientError, packed
from dltta.serving.journal import Fields, on_disk, on_disk_readable
from dltta.serving.keys import Key
from dltta.serving.outbox import NEEDS_DICOM, Destination, Outbox, Retries
from dltta.serving.session import Request
from dltta.serving.site_rule import SiteRule

LOG = logging.getLogger("dltta.node")
SUCCESS, NOT_AUTHORIZED = 0x0000, 0x0124
OUT_OF_RESOURCES, DOES_NOT_MATCH, CANNOT_UNDERSTAND = 0xA700, 0xA900, 0xC000


class Backend(Protocol):
    """Who predicts: shards in this process, or a service."""

    def predict(self, site: str, request: Request) -> "Predicted": ...


@dataclass(frozen=True)
class Predicted:
    """The line of the log, and the segmentation as DICOM; `problem` instead if the series cannot be used."""

    line: Fields | None
    segmentation: bytes | None
    problem: str | None = None


class OwnShard:
    """Predicts in this process; one series after the other."""

    def __init__(self, shard: Any, model: str) -> None:
        self._shard, self._model = shard, model

    def predict(self, site: str, request: Request) -> Predicted:
        key = Key(self._model, site)
        reply = self._shard.answer(key, request)
        if reply.status == "unavailable":
            raise StateError(reply.detail or "the stream cannot be written")
        if reply.line is None:
            return Predicted(None, None, reply.detail)
        found = self._shard.result(key, request.id, mask=True)
        return Predicted(reply.line, found.mask)


class RemoteService:
    """Predicts with a running `dltta serve`."""

    def __init__(self, client: Any, model: str | None = None) -> None:
        self._client, self._model = client, model

    def predict(self, site: str, request: Request) -> Predicted:
        from dltta.client import ServiceError

        try:
            line = self._client.predict(
                request.content, site=site, request=request.id, model=self._model, filename=request.filename
            )
            return Predicted(line, self._client.mask(request.id, site=site, model=self._model))
        except ServiceError as error:
            if error.status in (409, 413, 415, 422):
                return Predicted(None, None, error.detail)
            raise StateError(str(error)) from error


@dataclass(frozen=True)
class NodeSettings:
    """What a node listens to, and how."""

    root: Path
    title: str = "DLTTA"
    host: str = "127.0.0.1"
    port: int = 11112
    peers: tuple[str, ...] = ()  # AET or AET@HOST that may send; empty: anybody who can reach it
    rule: SiteRule = field(default_factory=SiteRule)
    quiet: float = 10.0
    capture: bool = False  # also send a picture with the overlay and the quality in words
    tls: ssl.SSLContext | None = None


class Node:
    """A DICOM node. `start`, then `work` in a loop, then `stop`."""

    def __init__(self, settings: NodeSettings, backend: Backend, destinations: Sequence[Destination]) -> None:
        self.settings, self.backend = settings, backend
        self.inbound = Inbound(settings.root, rule=settings.rule, quiet=settings.quiet)
        self.outbox = Outbox(settings.root, destinations)
        self._done = settings.root / "done"
        with on_disk(self._done):
            make_folder(self._done, mode=PRIVATE_FOLDER)
        self._server: Any = None
        self._retries = Retries()

    # receiving

    def start(self) -> int:
        """Listen; the port."""
        try:
            from pynetdicom import AE, AllStoragePresentationContexts, evt
            from pynetdicom.sop_class import Verification
        except ImportError as error:
            raise SettingError(NEEDS_DICOM) from error
        from pydicom.uid import AllTransferSyntaxes

        entity = AE(ae_title=self.settings.title)
        entity.add_supported_context(Verification)
        for context in AllStoragePresentationContexts:
            entity.add_supported_context(context.abstract_syntax, [str(syntax) for syntax in AllTransferSyntaxes])
        entity.require_calling_aet = sorted({peer.partition("@")[0] for peer in self.settings.peers})
        handlers = [
            (evt.EVT_C_STORE, self._store),
            (evt.EVT_RELEASED, self._closed),
            (evt.EVT_ABORTED, self._closed),
            (evt.EVT_CONN_CLOSE, self._closed),
        ]
        try:
            self._server = entity.start_server(
                (self.settings.host, self.settings.port),
                block=False,
                evt_handlers=handlers,
                ssl_context=self.settings.tls,
            )
        except OSError as error:
            place = f"{self.settings.host}:{self.settings.port}"
            raise SettingError(
                f"cannot listen on {place} ({error.strerror or error}); choose another --port"
            ) from error
        return int(self._server.server_address[1])

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server = None

    def _may_send(self, association: Any) -> bool:
        """Whether the sender is at the address that belongs to its title, if one was named."""
        peers = [peer.partition("@") for peer in self.settings.peers]
        hosts = {host for title, at, host in peers if at and title == association.requestor.ae_title.strip()}
        return not hosts or association.requestor.address in hosts

    def _store(self, event: Any) -> int:
        """A slice arrives; the answer says whether it is on the disk."""
        if not self._may_send(event.assoc):
            record("refused", why="address")
            return NOT_AUTHORIZED
        try:
            dataset = event.dataset
            dataset.file_meta = event.file_meta
            content = event.encoded_dataset()
            self.inbound.take(dataset, content, id(event.assoc))
        except OtherPatientError:
            record("refused", why="another patient's slice")
            return DOES_NOT_MATCH
        except DataError as error:
            record("refused", why=str(error))
            return CANNOT_UNDERSTAND
        except StateError as error:
            record("failed", why=str(error))
            return OUT_OF_RESOURCES
        return SUCCESS

    def _closed(self, event: Any) -> None:
        self.inbound.ended(id(event.assoc))

    # predicting and sending

    def work(self) -> int:
        """Predict what is complete and send what waits; how many series were dealt with."""
        dealt = 0
        for arrived in self.inbound.complete():
            if not self._retries.due(arrived.request):
                continue
            try:
                self._predict(arrived)
                self.inbound.forget(arrived)
            except StateError as error:  # the disk or the service: the series stays and is tried again
                pause = self._retries.failed(arrived.request)
                record("failed", why=f"{error}; tried again in {pause:.0f} s")
                continue
            self._retries.succeeded(arrived.request)
            dealt += 1
        delivered, problems = self.outbox.flush()
        if delivered:
            record("sent", objects=delivered)
        for problem in problems:
            record("not sent", why=problem)
        return dealt

    def _predict(self, arrived: Arrived) -> None:
        mark = self._done / f"{arrived.folder.name}.json"
        known = self._known(mark)
        if known.issuperset(arrived.slices):
            record("again", series=arrived.folder.name)
            return
        with on_disk_readable(arrived.folder):
            request = Request(arrived.request, "series.zip", packed(arrived.files))
        predicted = self.backend.predict(arrived.site, request)
        if predicted.line is None or predicted.segmentation is None:
            record("unusable", series=arrived.folder.name, why=predicted.problem or "no segmentation")
            return
        for name, content in self._objects(arrived, predicted):
            self.outbox.put(name, content)
        with on_disk(mark):
            write_atomically(mark, json.dumps({"slices": sorted(known.union(arrived.slices))}), mode=PRIVATE)
        record(
            "predicted",
            series=arrived.folder.name,
            slices=len(arrived.slices),
            decision=predicted.line.get("decision"),
            quality=predicted.line.get("quality"),
            review=predicted.line.get("review"),
        )

    def _known(self, mark: Path) -> frozenset[str]:
        """Slices of a series whose prediction is in the outbox or was sent."""
        if not mark.is_file():
            return frozenset()
        try:
            return frozenset(json.loads(mark.read_text("utf-8"))["slices"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StateError(f"{mark} cannot be read; remove it, and the series is predicted again") from error

    def _objects(self, arrived: Arrived, predicted: Predicted) -> list[tuple[str, bytes]]:
        from io import BytesIO

        from pydicom import dcmread

        segmentation = predicted.segmentation or b""
        header = dcmread(BytesIO(segmentation), stop_before_pixels=True)
        objects = [(str(header.SOPInstanceUID), segmentation)]
        if self.settings.capture:
            from dltta.serving.capture import secondary_capture

            objects.append(secondary_capture(arrived.files, segmentation, predicted.line or {}))
        return objects


def run_node(node: Node, say: Callable[[str], None], stop: threading.Event, *, pause: float = 0.5) -> None:
    """Until `stop` is set; then what was received is kept for the next start."""
    port = node.start()
    say(f"{node.settings.title} listens on {node.settings.host}:{port}")
    try:
        while not stop.is_set():
            if not node.work():
                stop.wait(pause)
    finally:
        node.stop()
        node.outbox.flush()


def record(event: str, **fields: Any) -> None:
    """A line of the node's log: JSON, no names of patients; series by a hash."""
    shown: Mapping[str, Any] = {name: value for name, value in fields.items() if value is not None}
    LOG.info(json.dumps({"time": round(time.time(), 3), "event": event, **shown}))
