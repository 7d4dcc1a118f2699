"""The main job: a model, images that arrive one by one, a prediction for each, and a record that survives anything.

OUT/
  NAME.png …          the predictions, in the images' format and geometry
  predictions.csv     classification instead: image, prediction, probability of each class
  stream.jsonl        one line per case, hash-chained (`journal.py`)
  state/              what was learned, version by version (`state.py`)
For each batch in this order: predictions, state, log, table; while the disk works on that, the network works on the
next batch. A case is done once its line is in the log; whatever a crash leaves without a line is done again from the
same state, and comes out the same. A case that fails leaves no trace in the state: before the next one the latest
version is loaded again.
"""

import errno
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from dltta.config import make_adapter
from dltta.core.adapter import Adapter
from dltta.core.objectives import Source
from dltta.data.formats import dicom
from dltta.data.formats.images import ENDINGS, ending
from dltta.data.inbox import Incoming, digest, read_incoming
from dltta.data.outputs import write_prediction, write_probabilities
from dltta.data.prefetch import prefetch
from dltta.errors import DataError, DlttaError, InputError, NonFiniteError, SettingError, StateError
from dltta.files import remove_parts, sync_folder, write_atomically
from dltta.models.io.opened import OpenedModel
from dltta.predictor import Loaded, Prediction, Predictor, load
from dltta.recipes import Method, Recipe, paper
from dltta.serving.index import PredictionTable, StreamIndex, shortest
from dltta.serving.journal import Fields, Journal, on_disk, write_anchor
from dltta.serving.naming import Naming
from dltta.serving.settings import Deployment, OnError, StreamSettings
from dltta.serving.state import Packed, StateFolder
from dltta.version import __version__

SCHEMA = 2  # of stream.jsonl and the state folder
LOG, TABLE, STATE = "stream.jsonl", "predictions.csv", "state"
FILES = (("prediction", "sha256"), ("probabilities_file", "probabilities_sha256"))  # keys of a line

CaseError: TypeAlias = DataError | InputError | NonFiniteError  # what one case can have, and the others not
Tick = Callable[[Mapping[str, Any]], None]  # the line of a case that was dealt with


@dataclass
class Summary:
    """What a run did."""

    predicted: int = 0
    repeated: int = 0  # the same content under another name: predicted, not learned from again
    before: int = 0  # had their prediction already
    failed: list[str] = field(default_factory=list)  # one sentence each


