"""What has a stream done so far? Its log, looked up by the names and the contents of its cases.

Memory holds the name, the hash and the place of the line of each case; all else is read from the log when needed.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dltta.errors import StateError
from dltta.files import csv_table, open_in_place, write_atomically
from dltta.quality.decision import EXPECTED
from dltta.serving.journal import Fields, Journal, Line, on_disk
from dltta.serving.summary import needs_review


class StreamIndex:
    """The cases that were predicted, and the current version of the state."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.version, self.sha256 = 0, ""  # the current version of the state and the hash of its file
        self.oldest = 0  # the oldest version that is kept
        self.deployment: str | None = None  # what the latest event of that kind says
        self.decisions: Counter[str] = Counter()  # of the guard, by outcome
        self.reasons: Counter[str] = Counter()
        self.reviews = 0  # predictions that somebody should look at
        self._digests: dict[str, bytes] = {}  # by name
        self._places: dict[bytes, int] = {}  # by content: where the line of the first such case begins
        self._lines: dict[str, int] = {}  # by name: where the line of the case begins
        self._failures: set[tuple[str, ...]] = set()
        for number, line in enumerate(journal, 1):
            try:
                self._index(line)
            except (LookupError, ValueError, TypeError, AttributeError) as error:
                raise StateError(f"{journal.path}: line {number} is not one that dltta adapt writes") from error

    def digest(self, name: str) -> str | None:
        """The content that was predicted under this name, ignoring upper and lower case."""
        found = self._digests.get(name.casefold())
        return None if found is None else found.hex()

    def holds(self, digest: str) -> bool:
        """Whether this content was predicted, under whatever name."""
        return bytes.fromhex(digest) in self._places

    def first(self, digest: str) -> Fields:
        """The line of the first case with this content."""
        return self.journal.at(self._places[bytes.fromhex(digest)])

    def line(self, name: str) -> Fields:
        """The line of the case of this name, which has a prediction."""
        return self.journal.at(self._lines[name.casefold()])

    @property
    def predicted(self) -> int:
        """How many cases have a prediction."""
        return len(self._digests)

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Lines of one group; on return they count."""
        for line in self.journal.append(entries):
            self._index(line)

    def fail(self, entry: Mapping[str, Any]) -> None:
        """The line of a case that could not be used, unless the same line is there already."""
        if _failure(entry) not in self._failures:
            self.append([entry])

    def _index(self, line: Line) -> None:
        entry = line.entry
        if "state_sha256" in entry:
            self.version, self.sha256 = int(entry["state"]), str(entry["state_sha256"])
            self.oldest = int(entry["oldest_state"])
        if entry.get("event") == "mode":
            self.deployment = str(entry["deployment"])
        if entry.get("decision") is not None:
            self.decisions[entry["decision"]] += 1
        if entry.get("reason") is not None:
            self.reasons[entry["reason"]] += 1
        self.reviews += needs_review(entry)
        if "prediction" in entry:
            digest = bytes.fromhex(entry["input"])
            self._digests[entry["case"].casefold()] = digest
            self._lines[entry["case"].casefold()] = line.begin
            self._places.setdefault(digest, line.begin)
        elif "error" in entry:
            self._failures.add(_failure(entry))


def _failure(entry: Mapping[str, Any]) -> tuple[str, ...]:
    return str(entry["case"]), str(entry["error"]), str(entry["detail"])


class PredictionTable:
    """`predictions.csv`: the predictions of a classification, written from the log and after it."""

    def __init__(self, path: Path, classes: Sequence[str], *, quality: bool = False) -> None:
        self.path, self.classes = path, classes
        self.more = EXPECTED if quality else ()  # columns

    def text(self, entries: Iterable[Mapping[str, Any]]) -> str:
        rows = (self._row(entry) for entry in entries if _predicted(entry))
        return self._rows([["image", "prediction", *self.classes, *self.more], *rows])

    def rewrite(self, entries: Iterable[Mapping[str, Any]]) -> None:
        with on_disk(self.path):
            write_atomically(self.path, self.text(entries))

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        with on_disk(self.path):
            handle = open_in_place(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            with os.fdopen(handle, "a", encoding="utf-8", newline="") as file:
                file.write(self._rows(map(self._row, entries)))

    def _row(self, entry: Mapping[str, Any]) -> list[Any]:
        return [
            entry["image"],
            entry["prediction"],
            *map(str, entry["probabilities"]),
            *("" if entry.get(name) is None else str(entry[name]) for name in self.more),
        ]

    def _rows(self, rows: Iterable[Sequence[Any]]) -> str:
        return csv_table(rows)


def _predicted(entry: Mapping[str, Any]) -> bool:
    return "probabilities" in entry


def shortest(values: Iterable[float]) -> list[float]:
    """float32 numbers with the fewest digits that give them back: 0.1 rather than 0.10000000149011612."""
    return [float(str(np.float32(value))) for value in values]
