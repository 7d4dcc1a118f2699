"""Writes docs/real.md and docs/results/real.json from finished benchmarks on real sites.

python docs/figures/real.py runs/real

reads runs/real/NAME/*/results.json of every configs/real/NAME.toml: one comparison may be several commands that share
their models (`--work runs/real/NAME -o runs/real/NAME/methods`), with more seeds or orders for some methods than for
others. The full results stay where they are: they name every case. What is kept beside the page are the numbers that it
shows and the scores of every case without its name, so that other methods, seeds and orders can join later. What is not
run again keeps its numbers, as long as the source models, trained again, still give the same scores.

runs/real/NAME/there/SITE/results.json, if any, is a comparison with the target SITE as source: what a network that was
trained there gives on cases it has not seen says what the data allow. runs/real/NAME/longer/N/results.json is one with
N epochs: whether training, not the data, is the limit at home.
"""

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev

from matplotlib.figure import Figure

from dltta.data.streams import split_stream
from dltta.evaluation.columns import from_columns, to_columns, without_names
from dltta.evaluation.comparison import bootstrap_interval
from dltta.evaluation.expected import quality_rows
from dltta.evaluation.formats import mark, signed
from dltta.evaluation.paper.published import Published
from dltta.evaluation.results import Results, StreamResult, strict
from dltta.evaluation.tables import NAMES, Row, by_target, method_label, primary_metric
from dltta.methods import Method
from dltta.recipes import NO_RATE, UDA

DOCS = Path(__file__).parent.parent
TITLES = {
    "wbc_cells": "White blood cells, segmentation, one laboratory → two others",
    "wbc_types": "White blood cells, kinds, one laboratory → two others",
    "nuclei_tissue": "Nuclei in stained tissue, white → lilac",
    "nuclei_fluo": "Nuclei in fluorescence, one acquisition format → another",
    "oct_layers": "Retinal layers, Optovue → Cirrus",
    "prostate_t2": "Prostate MRI, slice by slice, Radboud → UCL and BIDMC",
    "prostate_t2_ucl": "Prostate MRI, slice by slice, UCL → Radboud and BIDMC",
    "prostate_t2_bidmc": "Prostate MRI, slice by slice, BIDMC → Radboud and UCL",
    "prostate_t2_3d": "Prostate MRI, whole volumes, Radboud → UCL and BIDMC",
    "spinal_cord": "Spinal cord MRI, one scanner → three others",
}
PAPER = ("tent", "ttt", "atta")
OTHER_SITES = {"prostate_t2_ucl": "prostate_t2", "prostate_t2_bidmc": "prostate_t2"}  # with --source and --target
COLUMNS = {"ucl": "D", "bidmc": "E"}  # of the paper's prostate table, whose source A is Radboud
SHARED = ("source", "cases", "size", "training")  # by comparisons that are one
PLAIN = ("source", "none")
EXPECTED = ("expected", "review", "score", "correlation", "covered")
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f", "#a6761d", "#000000", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
PICTURE = (
    "![Each method's gain over the source model at every real target: most methods lie where batch statistics alone, "
    "PTBN, lie](images/real.png)"
)
MARKS = ("†", "‡")  # of differences that are significant
MEANS_ONLY = "Without an interval: of the first training only means were kept."
CONTROLS = {
    "fixed": "the method's own fixed rate",
    "matched": "a fixed rate at the mean of the dynamic one",
    "shuffled": "the same rates in random order",
}


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
        }
        if plain:
            kept[name] = {**joined(name, merged(plain), before), **beside}
        elif before:
            kept[name] = {**before, **beside}
    kept = strict(kept)
    file.write_text(written(kept))
    (DOCS / "real.md").write_text(page(kept))
    (DOCS / "images").mkdir(exist_ok=True)
    draw(kept).savefig(DOCS / "images" / "real.png", dpi=150)


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


# ---- from results to numbers


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
    """Comparisons on the same models as one; a stream that several of them share counts once."""
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
    ordered = sorted(streams.values(), key=lambda stream: place_of(stream.method))
    return replace(found[0], config=config, streams=tuple(ordered))


def place_of(method: str) -> int:
    """In the order of the methods' table; what learns with target images behind, and the default recipe last."""
    order = [*map(str, Method), *UDA, "recommended"]
    return order.index(method) if method in order else len(order)


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


