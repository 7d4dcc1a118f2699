"""Writes docs/real.md and docs/results/real.json from finished benchmarks on real sites.

python docs/figures/real.py runs/real

reads runs/real/NAME/*/results.json of every configs/real/NAME.toml: one comparison may be several commands that share
their models (`--work runs/real/NAME -o runs/real/NAME/methods`), with more seeds or orders for some methods than for
others. The full results stay where they are: they name every case. What is kept beside the page are the numbers that it
shows and the scores of every case without its name, so that other methods, seeds and orders can join later. What is not
run again keeps its numbers, as long as the source models, trained again, still give the same scores.

runs/real/NAME/there/SITE/results.json, if any, is a comparison with the target SITE as source: what a network that was
trained there gives on cases it has not seen says what the data allow. runs/real/NAME/longer/N/results.json is one with
N epochs: whether training, not the data, is the limit at home. runs/real/NAME/initial/*/results.json compare rules by
their initial rate (`--rates fixed:1e-2,dynamic:1e-2,…`).
"""

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from dltta.data.streams import split_stream
from dltta.evaluation.columns import from_columns, to_columns, without_names
from dltta.evaluation.expected import quality_rows
from dltta.evaluation.formats import mark
from dltta.evaluation.results import Results, StreamResult, strict
from dltta.evaluation.tables import NAMES, Row, by_target, primary_metric
from dltta.recipes import NO_RATE
from real_page import LONGER, TITLES, draw, draw_initial, page, place_of

DOCS = Path(__file__).parent.parent
SHARED = ("source", "cases", "size", "training")  # by comparisons that are one
EXPECTED = ("expected", "review", "score", "correlation", "covered")
RATES = (NO_RATE, "fixed", "dynamic", "matched", "shuffled", "aligned")  # in the order of a table; then all others
MARKS = ("†", "‡")  # of differences that are significant
MEANS_ONLY = "Without an interval: of the first training only means were kept."


def main(folder: Path) -> None:
    file = DOCS / "results" / "real.json"
    earlier = json.loads(file.read_text()) if file.is_file() else {}
    kept = {}
    for name in TITLES:
        found = [Results.load(path) for path in sorted((folder / name).glob("*/results.json"))]
        plain = [results for results in found if not changing(results)]
        before = earlier.get(name, {})
        long = [results for results in found if changing(results)]
        beside = {
            "changing": with_earlier(changing(merged(long)) if long else [], before.get("changing", [])),
            "there": {**before.get("there", {}), **trained_there(folder / name / "there")},
            "longer": {**before.get("longer", {}), **trained_longer(folder / name / "longer")},
            "initial": with_earlier(initial_rates(folder / name / "initial"), before.get("initial", [])),
        }
        if name in LONGER:
            beside["again"] = LONGER[name]
        if plain:
            kept[name] = {**joined(name, merged(plain), before), **beside}
        elif before:
            kept[name] = {**before, **beside}
    kept = strict(kept)
    file.write_text(written(kept))
    (DOCS / "real.md").write_text(page(kept, DOCS))
    (DOCS / "images").mkdir(exist_ok=True)
    draw(kept).savefig(DOCS / "images" / "real.png", dpi=150)
    if any(task["initial"] for task in kept.values()):
        draw_initial(kept).savefig(DOCS / "images" / "initial.png", dpi=150)


def written(kept: dict) -> str:
    """As JSON; the columns of a stream take a line each."""
    tasks = []
    for name, task in kept.items():
        lines = [f"  {json.dumps(key)}: {_lines(value)}" for key, value in task.items()]
        tasks.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(tasks) + "\n}\n"


def _lines(value: object) -> str:
    """A list with a line for each of its items, anything else on one line."""
    if isinstance(value, dict) and "streams" in value:
        head = {key: item for key, item in value.items() if key != "streams"}
        return f'{json.dumps(head, ensure_ascii=False)[:-1]}, "streams": {_lines(value["streams"])}}}'
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return (
            "[\n"
            + ",\n".join(f"   {json.dumps(item, ensure_ascii=False, separators=(',', ':'))}" for item in value)
            + "\n  ]"
        )
    return json.dumps(value, ensure_ascii=False)


