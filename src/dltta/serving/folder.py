"""The main job: a model, images that arrive one by one, a prediction for each, and a record that survives a crash.

A case meets three rooms, each once: it is read (`reading.py`, in a thread that reads ahead), predicted
(`predictor.py`), and kept: its files (`written.py`), then the state, the log and the table (`record.py`), in a thread
that waits for the disk while the network works on the next batch.

A case is done once its line is in the log. Whatever a crash leaves without a line is done again from the same state,
and comes out the same. A case that fails leaves no trace in the state: before the next one the latest version is
loaded again.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from dltta.config import make_adapter
from dltta.core.adapter import Adapter
from dltta.core.ensemble import Ensemble
from dltta.data.inbox import Incoming
from dltta.data.prefetch import prefetch
from dltta.errors import DataError, DlttaError, InputError, NonFiniteError, SettingError
from dltta.files import sync_folder
from dltta.fitting import Fitting, default_limit
from dltta.methods import Method
from dltta.models.io.opened import OpenedModel, Window
from dltta.predictor import Loaded, PartTick, Prediction, Predictor, members
from dltta.recipes import NO_RATE, RECOMMENDED, Recipe, paper
from dltta.serving.journal import Fields, on_disk
from dltta.serving.reading import Known, Reader, Unusable
from dltta.serving.record import SCHEMA, STATE, Record, require_own_place
from dltta.serving.settings import Deployment, OnError, StreamSettings
from dltta.serving.signing import Signer
from dltta.serving.state import Packed, StateFolder
from dltta.serving.summary import Summary
from dltta.serving.written import PredictionWriter, anonymity
from dltta.version import __version__

UNREHEARSED = (
    "the model was not rehearsed with: an entropy-weighted mixture of source, blended and batch statistics predicts "
    "(as InTEnt does), and no quality can be expected of it; run `dltta calibrate`"
)
CaseError: TypeAlias = DataError | InputError | NonFiniteError  # what is wrong with one case and not with the others
Tick = Callable[[Mapping[str, Any]], None]  # called with the line of every case that is done


@dataclass(frozen=True)
class Waiting:
    """A case of the batch that is being put together."""

    case: Incoming
    name: str
    loaded: Loaded


class Stream:
    """One stream in one output folder. `with Stream(…) as stream: stream.run(cases)`."""

    def __init__(
        self,
        opened: OpenedModel,
        output: Path,
        settings: StreamSettings | None = None,
        *,
        resume: bool = False,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.opened, self.output, self.settings = opened, output.resolve(), settings or StreamSettings()
        recipe = _resolved(opened, self.settings)
        self.adapter = make_adapter(opened, recipe)
        # what really runs, and what the log records: only the adapter knows whether a class of one's own has a loss
        self.recipe = recipe if self.adapter.steps else replace(recipe, rate=NO_RATE)
        self.batch_size = self.recipe.batch_size or 1
        self.folder = StateFolder(output / STATE)
        self.limit = self._max_memory(resume=resume)
        self.fitting = self._fitting(recipe)
        self.predictor = self._predictor(self.settings.deployment)
        self._signer = None if self.settings.sign is None else Signer.from_file(self.settings.sign, output)
        self._resume, self._may_write = resume, may_write
        self._ahead = False  # whether the adapter may have seen more than its latest version on disk
        self._keeping: Future[None] | None = None  # the batch that is on its way to the disk
        self._underway: frozenset[str] = frozenset()  # names and digests of its cases
        self._part: PartTick = lambda done, total: None  # told of the parts of the current case
        self._open = ExitStack()

    def __enter__(self) -> "Stream":
        if not self.folder.described():
            require_own_place(self.output)
        with on_disk(self.output):
            self.output.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(self.folder.locked())
            self.record = Record(
                self.output,
                self.folder,
                self._description(),
                self.adapter,
                self._signer,
                resume=self._resume,
                may_write=self._may_write,
            )
            self.naming, self.index = self.record.naming, self.record.index
            self._read = Reader(self.opened, self.output, self.index, self.fitting)
            self._writer = PredictionWriter(
                self.opened, self.output, self.naming, self.settings.save_probabilities, self.settings.uids
            )
            if self.index.deployment is not None:
                self.predictor = self._predictor(self.index.deployment)
            self._disk = stack.enter_context(ThreadPoolExecutor(1, "disk"))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def run(
        self,
        cases: Iterable[Incoming],
        tick: Tick = lambda line: None,
        part: PartTick = lambda done, total: None,
    ) -> Summary:
        """Predict every case that has no prediction yet, in order; `part` hears of slices and windows within a case."""
        waiting = cases if isinstance(cases, Sequence) else ()
        self._summary, self._tick, self._part = Summary(notices=self.notices(waiting)), tick, part
        self._retry = getattr(cases, "retry", lambda case: None)  # a watch looks again at what was skipped
        self._batch: list[Waiting] = []
        self._copies: list[tuple[Incoming, str]] = []  # cases with the content of one in the batch
        try:
            with closing(prefetch(cases, self._read, ahead=self.batch_size)) as arriving:
                for case, found in arriving:
                    self._take(case, found)
                self._finish_batch()
            self._settle()
        finally:
            if self._keeping is not None:
                wait([self._keeping])
        self._summary.head, self._summary.waiting_for = self.index.journal.last, self._waiting_for()
        self._summary.conclude(self.index.decisions, self.index.reasons, self.index.reviews)
        return self._summary

    def deploy(self, deployment: Deployment, note: Mapping[str, Any] | None = None) -> None:
        """From now on the adapted model predicts (live), or the source model while it adapts (shadow); logged.

        `note` is what its line says besides.
        """
        if Deployment.FROZEN in (deployment, self.settings.deployment):
            raise SettingError("a stream is frozen from its beginning or never; switch between live and shadow")
        self._settle()
        self.record.append_event({"event": "mode", "deployment": str(deployment), **(note or {})})
        self.predictor = self._predictor(deployment)

    def _predictor(self, deployment: str) -> Predictor:
        source = make_adapter(self.opened, paper(Method.SOURCE)) if deployment == Deployment.SHADOW else None
        return Predictor(self.opened, self.adapter, source, self.fitting, self._part_done)

    def answer(self, case: Incoming, tick: Tick = lambda line: None) -> Fields:
        """Predict one case now; its line of the log, on the disk, also if it was predicted before.

        Raises what is wrong with the case, and then nothing was written or learned.
        """
        self._summary, self._tick = Summary(), tick
        self._batch, self._copies = [], []
        found = self._read(case)
        if isinstance(found, Unusable):
            raise found.error
        self._take(case, found)
        self._finish_batch()
        self._settle()
        return self.index.line(self.naming.name(case, found.digest))

    def notices(self, cases: Sequence[Incoming] = ()) -> list[str]:
        """What a user must know before the first image, one sentence each; `cases` are those that wait."""
        notices = []
        if self.recipe.method == RECOMMENDED:
            notices += [] if self.opened.rehearsal is not None else [UNREHEARSED]
        elif self.recipe.calibration_matters and self.opened.calibration is None:
            notices.append(
                "no calibration: the model does not know what source images look like, so images far out of "
                "distribution are not recognized; train it with `dltta train`"
            )
        if (said := getattr(getattr(self.adapter, "objective", None), "notice", None)) is not None:
            notices.append(said)
        if self.settings.anonymize:
            notices.append(anonymity(self.settings.uids, cases))
        return notices

    def _waiting_for(self) -> int | None:
        """How many pairs the memory of a dynamic rate still waits for; None if it is ready or nothing is in it."""
        memory = members(self.adapter)[0].memory
        if self.recipe.method == RECOMMENDED or not memory:
            return None
        return max(0, memory.needed - len(memory)) or None

    def _max_memory(self, *, resume: bool) -> int:
        """As it was said, or as the stream was begun: the limit decides about windows, and so about predictions."""
        if self.settings.max_memory is not None:
            return self.settings.max_memory
        begun = self.folder.description() if resume and self.folder.described() else {}
        recorded = begun.get("max_memory")
        if isinstance(recorded, int):
            return recorded
        return default_limit(next(self.opened.model.parameters()).device)

    def _fitting(self, recipe: Recipe) -> Fitting | None:
        """None for a model that brings windows of its own, such as nnU-Net's, which are what it was planned for."""
        if isinstance(self.adapter, Ensemble) or not isinstance(self.opened.window, Window | None):
            return None
        return Fitting(self.opened, lambda: single_adapter(self.opened, recipe), self.limit)

    def _part_done(self, done: int, total: int) -> None:
        self._part(done, total)

    # what was read

    def _take(self, case: Incoming, found: Loaded | Known | Unusable | DlttaError) -> None:
        """Deal with a case at once, or let it wait for its batch."""
        if not isinstance(found, Loaded) or self._underway & {found.digest, self.naming.name(case, found.digest)}:
            self._settle()
        if isinstance(found, DlttaError):
            self._fail(case, None, found)
        elif isinstance(found, Unusable):
            self._fail(case, found.digest, found.error)
        elif (known := self.index.digest(self.naming.name(case, found.digest))) is not None:
            self._meet_again(case, found.digest, known)
        elif self.index.holds(found.digest):
            self._repeat(case, found.digest)
        elif any(waiting.loaded.digest == found.digest for waiting in self._batch):
            self._copies.append((case, found.digest))
        elif isinstance(found, Loaded):
            self._wait(Waiting(case, self.naming.name(case, found.digest), found))
        else:
            self._fail(case, found.digest, DataError("has the content of a case that could not be used"))

    def _wait(self, case: Waiting) -> None:
        """For its batch, which is images of one shape."""
        if self._batch and self._batch[0].loaded.shape != case.loaded.shape:
            self._finish_batch()
        self._batch.append(case)
        if len(self._batch) == self.batch_size:
            self._finish_batch()

    def _finish_batch(self) -> None:
        batch, copies = self._batch, self._copies
        self._batch, self._copies = [], []
        if batch:
            self._predict(batch)
        for case, found in copies:
            self._take(case, Known(found))

    def _meet_again(self, case: Incoming, found: str, known: str) -> None:
        """A case whose name has a prediction already."""
        self._settle()
        if found != known:
            error = DataError("was predicted before with other content; give the new image another name")
            self._fail(case, found, error)
        else:
            self._summary.already_predicted += 1
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
        """Adapt to a batch and predict it, all or nothing, while the disk may still work on the batch before."""
        self._catch_up()
        self._ahead = True
        started = time.perf_counter()
        names, loaded = [case.name for case in batch], [case.loaded for case in batch]
        if self.opened.task == "classification":
            predictions = self.predictor.classify(names, loaded)
        else:
            predictions = [self.predictor.segment(names[0], loaded[0])]
        self._settle()
        self._keep(batch, predictions, started)
        self._ahead = False

    def _catch_up(self) -> None:
        """Bring the adapter to where the log ends."""
        if self._ahead:
            self._settle()
            self.record.restore_adapter()
            self._ahead = False

    # what is kept

    def _keep(self, batch: Sequence[Waiting], predictions: Sequence[Prediction], started: float) -> None:
        """Write the predictions, and begin to bring state, log and table to the disk."""
        self.record.require_folder()
        done = list(zip(batch, predictions, strict=True))
        files = [self._writer.write(waiting.case, waiting.loaded, prediction) for waiting, prediction in done]
        packed = self.folder.pack(self.index.version + 1, self.adapter)
        same = {"state": packed.number, "state_sha256": packed.sha256}
        same["seconds"] = round((time.perf_counter() - started) / len(batch), 4)
        lines = [{**_line(*each), **written, **same} for each, written in zip(done, files, strict=True)]
        self._underway = frozenset(text for case in batch for text in (case.name, case.loaded.digest))
        self._keeping = self._disk.submit(self._put, packed, lines)

    def _put(self, packed: Packed, lines: Sequence[Mapping[str, Any]]) -> None:
        """Onto the disk, in an order in which a power cut does no harm: predictions, state, log, table."""
        if self.opened.task == "segmentation":
            with on_disk(self.output):
                sync_folder(self.output)
        self.record.put(packed, lines)
        self._summary.predicted += len(lines)
        self._summary.windowed += sum("windows" in line for line in lines)
        for line in lines:
            self._tick(line)

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

    def _repeat(self, case: Incoming, found: str) -> None:
        """The same content under another name: the same prediction, and nothing is learned from it twice."""
        self._settle()
        first = self.index.first(found)
        try:
            files = self._writer.copy(case, found, first)
        except DataError as error:
            self._fail(case, found, error)
            return
        name = self.naming.name(case, found)
        line = {"case": name, "input": found, "repeats": first["case"], **files, "state": self.index.version}
        line |= case.note
        self.record.append([line])
        self._summary.repeated += 1
        self._tick(line)

    def _fail(self, case: Incoming, found: str | None, error: DlttaError) -> None:
        """Stop with the case's name, or write the failure into the log and go on."""
        if not isinstance(error, CaseError):
            raise error
        name = self.naming.name(case, found)
        sentence = self.naming.sentence(error, case, name)
        if self.settings.on_error == OnError.STOP:
            raise type(error)(sentence) from error
        self._settle()
        self._summary.failed.append(sentence)
        line: Fields = {"case": name, "input": found, "error": type(error).__name__}
        line |= {"detail": self.naming.reason(error, case, name), "state": self.index.version}
        self.record.fail(line)
        self._retry(case)
        self._tick(line)

    def _description(self) -> Fields:
        """What a resumed stream must share with its beginning."""
        chosen = {
            "schema": SCHEMA,
            "dltta": __version__,
            "network": self.opened.fingerprint,
            "task": self.opened.task,
            "classes": self.opened.classes,
            "calibrated": self.opened.calibration is not None,
            "rehearsed": self.opened.rehearsal is not None,
            "max_memory": self.limit,
            "window": None if self.opened.window is None else asdict(self.opened.window),
            "deployment": self.settings.deployment,
            "anonymize": self.settings.anonymize,
            "uids": self.settings.uids,
            "signed": self.settings.sign is not None,
            "recipe": self.recipe.as_json(),
        }
        plain: Fields = json.loads(json.dumps(chosen))
        return plain


