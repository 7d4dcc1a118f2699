"""9 results. The same results without the names of cases, column by column: small enough to keep, and fit to publish.

What tables are made of stays: the scores of every case, its patient, and what was decided and expected of it. So other
seeds, orders and methods can join the comparison later, and every interval and test can be computed again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

from dltta.evaluation.provenance import Provenance
from dltta.evaluation.results import Results, StreamResult, strict
from dltta.evaluation.run import CaseRecord

FACTS = ("decision", "quality", "quality_low", "quality_high", "review", "missed", "invented", "unit", "discrepancy")
PLACE = ("source", "target", "method", "rate", "seed", "order", "task")
DIGITS, OF_QUALITY = 6, 4  # an expected quality is no more exact than that


def without_names(results: Results) -> Results:
    """The same results; a case or patient is known by a checksum of its name, the same in every comparison."""
    return replace(results, streams=tuple(map(_nameless, results.streams)))


def _nameless(stream: StreamResult) -> StreamResult:
    cases, volumes = (tuple(map(_renamed, rows)) for rows in (stream.cases, stream.volumes))
    return replace(stream, cases=cases, volumes=volumes)


def _renamed(case: CaseRecord) -> CaseRecord:
    group, volume = (None if name is None else _checksum(case.site, name) for name in (case.group, case.volume))
    return replace(case, case=_checksum(case.site, case.case), group=group, volume=volume)


def _checksum(site: str, name: str) -> str:
    return sha256(f"{site}\0{name}".encode()).hexdigest()[:10]


def to_columns(results: Results, metrics: Sequence[str]) -> dict[str, Any]:
    """As JSON, with these metrics of cases and streams."""
    sites = dict.fromkeys(stream.target for stream in results.streams)
    lists: dict[tuple[str, ...], int] = {}  # of cases, which most streams of a target share: their places
    streams = [_stream(stream, metrics, lists) for stream in results.streams]
    return {
        "config": results.config,
        "provenance": asdict(results.provenance),
        "patients": {site: _patients([s for s in results.streams if s.target == site]) for site in sites},
        "cases": [list(names) for names in lists],
        "streams": streams,
    }


def from_columns(document: Mapping[str, Any]) -> Results:
    """What `to_columns` gave, as results again."""
    record = document["provenance"]
    provenance = Provenance(**{**record, "seeds": tuple(record["seeds"])})
    lists, patients = document["cases"], document["patients"]
    streams = tuple(_stream_again(each, lists[each["cases"]], patients[each["target"]]) for each in document["streams"])
    return Results(document["config"], provenance, streams)


def _patients(streams: Iterable[StreamResult]) -> dict[str, str]:
    """The patient of every scored case of a target whose patient is known."""
    scored = [case for stream in streams for case in stream.scored]
    return {case.case: case.group for case in sorted(scored, key=_name) if case.group is not None}


def _name(case: CaseRecord) -> str:
    return case.case


def _stream(stream: StreamResult, metrics: Sequence[str], lists: dict[tuple[str, ...], int]) -> dict[str, Any]:
    scored = sorted(stream.scored, key=_name)
    slices = [case for case in stream.cases if case.volume is not None]
    record = {name: getattr(stream, name) for name in PLACE}
    record["metrics"] = {name: _short(value) for name, value in stream.metrics.items() if name in metrics}
    record["cases"] = lists.setdefault(tuple(map(_name, scored)), len(lists))
    if any(case.site != stream.target for case in scored):
        record["sites"] = [case.site for case in scored]
    record["scores"] = {
        name: _packed([_short(case.metrics.get(name, math.nan)) for case in scored])
        for name in metrics
        if any(name in case.metrics for case in scored)
    }
    record["facts"] = _facts(scored)
    return {**record, "slices": {"count": len(slices), "facts": _facts(slices)}} if _facts(slices) else record


def _facts(cases: Sequence[CaseRecord]) -> dict[str, Any]:
    """What was recorded of any of these cases beside its scores."""
    digits = {name: OF_QUALITY if name.startswith("quality") else DIGITS for name in FACTS}
    columns = {name: [_short(getattr(case, name), digits[name]) for case in cases] for name in FACTS}
    return {name: _packed(column) for name, column in columns.items() if any(value is not None for value in column)}


def _packed(column: list[Any]) -> Any:
    """A value that is always the same stands once."""
    return {"always": column[0]} if column and all(value == column[0] for value in column) else column


def _unpacked(column: Any, count: int) -> Sequence[Any]:
    return [column["always"]] * count if isinstance(column, dict) else column


def _short(value: Any, digits: int = DIGITS) -> Any:
    if not isinstance(value, float) or not math.isfinite(value):
        return strict(value)
    return int(value) if value.is_integer() else round(value, digits)  # 1 is shorter than 1.0


def _stream_again(record: Mapping[str, Any], names: Sequence[str], patients: Mapping[str, str]) -> StreamResult:
    scores = [
        {name: math.nan if value is None else value for name, value in row.items()}
        for row in _rows(record["scores"], len(names))
    ]
    facts, site = _rows(record["facts"], len(scores)), record["target"]
    sites = record.get("sites", [site] * len(scores))
    scored = tuple(
        CaseRecord(name, sites[place], scores[place], None, group=patients.get(name), **facts[place])
        for place, name in enumerate(names)
    )
    kept = record.get("slices", {"count": 0, "facts": {}})
    slices = tuple(
        CaseRecord(f"slice {place}", site, {}, None, volume="of some volume", **row)
        for place, row in enumerate(_rows(kept["facts"], kept["count"]))
    )
    where = {name: record[name] for name in PLACE}
    metrics = {name: math.nan if value is None else value for name, value in record["metrics"].items()}
    if slices:
        return StreamResult(**where, metrics=metrics, cases=slices, volumes=scored)
    return StreamResult(**where, metrics=metrics, cases=scored)


def _rows(columns: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    lists = {name: _unpacked(column, count) for name, column in columns.items()}
    return [{name: values[place] for name, values in lists.items()} for place in range(count)]
