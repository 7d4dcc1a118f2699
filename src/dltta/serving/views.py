"""What does a site's log say, for somebody who watches? Read from the file, without opening the stream."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from dltta.serving.journal import Fields
from dltta.serving.keys import Key, KeyFolders

RECENT = 50  # cases that say how a site is doing now


@dataclass(frozen=True)
class SiteView:
    """One site: all lines of its log, oldest first."""

    key: Key
    lines: tuple[Fields, ...]

    @property
    def cases(self) -> list[Fields]:
        return [line for line in self.lines if "prediction" in line]

    @property
    def recent(self) -> list[Fields]:
        return self.cases[-RECENT:]

    @property
    def version(self) -> int:
        return max((int(line["state"]) for line in self.lines if "state" in line), default=0)

    @property
    def oldest_version(self) -> int:
        return next((int(line["oldest_state"]) for line in reversed(self.lines) if "oldest_state" in line), 0)

    @property
    def deployment(self) -> str:
        events = [line for line in self.lines if "deployment" in line]
        return str(events[-1]["deployment"]) if events else "live"

    @property
    def quality(self) -> float | None:
        """The mean expected quality of the latest cases."""
        known = [float(line["quality"]) for line in self.recent if line.get("quality") is not None]
        return fmean(known) if known else None

    @property
    def decisions(self) -> Counter[str]:
        return Counter(str(line["decision"]) for line in self.cases if line.get("decision"))

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
    """Reads logs again only when they have grown."""

    def __init__(self, folders: KeyFolders) -> None:
        self.folders = folders
        self._read: dict[Key, tuple[int, tuple[Fields, ...]]] = {}  # bytes read so far and their lines

    def site(self, key: Key) -> SiteView | None:
        """None for a site that has no stream."""
        path = self.folders.stream(key) / "stream.jsonl"
        done, lines = self._read.get(key, (0, ()))
        more, end = _lines(path, done)
        if end is None:
            return None
        self._read[key] = end, (*lines, *more)
        return SiteView(key, self._read[key][1])

    def sites(self) -> list[SiteView]:
        found = (self.site(key) for key in self.folders)
        return sorted((view for view in found if view is not None), key=lambda view: view.key)


def _lines(path: Path, begin: int) -> tuple[Sequence[Fields], int | None]:
    """Whole lines from this byte on, and where they end; None if there is no such file."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size < begin:  # another stream took its place
                begin = 0
            file.seek(begin)
            content = file.read()
    except FileNotFoundError:
        return (), None
    whole = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], begin + len(whole)
