"""A shard answers the requests of its keys, one at a time: it is the only writer of their streams.

Adapters of the latest keys stay in memory; all else is on disk, so a key at rest costs only its files. Nothing here
knows Ray: `cluster.py` makes actors of it.
"""

import gc
import os
import shutil
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dltta.config import make_adapter
from dltta.errors import DataError, DlttaError, InputError, NonFiniteError, SettingError, StateError
from dltta.files import PRIVATE, write_atomically
from dltta.fitting import Fitting, default_limit
from dltta.methods import Method
from dltta.models.io.opened import OpenedModel
from dltta.models.io.opening import ModelSource
from dltta.predictor import Predictor
from dltta.recipes import paper
from dltta.serving.folder import single_adapter
from dltta.serving.journal import Fields, on_disk, walk
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.lease import Lease
from dltta.serving.maintenance import UnknownVersionError, roll_back
from dltta.serving.reading import read_case
from dltta.serving.record import LOG
from dltta.serving.session import Request, Session, spooled
from dltta.serving.settings import Deployment, StreamSettings

Mode = Literal["live", "shadow", "pause", "continue"]
Status = Literal["answered", "refused", "conflict", "unavailable", "unknown"]


@dataclass(frozen=True)
class Reply:
    """What became of a request: `line` is its line of the log, `detail` what is wrong in one sentence."""

    status: Status
    line: Fields | None = None
    detail: str | None = None
    seconds: float = 0.0  # that the shard worked on it
    mask: bytes | None = None
    mask_name: str | None = None


@dataclass(frozen=True)
class ShardSettings:
    """What all shards of a service share."""

    root: Path
    models: Mapping[str, ModelSource]
    stream: StreamSettings
    live: int = 4  # adapters kept in memory
    threads: int = 1  # of each shard
    device: str = "cpu"
    previews: int = 0  # pictures kept for the page, per key