def joined(name: str, found: Results, before: dict) -> dict:
    """What was run now, with what was run before on the same networks."""
    found = kept_of(found)
    if not before:
        return entry(found)
    earlier = [from_columns(before["columns"])] if "columns" in before else []
    same = same_networks(found, earlier[0]) if earlier else same_summary(before, entry(found))
    if not same:
        print(f"{name}: the source models or settings are others than before; its earlier numbers are dropped")
        return entry(found)
    together = merged([found, *earlier])
    new, scored = entry(together), {(s.method, s.rate) for s in together.streams if s.seed == 0}
    unscored = [row for row in without_scores(before) if (row["method"], row["rate"]) not in scored]
    if unscored:
        rows = {(row["method"], row["rate"]): row for row in new["rows"]}
        ran = set(rows)
        for row in unscored:
            key = row["method"], row["rate"]
            rows[key] = with_first_seed(rows[key], row) if key in ran else row
        left = [row for key, row in rows.items() if key not in ran]
        new["rows"] = sorted(rows.values(), key=lambda row: place_of(row["method"]))
        new["notes"] = notes_with(new["notes"], before["notes"], left, {method for method, _ in ran})
        new["notes"] += [MEANS_ONLY] if len(left) < len(unscored) else []
        new["expected"] += [row for row in before["expected"] if (row["method"], NO_RATE) not in ran]
        new["unscored"] = unscored
    return new


def without_scores(before: dict) -> list[dict]:
    """Rows of the first seed of a time when only means were kept."""
    if "unscored" in before:
        return before["unscored"]
    scored = {(stream["method"], stream["rate"]) for stream in before.get("columns", {"streams": ()})["streams"]}
    return [as_one_seed(row) for row in before["rows"] if (row["method"], row["rate"]) not in scored]


def with_first_seed(row: dict, first: dict) -> dict:
    """A row of later seeds with the means of the first one; an interval would need its scores."""

    def mean(later: float | None, alone: float | None) -> float | None:
        return None if later is None or alone is None else (row["seeds"] * later + alone) / (row["seeds"] + 1)

    cells = {}
    for target, cell in row["cells"].items():
        if (alone := first["cells"].get(target)) is None:  # it diverged there
            cells[target] = cell
            continue
        means = {key: mean(cell[key], alone.get(key)) for key in ("mean", "gain", "asd")}
        seeds = {**alone["by_seed"], **cell["by_seed"]}
        cells[target] = {**cell, **means, "low": None, "high": None, "mark": "", "by_seed": seeds}
    return {**row, "cells": cells, "worse": mean(row["worse"], first["worse"]), "seeds": row["seeds"] + 1}


def notes_with(notes: list[str], earlier: list[str], left: list[dict], ran: set[str]) -> list[str]:
    """Notes below a table, and of earlier ones what rows that are left still need: on methods that did not run again,
    and what their marks mean.
    """
    marks = {cell["mark"] for row in left for cell in row["cells"].values()} - {""}
    unsaid = {mark for mark in marks if not any(mark in note for note in notes)}
    names = tuple(f"{NAMES[row['method']]} " for row in left if row["method"] not in ran)
    kept = [note for note in earlier if note.startswith(names) or any(mark in note for mark in unsaid)]
    said = [note for note in notes if not _said_in(kept, note)]
    return [*said, *(note for note in kept if note not in said)]


def _said_in(kept: list[str], note: str) -> bool:
    """Whether a note on significance says nothing beside these: that no difference is, or what marks mean."""
    marked = {mark for mark in MARKS if any(mark in each for each in kept)}
    if note.startswith("No difference"):
        return bool(marked)
    return note.startswith(MARKS) and all(mark in marked for mark in MARKS if mark in note)


def kept_of(found: Results) -> Results:
    """What of these results is kept: the same whether they have just been run or were read again."""
    return from_columns(strict(to_columns(without_names(found), (primary_metric(found), "asd"))))


def same_networks(found: Results, earlier: Results) -> bool:
    """Whether source models of the same seeds, trained with the same settings, still give the same scores."""
    if shared(found.config) != shared(earlier.config):
        return False
    scores = [
        {(s.target, s.seed): s.metrics for s in each.streams if s.method == "source"} for each in (found, earlier)
    ]
    return all(scores[0][key] == scores[1][key] for key in scores[0].keys() & scores[1].keys())


def same_summary(before: dict, new: dict) -> bool:
    """Whether the first source model gives the means that it gave."""
    (old,), (now,) = ([row for row in task["rows"] if row["method"] == "source"] for task in (before, new))
    if any("0" not in cell["by_seed"] for cell in now["cells"].values()):
        raise SystemExit(f"of {', '.join(before['source'])} only means of the first seed were kept; run that again too")
    shared = old["cells"].keys() & now["cells"].keys()
    same = all(abs(old["cells"][at]["mean"] - now["cells"][at]["by_seed"]["0"]) < 1e-4 for at in shared)
    return bool(shared) and same and before["cases"] == new["cases"]


