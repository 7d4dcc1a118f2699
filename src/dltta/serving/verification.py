"""Is everything in the folder of a stream as `dltta adapt` wrote it? Every file is accounted for.

While a stream runs, files that are being written cannot be told from foreign ones, and lines are added at any moment:
then only what the log already names is checked.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dltta.errors import SettingError, StateError
from dltta.serving.index import PredictionTable
from dltta.serving.journal import START, Fields, read_head, unfinished, walk, wrong_end
from dltta.serving.maintenance import require_log
from dltta.serving.record import LOG, STATE, TABLE, expects_quality
from dltta.serving.signing import Signer
from dltta.serving.state import StateFolder
from dltta.serving.written import FILES, sha256

# what the first line has besides the settings
ADDED = ("event", "state", "state_sha256", "oldest_state", "of", "previous", "signature", "hash")


SHORTEST = 16  # letters of a hash that tell it from others


def verify(output: Path, key: Path | None = None, expected: str | None = None) -> list[str]:
    """One sentence for everything that is not as it was written; with the file of its key, signatures are checked.

    `expected` is the hash of a line, or its beginning, that somebody kept elsewhere: a log that was cut back together
    with its head and state does not hold it.
    """
    require_log(output)
    if expected is not None and not re.fullmatch(rf"[0-9a-f]{{{SHORTEST},64}}", expected):
        raise SettingError(f"{expected!r} is not the hash of a line; give the one that dltta adapt printed at its end")
    signer = None if key is None else Signer.from_file(key, output)
    folder = StateFolder(output / STATE)
    running = folder.in_use()
    problems = [f"{path} is a symbolic link" for path in sorted(output.rglob("*")) if path.is_symlink()]
    if problems:
        return problems
    try:
        log = _Log(output, folder, signer, running=running, expected=expected)
    except StateError as error:
        return [str(error)]
    problems += [*log.problems, *_predictions(output, log)]
    if log.begun is None:
        return problems
    problems += [*_settings(folder, log.begun), *_versions(folder, log, running=running), *_table(output, log.begun)]
    return problems if running else [*problems, *_foreign(output, folder, log)]


@dataclass
class _Log:
    """What the log says should be there."""

    output: Path
    folder: StateFolder
    signer: Signer | None
    running: bool
    expected: str | None = None
    problems: list[str] = field(default_factory=list)
    begun: Fields | None = None  # the first line
    made: dict[int, str] = field(default_factory=dict)  # version: hash of its file
    oldest: int = 0  # version that is kept
    files: dict[str, str] = field(default_factory=dict)  # of predictions: hash

    def __post_init__(self) -> None:
        path = self.output / LOG
        head = read_head(self.folder.head_file, self.signer)  # before the log, to which lines may be added
        last, size, found = START, 0, self.expected is None
        seen = head is not None and START in head
        for group in walk(path, self.signer):
            for line in group:
                self._note(line.entry)
                found = found or line.entry["hash"].startswith(self.expected)
            last, size = group[-1].entry["hash"], group[-1].end
            seen = seen or (head is not None and last in head)
        if not found:
            self.problems.append(f"{path}: the expected line {self.expected} is gone: it was cut back or replaced")
        if not (self.running and seen):
            problem = wrong_end(path, head, last, seen=seen)
            self.problems += [] if problem is None else [problem]
        if not self.running and head is not None and head.last != head.next:
            self.problems.append(f"{self.folder.head_file} was altered, or the stream was killed; --resume mends it")
        if not self.running and unfinished(path, size):
            self.problems.append(f"{path} ends in an unfinished line: a killed stream leaves one, --resume removes it")

    def _note(self, entry: Fields) -> None:
        self.begun = self.begun or entry
        try:
            if "state_sha256" in entry:
                self.made[int(entry["state"])] = str(entry["state_sha256"])
                self.oldest = int(entry["oldest_state"])
            self.files |= {str(entry[name]): str(entry[checksum]) for name, checksum in FILES if checksum in entry}
        except (LookupError, ValueError, TypeError) as error:
            raise StateError(f"{self.output / LOG}: a line is not one that dltta adapt writes ({error})") from error


def _predictions(output: Path, log: _Log) -> Iterator[str]:
    """Predictions that are missing or altered."""
    for name, checksum in log.files.items():
        file = output / name
        if Path(name).name != name:
            yield f"{output / LOG}: names the file {name!r}, which does not lie in {output}"
        elif not file.is_file():
            yield f"{file} is missing"
        elif sha256(file) != checksum:
            yield f"{file} was altered"


def _settings(folder: StateFolder, begun: Mapping[str, object]) -> Iterator[str]:
    """Settings that differ from those in the first line."""
    try:
        found = folder.description()
    except StateError as error:
        yield str(error)
        return
    found.pop("key", None)
    if found != {key: value for key, value in begun.items() if key not in ADDED}:
        yield f"{folder.folder / 'stream.json'} was altered"


def _versions(folder: StateFolder, log: _Log, *, running: bool) -> Iterator[str]:
    """Versions that are missing or differ from those that the log names."""
    newest = max(log.made, default=0)
    kept = {number for number in log.made if number >= log.oldest}
    for number in sorted(kept | (set(folder.numbers()) & log.made.keys())):
        try:
            folder.memory(folder.read(number, log.made[number]))
        except StateError as error:
            if number == newest or not running or number in folder.numbers():  # else it was just forgotten
                yield str(error)


def _table(output: Path, begun: Fields) -> Iterator[str]:
    """A table that differs from the log; after a crash it may end earlier."""
    if begun.get("task") != "classification":
        return
    table = PredictionTable(output / TABLE, begun["classes"], quality=expects_quality(begun))
    if not table.path.is_file():
        yield f"{table.path} is missing; resume the stream to write it again"
        return
    lines = (line.entry for group in walk(output / LOG) for line in group)
    if not table.text(lines).encode().startswith(table.path.read_bytes()):
        yield f"{table.path} was altered; resume the stream to write it again"


def _foreign(output: Path, folder: StateFolder, log: _Log) -> Iterator[str]:
    """Files and folders that the log does not account for."""
    expected = {output / name for name in (LOG, STATE, *log.files)}
    if log.begun is not None and log.begun.get("task") == "classification":
        expected.add(output / TABLE)
    expected |= {folder.folder / name for name in ("stream.json", "head", "lock", "versions", "memory")}
    expected |= set(folder.files(log.made))
    for path in sorted(output.rglob("*")):
        if path not in expected:
            yield f"{path} is not in the log: it is foreign, or a killed stream left it"
