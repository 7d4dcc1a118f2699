"""A shard answers the requests of its keys, one at a time: it is the only writer of their streams.

Adapters of the latest keys stay in memory; all else is on disk, so a key at rest costs only its files. Nothing here
knows Ray: `service/cluster.py` makes actors of it.
"""

import os
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dltta.config import make_adapter
from dltta.errors import DataError, DlttaError, InputError, NonFiniteError, SettingError, StateError
from dltta.methods import Method
from dltta.models.io.opened import OpenedModel
from dltta.models.io.opening import ModelSource
from dltta.predictor import Predictor, load
from dltta.recipes import paper
from dltta.serving.journal import Fields
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.lease import Lease
from dltta.serving.maintenance import roll_back
from dltta.serving.session import Request, Session, spooled
from dltta.serving.settings import Deployment, StreamSettings

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

    def __init__(self, settings: ShardSettings) -> None:
        import torch

        torch.set_num_threads(settings.threads)
        self.settings, self.folders = settings, KeyFolders(settings.root)
        self._opened: dict[str, OpenedModel] = {}
        self._sources: dict[str, Predictor] = {}
        self._sessions: OrderedDict[Key, Session] = OrderedDict()
        self._owner = f"{socket.gethostname()}:{os.getpid()}"

    def ready(self) -> bool:
        """Open every model; raises what is wrong with one."""
        for name in self.settings.models:
            self._model(name)
        return True

    def answer(self, key: Key, request: Request) -> Reply:
        """Adapt and predict; the same reply to the same request."""
        started = time.perf_counter()
        try:
            if not self.folders.has_stream(key):
                self._require_usable(key, request)  # before anything of a new site is written
            session = self._session(key)
            line = session.answer(request)
            self._preview(key, session, request, line)
            return Reply("answered", line, seconds=time.perf_counter() - started)
        except (InputError, NonFiniteError) as error:
            return Reply("refused", detail=_sentence(error, request))
        except DataError as error:
            conflict = "predicted before with other content" in str(error)
            return Reply("conflict" if conflict else "refused", detail=_sentence(error, request))
        except SettingError as error:
            return Reply("refused", detail=_sentence(error, request))
        except StateError as error:
            self._evict(key)
            return Reply("unavailable", detail=_sentence(error, request))

    def result(self, key: Key, request_id: str, *, mask: bool = False) -> Reply:
        """The answer that was given to a request, and its mask if wanted; writes nothing for an unknown site."""
        if not self.folders.has_stream(key):
            return Reply("unknown")
        try:
            session = self._session(key)
            line = session.known(request_id)
            if line is None:
                return Reply("unknown")
            file = session.mask(request_id) if mask else None
            if file is None:
                return Reply("answered", line)
            return Reply("answered", line, mask=file.read_bytes(), mask_name=file.name)
        except (StateError, OSError) as error:
            self._evict(key)
            return Reply("unavailable", detail=str(error))

    def roll_back(self, key: Key, version: int) -> Reply:
        """Continue from an older version; journaled."""
        if not self.folders.has_stream(key):
            return Reply("unknown")
        self._evict(key)
        try:
            Lease(self.folders.folder(key), self._owner)
            new = roll_back(self.folders.stream(key), version, self.settings.stream.sign)
        except (StateError, SettingError) as error:
            return Reply("refused", detail=str(error))
        return Reply("answered", {"event": "rollback", "to": version, "state": new})

    def deploy(self, key: Key, deployment: str) -> Reply:
        """Live or shadow from now on; journaled."""
        if not self.folders.has_stream(key):
            return Reply("unknown")
        try:
            self._session(key).stream.deploy(Deployment(deployment))
        except (StateError, SettingError) as error:
            return Reply("refused", detail=str(error))
        return Reply("answered", {"event": "mode", "deployment": deployment})

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
            spool=self.folders.spool,
            lease=lease,
        )
        self._sessions[key] = session.__enter__()
        return session

    def _require_usable(self, key: Key, request: Request) -> None:
        """Raise unless the image can be read and the network takes it."""
        from dltta.data.inbox import read_incoming

        opened = self._model(key.model)
        with spooled(self.folders.spool, request) as case:
            load(opened, read_incoming(case), "")

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

    def _evict(self, key: Key) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            session.__exit__(None, None, None)

    def _preview(self, key: Key, session: Session, request: Request, line: Fields) -> None:
        if self.settings.previews:
            from dltta.serving.previews import keep_preview

            source = self._plain(key.model)
            keep_preview(self.folders.folder(key), source, session, request, line, self.settings.previews)


def _sentence(error: DlttaError, request: Request) -> str:
    """What is wrong, without names of our own files."""
    words = " ".join(str(error).split())
    head, separator, rest = words.partition(": ")
    return rest if separator and "/" in head else words
