"""What does a site's log say, for somebody who watches? Read from the file, without opening the stream.

Memory holds the latest cases of each site and counts of the others, however long its log is.
"""

import json
import threading
from collections import Counter, deque
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from dltta.serving.journal import Fields
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.record import LOG

RECENT = 50  # cases that say how a site is doing now
BY_HAND = ("rollback", "mode", "pause", "continue")  # events


@dataclass
class SiteView:
    """One site, as far as its log was read."""

    key: Key
    read: int = 0  # bytes of the log
    latest: float = 0.0  # when a line was added, seconds since 1970
    answered: int = 0
    version: int = 0
    oldest_version: int = 0
    deployment: str = "live"
    decisions: Counter[str] = field(default_factory=Counter)
    recent: deque[Fields] = field(default_factory=lambda: deque(maxlen=RECENT))  # cases, oldest first
    changes: deque[Fields] = field(default_factory=lambda: deque(maxlen=10))  # by hand

    def add(self, line: Fields) -> None:
        """One more line of the log."""
        self.version = max(self.version, int(line.get("state", 0)))
        self.oldest_version = int(line.get("oldest_state", self.oldest_version))
        self.deployment = str(line.get("deployment", self.deployment))
        if line.get("event") in BY_HAND:
            self.changes.append(line)
        if "prediction" in line:
            self.answered += 1
            self.recent.append(line)
            if line.get("decision"):
                self.decisions[str(line["decision"])] += 1

    def copied(self) -> "SiteView":
        """One that stays as it is when lines are added."""
        recent, changes = copy(self.recent), copy(self.changes)
        return replace(self, decisions=copy(self.decisions), recent=recent, changes=changes)

    @property
    def quality(self) -> float | None:
        """The mean expected quality of the latest cases."""
        known = [float(line["quality"]) for line in self.recent if line.get("quality") is not None]
        return fmean(known) if known else None

    @property
    def to_review(self) -> int:
        """Of the latest cases."""
        return sum(bool(line.get("review")) for line in self.recent)

    @property
    def alarm(self) -> str | None:
        """Why somebody should look at this site now."""
        recent = self.recent
        far = sum(line.get("reason") == "ood-score" for line in recent)
        if recent and 2 * far > len(recent):
            return f"{far} of the latest {len(recent)} images are far out of distribution"
        if recent and 2 * self.to_review > len(recent):
            return f"{self.to_review} of the latest {len(recent)} predictions should be reviewed"
        return None


class Views:
    """Reads of each log only what was added since."""

    def __init__(self, folders: KeyFolders) -> None:
        self.folders = folders
        self._views: dict[Key, SiteView] = {}
        self._lock = threading.Lock()  # pages are made in threads

    def site(self, key: Key) -> SiteView | None:
        """None for a site that has no stream."""
        with self._lock:
            view = self._updated(key)
            return None if view is None else view.copied()

    def _updated(self, key: Key) -> SiteView | None:
        path = self.folders.stream(key) / LOG
        view = self._views.get(key) or SiteView(key)
        try:
            found = path.stat()
            if found.st_size < view.read:  # another stream took its place
                view = SiteView(key)
            view.latest = found.st_mtime
            for line, end in _lines(path, view.read):
                view.add(line)
                view.read = end
        except FileNotFoundError:
            self._views.pop(key, None)
            return None
        self._views[key] = view
        return view

    def sites(self) -> list[SiteView]:
        found = (self.site(key) for key in self.folders)
        return sorted((view for view in found if view is not None), key=lambda view: view.key)

    def cases(self, key: Key, latest: int) -> list[Fields] | None:
        """The lines of the latest cases, oldest first; None for a site that has no stream."""
        path = self.folders.stream(key) / LOG
        try:
            return list(deque((line for line, _ in _lines(path, 0) if "prediction" in line), latest))
        except FileNotFoundError:
            return None


def _lines(path: Path, begin: int) -> Iterator[tuple[Fields, int]]:
    """Whole lines from this byte on, and where each ends."""
    with path.open("rb") as file:
        file.seek(begin)
        for text in file:
            begin += len(text)
            if text.endswith(b"\n"):
                yield json.loads(text), begin