@dataclass(frozen=True)
class Known:
    """A case whose content was predicted before; not even read."""

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

    def __init__(
        self, opened: OpenedModel, output: Path, settings: StreamSettings | None = None, *, resume: bool = False
    ) -> None:
        self.opened, self.output, self.settings = opened, output, settings or StreamSettings()
        self.recipe = _resolved(opened, self.settings)  # what really runs, and what the log records
        self.batch_size = self.recipe.batch_size or 1
        self.adapter = make_adapter(opened, self.recipe)
        shadowed = self.settings.deployment == Deployment.SHADOW
        source = Adapter(opened.model, Source(), layout="given") if shadowed else None
        self.predictor = Predictor(opened, self.adapter, source)
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
        """Predict every case that has no prediction yet, in order."""
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
        """Read a case, in the thread that reads ahead; content that was predicted is not read again."""
        if any(file.parent.resolve() == self.output.resolve() for file in case.files):
            raise SettingError(f"{self.output} holds the images; choose another folder for the predictions")
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
            self._predict(batch)
        for case, found in echoes:
            self._take(case, Known(found))

    def _again(self, case: Incoming, found: str, known: str) -> None:
        """A name that has an prediction."""
        self._settle()
        if found != known:
            error = DataError("was predicted before with other content; give the new image another name")
            self._fail(case, found, error)
        else:
            self._summary.before += 1
            self._tick({"case": self.naming.name(case, found)})

    # the network

    def _predict(self, batch: Sequence[Waiting]) -> None:
        """Predict a batch; if it fails, without those of its cases that are to blame."""
        try:
            self._adapt(batch)
        except (DataError, InputError, NonFiniteError) as error:
            blamed = self._culprits(batch, error)
            for index, reason in blamed.items():
                self._fail(batch[index].case, batch[index].loaded.digest, reason)
            innocent = [case for index, case in enumerate(batch) if index not in blamed]
            if innocent:
                self._predict(innocent)

    def _culprits(self, batch: Sequence[Waiting], error: CaseError) -> dict[int, CaseError]:
        """The cases that fail alone too, or all of them."""
        blamed: dict[int, CaseError] = {}
        if len(batch) > 1:
            self._catch_up()
            self._ahead = True
            blamed = {**self.predictor.culprits([case.loaded for case in batch])}
        return blamed or dict.fromkeys(range(len(batch)), error)

    def _adapt(self, batch: Sequence[Waiting]) -> None:
        """Adapt to a batch and predict it, all or nothing. The disk may still work on the batch before it."""
        self._catch_up()
        self._ahead = True
        started = time.perf_counter()
        names, loaded = [case.name for case in batch], [case.loaded for case in batch]
        if self.opened.task == "classification":
            predictions = self.predictor.classify(names, loaded)
        else:
            predictions = [self.predictor.segment(names[0], loaded[0])]
        self._settle()
        written = [self._write(case, predicted) for case, predicted in zip(batch, predictions, strict=True)]
        packed = self.folder.pack(self.record.version + 1, self.adapter)
        state = {"state": packed.number, "state_sha256": packed.sha256}
        seconds = round((time.perf_counter() - started) / len(batch), 4)
        lines = [
            {**_line(case, predicted), **files, **state, "seconds": seconds}
            for case, predicted, files in zip(batch, predictions, written, strict=True)
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
        """Onto the disk, in an order that bears a power cut at any moment: predictions, state, log."""
        if self.table is None:  # predictions are files
            with on_disk(self.output):
                sync_folder(self.output)
        self.folder.put(packed)
        self._commit(lines)
        self._summary.predicted += len(lines)

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

    def _write(self, case: Waiting, predicted: Prediction) -> Fields:
        """The prediction's files and what the log says of them; a classification is a row of the table."""
        if self.opened.task == "classification":
            prediction = self.opened.classes[int(self.opened.labels(predicted.probabilities))]
            image = self.naming.image(case.case, case.loaded.digest)
            return {
                "image": image,
                "prediction": prediction,
                "probabilities": shortest(predicted.probabilities.tolist()),
            }
        named, geometry = replace(case.case, name=case.name), case.loaded.geometry
        labels, files = self.opened.labels(predicted.probabilities), []
        try:
            files.append(write_prediction(self.output, named, labels.numpy(), geometry, self.opened.classes))
            if self.settings.save_probabilities:
                files.append(write_probabilities(self.output, named, predicted.probabilities.numpy(), geometry))
        except DataError as error:
            for file in files:
                file.unlink()
            if _disk(error):
                raise StateError(f"{error}, then --resume") from error
            raise
        return _named(files)

    def _repeat(self, case: Incoming, found: str) -> None:
        """The same content under another name: the same prediction, and nothing is learned from it twice."""
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

    def _copied(self, case: Incoming, name: str, first: Fields) -> Fields:
        """Copies of the files of an earlier case's prediction, or its row of the table."""
        if "sha256" not in first:
            return {key: first[key] for key in ("prediction", "probabilities")}
        copies = []
        for key, checksum in FILES:
            if key in first:
                before = self.output / first[key]
                if not before.is_file() or _sha256(before) != first[checksum]:
                    raise DataError(f"repeats {first['case']}, whose prediction {before.name} is gone; put it back")
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
        if self.settings.on_error == OnError.STOP:
            raise type(error)(sentence) from error
        self._settle()
        self._summary.failed.append(sentence)
        line: Fields = {"case": name, "input": found, "error": type(error).__name__}
        line |= {"detail": self.naming.reason(error, case, name), "state": self.record.version}
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
            require_schema(self.folder.description(), self.output)
            _require_same(self.folder.description(), wanted, self.output)
        else:
            self._start(journal, wanted)
        self.naming = Naming(self.folder.description().get("key"))
        self.record = StreamIndex(journal)
        self.table = (
            PredictionTable(self.output / TABLE, self.opened.classes) if self.opened.task == "classification" else None
        )
        if self.table is not None:
            self.table.rewrite(line.entry for line in journal)
        with on_disk(self.folder.anchor):
            write_anchor(self.folder.anchor, journal.head)
        self.folder.load(self.record.version, self.record.sha256, self.adapter)

    def _start(self, journal: Journal, description: Fields) -> None:
        _require_room(self.output)
        key = {"key": secrets.token_hex(16)} if self.settings.anonymize else {}
        self.folder.describe({**description, **key})
        with on_disk(self.folder.anchor):
            write_anchor(self.folder.anchor, journal.head)
        first = {"state": 0, "state_sha256": self.folder.save(0, self.adapter)}
        journal.append([{"event": "start", **description, **first}])

    def _description(self) -> Fields:
        """What a resumed stream must share with its beginning."""
        chosen = {
            "schema": SCHEMA,
            "dltta": __version__,
            "network": self.opened.fingerprint,
            "task": self.opened.task,
            "classes": self.opened.classes,
            "window": None if self.opened.window is None else asdict(self.opened.window),
            "deployment": self.settings.deployment,
            "anonymize": self.settings.anonymize,
            "recipe": self.recipe.as_json(),
        }
        plain: Fields = json.loads(json.dumps(chosen))
        return plain


def _resolved(opened: OpenedModel, settings: StreamSettings) -> Recipe:
    """The recipe with a value for everything, as this model runs it."""
    recipe = paper(Method.SOURCE) if settings.deployment == Deployment.FROZEN else settings.recipe
    if recipe.batch_size is None and settings.recipe.batch_size is not None:
        recipe = replace(recipe, batch_size=settings.recipe.batch_size)
    resolved = recipe.resolved(opened.task, calibrated=opened.calibration is not None)
    if opened.task == "segmentation" and resolved.batch_size != 1:
        raise SettingError(
            f"a batch of {resolved.batch_size} images cannot be; segmentations are adapted to one by one"
        )
    return resolved


def _line(case: Waiting, predicted: Prediction) -> Fields:
    """How a prediction came about."""
    step, decision = predicted.step, predicted.decision
    line: Fields = {
        "case": case.name,
        "input": case.loaded.digest,
        "loss": step.loss,
        "discrepancy": step.discrepancy,
        "rate": step.rate,
        "decision": None if decision is None else decision.outcome,
        "reason": None if decision is None else decision.reason,
        "detail": None if decision is None else decision.detail,
    }
    return line if predicted.change is None else {**line, "change": predicted.change}


def _named(files: Sequence[Path]) -> Fields:
    """What the log says of an prediction's files."""
    entry: Fields = {}
    for (key, checksum), file in zip(FILES, files, strict=False):
        entry |= {key: file.name, checksum: _sha256(file)}
    return entry


def _ending(of: str, case: Incoming) -> str:
    """The ending of an prediction like another one: that of this case's file where both are of one format."""
    own = ending(case.files[0])
    return own if own is not None and of in ENDINGS and ENDINGS[own] == ENDINGS[of] else of


def _look(case: Incoming) -> list[tuple[int, int]]:
    """What changes while a file is being written."""
    try:
        return [(status.st_size, status.st_mtime_ns) for status in (file.stat() for file in case.files)]
    except OSError:  # gone: reading it will say so
        return []


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _disk(error: DataError) -> bool:
    """Whether the disk is to blame for an prediction that cannot be written, and not the case and its long name."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno != errno.ENAMETOOLONG


def _require_room(output: Path) -> None:
    """A new stream must not write over what somebody else has put there."""
    foreign = (*ENDINGS, *dicom.ENDINGS, ".npz")
    there = [path.name for path in output.iterdir() if path.name.lower().endswith(foreign) or path.name == TABLE]
    if there:
        raise SettingError(f"{output} holds {min(there)}, which is not ours; choose an empty folder")


def require_schema(description: Mapping[str, Any], output: Path) -> None:
    """A stream of an older release is refused, not guessed at."""
    if description.get("schema") != SCHEMA:
        found = description.get("schema", 1)
        raise StateError(f"{output} has a log of schema {found}, this version writes {SCHEMA}; begin a new stream")


def _require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], output: Path) -> None:
    for key, value in wanted.items():
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            _require_same(found[key], value, output)
        elif key != "dltta" and found.get(key) != value:
            begun, now = ("another network", "this one") if key == "network" else (f"{key} {found.get(key)}", value)
            raise StateError(
                f"{output} was begun with {begun}, not {now}; resume with the same, or choose another folder"
            )