# ---- from numbers to the page


def gains(kept: dict, method: str, rate: str, over: tuple[str, str] = PLAIN) -> dict:
    """(task, target): how many points better than another method or rate, wherever both were run on the same models."""
    found = {}
    for name, task in kept.items():
        rows = {(row["method"], row["rate"]): row["cells"] for row in task["rows"]}
        for target, cell in rows.get((method, rate), {}).items():
            ours, theirs = by_seed(cell), by_seed(rows.get(over, {}).get(target))
            if seeds := ours.keys() & theirs.keys():
                found[name, target] = fmean(ours[seed] - theirs[seed] for seed in sorted(seeds))
    return found


def by_seed(cell: dict | None) -> dict[str, float]:
    """The mean of each source training; one of before they were kept is the first's."""
    return {} if cell is None else cell.get("by_seed", {"0": cell["mean"]})


def place(key: tuple[str, str]) -> str:
    return f"{key[0]}, {key[1]}"


def plain_rates(kept: dict) -> list[tuple[str, str]]:
    """Every method as its authors run it, in the order of the methods' table; the default recipe last."""
    found = dict.fromkeys((row["method"], row["rate"]) for task in kept.values() for row in task["rows"])
    usual = [pair for pair in found if pair[1] in ("none", "fixed", "aligned") and pair[0] != "source"]
    aligned = {method for method, rate in usual if rate == "aligned"}  # its authors' rule
    chosen = [pair for pair in usual if pair[1] != "fixed" or pair[0] not in aligned]
    return sorted(chosen, key=lambda pair: place_of(pair[0]))


