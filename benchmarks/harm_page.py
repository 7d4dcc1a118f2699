"""docs/guard.md and its figures from what harmful streams did: python benchmarks/harm_page.py redraws them.

The table between BEGIN and END is that of docs/figures/guard_rules.py and stays as it is.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

COLORS = {"source": "#888888", "unguarded": "#c0392b", "guarded": "#1f6fb4"}
LABELS = {"source": "source model", "unguarded": "adapted, no guard", "guarded": "adapted, with guard"}
TOLERANCE = 1.0  # points that the guard may cost
WINDOW = {"segmentation": 5, "classification": 31}  # scored images that are averaged along the stream
BEGIN, END = "<!-- guard rules: begin -->", "<!-- guard rules: end -->"


def write_page(results: Mapping[str, Any], output: Path) -> None:
    (output / "images").mkdir(parents=True, exist_ok=True)
    for name, bed in results["beds"].items():
        for strength in results["strengths"]:
            draw(bed, strength).savefig(output / "images" / f"guard_{name}_{strength}.png", dpi=110)
    written = output / "guard.md"
    written.write_text(page(results, rules_in(written.read_text() if written.is_file() else "")))


def page(results: Mapping[str, Any], rules: str) -> str:
    """The whole page; `rules` is the table of what each rule is worth."""
    head = (Path(__file__).parent / "guard_head.md").read_text()
    before, after = head.split(f"{BEGIN}\n{END}")
    sections = [section(name, bed, results["strengths"]) for name, bed in results["beds"].items()]
    return f"{before}{BEGIN}\n{rules}{END}{after}\n{promise(results)}\n" + "\n".join(sections)


def rules_in(text: str) -> str:
    """The table of docs/figures/guard_rules.py in a page."""
    return text.partition(f"{BEGIN}\n")[2].partition(END)[0]


def promise(results: Mapping[str, Any]) -> str:
    """Is the promise kept? Counted, not claimed."""
    rows = [row for bed in results["beds"].values() for row in table(bed)]
    kept = [row for row in rows if row["margin"] >= -TOLERANCE]
    worst = min(rows, key=lambda row: row["margin"])
    hurt = max(rows, key=lambda row: row["source"] - row["unguarded"])
    machine = results["provenance"]["machine"]
    small = "**Small networks, to try the program.** " if results["quick"] else ""
    return (
        f"{small}In {len(kept)} of {len(rows)} streams the guarded one is within {TOLERANCE:g} point of the better of "
        f"source model and unguarded stream; the worst is {worst['margin']:+.1f} ({worst['stream']}, "
        f"{worst['strength']}). Unguarded, the greatest damage is {hurt['source'] - hurt['unguarded']:.1f} points "
        f"below the source model ({hurt['stream']}, {hurt['strength']}). Made by `make bench-harm` with dltta "
        f"{results['provenance']['version']} on {machine['cpu']}, with source networks that learned their task alone.\n"
    )


def table(bed: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for stream, strengths in bed["streams"].items():
        for strength, entry in strengths.items():
            means = {way: _mean(part["scores"]) for way, part in entry.items()}
            margin = means["guarded"] - max(means["source"], means["unguarded"])
            scored = [s is not None for s in entry["guarded"]["scores"]]
            pairs = list(zip(entry["guarded"]["decisions"], scored, strict=True))
            rows.append(
                {
                    "stream": stream,
                    "strength": strength,
                    **means,
                    "margin": margin,
                    "genuine": Counter(v for v, is_scored in pairs if is_scored),
                    "useless": Counter(v for v, is_scored in pairs if not is_scored),
                }
            )
    return rows


def section(name: str, bed: Mapping[str, Any], strengths: Mapping[str, str]) -> str:
    lines = []
    for strength, meaning in strengths.items():
        lines += [
            f"\n*{strength}*: {meaning}.\n",
            "| stream | source | unguarded | guarded | guarded − better of both | decisions on genuine | on useless |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in table(bed):
            if row["strength"] == strength:
                scores = " | ".join(f"{row[way]:.1f}" for way in ("source", "unguarded", "guarded"))
                lines.append(
                    f"| {row['stream']} | {scores} | {row['margin']:+.1f} | {_counts(row['genuine'])} | "
                    f"{_counts(row['useless'])} |"
                )
        lines.append(f"\n![{bed['title']}, {strength}: scores along the streams](images/guard_{name}_{strength}.png)")
    unit = "Mean Dice" if bed["task"] == "segmentation" else "Accuracy"
    return f"### {bed['title']}\n\n{unit} of the genuine images, in percent.\n" + "\n".join(lines) + "\n"


def draw(bed: Mapping[str, Any], strength: str) -> Figure:
    """One panel per stream: running means of the scores, useless images shaded, objections as marks below."""
    names = list(bed["streams"])
    rows = (len(names) + 1) // 2
    figure = Figure(figsize=(11, 2.3 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for axis, name in zip(axes, names, strict=False):
        entry = bed["streams"][name][strength]
        _panel(axis, entry, WINDOW[bed["task"]])
        axis.set_title(name, fontsize=10, loc="left")
    for axis in axes[len(names) :]:
        axis.set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def _panel(axis: Any, entry: Mapping[str, Any], window: int) -> None:
    scores = entry["guarded"]["scores"]
    for start, end in _runs([value is None for value in scores]):
        axis.axvspan(start - 0.5, end - 0.5, color="#f0e2c0", linewidth=0)
    for way, part in entry.items():
        places = [place for place, value in enumerate(part["scores"]) if value is not None]
        values = _smooth([value for value in part["scores"] if value is not None], window)
        axis.plot(places, values, color=COLORS[way], label=LABELS[way], linewidth=1.6)
    harmless = ("accepted", "in-distribution")
    marked = [i for i, outcome in enumerate(entry["guarded"]["decisions"]) if outcome not in harmless]
    axis.plot(marked, [2] * len(marked), "|", color="#444444", markersize=6, label="the guard steps in")
    axis.set(ylim=(0, 100), xlim=(-0.5, len(scores) - 0.5))
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    half = window // 2
    return [fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Where flags are set: first position and the one after the last, of every run."""
    edges = [i for i in range(len(flags) + 1) if (i < len(flags) and flags[i]) != (i > 0 and flags[i - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _mean(scores: Sequence[float | None]) -> float:
    return fmean(score for score in scores if score is not None)


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.most_common())


if __name__ == "__main__":
    docs = Path(__file__).resolve().parent.parent / "docs"
    write_page(json.loads((docs / "results" / "harm.json").read_text()), docs)
