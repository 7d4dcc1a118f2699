"""The main job: a network, images that arrive one by one, an answer for each, and a record that survives anything.

OUT/
  NAME.png …          the answers, in the images' format and geometry
  predictions.csv     classification instead: image, answer, probability of each class
  stream.jsonl        one line per case, hash-chained (`journal.py`)
  state/              what was learned, version by version (`state.py`)
For each batch in this order: answers, state, log, table; while the disk works on that, the network works on the next
batch. The log's lines make it so; whatever a crash leaves without a line is done again from the same state, and comes
out the same. A case that fails leaves no trace in the state: before the next one the latest version is loaded again.
"""

import errno
import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dltta.config import WITHOUT_RATE, AdaptationSettings, make_adapter
from dltta.core.adapter import Adapter
from dltta.core.objectives import Source
from dltta.data.formats import dicom
from dltta.data.formats.format import ending, endings, format_of
from dltta.data.inbox import Incoming, digest, read_incoming
from dltta.data.outputs import write_prediction, write_probabilities
from dltta.data.prefetch import prefetch
from dltta.errors import DataError, DlttaError, InputError, NonFiniteError, SettingError, StateError
from dltta.files import remove_parts, sync_folder, write_atomically
from dltta.models.io.opened import OpenedModel
from dltta.predictor import Answered, Answering, Loaded, load
from dltta.serving.index import Record, Table, shortest
from dltta.serving.journal import Entry, Journal, on_disk, write_anchor
from dltta.serving.naming import Naming
from dltta.serving.state import Packed, StateFolder
from dltta.version import __version__

LOG, TABLE, STATE = "stream.jsonl", "predictions.csv", "state"
POOL = 8  # positions per axis of the memory's keys where images differ in size
PAIRS = 800  # that a classification remembers, in the paper 4 batches of 200
FILES = (("answer", "sha256"), ("probabilities_file", "probabilities_sha256"))  # keys of a line
MODES = ("continual", "image-specific", "shadow", "frozen")
ON_ERROR = ("stop", "skip")

CaseError: TypeAlias = DataError | InputError | NonFiniteError  # what one case can have, and the others not
Tick = Callable[[Mapping[str, Any]], None]  # the line of a case that was dealt with


@dataclass(frozen=True)
class StreamSettings:
    """How a stream is adapted and answered.

    `shadow` adapts and answers with the network as it was trained, recording how the two differ; `frozen` does not
    adapt at all. `anonymize` puts the image's hash in the place of its name, in the log and in the answers' file names.
    """

    method: str = "tent"
    rate: str = "relative"
    mode: Literal["continual", "image-specific", "shadow", "frozen"] = "continual"
    adaptation: AdaptationSettings = field(default_factory=lambda: AdaptationSettings(ready="neighbors", guard=True))
    on_error: Literal["stop", "skip"] = "stop"
    save_probabilities: bool = False
    anonymize: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (("mode", self.mode, MODES), ("on-error", self.on_error, ON_ERROR)):
            if value not in known:
                raise SettingError(f"{name} must be one of {', '.join(known)}, got {value!r}")


@dataclass
class Summary:
    """What a run did."""

    answered: int = 0
    repeated: int = 0  # the same content under another name: answered, not learned from again
    before: int = 0  # had their answer already
    failed: list[str] = field(default_factory=list)  # one sentence each


@dataclass(frozen=True)
class Known:
    """A case whose content was answered before; not even read."""

    digest: str


@dataclass(frozen=True)
class Broken:
    """A case with content that is no image for this network."""

    digest: str
    error: DlttaError


@dataclass(frozen=True)
class Waiting:
    """A case of the batch that is being put together."""

    case: Incoming
    name: str
    loaded: Loaded