def as_one_seed(row: dict) -> dict:
    """A row of a time when one seed and one order were all that was run."""
    cells = {target: {**cell, "by_seed": {"0": cell["mean"]}} for target, cell in row["cells"].items()}
    return {**row, "cells": cells, "seeds": 1, "orders": 1}


def merged(found: list[Results]) -> Results:
    """Comparisons on the same models as one, in an order that does not follow from what was run when; a stream that
    several of them share counts once.
    """
    streams: dict[tuple, StreamResult] = {}
    for results in found:
        for stream in results.streams:
            key = (stream.source, stream.target, stream.method, stream.rate, stream.seed, stream.order)
            streams.setdefault(key, stream)
    first = found[0].config
    for each in found[1:]:
        differing = [name for name in SHARED if shared(each.config)[name] != shared(first)[name]]
        if differing:
            raise SystemExit(f"comparisons of {first['source']} differ in {differing[0]}; they cannot share a table")
    losses = {name: loss for each in found for name, loss in each.config.get("trained_with", {}).items()}
    left_out = {name: why for each in found for name, why in each.config.get("left_out", {}).items()}
    diverged = {json.dumps(item): item for each in found for item in each.config.get("diverged", ())}
    config = {**first, "trained_with": losses, "left_out": left_out, "diverged": list(diverged.values())}
    targets = list(dict.fromkeys(stream.target for stream in streams.values()))

    def place(stream: StreamResult) -> tuple:
        rule = RATES.index(stream.rate) if stream.rate in RATES else len(RATES)
        return place_of(stream.method), rule, stream.rate, targets.index(stream.target), stream.seed, stream.order

    return replace(found[0], config=config, streams=tuple(sorted(streams.values(), key=place)))


def shared(config: dict) -> dict:
    """What comparisons must share to be one; what else was trained beside the source model may differ."""
    training = {key: value for key, value in config["training"].items() if key != "with_"}
    return {**{name: config.get(name) for name in SHARED}, "training": training}


def entry(results: Results) -> dict:
    """What the page needs of one task; scores and gains in points."""
    table, config = by_target(results), results.config
    pairs = [column.pair for column in table.columns]
    home = next((i for i, pair in enumerate(pairs) if pair and pair[0] == pair[1]), None)
    targets = [(i, pair[1]) for i, pair in enumerate(pairs) if pair and pair[0] != pair[1]]
    rows = [numbers(row, targets, results) for row in table.rows]
    return {
        "source": list(config["source"]),
        "epochs": config["training"]["epochs"],
        "seeds": most(row["seeds"] for row in rows),
        "orders": most(row["orders"] for row in rows),
        "cases": config.get("cases"),
        "batch_size": (config.get("adaptation") or {}).get("batch_size"),
        "metric": primary_metric(results),
        "provenance": asdict(results.provenance),
        "home": None if home is None else at_home(results, homes_of(results)),
        "targets": {target: counted(results, target) for _, target in targets},
        "rows": rows,
        "expected": mean_expected(results),
        "notes": list(table.notes),
        "columns": to_columns(results, (primary_metric(results), "asd")),
    }


def mean_expected(results: Results) -> list[dict]:
    """What was expected of each method's predictions at each target, over all trainings and orders."""
    found: dict[tuple[str, str], list[dict]] = {}
    for row in quality_rows(results):
        found.setdefault((row.target, row.method), []).append(asdict(row))
    rows = []
    for (target, method), each in found.items():
        known = {key: [row[key] for row in each if not math.isnan(row[key])] for key in EXPECTED}
        means = {key: fmean(values) if values else math.nan for key, values in known.items()}
        rows.append({"target": target, "method": method, "cases": each[0]["cases"], **means})
    return rows


def most(numbers: Iterable[int]) -> int:
    return max(numbers, default=1)


def trained_there(folder: Path) -> dict:
    """By target site: what a network trained there scores on the cases held out, in points."""
    found = [(results, homes_of(results)) for results in map(Results.load, sorted(folder.glob("*/results.json")))]
    return {home[0].target: at_home(results, home) for results, home in found}


def trained_longer(folder: Path) -> dict:
    """By number of epochs: the same of a network of the source site."""
    found = [Results.load(path) for path in sorted(folder.glob("*/results.json"))]
    return {str(each.config["training"]["epochs"]): at_home(each, homes_of(each)) for each in found}


