"""9 results. Everything a number needs to be trusted, in one `results.json`.

`config`, `provenance`, `streams` (one per source, target, method, rate, seed and order) and `summary`, which follows
from the streams. Strict JSON: what has no value (`nan`) is `null`. Same results, same bytes.
"""

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from dltta.data.case import Task
from dltta.errors import DataError, SettingError
from dltta.evaluation.provenance import Provenance
from dltta.evaluation.run import CaseRecord, StreamRecord
from dltta.files import write_atomically
from dltta.metrics import Unit, mean_defined

SCHEMA = 2
SOURCE = "source"  # the method that does not adapt, against which gains are measured

Value = TypeVar("Value")


@dataclass(frozen=True)
class StreamResult(StreamRecord):
    """A stream and what makes it different from the others of an experiment."""

    source: str
    method: str  # lower case, as on the command line
    rate: str  # none, fixed, dynamic, or the rule's name
    seed: int
    order: int  # which of the image orders; the rows are in that order

    @classmethod
    def of(
        cls, record: StreamRecord, *, source: str, method: str, rate: str, seed: int = 0, order: int = 0
    ) -> "StreamResult":
        """The record of a run with its place in the experiment."""
        return cls(
            target=record.target, task=record.task, metrics=record.metrics, cases=record.cases, volumes=record.volumes,
            source=source, method=method, rate=rate, seed=seed, order=order,
        )  # fmt: skip


@dataclass(frozen=True)
class SummaryRow:
    """One metric of one method at one target: mean and sample sd over streams (seeds x orders)."""

    source: str
    target: str
    method: str
    rate: str
    metric: str
    mean: float
    sd: float  # nan with one stream
    n: int  # streams that define the metric
    case_sd: float = math.nan  # over the cases, when there is one stream and cases have values of their own
    cases: int | None = None


@dataclass(frozen=True)
class Results:
    """All streams of an experiment with what produced them."""

    config: Mapping[str, Any]
    provenance: Provenance
    streams: tuple[StreamResult, ...]

    def __post_init__(self) -> None:
        seen = set()
        for stream in self.streams:
            key = (stream.source, stream.target, stream.method, stream.rate, stream.seed, stream.order)
            if key in seen:
                raise DataError(f"two streams are {', '.join(map(str, key))}; each may be counted once")
            seen.add(key)

    @property
    def summary(self) -> tuple[SummaryRow, ...]:
        """Means over streams, in the order in which methods and metrics first appear."""
        groups: dict[tuple[str, str, str, str], list[StreamResult]] = {}
        for stream in self.streams:
            groups.setdefault((stream.source, stream.target, stream.method, stream.rate), []).append(stream)
        return tuple(
            summarize(streams, metric)
            for streams in groups.values()
            for metric in dict.fromkeys(name for stream in streams for name in stream.metrics)
        )

    def select(self, source: str, target: str, method: str, rate: str) -> tuple[StreamResult, ...]:
        """The streams that are summarized together: every seed and order of one method."""
        wanted = (source, target, method, rate)
        return tuple(s for s in self.streams if (s.source, s.target, s.method, s.rate) == wanted)

    def write(self, path: Path) -> None:
        """Write `results.json` in one move: the file is the old one or the new one, never half of it."""
        document = {
            "schema": SCHEMA,
            "config": self.config,
            "provenance": asdict(self.provenance),
            "streams": [_stream_to_json(stream) for stream in self.streams],
            "summary": [_without_none(asdict(row)) for row in self.summary],
        }
        try:
            text = json.dumps(strict(document), indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        except TypeError as error:
            raise SettingError(
                f"the results cannot be written as JSON: {error}; use numbers, text, lists and dicts"
            ) from error
        write_atomically(path, text)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read what `write` wrote; a file that is something else is one `DataError`."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as results: {error}") from error
        try:
            return _results_from_json(document)
        except DataError as error:
            raise DataError(f"{path} is not a results file: {error}; `dltta bench` writes one") from error


def summarize(streams: Iterable[StreamResult], metric: str) -> SummaryRow:
    """Mean over the streams of one source, target, method and rate."""
    streams = list(streams)
    first = streams[0]
    values = [value for stream in streams if not math.isnan(value := stream.metrics.get(metric, math.nan))]
    row = SummaryRow(
        first.source, first.target, first.method, first.rate, metric, mean_defined(values), _sd(values), len(values)
    )
    if len(streams) > 1 or first.task == "classification":  # right and wrong predictions have no sd worth a table
        return row
    per_case = [value for case in first.scored if not math.isnan(value := case.metrics.get(metric, math.nan))]
    return SummaryRow(**{**asdict(row), "case_sd": _sd(per_case), "cases": len(per_case)})


def case_means(streams: Iterable[StreamResult], metric: str) -> dict[tuple[str, str], float]:
    """Each case's value, averaged over streams; cases that never define it are left out."""
    values: dict[tuple[str, str], list[float]] = {}
    for stream in streams:
        for case in stream.scored:
            values.setdefault(case.key, []).append(case.metrics.get(metric, math.nan))
    means = {case: mean_defined(listed) for case, listed in values.items()}
    return {case: mean for case, mean in means.items() if not math.isnan(mean)}


def case_patients(streams: Iterable[StreamResult]) -> dict[tuple[str, str], tuple[str, str]]:
    """The patient of each scored case; of a volume without one, itself."""
    return {case.key: case.patient for stream in streams for case in stream.scored}


