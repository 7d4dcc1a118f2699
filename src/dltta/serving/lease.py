"""Who may write a site's stream? On storage that several machines share, the holder of the highest fencing token.

KEY/leases/000007.json   {"owner": …}; created exclusively, so that each number has one owner

A lock of the operating system ends with its process, but other machines may not see it. So whoever opens a site takes
the next number, and looks before every write whether a higher one was taken since: a machine that was cut off and
comes back finds its successor and stops. It looks once more after the write and before it answers: a successor that
came in between may not have read the line, so the line does not count. The number stands in every line (`fence`).

Who was stopped between the look and the write finds the log longer than it left it (`journal.py`) and stops too.
"""

import json
import os
import re
from pathlib import Path

from dltta.errors import StateError
from dltta.files import PRIVATE, PRIVATE_FOLDER, make_folder, open_in_place
from dltta.serving.journal import on_disk, on_disk_readable

KEEP = 8  # files of earlier holders


class Lease:
    """The right to write one site's stream, until somebody takes it over."""

    def __init__(self, folder: Path, owner: str) -> None:
        self.folder, self.owner = folder / "leases", owner
        with on_disk(self.folder):
            make_folder(self.folder, mode=PRIVATE_FOLDER)
            self.token = self._take()
            for number in _numbers(self.folder)[:-KEEP]:
                (self.folder / f"{number:06d}.json").unlink(missing_ok=True)

    def require(self) -> None:
        """Raise unless nobody took over."""
        with on_disk_readable(self.folder):
            newest = max(_numbers(self.folder), default=0)
        if newest != self.token:
            raise LeaseLostError(f"{self.folder.parent}: another process took this site over; this one stops")

    def _take(self) -> int:
        """The next free number: two who try at once get different ones."""
        while True:
            token = max(_numbers(self.folder), default=0) + 1
            try:
                handle = open_in_place(
                    self.folder / f"{token:06d}.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=PRIVATE
                )
            except FileExistsError:
                continue
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"owner": self.owner}, file)
                file.flush()
                os.fsync(file.fileno())
            return token


class LeaseLostError(StateError):
    """Another process writes this site's stream now."""


def holders(folder: Path) -> list[int]:
    """The tokens that were taken for a site, the latest last; none where nobody took one."""
    leases = folder / "leases"
    return _numbers(leases) if leases.is_dir() else []


def _numbers(leases: Path) -> list[int]:
    found = (re.fullmatch(r"(\d{6,})\.json", path.name) for path in leases.iterdir())
    return sorted(int(match[1]) for match in found if match)
