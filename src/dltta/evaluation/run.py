"""8 run over a stream. What did an adapter predict, case by case, and how good was it?

The only place where labels meet predictions: the adapter is handed images and names, nothing else.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from dltta.core.step import Step
from dltta.data.case import Case, Dataset, Task
from dltta.errors import DataError, SettingError
from dltta.evaluation.stacks import Stacks, Volume
from dltta.metrics import SegmentationScores, Unit, mean_defined, score_classification, score_segmentation
from dltta.models.predictions import most_likely, probabilities
from dltta.quality.decision import Decision
from dltta.quality.guarded import decision_of


class Steps(Protocol):
    """Anything that predicts a stream batch by batch, such as `Predictor`."""

    def step(self, x: Tensor, *, case: str) -> Step: ...


@dataclass(frozen=True)
class CaseRecord:
    """One row of a stream: what happened to one image. None where there was nothing to record."""

    case: str
    site: str
    metrics: Mapping[str, float]  # empty without a label; classification: accuracy, 1 for right and 0 for wrong
    seconds: float | None  # of adaptation and prediction; a batch's time shared equally
    loss: float | None = None  # these three belong to the batch of the case
    discrepancy: float | None = None
    rate: float | None = None
    unit: Unit | None = None  # of hd95 and asd
    missed: int | None = None  # classes in the label only
    label: int | None = None  # these three in classification only
    prediction: int | None = None
    probabilities: tuple[float, ...] | None = None
    decision: str | None = None  # of the guard, an `Outcome`
    reason: str | None = None  # for the decision, a `Reason`
    candidate: str | None = None  # which of several predictions was given
    quality: float | None = None  # expected, from 0 to 1, and its 90 % interval
    quality_low: float | None = None
    quality_high: float | None = None
    review: bool | None = None  # whether somebody should look at it
    invented: int | None = None  # classes in the prediction only
    group: str | None = None  # patient or volume: the unit of tests and intervals
    volume: str | None = None  # of a slice: what is scored instead of it

    @property
    def key(self) -> tuple[str, str]:
        """Site and name: unique in a stream, whatever sites it mixes."""
        return self.site, self.case

    @property
    def patient(self) -> tuple[str, str]:
        """Site and patient; where nobody knows the patient, the case."""
        return self.site, self.group or self.case


@dataclass(frozen=True)
class StreamRecord:
    """One stream from its first case to its last."""

    target: str
    task: Task
    metrics: Mapping[str, float]  # segmentation: means over the cases that define them; classification: of the stream
    cases: tuple[CaseRecord, ...]  # in the order in which they came
    volumes: tuple[CaseRecord, ...] = field(default=(), kw_only=True)  # scores of what came slice by slice

    @property
    def scored(self) -> tuple[CaseRecord, ...]:
        """The rows that have scores: cases, and volumes instead of their slices."""
        return (*(case for case in self.cases if case.volume is None), *self.volumes)

    @property
    def missed(self) -> int:
        """How many structures of the labels no prediction has."""
        return sum(case.missed or 0 for case in self.scored)

    @property
    def invented(self) -> int:
        """How many structures were predicted that the labels do not have."""
        return sum(case.invented or 0 for case in self.scored)

    @property
    def unit(self) -> Literal["mm", "px", "mixed"] | None:
        """Unit of hd95 and asd; `mixed` when only some cases have a spacing."""
        units = {case.unit for case in self.scored if case.unit is not None}
        return "mixed" if len(units) > 1 else next(iter(units), None)


Progress = Callable[[int, int], None]  # cases done, cases in all
Collect = Callable[[Case, Tensor, CaseRecord], None]  # the case, its prediction as `predicted` gives it, its row


def run_stream(
    adapter: Steps,
    dataset: Dataset,
    order: Sequence[int],
    *,
    batch_size: int = 1,
    progress: Progress | None = None,
    collect: Collect | None = None,
) -> StreamRecord:
    """The record of `adapter` on the cases of `dataset` in this order; the last batch may be smaller.

    Slices are adapted to one after another, in whatever order they come, and scored as the volumes that they make up.
    """
    if batch_size < 1:
        raise SettingError(f"batch_size must be at least 1, found {batch_size}")
    rows: list[CaseRecord] = []
    stacks = Stacks()
    for cases in _batches(dataset, order, batch_size):
        started = time.perf_counter()
        step = adapter.step(_stack(cases), case=_batch_name(cases))
        seconds = (time.perf_counter() - started) / len(cases)
        for position, (case, prediction) in enumerate(zip(cases, predicted(step.logits, dataset), strict=True)):
            row = record_case(case, prediction, dataset, step, position, seconds)
            rows.append(row)
            if row.volume is not None:
                stacks.add(case, prediction)
            if collect is not None:
                collect(case, prediction, row)
        if progress is not None:
            progress(len(rows), len(order))
    return stream_record(dataset, rows, stacks)


def stream_record(dataset: Dataset, rows: Sequence[CaseRecord], stacks: Stacks) -> StreamRecord:
    """The record of cases, and of the volumes that slices among them make up."""
    volumes = tuple(_volume_row(volume, dataset.classes) for volume in stacks.volumes())
    record = StreamRecord(dataset.site, dataset.task, {}, tuple(rows), volumes=volumes)
    return replace(record, metrics=stream_metrics(record.scored, dataset.task))


def predicted(logits: Tensor, dataset: Dataset) -> Tensor:
    """What logits (B, C, *positions) say about each case.

    Segmentation: (B, *positions) class values; classification: (B, classes) probabilities. One channel is a binary
    sigmoid: foreground where it is above 0.
    """
    logits = logits.detach().cpu()
    classes = max(2, logits.shape[1])
    if classes != len(dataset.classes):
        raise DataError(
            f"the network predicts {classes} classes, {dataset.site} has {len(dataset.classes)}: "
            f"{', '.join(dataset.classes)}; use the network that was trained for these classes"
        )
    if dataset.task == "classification":
        return probabilities(logits.double())
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else most_likely(logits)


def stream_metrics(rows: Sequence[CaseRecord], task: Task) -> dict[str, float]:
    """The metrics of a whole stream; empty when no case has a label."""
    if task == "classification":
        scored = [(row.probabilities, row.label) for row in rows if row.probabilities and row.label is not None]
        if not scored:
            return {}
        table, labels = zip(*scored, strict=True)
        return score_classification(torch.tensor(table, dtype=torch.float64), torch.tensor(labels))
    names = dict.fromkeys(name for row in rows for name in row.metrics)
    return {name: mean_defined(row.metrics.get(name, math.nan) for row in rows) for name in names}


def _batches(dataset: Dataset, order: Sequence[int], size: int) -> Iterator[list[Case]]:
    indices = iter(order)
    while batch := [dataset[index] for index in islice(indices, size)]:
        yield batch


def _stack(cases: Sequence[Case]) -> Tensor:
    shapes = {tuple(case.image.shape) for case in cases}
    if len(shapes) > 1:
        names = ", ".join(case.name for case in cases)
        raise DataError(f"images of one batch differ in shape: {sorted(shapes)} in {names}; use batch_size=1")
    return torch.stack([case.image for case in cases])  # (B, C, *spatial)


def _batch_name(cases: Sequence[Case]) -> str:
    more = len(cases) - 1
    return cases[0].name if not more else f"{cases[0].name} and {more} more"


def record_case(
    case: Case, prediction: Tensor, dataset: Dataset, step: Step, position: int, seconds: float
) -> CaseRecord:
    """The record of one case; an unlabeled one has no metrics."""
    numbers = (_finite(step.loss), _finite(step.discrepancy), _finite(step.rate))
    decision = decision_of(step)
    decided = None if decision is None else decision.of(position)
    row = CaseRecord(case.name, case.site, {}, seconds, *numbers, group=case.group)
    if decided is not None:
        row = replace(row, decision=str(decided.outcome), reason=decided.reason and str(decided.reason))
        row = replace(row, candidate=decided.candidate, **_expected(decided))
    try:
        if dataset.task == "classification":
            return _classified(row, prediction, case)
        if case.place is not None:
            return replace(row, volume=case.place.volume)
        return row if case.label is None else _segmented(row, prediction, case.label, case, dataset.classes)
    except DataError as error:
        raise DataError(f"case {case.name}: {error}") from error


def _expected(decided: Decision) -> dict[str, Any]:
    if (expected := decided.expected) is None:
        return {}
    return {
        "quality": expected.score, "quality_low": expected.low, "quality_high": expected.high,
        "review": expected.review,
    }  # fmt: skip


def _classified(row: CaseRecord, chances: Tensor, case: Case) -> CaseRecord:
    prediction = int(chances.argmax())
    row = replace(row, prediction=prediction, probabilities=tuple(chances.tolist()))
    if case.label is None:
        return row
    label = int(case.label)
    last = len(chances) - 1
    if not 0 <= label <= last:
        raise DataError(f"the label is {label}; with {last + 1} classes it must lie between 0 and {last}")
    return replace(row, label=label, metrics={"accuracy": float(prediction == label)})


def _segmented(row: CaseRecord, prediction: Tensor, label: Tensor, case: Case, classes: Sequence[str]) -> CaseRecord:
    return with_scores(row, score_segmentation(prediction, label, classes, spacing=case.spacing))


def _volume_row(volume: Volume, classes: Sequence[str]) -> CaseRecord:
    scores = score_segmentation(volume.prediction, volume.label, classes, spacing=volume.spacing)
    return with_scores(CaseRecord(volume.name, volume.site, {}, None, group=volume.group), scores)


def with_scores(row: CaseRecord, scores: SegmentationScores) -> CaseRecord:
    """The row of a segmented case with what it scored."""
    return replace(row, metrics=scores.metrics, unit=scores.unit, missed=scores.missed, invented=scores.invented)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