def single_adapter(opened: OpenedModel, recipe: Recipe) -> Adapter:
    """Raises where several networks predict together."""
    adapter = make_adapter(opened, recipe)
    if isinstance(adapter, Ensemble):
        raise SettingError("several networks predict together; there is no single one")
    return adapter


def _resolved(opened: OpenedModel, settings: StreamSettings) -> Recipe:
    """The recipe with a value for everything, as this model runs it."""
    recipe = settings.recipe
    if settings.deployment == Deployment.FROZEN:
        recipe = replace(paper(Method.SOURCE), batch_size=settings.recipe.batch_size)
    resolved = recipe.resolved(opened.task, calibrated=opened.calibration is not None)
    if opened.task == "segmentation" and resolved.batch_size != 1:
        raise SettingError(f"segmentations are adapted to one by one, got a batch size of {resolved.batch_size}; use 1")
    return resolved


def _line(waiting: Waiting, prediction: Prediction) -> Fields:
    """What the log says of how a prediction came about."""
    step, decision = prediction.step, prediction.decision
    line: Fields = {
        "case": waiting.name,
        "input": waiting.loaded.digest,
        "loss": step.loss,
        "discrepancy": step.discrepancy,
        "rate": step.rate,
        "decision": None if decision is None else decision.outcome,
        "reason": None if decision is None else decision.reason,
        "detail": None if decision is None else decision.detail,
    }
    line |= waiting.case.note
    if decision is not None and decision.candidate is not None:
        line["candidate"] = decision.candidate
    if decision is not None and (expected := decision.expected) is not None:
        line |= {"quality": expected.score, "quality_low": expected.low, "quality_high": expected.high}
        line["review"] = expected.review
    if decision is not None and decision.ood_score is not None and math.isfinite(decision.ood_score):
        line["ood_score"] = decision.ood_score
    if prediction.window is not None:  # the whole did not fit into memory
        line["windows"] = prediction.window.patch
    return line if prediction.change is None else {**line, "change": prediction.change}