def _sd(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


# ---- to JSON


def strict(value: Any) -> Any:
    """The same value with `null` for whatever JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_none(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if value is not None}


def _stream_to_json(stream: StreamResult) -> dict[str, Any]:
    names = ("source", "target", "method", "rate", "seed", "order", "task", "unit", "missed", "invented", "metrics")
    head = {name: getattr(stream, name) for name in names}
    record = {**_without_none(head), "cases": list(map(_case_to_json, stream.cases))}
    return {**record, "volumes": list(map(_case_to_json, stream.volumes))} if stream.volumes else record


def _case_to_json(case: CaseRecord) -> dict[str, Any]:
    return _without_none({item.name: getattr(case, item.name) for item in fields(case)})


# ---- from JSON


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _results_from_json(document: Any) -> Results:
    where = "the file"
    if _take(document, "schema", int, where) != SCHEMA:
        raise DataError(f"it has schema {document['schema']}, this version reads {SCHEMA}")
    provenance = _take(document, "provenance", dict, where)
    streams = _take(document, "streams", list, where)
    _take(document, "summary", list, where)
    return Results(
        config=_take(document, "config", dict, where),
        provenance=_provenance_from_json(provenance),
        streams=tuple(_stream_from_json(item, f"streams[{index}]") for index, item in enumerate(streams)),
    )


def _provenance_from_json(record: Any) -> Provenance:
    where = "provenance"
    return Provenance(
        version=_take(record, "version", str, where),
        commit=_maybe(record, "commit", str, where),
        seeds=tuple(_take(record, "seeds", list, where)),
        packages=_take(record, "packages", dict, where),
        machine=_take(record, "machine", dict, where),
        data=_take(record, "data", dict, where),
    )


def _stream_from_json(record: Any, where: str) -> StreamResult:
    cases = _take(record, "cases", list, where)
    volumes = _maybe(record, "volumes", list, where) or []
    return StreamResult(
        source=_take(record, "source", str, where),
        target=_take(record, "target", str, where),
        method=_take(record, "method", str, where),
        rate=_take(record, "rate", str, where),
        seed=_take(record, "seed", int, where),
        order=_take(record, "order", int, where),
        task=_task(record, where),
        metrics=_metrics(record, where),
        cases=tuple(_case_from_json(item, f"{where}.cases[{index}]") for index, item in enumerate(cases)),
        volumes=tuple(_case_from_json(item, f"{where}.volumes[{index}]") for index, item in enumerate(volumes)),
    )


def _case_from_json(record: Any, where: str) -> CaseRecord:
    return CaseRecord(
        case=_take(record, "case", str, where),
        site=_take(record, "site", str, where),
        metrics=_metrics(record, where),
        seconds=_number(record, "seconds", where),
        loss=_number(record, "loss", where),
        discrepancy=_number(record, "discrepancy", where),
        rate=_number(record, "rate", where),
        unit=_unit(record, where),
        missed=_maybe(record, "missed", int, where),
        label=_maybe(record, "label", int, where),
        prediction=_maybe(record, "prediction", int, where),
        probabilities=_probabilities(record, where),
        decision=_maybe(record, "decision", str, where),
        reason=_maybe(record, "reason", str, where),
        candidate=_maybe(record, "candidate", str, where),
        quality=_number(record, "quality", where),
        quality_low=_number(record, "quality_low", where),
        quality_high=_number(record, "quality_high", where),
        review=_maybe(record, "review", bool, where),
        invented=_maybe(record, "invented", int, where),
        group=_maybe(record, "group", str, where),
        volume=_maybe(record, "volume", str, where),
    )


def _metrics(record: Any, where: str) -> dict[str, float]:
    values = _take(record, "metrics", dict, where)
    numbers = {name: _number(values, name, f"{where}.metrics") for name in values}
    return {name: math.nan if value is None else value for name, value in numbers.items()}


def _probabilities(record: Any, where: str) -> tuple[float, ...] | None:
    values = _maybe(record, "probabilities", list, where)
    if values is None:
        return None
    numbered = {str(index): value for index, value in enumerate(values)}
    return tuple(_take_number(numbered, index, f"{where}.probabilities") for index in numbered)


def _task(record: Any, where: str) -> Task:
    name = _take(record, "task", str, where)
    if name in ("segmentation", "classification"):
        return cast(Task, name)
    raise DataError(f"{where}.task is {name!r}, not 'segmentation' or 'classification'")


def _unit(record: Any, where: str) -> Unit | None:
    name = _maybe(record, "unit", str, where)
    if name in (None, "mm", "px"):
        return cast(Unit | None, name)
    raise DataError(f"{where}.unit is {name!r}, not 'mm' or 'px'")


def _take_number(record: Any, key: str, where: str) -> float:
    number = _number(record, key, where)
    if number is None:
        raise DataError(f"{where} has no {key!r}")
    return number


def _number(record: Any, key: str, where: str) -> float | None:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise DataError(f"{where}.{key} should be a number, found {value!r}")
    return None if value is None else float(value)


def _maybe(record: Any, key: str, kind: type[Value], where: str) -> Value | None:
    return None if record.get(key) is None else _take(record, key, kind, where)


def _take(record: Any, key: str, kind: type[Value], where: str) -> Value:
    if not isinstance(record, dict) or key not in record:
        raise DataError(f"{where} has no {key!r}")
    value = record[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise DataError(f"{where}.{key} should be {kind.__name__}, found {type(value).__name__}")
    return value
