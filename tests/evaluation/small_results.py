"""A small experiment whose every number is written down here."""

from collections.abc import Sequence

from dltta.evaluation.provenance import Provenance
from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.run import CaseRecord, StreamRecord

PROVENANCE = Provenance("0.0.0", None, (0,), {"torch": "2"}, {"cores": 2}, {"A": "aa", "B": "bb"})


def stream(
    method: str,
    rate: str,
    dice: Sequence[float],
    *,
    target: str = "B",
    source: str = "A",
    seed: int = 0,
    hd95: float = 4.0,
) -> StreamResult:
    rows = tuple(
        CaseRecord(f"case_{i}", target, {"dice": value, "hd95": hd95}, 0.1, 0.5, 0.2, 1e-3, "px", 0)
        for i, value in enumerate(dice)
    )
    metrics = {"dice": sum(dice) / len(dice), "hd95": hd95}
    record = StreamRecord(target, "segmentation", metrics, rows)
    return StreamResult.of(record, source=source, method=method, rate=rate, seed=seed)


def results(*streams: StreamResult) -> Results:
    return Results({"name": "small"}, PROVENANCE, streams)


def one_target() -> Results:
    """Mean Dice: source 0.6, Tent 0.65 with the fixed rate and 0.75 with the dynamic one, which harms the last case."""
    source = [0.5, 0.55, 0.6, 0.6, 0.6, 0.6, 0.65, 0.7]
    fixed = [0.55, 0.6, 0.65, 0.65, 0.65, 0.65, 0.7, 0.75]
    dynamic = [0.7, 0.74, 0.78, 0.79, 0.8, 0.81, 0.71, 0.67]
    return results(
        stream("source", "none", [0.9, 0.92], target="A"),
        stream("source", "none", source),
        stream("tent", "fixed", fixed, hd95=3.0),
        stream("tent", "dynamic", dynamic, hd95=3.5),
    )
