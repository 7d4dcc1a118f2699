"""1 images. Which images arrive in a folder, and when is one of them all there?

A file is taken when it stopped changing and its format says that its end is there. A copy that pauses is waited for.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

from dltta.data.formats import dicom
from dltta.data.formats.format import complete, ending
from dltta.data.inbox import (
    STOP,
    Ignored,
    Incoming,
    Order,
    image_folder,
    in_order,
    is_file,
    is_temporary,
    look,
    state_of,
)
from dltta.data.names import split_channel
from dltta.errors import DataError

SETTLE = 10.0  # seconds without a change


def watch_incoming(
    path: Path | str,
    *,
    order: Order = "name",
    poll: float = 1.0,
    settle: float = SETTLE,
    stalled: float = 300.0,
    idle: float | None = None,
    seen: Collection[str] = (),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] | None = None,
) -> "Watch":
    """Cases as they appear in a folder, each once, looked for every `poll` seconds.

    A case is taken when its files are as large and as old as at the look before, and their format says that they are
    complete. Nothing must have come for `settle` seconds where more files may belong to it (a DICOM series, numbered
    channels) or the format cannot say. A file that is not complete is waited for; it is taken as it is, for its reader
    to report, when it has not changed for `stalled` seconds, and is taken again whenever it changes.

    The watch ends after `idle` seconds without anything new, when a file named STOP appears in the folder, or by
    `close`. Cases named in `seen` are left out. A folder that cannot be listed (a network drive that is away) ends it
    after `stalled` seconds.
    """
    if is_file(Path(path)):
        raise DataError(f"{path}: a single file does not grow; watch a folder")
    folder = image_folder(Path(path))
    stops = (Path(path) / STOP, folder / STOP)
    if any(map(is_file, stops)):
        raise DataError(f"{path}: holds a file named {STOP}, which ends watching; remove it to start")
    return Watch(folder, order, poll, settle, stalled, idle, seen, stops, clock, sleep)


class Watch(Iterator[Incoming]):
    """What `watch_incoming` gives; `close`, from any thread, wakes and ends it."""

    def __init__(
        self,
        folder: Path,
        order: Order,
        poll: float,
        settle: float,
        stalled: float,
        idle: float | None,
        seen: Collection[str],
        stops: Collection[Path],
        clock: Callable[[], float],
        sleep: Callable[[float], object] | None,
    ) -> None:
        self.ignored = Ignored()
        self._closed = threading.Event()
        self._folder, self._order, self._poll, self._settle, self._idle = folder, order, poll, settle, idle
        self._stalled, self._stops, self._clock, self._sleep = stalled, stops, clock, sleep or self._closed.wait
        self._taken: dict[str, set[Path] | None] = dict.fromkeys(seen)  # files; None: not known, from before
        self._failed: dict[str, object] = {}  # taken, but not whole: how it looked
        self._looked: dict[str, object] = {}  # taken: how it looked
        self._standing: dict[str, tuple[object, float]] = {}  # not taken yet: how it looks, and since when
        self._listed = clock()  # when the folder could last be listed
        self._cases = self._watch()

    def __next__(self) -> Incoming:
        return next(self._cases)

    def close(self) -> None:
        self._closed.set()

    def retry(self, case: Incoming) -> None:
        """Gives a case that could not be used once more, when its files are not as they were when it was given."""
        self._failed[case.name] = self._looked.pop(case.name, None)

    def _watch(self) -> Iterator[Incoming]:
        news = self._clock()
        while not self._ended():
            for case in in_order(self._complete(), self._order):
                if self._ended():
                    return
                if _state(case) == self._standing[case.name][0]:  # else it changed or went while others were read
                    self._take(case)
                    yield case
                    news = self._clock()
            news = self._clock() if self._standing else news
            if self._idle is not None and self._clock() - news >= self._idle:
                return
            self._sleep(self._poll)

    def _ended(self) -> bool:
        return self._closed.is_set() or any(map(is_file, self._stops))

    def _take(self, case: Incoming) -> None:
        self._taken[case.name] = set(case.files) | (self._taken.get(case.name) or set())
        self._failed.pop(case.name, None)
        state, _ = self._standing.pop(case.name)
        self._looked[case.name] = state
        if case.problem is not None or _whole(case) is False:
            self._failed[case.name] = state

    def _complete(self) -> list[Incoming]:
        """New cases that have stood still for long enough."""
        now, standing = self._clock(), {}
        found = []
        for case in filter(None, map(self._new, self._look(now))):
            state = _state(case)
            before, since = self._standing.get(case.name, (None, now))
            standing[case.name] = (state, since if state == before else now)
            if state == before and now - since >= self._patience(case):
                found.append(case)
        self._standing = standing
        return found

    def _look(self, now: float) -> list[Incoming]:
        try:
            found = look(self._folder)
        except DataError:
            if now - self._listed >= self._stalled:
                raise
            return []
        self._listed, self.ignored = now, found.ignored
        return found

    def _new(self, case: Incoming) -> Incoming | None:
        """A case not taken yet, or changed since it failed, or one that has got a file since, which is a problem."""
        if case.name not in self._taken:
            return case
        if case.name in self._failed:
            return case if _state(case) != self._failed[case.name] else None
        taken = self._taken[case.name]
        late = next((file for file in case.files if taken is not None and file not in taken), None)
        if late is None:
            return None
        problem = f"{late}: arrived after its case was taken; wait longer for a case's files (settle) and run it again"
        return replace(case, problem=case.problem or problem)

    def _patience(self, case: Incoming) -> float:
        """Seconds for which the files of a case must not change."""
        whole = _whole(case)
        if whole is False:
            return self._stalled
        several = case.kind == "dicom" or any(split_channel(file)[1] is not None for file in case.files)
        return self._settle if several or whole is None else 0.0


def _whole(case: Incoming) -> bool | None:
    """Whether all files are complete; None where one of them cannot tell."""
    found = [_complete_file(file) for file in case.files]
    return False if False in found else None if None in found else True


def _complete_file(file: Path) -> bool | None:
    if not is_file(file):
        return True  # a link to nowhere, a folder: nothing to wait for
    if ending(file) is not None:
        return complete(file)
    if is_temporary(file):
        return False
    peek = dicom.peek(file)
    return peek is None or peek.complete


def _state(case: Incoming) -> object:
    """What changes while a file is being written."""
    found = [(file, state_of(file)) for file in case.files]
    return [(file, status and (status.st_size, status.st_mtime_ns)) for file, status in found]