def overview(kept: dict) -> str:
    """Every method over all targets."""
    lines = [
        "| Method | targets | gain over source | worst target | gap closed | cases made worse | over PTBN |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for method, rate in plain_rates(kept):
        found = gains(kept, method, rate)
        worst = min(found, key=lambda key: found[key])
        gaps = {
            (name, target): task["home"]["mean"] - cell["mean"]
            for name, task in kept.items()
            if task["home"] is not None
            for row in task["rows"]
            if row["method"] == "source"
            for target, cell in row["cells"].items()
        }
        open_gaps = [key for key in found if gaps.get(key, 0.0) > 0]
        closed = sum(found[key] for key in open_gaps) / sum(gaps[key] for key in open_gaps) if open_gaps else math.nan
        over = gains(kept, method, rate, ("ptbn", "none"))
        worse = [
            row["worse"]
            for task in kept.values()
            for row in task["rows"]
            if (row["method"], row["rate"]) == (method, rate) and row["worse"] is not None
        ]
        cells = [
            NAMES.get(method, method),
            str(len(found)),
            points(fmean(found.values())) + over_tasks(found),
            f"{points(found[worst])} ({place(worst)})",
            "–" if math.isnan(closed) else signed(f"{100 * closed:.0f} %"),
            f"{100 * fmean(worse):.0f} %" if worse else "–",
            points(fmean(over.values())) + over_tasks(over) if over and method != "ptbn" else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def over_tasks(found: dict[tuple[str, str], float]) -> str:
    """The 95 % interval of the mean over targets: other tasks, each with its targets, which share source models."""
    low, high = bootstrap_interval([found], {key: key[0] for key in found})
    return "" if math.isnan(low) else f" ({points(low)} to {points(high)})"


def draw(kept: dict) -> Figure:
    """Each method's gain over the source model: a dot for every target, a bar at their mean."""
    rows = [(method, found) for method, rate in plain_rates(kept) if (found := gains(kept, method, rate))]
    figure = Figure(figsize=(7.2, 0.3 * len(rows) + 1.6), layout="constrained")
    axis = figure.subplots()
    axis.axvline(0, color="#888888", linewidth=1, zorder=1)
    tasks = list(kept)
    for place, (_, found) in enumerate(rows):
        axis.plot([min(found.values()), max(found.values())], [place, place], color="#e4e4e4", linewidth=5, zorder=0)
        for (name, _), gain in found.items():
            color, marker = COLORS[tasks.index(name) % len(COLORS)], MARKERS[tasks.index(name) % len(MARKERS)]
            axis.scatter(gain, place, s=26, color=color, marker=marker, alpha=0.9, linewidths=0, zorder=2)
        axis.scatter(fmean(found.values()), place, s=170, color="black", marker="|", linewidths=2, zorder=3)
    axis.set_yticks(range(len(rows)), [f"{NAMES.get(method, method)} ({len(found)})" for method, found in rows])
    axis.invert_yaxis()
    axis.set_xlabel("points above the source model, at each target (bar: mean; in brackets: targets)")
    axis.spines[["top", "right"]].set_visible(False)
    for place, name in enumerate(tasks):
        color, marker = COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]
        axis.scatter([], [], s=26, color=color, marker=marker, linewidths=0, label=name)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def points(value: float) -> str:
    return signed(f"{round(value, 1) + 0.0:+.1f}")


def dynamic(kept: dict) -> str:
    """The paper's rate against its controls."""
    lines = ["| Method | dynamic over | targets | mean | worst target | targets ≥ 0 |", "|:--|:--|--:|--:|--:|--:|"]
    for method in PAPER:
        for control, words in CONTROLS.items():
            found = gains(kept, method, "dynamic", (method, control))
            if found:
                worst = min(found, key=lambda key: found[key])
                shown = [
                    NAMES[method],
                    words,
                    str(len(found)),
                    signed(f"{fmean(found.values()):+.2f}"),
                    signed(f"{found[worst]:+.2f} ({place(worst)})"),
                    f"{sum(round(value, 2) >= 0 for value in found.values())} of {len(found)}",
                ]
                lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def homes(kept: dict) -> str:
    lines = [
        "| task | source | epochs | held out | at home | at the targets | trained at the target |",
        "|:--|:--|--:|--:|--:|:--|:--|",
    ]
    for name, task in kept.items():
        source = next(row for row in task["rows"] if row["method"] == "source")
        away = ", ".join(f"{target} {cell['mean']:.1f}" for target, cell in source["cells"].items())
        there = [
            f"{target} {found['mean']:.1f} ({found['n']} held out)"
            for target in source["cells"]
            if (found := at_target(kept, name, target)) is not None
        ]
        home = task["home"]
        sites = " + ".join(spec.rpartition("/")[2] for spec in task["source"])
        score = (
            "–" if home is None else f"{task['metric'].capitalize()} {home['mean']:.1f}{spread(home, task['metric'])}"
        )
        score += "".join(
            f"; {found['mean']:.1f} with {epochs} epochs" for epochs, found in task.get("longer", {}).items()
        )
        lines.append(
            f"| {name} | {sites} | {task['epochs']} | {'–' if home is None else home['n']} | {score} | {away} | "
            f"{', '.join(there) or '–'} |"
        )
    return "\n".join(lines)


def spread(home: dict, metric: str) -> str:
    """From which training to which, if there are several, and from which case to which; a class is right or not."""
    trainings = list(home.get("by_seed", {}).values())
    known = {"trainings": trainings if len(trainings) > 1 else [], "cases": home.get("cases", [])}
    shown = [
        f"{what} {min(scores):.1f} to {max(scores):.1f}"
        for what, scores in known.items()
        if scores and not (what == "cases" and metric == "accuracy")
    ]
    return f" ({', '.join(shown)})" if shown else ""


def at_target(kept: dict, name: str, target: str) -> dict | None:
    """At home, a network whose source is this target: of a comparison for that, or of another direction."""
    family = OTHER_SITES.get(name, name)
    others = [kept[each] for each in kept if OTHER_SITES.get(each, each) == family]
    homes = [task["home"] for task in others if [spec.rpartition("/")[2] for spec in task["source"]] == [target]]
    return kept[name].get("there", {}).get(target) or next(iter(homes), None)


def expected(kept: dict) -> str:
    """What the recommended recipe said of its predictions, and what labels say."""
    lines = [
        "| task, target | expected, mean | score, mean | Spearman | inside the 90 % interval | to review |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for name, task in kept.items():
        for row in task["expected"]:
            if row["method"] != "recommended" or row["target"] not in task["targets"]:
                continue
            cells = [
                f"{name}, {row['target']}",
                f"{100 * row['expected']:.1f}",
                *("–" if row[key] is None else f"{100 * row[key]:.1f}" for key in ("score",)),
                "–" if row["correlation"] is None else signed(f"{row['correlation']:.2f}"),
                "–" if row["covered"] is None else f"{100 * row['covered']:.0f} %",
                f"{100 * row['review']:.0f} %",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else "Not run yet."


def task_table(task: dict) -> str:
    """Scores, and the gain over the source model with its 95 % interval."""
    targets, uneven = list(task["targets"]), len({streams_of(row) for row in task["rows"]}) > 1
    heads = ["Method", *(f"{target} | gain" for target in targets), "Made worse", *(["Seeds × orders"] * uneven)]
    lines = [f"| {' | '.join(heads)} |", "|:--|" + "--:|--:|" * len(targets) + "--:|" + "--:|" * uneven]
    for row in task["rows"]:
        cells = [part for target in targets for part in shown(row["cells"].get(target))]
        cells.append("" if row["worse"] is None else f"{100 * row['worse']:.0f} %")
        cells += [streams_of(row)] * uneven
        lines.append(f"| {' | '.join([method_label(row['method'], row['rate']), *cells])} |")
    return "\n".join(lines)


def streams_of(row: dict) -> str:
    """How many source trainings a row is over, and how many orders of each stream."""
    return f"{row.get('seeds', 1)} × {row.get('orders', 1)}"


def beside_the_paper(task: dict) -> str:
    """The rows of the paper's prostate table at the hospitals that are its columns D and E."""
    published = Published.load("prostate")
    ours = {(row["method"], row["rate"]): row["cells"] for row in task["rows"]}
    targets = [target for target in task["targets"] if target in COLUMNS]
    heads = [
        part for target in targets for part in (f"paper, {COLUMNS[target]}", f"here, {target}", "surface distance")
    ]
    lines = [f"| Method | {' | '.join(heads)} |", "|:--|" + "--:|" * len(heads)]
    for row in published.rows:
        cells = []
        for target in targets:
            printed = row.values[published.columns.index(COLUMNS[target])]
            cell = ours.get((row.method, row.rate), {}).get(target)
            distance = None if cell is None else cell.get("asd")
            cells += [
                "–" if printed is None else printed.shown(1),
                "not run" if cell is None else over_trainings(cell),
                "–" if distance is None else f"{distance:.2f}",
            ]
        lines.append(f"| {method_label(row.method, row.rate)} | {' | '.join(cells)} |")
    return (
        "### Beside the paper\n\nThree of the hospitals of the paper's third table: A (Radboud, the source), D (UCL) "
        "and E (BIDMC). Dice in points per volume. What differs: 12 source cases, other patients than the paper's, of "
        "which a quarter is held out; images of 8 bits, of a lower resolution, as the configuration says; networks of "
        "minutes; ± is over trainings here, where there are several. Surface distances are in voxels, because the "
        "spacing of these files is not known; the paper prints none here.\n\n" + "\n".join(lines)
    )


def over_trainings(cell: dict) -> str:
    """The mean, and the standard deviation where there are several trainings."""
    scores = list(by_seed(cell).values())
    return f"{cell['mean']:.1f}" + (f" ± {stdev(scores):.1f}" if len(scores) > 1 else "")


def shown(cell: dict | None) -> tuple[str, str]:
    if cell is None:
        return "–", "–"
    if cell["gain"] is None:
        return f"{cell['mean']:.1f}", ""
    interval = "" if cell["low"] is None else f" ({points(cell['low'])} to {points(cell['high'])})"
    return f"{cell['mean']:.1f}{cell['mark']}", points(cell["gain"]) + interval


def run_of(task: dict) -> str:
    """How a comparison was run, in one sentence."""
    part = "" if task["cases"] is None else f"; at most {task['cases']} cases of a target, evenly spread"
    batches = "one by one" if task["batch_size"] in (None, 1) else f"batches of {task['batch_size']}"
    sizes = ", ".join(
        f"{target}: {size['cases']}" + ("" if size["cases"] == size["patients"] else f" of {size['patients']} patients")
        for target, size in task["targets"].items()
    )
    return (
        f"{up_to(task, 'seed')}, {up_to(task, 'order')}, {batches}{part}. Scored cases, the same for every method: "
        f"{sizes}."
    )


def up_to(task: dict, thing: str) -> str:
    """`3 seeds` where every row is over as many, `up to 3 seeds` where some are over fewer."""
    numbers = {row.get(f"{thing}s", 1) for row in task["rows"]}
    return ("up to " if len(numbers) > 1 else "") + count(max(numbers), thing)


def configured(name: str) -> str:
    """The file of a task, or that of which it takes other sites."""
    return f"`configs/real/{OTHER_SITES.get(name, name)}.toml`{' with other sites' if name in OTHER_SITES else ''}"


def changes(kept: dict) -> str:
    parts = []
    for name, task in kept.items():
        for target in dict.fromkeys(row["target"] for row in task["changing"]):
            rows = [row for row in task["changing"] if row["target"] == target]
            sites = [site for site, _ in rows[0]["parts"]]
            heads = " | ".join(f"{number}. {site}" for number, site in enumerate(sites, 1))
            lines = [f"| Method | {heads} |", "|:--|" + "--:|" * len(sites)]
            for row in rows:
                scores = " | ".join(f"{score:.1f}" for _, score in row["parts"])
                lines.append(f"| {method_label(row['method'], row['rate'])} | {scores} |")
            run = f"{up_to({'rows': rows}, 'seed')}, {up_to({'rows': rows}, 'order')}"
            parts.append(f"**{name}, {target}**, {rows[0]['cases']} cases, {run}\n\n" + "\n".join(lines))
    return "\n\n".join(parts) if parts else "Not run yet."


def passes(kept: dict) -> str:
    """Who degrades when the same images come again: the last pass against the first."""
    streams = {(name, row["target"]) for name, task in kept.items() for row in task["changing"] if repeated(row)}
    columns = sorted(streams, key=lambda stream: list(kept).index(stream[0]))
    found: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for name, target in columns:
        for row in kept[name]["changing"]:
            if row["target"] == target:
                (_, first), *_, (_, last) = row["parts"]
                found.setdefault((row["method"], row["rate"]), {})[name, target] = last - first
    if not found:
        return ""
    lines = [
        f"| Last pass over first, points | {' | '.join(f'{name}, {target}' for name, target in columns)} |",
        "|:--|" + "--:|" * len(columns),
    ]
    for method, rate in sorted(found, key=lambda row: place_of(row[0])):
        shown = [points(found[method, rate][at]) if at in found[method, rate] else "–" for at in columns]
        lines.append(f"| {method_label(method, rate)} | {' | '.join(shown)} |")
    lines.append("\nPTBN learns nothing: where images come in batches it differs by which of them share one.")
    return "\n".join(lines)


def repeated(row: dict) -> bool:
    return len(row["parts"]) > 1 and len({site for site, _ in row["parts"]}) == 1


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def why() -> str:
    """What docs/figures/why.py measured: only the statistics differ, one image at a time."""
    file = DOCS / "results" / "why.json"
    if not file.is_file():
        return ""
    lines = ["| | stored | shrinkage | instance | usual discrepancy |", "|:--|--:|--:|--:|--:|"]
    for task, entry in json.loads(file.read_text()).items():
        for site, scores in entry["sites"].items():
            shown = " | ".join(f"{scores[way]:.1f}" for way in ("source", "shrinkage", "instance"))
            level = f"{entry['discrepancy']:.3g}" if site == "source site" and entry["discrepancy"] is not None else ""
            lines.append(f"| {task}, {site} | {shown} | {level} |")
    return (
        "### Why\n\nOne image at a time, nothing learned, only the statistics of batch normalization differ "
        "(`python docs/figures/why.py runs/real SITES`; up to 24 images of a site). *Source site*: source images kept "
        "for validation. What instance statistics lose there they lose without any change of site. The usual "
        "discrepancy is the factor that Eq. (6) multiplies the rate with at the source site.\n\n" + "\n".join(lines)
    )


def sweep() -> str:
    """What docs/figures/sweep.py read: Tent at several initial rates."""
    file = DOCS / "results" / "sweep.json"
    if not file.is_file():
        return ""
    found = json.loads(file.read_text())
    alphas = sorted({alpha for cell in found.values() for alpha in cell["fixed"]}, key=float)
    lines = [
        "| | " + " | ".join(f"fixed {a}" for a in alphas) + " | spread | "
        + " | ".join(f"earlier default {a}" for a in alphas) + " | spread |",
        "|:--|" + "--:|" * (2 * len(alphas) + 2),
    ]  # fmt: skip
    spreads: dict = {"fixed": [], "recommended": []}
    for name, cell in found.items():
        shown = []
        for rule, values in spreads.items():
            scores = [cell[rule][alpha] for alpha in alphas]
            values.append(max(scores) - min(scores))
            shown += [f"{score:.1f}" for score in scores] + [f"{values[-1]:.1f}"]
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    ratio = fmean(spreads["recommended"]) / fmean(spreads["fixed"])
    return (
        "### The initial rate\n\nTent, over a factor of a thousand. Spread is best minus worst; the default of "
        f"that time, which is gone, has a mean spread of {100 * ratio:.0f} % of the fixed rate's.\n\n"
        + "\n".join(lines)
    )


def page(kept: dict) -> str:
    targets = sum(len(task["targets"]) for task in kept.values())
    seeds, orders = ({row.get(key, 1) for task in kept.values() for row in task["rows"]} for key in ("seeds", "orders"))
    run = f"**{_several(seeds, 'seed')} and {_several(orders, 'order')}**"
    head = (DOCS / "figures" / "real_head.md").read_text().strip()
    beginning, _, protocol = head.partition("<!-- overview -->")
    missing = [name for name in TITLES if name not in kept]
    parts = [
        beginning.strip(),
        f"## All together\n\n{count(targets, 'target')} of {count(len(kept), 'task')}, {run}, every method as its "
        "authors set it. Gains are means over targets, in points, each on the source models that both methods ran on; "
        "those over different targets do not compare: mind their number. In brackets the 95 % interval of the mean, by "
        "a bootstrap over tasks, of which there are few. *Gap closed*: gains over gaps between home and target, both "
        "summed over the targets at which there is a gap.",
        overview(kept),
        PICTURE,
        "### Is it the rate being dynamic?\n\nThe paper's rate (Eq. 6) against its controls, in points:",
        dynamic(kept),
        "### The source networks at home\n\nOn cases of the source site that training did not see; weights of the last "
        "epoch, so these cases decided nothing; of several trainings, each of which holds out other cases, the "
        "mean. *Trained at the target*: the same training with labels of the target, scored on cases of it "
        "that were held out: about what these data allow.",
        homes(kept),
        "### Expected quality against the truth\n\nOf the recommended recipe, case by case; slices of volumes have no "
        "score of their own.",
        expected(kept),
        protocol.strip(),
    ]
    for name, task in kept.items():
        notes = "  \n".join(note for note in task["notes"] if not note.startswith(("Points", "With a sign")))
        parts.append(
            f"## {TITLES[name]}\n\n{configured(name)}: {run_of(task)}\n\n{task_table(task)}\n\n"
            f"{task['metric'].capitalize()} in points; gain over Source with its 95 % interval (bootstrap over "
            f"patients and source trainings).  \n{notes}"
        )
        if task["source"][0].endswith("/radboud") and set(COLUMNS) & set(task["targets"]):
            parts.append(beside_the_paper(task))
    parts.append(
        "## Long and changing streams\n\nOne stream, several parts: the adapter is told nothing of where a part begins "
        "([how](changing.md)): `a+b` is a, then b; `a/b` the two in turn; `a>b` a that gives way to b little by "
        "little. A site that comes three times is the same images three times over. Mean of each part."
    )
    parts += [part for part in (passes(kept), changes(kept)) if part]
    earlier = [part for part in (why(), sweep()) if part]
    if earlier:
        parts.append(
            "## Earlier measurements\n\nOf older source networks, which were trained jointly with the rotation task; "
            "*recommended* is the default of that time (shrinkage statistics, relative rate, guard)."
        )
    parts += earlier
    if missing:
        parts.append("## Not run\n\n" + "\n".join(f"- {TITLES[name]} ({configured(name)})" for name in missing))
    return "\n\n".join(parts) + "\n"


def _several(numbers: set[int], thing: str) -> str:
    few, many = min(numbers), max(numbers)
    return count(few, thing) if few == many else f"{few} to {many} {thing}s"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
