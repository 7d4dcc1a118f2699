"""The main job: a network, images that arrive one by one, an answer for each, and a record that survives anything.

OUT/
  NAME.png …          the answers, in the images' format and geometry
  predictions.csv     classification instead: case, answer, probability of each class
  stream.jsonl        one line per case, hash-chained (`journal.py`)
  state/              what was learned, version by version (`state.py`)
For each batch in this order: answers, state, log. The log's line makes it so; whatever a crash leaves without one is
done again from the same state, and comes out the same.
"""

import csv
import hashlib
import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dltta.adapter import Adapter, Step
from dltta.config import AdaptationSettings, make_adapter
from dltta.data.answers import write_answer, write_probabilities
from dltta.data.images import Geometry, Image
from dltta.data.incoming import Incoming, digest, read_incoming
from dltta.data.prefetch import prefetch
from dltta.data.slices import from_slices, slice_axis
from dltta.errors import DataError, DlttaError, InputError, NonFiniteError, SettingError, StateError
from dltta.files import write_atomically
from dltta.journal import Journal
from dltta.models.opened import OpenedModel, Prepared
from dltta.objectives import Source
from dltta.predictions import probabilities
from dltta.state import StateFolder
from dltta.version import __version__
from dltta.windows import SlidingWindows, joined

POOL = 8  # positions per axis of the memory's keys where images differ in size
StreamMode = Literal["continual", "image-specific", "shadow", "frozen"]
OnError = Literal["stop", "skip"]


@dataclass(frozen=True)
class StreamSettings:
    """How a stream is adapted and answered.

    `shadow` adapts and answers with the network as it was trained, recording how the two differ; `frozen` does not
    adapt at all. `anonymize` puts the image's hash in the place of its name, in the log and in the answers' file names.
    """

    method: str = "tent"
    rate: str = "relative"
    mode: StreamMode = "continual"
    adaptation: AdaptationSettings = field(default_factory=AdaptationSettings)
    on_error: OnError = "stop"
    save_probabilities: bool = False
    anonymize: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("mode", self.mode, ("continual", "image-specific", "shadow", "frozen")),
            ("on-error", self.on_error, ("stop", "skip")),
        ):
            if value not in known:
                raise SettingError(f"{name} must be one of {', '.join(known)}, got {value!r}")

    def deciding(self) -> dict[str, Any]:
        """What a resumed stream must share with its beginning."""
        chosen = {key: value for key, value in asdict(self).items() if key not in ("on_error", "save_probabilities")}
        plain: dict[str, Any] = json.loads(json.dumps(chosen))
        return plain


@dataclass(frozen=True)
class Loaded:
    """A case that was read in advance: its hash and its image, ready for the network."""

    digest: str
    geometry: Geometry
    parts: tuple[Prepared, ...]  # one, or one per slice
    axis: int | None  # across which it was sliced


@dataclass(frozen=True)
class Answered:
    """What the network said about one case, on the grid of its file, and how that came about."""

    probabilities: Tensor  # (classes, *spatial) or (classes,)
    step: Step
    changed: float | None = None  # shadow: share of positions that the adapted network answers otherwise


@dataclass
class Summary:
    """What a run did."""

    answered: int = 0
    repeated: int = 0  # the same content under another name: answered, not learned from again
    before: int = 0  # answered by an earlier run
    failed: list[str] = field(default_factory=list)  # one sentence each


Tick = Callable[[Mapping[str, Any]], None]  # the line of a case that is done


