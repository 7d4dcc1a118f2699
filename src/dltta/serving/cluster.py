"""Shards as Ray actors: each key belongs to one of them, one request of a key is under way at a time.

Ray restarts an actor that died, but does not say whether its last call had come to an end, and repeated calls may come
in another order. So nothing is retried by Ray. `Cluster.answer` sends the request again, under its id: if the line is
in the log already, it is the answer; else the request is worked on now.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any

from dltta.errors import SettingError
from dltta.serving.keys import Key
from dltta.serving.session import Request
from dltta.serving.shard import Mode, Reply, Shard, ShardSettings

NEEDS_SERVE = "the service needs Ray and FastAPI; install them: pip install 'dltta[serve]'"
PATIENCE = 120.0  # seconds in which a dead shard must have come back
STARTING = 600.0  # seconds in which every shard must have opened its models
MOST_BYTES = 2 << 30  # of images that wait


class BusyError(Exception):
    """Too many requests wait; `after` is when to try again, in seconds."""

    def __init__(self, after: float) -> None:
        super().__init__(f"too many requests are waiting; try again in {after:.0f} s")
        self.after = after


class Cluster:
    """N shards. `waiting` requests of one key, `total` of all, and so many bytes may wait; more raise `BusyError`."""

    def __init__(
        self,
        settings: ShardSettings,
        *,
        shards: int = 2,
        waiting: int = 16,
        total: int = 256,
        address: str | None = None,
    ) -> None:
        self.settings, self.shards = settings, shards
        self._most_waiting, self._most = waiting, total
        self._address = address
        self._actors: list[Any] = []
        self._joined = False  # whether Ray was started or joined here
        self._locks: dict[Key, asyncio.Lock] = {}
        self._waiting: Counter[Key] = Counter()
        self._bytes = 0  # of images that wait
        self._reading = 0  # calls that write nothing
        self._asked: dict[int, Future[Mapping[str, float]]] = {}  # shards, how large they are
        self._seen: dict[int, Mapping[str, float]] = {}  # what each that is alive said last
        self._seconds = 0.5  # how long an answer takes, a running mean
        self.restarts = 0  # calls that found their shard dead
        self.started = False

    def start(self) -> None:
        """Start or join Ray, make the shards, and wait until each has opened its models."""
        ray = _ray()
        if not ray.is_initialized():
            try:
                ray.init(**_ray_options(self._address, self.shards))
                self._joined = True
            except (ConnectionError, ValueError, RuntimeError) as error:
                place = "here" if self._address is None else f"at {self._address}"
                raise SettingError(f"cannot start or join Ray {place}: {' '.join(str(error).split())[:200]}") from error
        actor = ray.remote(Shard)
        options: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0, "num_cpus": 0, "max_concurrency": 1}
        options["scheduling_strategy"] = "SPREAD"  # over the machines of a cluster
        self._actors = [actor.options(**options).remote(self.settings, number) for number in range(self.shards)]
        try:
            ray.get([shard.ready.remote() for shard in self._actors], timeout=STARTING)
            sizes = ray.get([shard.memory.remote() for shard in self._actors], timeout=STARTING)
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1][:200]
            raise SettingError(f"a shard cannot start ({reason}); have all machines package, model, state?") from error
        self._seen = {number: {**size, "shard": number} for number, size in enumerate(sizes)}
        self.started = True

    def stop(self) -> None:
        """Let every shard finish what it does and release its keys; then end the Ray that was started here."""
        ray = _ray()
        for shard in self._actors:
            with suppress(ray.exceptions.RayError):  # it is dead: what it had answered is on the disk
                ray.get(shard.close.remote(), timeout=60)
            ray.kill(shard)
        self._actors, self._asked, self._seen, self.started = [], {}, {}, False
        if self._joined:
            ray.shutdown()
            self._joined = False

    async def answer(self, key: Key, request: Request) -> Reply:
        """Adapt and predict, once, after the earlier requests of the key."""
        async with self._turn(key, len(request.content)):
            started = time.perf_counter()
            reply = await self._call(key, "answer", key, request)
            if reply.status == "answered":
                self._seconds += 0.1 * (time.perf_counter() - started - self._seconds)
            return reply

    async def result(self, key: Key, request_id: str, *, mask: bool = False) -> Reply:
        """What was answered to a request before."""
        if self._reading >= self._most:
            raise BusyError(1.0)
        self._reading += 1
        try:
            return await self._call(key, "result", key, request_id, mask=mask)
        finally:
            self._reading -= 1

    async def roll_back(self, key: Key, version: int, by: str) -> Reply:
        async with self._turn(key):
            return await self._call(key, "roll_back", key, version, by)

    async def change(self, key: Key, mode: Mode, by: str) -> Reply:
        async with self._turn(key):
            return await self._call(key, "change", key, mode, by)

    async def memory(self, patience: float = 1.0) -> list[Mapping[str, float]]:
        """Of every shard that is alive, with its number as `shard`; of one that is at work, what it said last."""
        self._hear()
        for number, shard in enumerate(self._actors):
            if number not in self._asked:
                self._asked[number] = shard.memory.remote().future()
        waiting = [asyncio.wrap_future(call) for call in self._asked.values()]
        for each in waiting:
            each.add_done_callback(lambda done: done.cancelled() or done.exception())  # it is heard of below
        if waiting:
            await asyncio.wait(waiting, timeout=patience)
        self._hear()
        return list(self._seen.values())

    def _hear(self) -> None:
        """Note what shards have said, and which are dead."""
        for number in [number for number, call in self._asked.items() if call.done()]:
            call = self._asked.pop(number)
            self._seen.pop(number, None)
            if call.exception() is None:
                self._seen[number] = {**call.result(), "shard": number}

    @property
    def waiting(self) -> int:
        """Requests that wait or are being worked on."""
        return self._waiting.total()

    async def idle(self) -> None:
        """Return once nothing is under way."""
        while self._waiting.total():
            await asyncio.sleep(0.05)

    def require_room(self, key: Key, size: int = 0) -> None:
        """Raise `BusyError` unless one more request of so many bytes may wait."""
        full = self._waiting.total() >= self._most or (self._bytes > 0 and self._bytes + size > MOST_BYTES)
        if full or self._waiting[key] >= self._most_waiting:
            raise BusyError(max(1.0, self._seconds * self._waiting[key]))

    @asynccontextmanager
    async def _turn(self, key: Key, size: int = 0) -> AsyncIterator[None]:
        """One at a time for each key, in the order of arrival."""
        self.require_room(key, size)
        self._waiting[key] += 1
        self._bytes += size
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                yield
        finally:
            self._waiting[key] -= 1
            self._bytes -= size
            if not self._waiting[key]:
                del self._waiting[key]
                self._locks.pop(key, None)

    async def _call(self, key: Key, method: str, *args: Any, **kwargs: Any) -> Reply:
        """Ask the key's shard, again while it comes back from the dead."""
        lost = _lost(_ray())
        shard = self._actors[key.shard(self.shards)]
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                reply: Reply = await asyncio.wrap_future(getattr(shard, method).remote(*args, **kwargs).future())
            except lost:
                self.restarts += 1
                if time.monotonic() > deadline:
                    return Reply("unavailable", detail="the shard of this site does not come back; see Ray's logs")
                await asyncio.sleep(0.2)
                continue
            return reply


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise SettingError(NEEDS_SERVE) from error
    return ray


def _lost(ray: Any) -> tuple[type[Exception], ...]:
    """What Ray raises when a shard, its machine or its reply is gone."""
    found = ray.exceptions
    return found.RayActorError, found.WorkerCrashedError, found.ObjectLostError


def _ray_options(address: str | None, shards: int) -> dict[str, Any]:
    if address is not None:
        return {"address": address, "log_to_driver": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own 15 lets every other program go first
    return {
        "address": "local",  # also where another Ray runs on this machine
        "num_cpus": max(shards, os.cpu_count() or 1),
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": "error",
    }