class Shard:
    """One writer. Its methods are called one after the other."""

    def __init__(self, settings: ShardSettings, number: int = 0) -> None:
        import torch

        torch.set_num_threads(settings.threads)
        self.settings, self.folders = settings, KeyFolders(settings.root)
        self.spool = self.folders.spool / str(number)  # of this shard alone
        shutil.rmtree(self.spool, ignore_errors=True)  # what its predecessor, killed, left of images
        self._opened: dict[str, OpenedModel] = {}
        self._sources: dict[str, Predictor] = {}
        self._sessions: OrderedDict[Key, Session] = OrderedDict()
        self._owner = f"{socket.gethostname()}:{os.getpid()}"

    def ready(self) -> bool:
        """Open every model; raises what is wrong with one."""
        for name in self.settings.models:
            self._model(name)
        gc.collect()
        gc.freeze()  # modules and models stay: later collections need not look at them
        return True

    def answer(self, key: Key, request: Request) -> Reply:
        """Adapt and predict; the same reply to the same request."""
        new = not self.folders.has_stream(key)
        try:
            if new:
                self._require_usable(key, request)  # before anything of it is written
            return self._answer(key, request)
        except (DataError, InputError, NonFiniteError, SettingError) as error:
            reply = Reply("conflict" if self._knows(key, request.id) else "refused", detail=_without_place(error))
        except StateError as error:
            self._evict(key)
            reply = Reply("unavailable", detail=_without_place(error))
        if new:  # a site whose first image could not be used was never begun
            self._evict(key)
            self.folders.forget(key)
        return reply

    def _answer(self, key: Key, request: Request) -> Reply:
        started = time.perf_counter()
        session = self._session(key)
        line = session.answer(request)
        working = time.perf_counter() - started
        self._preview(key, session, request, line)
        return Reply("answered", line, seconds=working)

    def result(self, key: Key, request_id: str, *, mask: bool = False) -> Reply:
        """The answer that was given to a request, and its mask if wanted; writes nothing, and keeps who is in memory.

        A site at rest is not opened: its log is read.
        """
        if not self.folders.has_stream(key):
            return Reply("unknown")
        try:
            session = self._sessions.get(key)
            line = self._logged(key, request_id) if session is None else session.known(request_id)
            if line is None:
                return Reply("unknown")
            if not mask or "sha256" not in line:
                return Reply("answered", line)
            file = self.folders.stream(key) / str(line["prediction"])
            return Reply("answered", line, mask=file.read_bytes(), mask_name=file.name)
        except (StateError, OSError) as error:
            return Reply("unavailable", detail=str(error))

    def roll_back(self, key: Key, version: int, by: str = "") -> Reply:
        """Continue from an older version; journaled, with the name of who asked."""
        if not self.folders.has_stream(key):
            return Reply("unknown")
        self._evict(key)
        try:
            lease = Lease(self.folders.folder(key), self._owner)
            note = {"by": by, "fence": lease.token}
            sign = self.settings.stream.sign
            new = roll_back(self.folders.stream(key), version, sign, note, may_write=lease.require)
        except (UnknownVersionError, SettingError) as error:
            return Reply("refused", detail=_without_place(error))
        except StateError as error:
            return Reply("unavailable", detail=_without_place(error))
        return Reply("answered", {"event": "rollback", "to": version, "state": new})

    def change(self, key: Key, mode: Mode, by: str = "") -> Reply:
        """Live or shadow, or pause and continue, from now on; journaled, with the name of who asked."""
        if not self.folders.has_stream(key):
            return Reply("unknown")
        try:
            session = self._session(key)
            note = {"by": by, "fence": session.fence}
            mark = self.folders.folder(key) / "paused"
            if mode in ("live", "shadow"):
                session.stream.deploy(Deployment(mode), note)
                return Reply("answered", {"event": "mode", "deployment": mode})
            session.stream.record.append_event({"event": mode, **note})
            with on_disk(mark):
                if mode == "pause":
                    write_atomically(mark, "", mode=PRIVATE)
                else:
                    mark.unlink(missing_ok=True)
        except SettingError as error:
            return Reply("refused", detail=_without_place(error))
        except StateError as error:
            self._evict(key)
            return Reply("unavailable", detail=_without_place(error))
        return Reply("answered", {"event": mode})

    def close(self) -> None:
        """Release every key; all that was answered is on the disk."""
        while self._sessions:
            self._evict(next(iter(self._sessions)))

    def memory(self) -> dict[str, float]:
        """Sessions in memory, the resident size of this process in bytes, and its number."""
        with Path("/proc/self/statm").open() as file:
            pages = int(file.read().split()[1])
        return {"live": len(self._sessions), "resident": pages * os.sysconf("SC_PAGE_SIZE"), "pid": os.getpid()}

    def _session(self, key: Key) -> Session:
        """The key's session, opened if it is not in memory; the one that rested longest goes."""
        if key in self._sessions:
            self._sessions.move_to_end(key)
            return self._sessions[key]
        while len(self._sessions) >= max(1, self.settings.live):
            self._evict(next(iter(self._sessions)))
        folder = self.folders.begin(key)
        lease = Lease(folder, self._owner)
        session = Session(
            self._model(key.model),
            self.folders.stream(key),
            self.settings.stream,
            spool=self.spool,
            lease=lease,
        )
        self._sessions[key] = session.__enter__()
        return session

    def _require_usable(self, key: Key, request: Request) -> None:
        """Raise unless the image can be read and the network takes it."""
        opened = self._model(key.model)
        limit = self.settings.stream.max_memory
        if limit is None:
            limit = default_limit(next(opened.model.parameters()).device)
        fitting = Fitting(opened, lambda: single_adapter(opened, self.settings.stream.recipe), limit)
        with spooled(self.spool, request) as case:
            read_case(opened, case, "", fitting)

    def _model(self, name: str) -> OpenedModel:
        if name not in self._opened:
            opened = self.settings.models[name].open()
            opened.model.to(self.settings.device)
            self._opened[name] = opened
        return self._opened[name]

    def _plain(self, name: str) -> Predictor:
        """Predicts with the source model."""
        if name not in self._sources:
            opened = self._model(name)
            self._sources[name] = Predictor(opened, make_adapter(opened, paper(Method.SOURCE)))
        return self._sources[name]

    def _logged(self, key: Key, request_id: str) -> Fields | None:
        """The line of a request in a log that is not open."""
        wanted = request_id.casefold()
        for group in walk(self.folders.stream(key) / LOG):
            for line in group:
                if "prediction" in line.entry and str(line.entry["case"]).casefold() == wanted:
                    return line.entry
        return None

    def _knows(self, key: Key, request_id: str) -> bool:
        """Whether a site in memory answered this id: then another image came with it."""
        session = self._sessions.get(key)
        return session is not None and session.known(request_id) is not None

    def _evict(self, key: Key) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            session.__exit__(None, None, None)
            del session
            gc.collect()  # a network and its hooks hold each other: nothing else frees them soon

    def _preview(self, key: Key, session: Session, request: Request, line: Fields) -> None:
        """A picture for the page; the answer stands also if the disk has no room for it."""
        if self.settings.previews:
            from dltta.serving.previews import keep_preview

            source = self._plain(key.model)
            with suppress(StateError):
                keep_preview(self.folders.folder(key), source, session, request, line, self.settings.previews)


def _without_place(error: DlttaError) -> str:
    """What is wrong, without names of our own files or advice about a command that nobody typed."""
    words = " ".join(str(error).split()).removesuffix(", then --resume")
    head, separator, rest = words.partition(": ")
    return rest if separator and "/" in head else words