def initial_rates(folder: Path) -> list[dict]:
    """Each method by its rule and initial rate at each target, in points: the mean over all trainings and orders."""
    found = [Results.load(path) for path in sorted(folder.glob("*/results.json"))]
    rows = []
    for results in found:
        streams: dict[tuple[str, str, str], list[StreamResult]] = {}
        for stream in results.streams:
            if stream.source != stream.target:
                streams.setdefault((stream.target, stream.method, stream.rate), []).append(stream)
        for (target, method, rate), each in streams.items():
            mean = 100 * fmean(stream.metrics[primary_metric(results)] for stream in each)
            row = {"target": target, "method": method, "rate": rate, "mean": mean}
            rows.append({**row, **{f"{key}s": len({getattr(s, key) for s in each}) for key in ("seed", "order")}})
    return rows


def homes_of(results: Results) -> list[StreamResult]:
    return [stream for stream in results.streams if stream.source == stream.target]


def at_home(results: Results, home: list[StreamResult]) -> dict:
    """Source models on the cases held out, in points; of each training by its seed."""
    metric = primary_metric(results)
    by_seed = seed_means(home, metric)
    known = [case.metrics.get(metric, math.nan) for stream in home for case in stream.scored]
    scores = [100 * value for value in known if not math.isnan(value)]
    cases = [min(scores), max(scores)] if len(set(scores)) > 1 else []
    return {"mean": fmean(by_seed.values()), "n": held_out(results), "by_seed": by_seed, "cases": cases}


def held_out(results: Results) -> int:
    """Cases of one training; another seed holds out others."""
    return len(homes_of(results)[0].scored)


def counted(results: Results, target: str) -> dict:
    scored = next(stream.scored for stream in results.streams if stream.target == target)
    return {"cases": len(scored), "patients": len({case.patient for case in scored})}


def numbers(row: Row, targets: list[tuple[int, str]], results: Results) -> dict:
    """One method with one rate at every target."""
    cells, found = {}, []
    for i, target in targets:
        if (cell := row.cells[i]) is not None:
            values = {"mean": cell.mean, "gain": cell.gain, "low": cell.interval[0], "high": cell.interval[1]}
            cells[target] = {key: 100 * value for key, value in values.items()} | {"mark": mark(cell)}
            streams = [s for s in results.streams if (s.method, s.rate, s.target) == (row.method, row.rate, target)]
            cells[target]["by_seed"] = seed_means(streams, primary_metric(results))
            distances = [stream.metrics["asd"] for stream in streams if "asd" in stream.metrics]
            cells[target]["asd"] = fmean(distances) if distances else None  # in voxels where the spacing is unknown
            found.append(streams)
    seeds, orders = (most(len({getattr(s, name) for s in each}) for each in found) for name in ("seed", "order"))
    return {
        "method": row.method, "rate": row.rate, "worse": row.worse, "cells": cells, "seeds": seeds, "orders": orders
    }  # fmt: skip


def seed_means(streams: list[StreamResult], metric: str) -> dict[str, float]:
    """Of each source training, in points, over its orders."""
    seeds = sorted({stream.seed for stream in streams})
    return {str(seed): 100 * fmean(s.metrics[metric] for s in streams if s.seed == seed) for seed in seeds}


def changing(results: Results) -> list[dict]:
    """Streams of several sites or several passes: the mean of each part, over all seeds and orders. Empty for a
    comparison of plain targets.
    """
    specs = [split_stream(spec) for spec in results.config["targets"]]
    if not all(specs):
        return []
    found: dict[tuple[str, str, str], list[StreamResult]] = {}
    for stream in results.streams:
        if stream.source != stream.target:
            found.setdefault((stream.target, stream.method, stream.rate), []).append(stream)
    rows = []
    for (target, method, rate), streams in found.items():
        each = [part_means(stream, primary_metric(results)) for stream in streams]
        parts = [[site, fmean(means[number, site] for means in each)] for number, site in sorted(each[0])]
        row = {"target": target, "method": method, "rate": rate, "cases": len(streams[0].scored), "parts": parts}
        rows.append({**row, **{f"{key}s": len({getattr(s, key) for s in streams}) for key in ("seed", "order")}})
    return rows


def with_earlier(rows: list[dict], earlier: list[dict]) -> list[dict]:
    """And streams of methods and rates that were not run again."""
    again = {(row["target"], row["method"], row["rate"]) for row in rows}
    kept = [row for row in earlier if (row["target"], row["method"], row["rate"]) not in again]
    return sorted([*rows, *kept], key=lambda row: place_of(row["method"]))


def part_means(stream: StreamResult, metric: str) -> dict[tuple[int, str], float]:
    """Number and site of each part: its mean, in points."""
    parts: dict[tuple[int, str], list[float]] = {}
    for case in stream.scored:
        score = case.metrics.get(metric, math.nan)
        if not math.isnan(score):
            parts.setdefault((int(case.case.partition("_")[0]), case.site), []).append(100 * score)
    return {part: fmean(values) for part, values in parts.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