class Stream:
    """One stream in one output folder. `with Stream(…) as stream: stream.run(cases)`."""

    def __init__(self, opened: OpenedModel, output: Path, settings: StreamSettings, *, resume: bool = False) -> None:
        self.opened, self.output, self.settings = opened, output, settings
        self.batch_size = settings.adaptation.for_task(opened.task).batch_size or 1
        if opened.task == "segmentation" and self.batch_size > 1:
            raise SettingError("segmentations are adapted image by image; leave the batch size at 1")
        self.adapter = self._make_adapter()
        self.trained = Adapter(opened.model, Source()) if settings.mode == "shadow" else None
        self.folder = StateFolder(output / "state")
        self._resume = resume
        self._version = 0

    def __enter__(self) -> "Stream":
        try:
            self.output.mkdir(parents=True, exist_ok=True)
            self._lock = self.folder.locked()
            self._lock.__enter__()
        except OSError as error:
            raise StateError(f"{self.output}: cannot be written ({error.strerror or error})") from error
        try:
            self._open()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(None, None, None)

    def run(self, cases: Iterable[Incoming], tick: Tick = lambda line: None) -> Summary:
        """Answer every case that has no answer yet, in order."""
        summary = Summary()
        for batch in _batches(self._new(cases, summary, tick), self.batch_size):
            try:
                self._answer(batch, summary, tick)
            except (InputError, NonFiniteError, DataError) as error:
                for case, loaded in batch:
                    self._fail(case, loaded, error, summary, tick)
        return summary

    # before the network

    def _new(self, cases: Iterable[Incoming], summary: Summary, tick: Tick) -> Iterator[tuple[Incoming, Loaded]]:
        """Cases to be answered, read one ahead; done, repeated and broken ones are dealt with here."""
        for case, loaded in prefetch(cases, self._load):
            if isinstance(loaded, DlttaError):
                self._fail(case, None, loaded, summary, tick)
                continue
            if self._done.get(self._name(case, loaded)) == loaded.digest:
                summary.before += 1
            elif self._name(case, loaded) in self._done:
                error = DataError("was answered before with other content; give the new image another name")
                self._fail(case, loaded, error, summary, tick)
            elif loaded.digest in self._contents:
                self._repeat(case, loaded, summary, tick)
            else:
                yield case, loaded

    def _load(self, case: Incoming) -> Loaded:
        image = read_incoming(case)
        found = digest(case)
        dims, spatial = self.opened.spatial_dims, image.array.ndim - 1
        if dims == 2 and spatial == 3 and self.opened.task == "segmentation":
            axis = slice_axis(image.geometry)
            return Loaded(found, image.geometry, tuple(map(self.opened.prepare, _slices(image, axis))), axis)
        return Loaded(found, image.geometry, (self.opened.prepare(image),), None)

    def _name(self, case: Incoming, loaded: Loaded | None) -> str:
        if not self.settings.anonymize:
            return case.name
        return loaded.digest[:16] if loaded is not None else hashlib.sha256(case.name.encode()).hexdigest()[:16]

    # the network

    def _answer(self, batch: list[tuple[Incoming, Loaded]], summary: Summary, tick: Tick) -> None:
        started = time.perf_counter()
        names = [self._name(case, loaded) for case, loaded in batch]
        if len(set(names)) < len(names):  # the same content twice in one batch
            raise DataError(f"{names[0]}: the same image twice in a batch; remove one")
        if self.opened.task == "classification":
            answers = self._classify(names, [loaded for _, loaded in batch])
        else:
            answers = [self._segment(names[0], batch[0][1])]
        version = self._version + 1
        lines = []
        for (case, loaded), name, answered in zip(batch, names, answers, strict=True):
            file = self._write(case, name, loaded, answered)
            lines.append(self._line(name, loaded, answered, file, version))
        self.folder.save(version, self.adapter, self.journal.head)
        seconds = (time.perf_counter() - started) / len(batch)
        self._commit([{**line, "seconds": round(seconds, 4), "of": len(batch)} for line in lines])
        self._version = version
        summary.answered += len(batch)
        for line in lines:
            tick(line)

    def _segment(self, name: str, loaded: Loaded) -> Answered:
        answered = [self._step(part, name) for part in loaded.parts]
        if loaded.axis is None:
            return answered[0]
        volume = from_slices(torch.stack([part.probabilities for part in answered]), loaded.axis)
        changed = [part.changed for part in answered if part.changed is not None]
        return Answered(
            volume, joined([part.step for part in answered]), sum(changed) / len(changed) if changed else None
        )

    def _step(self, part: Prepared, name: str) -> Answered:
        x = part.image[None]
        step = self._through(self.adapter, x).step(x, case=name)
        given = probabilities(step.logits)[0].cpu()
        changed = None
        if self.trained is not None:
            adapted = given.argmax(0)
            given = probabilities(self._through(self.trained, x).step(x, case=name).logits)[0].cpu()
            changed = (given.argmax(0) != adapted).float().mean().item()
        return Answered(part.restore(given), step, changed)

    def _through(self, adapter: Adapter, x: Tensor) -> Adapter | SlidingWindows:
        """Whole, or window by window where the network has a window and the image is larger."""
        window = self.opened.window
        if window is None or tuple(x.shape[2:]) == window.size(tuple(x.shape[2:])):
            return adapter
        return SlidingWindows(
            adapter,
            window.size(tuple(x.shape[2:])),
            window.overlap,
            window.mode,
            sigma_scale=window.sigma_scale,
            padding_mode=window.padding_mode,
            cval=window.cval,
            whole=True,
        )

    def _classify(self, names: list[str], loaded: list[Loaded]) -> list[Answered]:
        shapes = {tuple(item.parts[0].image.shape) for item in loaded}
        if len(shapes) > 1:
            raise InputError(f"images of one batch differ in shape: {sorted(shapes)}; train with one --size")
        x = torch.stack([item.parts[0].image for item in loaded])
        step = self.adapter.step(x, case=names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more")
        rows = probabilities(step.logits).cpu()
        changed: list[float | None] = [None] * len(rows)
        if self.trained is not None:
            given = probabilities(self.trained.step(x).logits).cpu()
            changed = [float(a.argmax() != b.argmax()) for a, b in zip(rows, given, strict=True)]
            rows = given
        return [Answered(row, step, moved) for row, moved in zip(rows, changed, strict=True)]

    # after the network

    def _write(self, case: Incoming, name: str, loaded: Loaded, answered: Answered) -> Path | None:
        """The answer's file; a classification is a row of the table, made from the log."""
        if self.opened.task == "classification":
            return None
        named = Incoming(name, case.files, case.kind, case.modified)
        labels = self.opened.labels(answered.probabilities)
        path = write_answer(self.output, named, labels.numpy(), loaded.geometry, self.opened.classes)
        if self.settings.save_probabilities:
            write_probabilities(self.output, named, answered.probabilities.numpy(), loaded.geometry)
        return path

    def _line(self, name: str, loaded: Loaded, answered: Answered, file: Path | None, version: int) -> dict[str, Any]:
        step, ruling = answered.step, answered.step.ruling
        line: dict[str, Any] = {
            "case": name,
            "input": loaded.digest,
            "loss": step.loss,
            "discrepancy": step.discrepancy,
            "rate": step.rate,
            "guard": ruling.verdict if ruling is not None else None,
            "reason": ruling.reason if ruling is not None else None,
            "state": version,
        }
        if file is not None:
            line |= {"answer": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        else:
            row = answered.probabilities
            line |= {"answer": self.opened.classes[int(row.argmax())], "probabilities": [float(p) for p in row]}
        if answered.changed is not None:
            line["changed"] = answered.changed
        return line

    def _repeat(self, case: Incoming, loaded: Loaded, summary: Summary, tick: Tick) -> None:
        """The same content under another name: the same answer, and nothing is learned from it twice."""
        first = self._contents[loaded.digest]
        name = self._name(case, loaded)
        line: dict[str, Any] = {"case": name, "input": loaded.digest, "repeats": first["case"], "state": self._version}
        if self.opened.task == "classification":
            line |= {"answer": first["answer"], "probabilities": first["probabilities"]}
        else:
            before = self.output / first["answer"]
            if not before.is_file():
                error = DataError(f"repeats {first['case']}, whose answer {before.name} is gone; put it back")
                self._fail(case, loaded, error, summary, tick)
                return
            path = self.output / f"{name}{before.name.removeprefix(first['case'])}"
            write_atomically(path, before.read_bytes())
            line |= {"answer": path.name, "sha256": first["sha256"]}
        self._commit([{**line, "of": 1}])
        summary.repeated += 1
        tick(line)

    def _fail(self, case: Incoming, loaded: Loaded | None, error: DlttaError, summary: Summary, tick: Tick) -> None:
        """Stop with the case's name, or write the failure down and go on."""
        name = self._name(case, loaded)
        sentence = " ".join(str(error).split())
        text = sentence if name in sentence or self.settings.anonymize else f"{name}: {sentence}"
        if self.settings.on_error == "stop":
            raise type(error)(text) from error
        summary.failed.append(text)
        line = {"case": name, "error": type(error).__name__, "state": self._version}
        self.journal.append([{**line, "of": 1}])
        tick(line)

    # the record

    def _open(self) -> None:
        path = self.output / "stream.jsonl"
        if path.exists() and not self._resume:
            raise SettingError(f"{self.output} already holds a stream; add --resume to continue it, or choose another")
        self.journal = Journal(path)
        self.journal.drop(_unfinished(self.journal.entries))
        description = {"dltta": __version__, "network": self.opened.fingerprint, **self.settings.deciding()}
        if not self.journal.entries:
            self.folder.describe(description)
            self.folder.save(0, self.adapter, self.journal.head)
            self.journal.append([{"event": "start", "state": 0, "of": 1, **_plain(description)}])
        else:
            _require_same(self.folder.description(), description, self.output)
        self._version = int(self.journal.entries[-1]["state"])
        self.folder.load(self._version, self.adapter)
        answered = [line for line in self.journal.entries if "answer" in line]
        self._done = {line["case"]: line["input"] for line in answered}
        self._contents = {line["input"]: line for line in reversed(answered)}
        self._table()

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        self.journal.append(lines)
        for line in lines:
            self._done[line["case"]] = line["input"]
            self._contents.setdefault(line["input"], line)
        if self.opened.task == "classification":
            with (self.output / "predictions.csv").open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(map(_row, lines))

    def _table(self) -> None:
        """The table of a classification, made anew from the log: it has the rows that the log has."""
        if self.opened.task != "classification":
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["case", "prediction", *self.opened.classes])
        writer.writerows(_row(line) for line in self.journal.entries if "answer" in line)
        write_atomically(self.output / "predictions.csv", text.getvalue())

    def _one_size(self) -> bool:
        """Whether every image reaches the network in the same size."""
        if self.opened.window is not None and 0 not in self.opened.window.patch:
            return True
        checkpoint = self.opened.checkpoint
        return checkpoint is not None and checkpoint.preprocessing.size is not None

    def _make_adapter(self) -> Adapter:
        if self.settings.mode == "frozen":
            return Adapter(self.opened.model, Source())
        chosen = self.settings.adaptation.for_task(self.opened.task)
        if chosen.pool is None and not self._one_size():
            chosen = replace(chosen, pool=POOL)
        mode: Literal["continual", "image-specific"] = (
            "image-specific" if self.settings.mode == "image-specific" else "continual"
        )
        rate = "none" if self.settings.method in ("source", "ptbn") else self.settings.rate
        return make_adapter(self.opened, self.settings.method, rate, replace(chosen, mode=mode))


def _slices(image: Image, axis: int) -> list[Image]:
    """The pictures of a volume (C, *spatial), cut across a spatial axis."""
    geometry = image.geometry
    shape = tuple(n for i, n in enumerate(geometry.shape) if i != axis)
    spacing = None if geometry.spacing is None else tuple(s for i, s in enumerate(geometry.spacing) if i != axis)
    flat = Geometry(geometry.kind, shape, geometry.channels, geometry.limit, spacing)
    pictures = np.moveaxis(image.array, 1 + axis, 0)  # (slices, C, *plane)
    return [Image(np.ascontiguousarray(picture), flat) for picture in pictures]


def _batches(items: Iterator[tuple[Incoming, Loaded]], size: int) -> Iterator[list[tuple[Incoming, Loaded]]]:
    while batch := list(islice(items, size)):
        yield batch


def _unfinished(entries: list[dict[str, Any]]) -> int:
    """How many lines at the end belong to a batch that a crash cut off."""
    if not entries:
        return 0
    last = entries[-1]
    same = 0
    for line in reversed(entries):
        if line["of"] == last["of"] > 1 and line["state"] == last["state"]:
            same += 1
        else:
            break
    return same % int(last["of"])


def _require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], output: Path) -> None:
    for key in wanted:
        if key != "dltta" and found.get(key) != wanted[key]:
            what = "the network" if key == "network" else f"{key} {found.get(key)}"
            now = "another one" if key == "network" else str(wanted[key])
            raise StateError(
                f"{output} was begun with {what}, not {now}; resume with the same, or choose another folder"
            )


def _plain(description: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in description.items() if key != "adaptation"}


def _row(line: Mapping[str, Any]) -> list[Any]:
    return [line["case"], line["answer"], *(f"{p:.6f}" for p in line["probabilities"])]
