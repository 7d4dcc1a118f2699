"""Writes docs/real.md from finished benchmarks on real sites: python docs/figures/real.py runs/real.

The full results stay where they are: they name every case. What is kept beside the page is each benchmark's
configuration, provenance and summary (docs/results/real.json) with the table made from the full results.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from dltta.evaluation.formats import markdown
from dltta.evaluation.headline import sentences
from dltta.evaluation.results import Results, strict
from dltta.evaluation.tables import by_target

DOCS = Path(__file__).parent.parent
TITLES = {
    "oct_layers": "Retinal layers, Optovue → Cirrus",
    "nuclei_tissue": "Nuclei in stained tissue, white → lilac",
    "nuclei_fluo": "Nuclei in fluorescence, one acquisition format → another",
    "wbc_cells": "White blood cells, segmentation, one laboratory → two others",
    "wbc_types": "White blood cells, kinds, one laboratory → two others",
    "spinal_cord": "Spinal cord MRI, one scanner → three others",
}

NAMES = {"ptbn": "PTBN", "ttt": "TTT", "tent": "Tent", "atta": "ATTA"}
COMPARISONS = (
    ("dynamic", "fixed", "The paper's dynamic rate (Eq. 6) against the paper's fixed rate, in points:"),
    (
        "dynamic",
        "matched",
        "The same against a fixed rate equal to the dynamic stream's own mean, so that a gain from a merely larger "
        "or smaller rate is not called dynamic:",
    ),
    (
        "recommended",
        "fixed",
        "The recommended default (shrinkage statistics, relative rate, guard) against the paper's recipe with a fixed "
        "rate:",
    ),
)
HARM = (
    ("fixed", "The paper's recipe with a fixed rate against no adaptation:"),
    ("recommended", "The recommended default against no adaptation:"),
)


def main(folder: Path) -> None:
    kept = {}
    for name in TITLES:
        if (folder / name / "results.json").is_file():
            results = Results.load(folder / name / "results.json")
            kept[name] = {
                "config": results.config,
                "provenance": asdict(results.provenance),
                "summary": [asdict(row) for row in results.summary],
                "table": markdown(by_target(results)),
                "headline": sentences(results),
            }
    (DOCS / "results" / "real.json").write_text(json.dumps(strict(kept), indent=1, ensure_ascii=False) + "\n")
    (DOCS / "real.md").write_text(page(kept))


def cells(kept: dict) -> dict:
    """(task, target): score in points by (method, rate); under "source site" the source model there."""
    found: dict = {}
    for name, entry in kept.items():
        metric = "accuracy" if any(row["metric"] == "accuracy" for row in entry["summary"]) else "dice"
        rows = [row for row in entry["summary"] if row["metric"] == metric]
        there = [100 * row["mean"] for row in rows if row["source"] == row["target"]]
        for row in rows:
            if row["source"] != row["target"]:
                cell = found.setdefault((name, row["target"]), {"source site": there[0] if there else None})
                cell[row["method"], row["rate"]] = 100 * row["mean"]
    return found


def against(found: dict, one: str, other: str) -> str:
    """A table of how much better one rate is than another: per method the mean over the cells, and the worst cell."""
    lines = [f"| Method | {one} over {other}, mean | worst cell | cells ≥ 0 |", "|:--|--:|--:|--:|"]
    for method in ("ttt", "tent", "atta"):
        gains = {
            place: cell[method, one] - cell[method, other]
            for place, cell in found.items()
            if (method, one) in cell and (method, other) in cell
        }
        if gains:
            worst = min(gains, key=gains.get)
            lines.append(
                f"| {NAMES[method]} | {fmean(gains.values()):+.2f} | {gains[worst]:+.2f} ({worst[0]}, {worst[1]}) | "
                f"{sum(round(gain, 2) >= 0 for gain in gains.values())} of {len(gains)} |"
            )
    return "\n".join(lines) if len(lines) > 2 else ""


def harm(found: dict, rate: str) -> str:
    """A table of what adaptation does to each target against no adaptation, and how much of the gap it closes."""
    methods = [m for m in ("ptbn", "ttt", "tent", "atta") if any((m, rate) in cell for cell in found.values())]
    lines = [
        "| Target | source model at the source site | at the target | " + " | ".join(NAMES[m] for m in methods) + " |",
        "|:--|--:|--:|" + "--:|" * len(methods),
    ]
    closed: dict = {m: [] for m in methods}
    for (task, target), cell in found.items():
        source = cell["source", "none"]
        shown = []
        for m in methods:
            if (m, rate) not in cell:
                shown.append("–")
                continue
            shown.append(f"{cell[m, rate]:.1f} ({cell[m, rate] - source:+.1f})")
            if cell["source site"] is not None and cell["source site"] > source:
                closed[m].append((cell[m, rate] - source) / (cell["source site"] - source))
        at_source = "–" if cell["source site"] is None else f"{cell['source site']:.1f}"
        lines.append(f"| {task}, {target} | {at_source} | {source:.1f} | " + " | ".join(shown) + " |")
    share = ["–" if not closed[m] else f"{100 * fmean(closed[m]):.0f} %" for m in methods]
    lines.append(
        "| *share of the gap to the source site closed, mean over what was run* | | | " + " | ".join(share) + " |"
    )
    return "\n".join(lines)


def overall(kept: dict) -> str:
    """What the tables below say together."""
    found = cells(kept)
    parts = ["## All together"]
    for one, other, text in COMPARISONS:
        if table := against(found, one, other):
            parts += [text, table]
    for rate, text in HARM:
        if any(key[1:] == (rate,) for cell in found.values() for key in cell if isinstance(key, tuple)):
            parts += [text, harm(found, rate)]
    return "\n\n".join(parts)


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
        "## Why\n\nOne image at a time, nothing learned, only the statistics of batch normalization differ "
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
        + " | ".join(f"recommended {a}" for a in alphas) + " | spread |",
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
    rates = ",".join(f"{rule}:{alpha}" for rule in spreads for alpha in alphas)
    return (
        "## The initial rate\n\nTent, over a factor of a thousand. Spread is best minus worst; the recommended "
        f"default's mean spread is {100 * ratio:.0f} % of the fixed rate's.\n\n```\n"
        "dltta bench configs/real/NAME.toml --data SITES --work runs/real/NAME -o runs/sweep/NAME \\\n"
        f"  --methods source,tent --rates {rates}\npython docs/figures/sweep.py runs/sweep\n```\n\n" + "\n".join(lines)
    )


def page(kept: dict) -> str:
    missing = [name for name in TITLES if name not in kept]
    parts = [(DOCS / "figures" / "real_head.md").read_text().strip(), overall(kept)]
    for name, entry in kept.items():
        config = entry["config"]
        training = config["training"]
        run = f"{training['epochs']} epochs of source training"
        run += f"; {_count(config['seeds'], 'seed')}, {_count(config['orders'], 'order')}."
        headline = " ".join(entry["headline"])
        parts.append(
            f"## {TITLES[name]}\n\n`configs/real/{name}.toml`: {run}\n\n{entry['table'].strip()}\n\n{headline}"
        )
    parts += [part for part in (why(), sweep()) if part]
    if missing:
        parts.append(
            "## Not run yet\n\n" + "\n".join(f"- {TITLES[name]} (`configs/real/{name}.toml`)" for name in missing)
        )
    return "\n\n".join(parts) + "\n"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