class Stream:
    """One stream in one output folder. `with Stream(…) as stream: stream.run(cases)`."""

    def __init__(self, opened: OpenedModel, output: Path, settings: StreamSettings, *, resume: bool = False) -> None:
        self.opened, self.output, self.settings = opened, output, settings
        self.adaptation = _adaptation(opened, settings)
        self.batch_size = self.adaptation.batch_size or 1
        self.adapter = _make_adapter(opened, settings, self.adaptation)
        trained = Adapter(opened.model, Source(), layout="given") if settings.mode == "shadow" else None
        self.answering = Answering(opened, self.adapter, trained, whole=settings.mode != "image-specific")
        self.folder = StateFolder(output / STATE)
        self._resume = resume
        self._ahead = False  # whether the adapter may have seen more than its latest version on disk
        self._keeping: Future[None] | None = None  # what is underway to the disk
        self._underway: frozenset[str] = frozenset()  # names and digests of its cases
        self._open = ExitStack()

    def __enter__(self) -> "Stream":
        with on_disk(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(self.folder.locked())
            self._begin()
            self._disk = stack.enter_context(ThreadPoolExecutor(1, "disk"))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def run(self, cases: Iterable[Incoming], tick: Tick = lambda line: None) -> Summary:
        """Answer every case that has no answer yet, in order."""
        self._summary, self._tick = Summary(), tick
        self._batch: list[Waiting] = []
        self._echoes: list[tuple[Incoming, str]] = []  # cases with the content of one in the batch
        try:
            with closing(prefetch(cases, self._load, ahead=self.batch_size)) as arriving:
                for case, found in arriving:
                    self._take(case, found)
                self._finish_batch()
            self._settle()
        finally:
            if self._keeping is not None:
                wait([self._keeping])
        return self._summary

    # before the network

    def _load(self, case: Incoming) -> Loaded | Known | Broken:
        """Read a case, in the thread that reads ahead; content that was answered is not read again."""
        if any(file.parent.resolve() == self.output.resolve() for file in case.files):
            raise SettingError(f"{self.output} holds the images; choose another folder for the answers")
        before = _look(case)
        found = digest(case)
        if self.record.holds(found):
            return Known(found)
        try:
            loaded = load(self.opened, read_incoming(case), found)
        except (DataError, InputError) as error:
            return Broken(found, error)
        if _look(case) != before:
            return Broken(found, DataError("it changed while it was read; give it once it is complete"))
        return loaded

    def _take(self, case: Incoming, found: Loaded | Known | Broken | DlttaError) -> None:
        """Deal with a case at once, or let it wait for its batch."""
        if not isinstance(found, Loaded) or self._underway & {found.digest, self.naming.name(case, found.digest)}:
            self._settle()
        if isinstance(found, DlttaError):
            self._fail(case, None, found)
        elif isinstance(found, Broken):
            self._fail(case, found.digest, found.error)
        elif (known := self.record.digest(self.naming.name(case, found.digest))) is not None:
            self._again(case, found.digest, known)
        elif self.record.holds(found.digest):
            self._repeat(case, found.digest)
        elif any(waiting.loaded.digest == found.digest for waiting in self._batch):
            self._echoes.append((case, found.digest))
        elif isinstance(found, Loaded):
            self._wait(Waiting(case, self.naming.name(case, found.digest), found))
        else:
            self._fail(case, found.digest, DataError("has the content of a case that could not be used"))

    def _wait(self, case: Waiting) -> None:
        """For a batch, which is images of one shape."""
        if self._batch and self._batch[0].loaded.shape != case.loaded.shape:
            self._finish_batch()
        self._batch.append(case)
        if len(self._batch) == self.batch_size:
            self._finish_batch()

    def _finish_batch(self) -> None:
        batch, echoes = self._batch, self._echoes
        self._batch, self._echoes = [], []
        if batch:
            self._answer(batch)
        for case, found in echoes:
            self._take(case, Known(found))

    def _again(self, case: Incoming, found: str, known: str) -> None:
        """A name that has an answer."""
        self._settle()
        if found != known:
            error = DataError("was answered before with other content; give the new image another name")
            self._fail(case, found, error)
        else:
            self._summary.before += 1
            self._tick({"case": self.naming.name(case, found)})

    # the network

    def _answer(self, batch: Sequence[Waiting]) -> None:
        """Answer a batch; if it fails, without those of its cases that are to blame."""
        try:
            self._adapt(batch)
        except (DataError, InputError, NonFiniteError) as error:
            blamed = self._culprits(batch, error)
            for index, reason in blamed.items():
                self._fail(batch[index].case, batch[index].loaded.digest, reason)
            innocent = [case for index, case in enumerate(batch) if index not in blamed]
            if innocent:
                self._answer(innocent)

    def _culprits(self, batch: Sequence[Waiting], error: CaseError) -> dict[int, CaseError]:
        """The cases that fail alone too, or all of them."""
        blamed: dict[int, CaseError] = {}
        if len(batch) > 1:
            self._catch_up()
            self._ahead = True
            blamed = {**self.answering.culprits([case.loaded for case in batch])}
        return blamed or dict.fromkeys(range(len(batch)), error)

    def _adapt(self, batch: Sequence[Waiting]) -> None:
        """Adapt to a batch and answer it: all of this or nothing. The disk may still work on the batch before it."""
        self._catch_up()
        self._ahead = True
        started = time.perf_counter()
        names, loaded = [case.name for case in batch], [case.loaded for case in batch]
        if self.opened.task == "classification":
            answers = self.answering.classify(names, loaded)
        else:
            answers = [self.answering.segment(names[0], loaded[0])]
        self._settle()
        written = [self._write(case, answered) for case, answered in zip(batch, answers, strict=True)]
        packed = self.folder.pack(self.record.version + 1, self.adapter)
        state = {"state": packed.number, "state_sha256": packed.sha256}
        seconds = round((time.perf_counter() - started) / len(batch), 4)
        lines = [
            {**_line(case, answered), **files, **state, "seconds": seconds}
            for case, answered, files in zip(batch, answers, written, strict=True)
        ]
        self._underway = frozenset(text for case in batch for text in (case.name, case.loaded.digest))
        self._keeping = self._disk.submit(self._keep, packed, lines)
        self._ahead = False

    def _catch_up(self) -> None:
        """The adapter as the log says it is."""
        if self._ahead:
            self._settle()
            self.folder.load(self.record.version, self.record.sha256, self.adapter)
            self._ahead = False

    # after the network

    def _keep(self, packed: Packed, lines: Sequence[Mapping[str, Any]]) -> None:
        """Onto the disk, in an order that bears a power cut at any moment: answers, state, log."""
        if self.table is None:  # answers are files
            with on_disk(self.output):
                sync_folder(self.output)
        self.folder.put(packed)
        self._commit(lines)
        self._summary.answered += len(lines)

    def _settle(self) -> None:
        """Wait until the batch before is on the disk."""
        if self._keeping is None:
            return
        try:
            self._keeping.result()
        except BaseException:
            self._ahead = True
            raise
        finally:
            if self._keeping.done():
                self._keeping, self._underway = None, frozenset()

    def _write(self, case: Waiting, answered: Answered) -> Entry:
        """The answer's files and what the log says of them; a classification is a row of the table."""
        if self.opened.task == "classification":
            answer = self.opened.classes[int(self.opened.labels(answered.probabilities))]
            image = self.naming.image(case.case, case.loaded.digest)
            return {"image": image, "answer": answer, "probabilities": shortest(answered.probabilities.tolist())}
        named, geometry = replace(case.case, name=case.name), case.loaded.geometry
        labels, files = self.opened.labels(answered.probabilities), []
        try:
            files.append(write_prediction(self.output, named, labels.numpy(), geometry, self.opened.classes))
            if self.settings.save_probabilities:
                files.append(write_probabilities(self.output, named, answered.probabilities.numpy(), geometry))
        except DataError as error:
            for file in files:
                file.unlink()
            if _disk(error):
                raise StateError(f"{error}, then --resume") from error
            raise
        return _named(files)

    def _repeat(self, case: Incoming, found: str) -> None:
        """The same content under another name: the same answer, and nothing is learned from it twice."""
        self._settle()
        name, first = self.naming.name(case, found), self.record.first(found)
        try:
            files = self._copied(case, name, first)
        except DataError as error:
            self._fail(case, found, error)
            return
        if "image" in first:
            files["image"] = self.naming.image(case, found)
        self._commit([{"case": name, "input": found, "repeats": first["case"], **files, "state": self.record.version}])
        self._summary.repeated += 1

    def _copied(self, case: Incoming, name: str, first: Entry) -> Entry:
        """Copies of the files of an earlier case's answer, or its row of the table."""
        if "sha256" not in first:
            return {key: first[key] for key in ("answer", "probabilities")}
        copies = []
        for key, checksum in FILES:
            if key in first:
                before = self.output / first[key]
                if not before.is_file() or _sha256(before) != first[checksum]:
                    raise DataError(f"repeats {first['case']}, whose answer {before.name} is gone; put it back")
                copies.append(self.output / f"{name}{_ending(before.name.removeprefix(first['case']), case)}")
                with on_disk(copies[-1]):
                    write_atomically(copies[-1], before.read_bytes())
        return _named(copies)

    def _fail(self, case: Incoming, found: str | None, error: DlttaError) -> None:
        """Stop with the case's name, or write the failure down and go on."""
        if not isinstance(error, CaseError):
            raise error
        name = self.naming.name(case, found)
        sentence = self.naming.sentence(error, case, name)
        if self.settings.on_error == "stop":
            raise type(error)(sentence) from error
        self._settle()
        self._summary.failed.append(sentence)
        line: Entry = {"case": name, "input": found, "error": type(error).__name__}
        line |= {"reason": self.naming.reason(error, case, name), "state": self.record.version}
        self.record.fail(line)
        self._tick(line)

    def _commit(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.record.append(lines)
        if self.table is not None:
            self.table.append(lines)
        for line in lines:
            self._tick(line)

    # the record

    def _begin(self) -> None:
        """Open the log, or start one, and bring the adapter to where it ends."""
        path = self.output / LOG
        journal = Journal(path, self.folder.anchor)
        if journal.size and not self._resume:
            raise SettingError(f"{self.output} already holds a stream; add --resume to continue it, or choose another")
        remove_parts(self.output)
        self.folder.clean()
        wanted = self._description()
        if journal.size:
            _require_same(self.folder.description(), wanted, self.output)
        else:
            self._start(journal, wanted)
        self.naming = Naming(self.folder.description().get("key"))
        self.record = Record(journal)
        self.table = Table(self.output / TABLE, self.opened.classes) if self.opened.task == "classification" else None
        if self.table is not None:
            self.table.rewrite(line.entry for line in journal)
        with on_disk(self.folder.anchor):
            write_anchor(self.folder.anchor, journal.head)
        self.folder.load(self.record.version, self.record.sha256, self.adapter)

    def _start(self, journal: Journal, description: Entry) -> None:
        _require_room(self.output)
        key = {"key": secrets.token_hex(16)} if self.settings.anonymize else {}
        self.folder.describe({**description, **key})
        with on_disk(self.folder.anchor):
            write_anchor(self.folder.anchor, journal.head)
        first = {"state": 0, "state_sha256": self.folder.save(0, self.adapter)}
        journal.append([{"event": "start", **description, **first}])

    def _description(self) -> Entry:
        """What a resumed stream must share with its beginning."""
        chosen = {
            "dltta": __version__,
            "network": self.opened.fingerprint,
            "task": self.opened.task,
            "classes": self.opened.classes,
            "window": None if self.opened.window is None else asdict(self.opened.window),
            **{name: getattr(self.settings, name) for name in ("method", "rate", "mode", "anonymize")},
            "adaptation": asdict(self.adaptation),
        }
        plain: Entry = json.loads(json.dumps(chosen))
        return plain


def _adaptation(opened: OpenedModel, settings: StreamSettings) -> AdaptationSettings:
    """The settings with a value for everything, as this network and these images need them."""
    given = settings.adaptation
    chosen = given.for_task(opened.task)
    size = 1 if chosen.batch_size is None else chosen.batch_size
    if size < 1 or (opened.task == "segmentation" and size > 1):
        raise SettingError(f"a batch of {size} images cannot be; segmentations are adapted to one by one")
    if opened.task == "classification" and given.batches_kept is None:
        chosen = replace(chosen, batches_kept=math.ceil(PAIRS / size))
    if chosen.pool is None and not _one_size(opened):
        chosen = replace(chosen, pool=POOL)
    return replace(chosen, mode="image-specific" if settings.mode == "image-specific" else "continual")


def _one_size(opened: OpenedModel) -> bool:
    """Whether every image reaches the network in the same size."""
    if opened.window is not None and 0 not in opened.window.patch:
        return True
    return opened.checkpoint is not None and opened.checkpoint.preprocessing.size is not None


def _make_adapter(opened: OpenedModel, settings: StreamSettings, adaptation: AdaptationSettings) -> Adapter:
    if settings.mode == "frozen":
        return Adapter(opened.model, Source(), layout="given")
    rate = "none" if settings.method in WITHOUT_RATE else settings.rate
    return make_adapter(opened, settings.method, rate, adaptation)


def _line(case: Waiting, answered: Answered) -> Entry:
    """How an answer came about."""
    step, ruling = answered.step, answered.step.ruling
    line: Entry = {
        "case": case.name,
        "input": case.loaded.digest,
        "loss": step.loss,
        "discrepancy": step.discrepancy,
        "rate": step.rate,
        "guard": None if ruling is None else ruling.verdict,
        "reason": None if ruling is None else ruling.reason,
    }
    return line if answered.changed is None else {**line, "changed": answered.changed}


def _named(files: Sequence[Path]) -> Entry:
    """What the log says of an answer's files."""
    entry: Entry = {}
    for (key, checksum), file in zip(FILES, files, strict=False):
        entry |= {key: file.name, checksum: _sha256(file)}
    return entry


def _ending(of: str, case: Incoming) -> str:
    """The ending of an answer like another one: that of this case's file where both are of one format."""
    own = ending(case.files[0])
    alike = own is not None and of in endings() and format_of(Path(f"_{of}")) is format_of(case.files[0])
    return own if own is not None and alike else of


def _look(case: Incoming) -> list[tuple[int, int]]:
    """What changes while a file is being written."""
    try:
        return [(status.st_size, status.st_mtime_ns) for status in (file.stat() for file in case.files)]
    except OSError:  # gone: reading it will say so
        return []


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _disk(error: DataError) -> bool:
    """Whether the disk is to blame for an answer that cannot be written, and not the case and its long name."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.ENAMETOOLONG


def _require_room(output: Path) -> None:
    """A new stream must not write over what somebody else has put there."""
    foreign = (*endings(), *dicom.ENDINGS, ".npz")
    there = [path.name for path in output.iterdir() if path.name.lower().endswith(foreign) or path.name == TABLE]
    if there:
        raise SettingError(f"{output} holds {min(there)}, which is not ours; choose an empty folder for the answers")


def _require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], output: Path) -> None:
    for key, value in wanted.items():
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            _require_same(found[key], value, output)
        elif key != "dltta" and found.get(key) != value:
            begun, now = ("another network", "this one") if key == "network" else (f"{key} {found.get(key)}", value)
            raise StateError(
                f"{output} was begun with {begun}, not {now}; resume with the same, or choose another folder"
            )
