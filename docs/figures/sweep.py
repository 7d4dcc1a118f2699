"""How much does the initial rate matter? python docs/figures/sweep.py runs/sweep

Reads finished benchmarks of Tent at several rates (docs/real.md says how); writes docs/results/sweep.json and
docs/images/sweep.png. docs/figures/real.py puts the table on its page.
"""

import json
import math
import sys
from pathlib import Path

from matplotlib.figure import Figure

from dltta.evaluation.results import Results
from dltta.recipes import split_rate

DOCS = Path(__file__).parent.parent
COLORS = {"fixed": "#c0392b", "recommended": "#1f6fb4"}


def main(folder: Path) -> None:
    found = {}
    for file in sorted(folder.glob("*/results.json")):
        results = Results.load(file)
        metric = "accuracy" if any(row.metric == "accuracy" for row in results.summary) else "dice"
        for row in results.summary:
            if row.metric != metric or row.source == row.target:
                continue
            cell = found.setdefault(f"{file.parent.name}, {row.target}", {"fixed": {}, "recommended": {}})
            if row.method == "source":
                cell["source"] = 100 * row.mean
            elif row.method == "tent" and split_rate(row.rate)[1] is not None:
                rule, alpha = split_rate(row.rate)
                cell[rule][f"{alpha:g}"] = 100 * row.mean
    (DOCS / "results" / "sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found).savefig(DOCS / "images" / "sweep.png", dpi=120)


def draw(found: dict) -> Figure:
    columns = math.ceil(math.sqrt(len(found)))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.4 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (name, cell) in zip(axes, found.items(), strict=False):
        axis.axhline(cell["source"], color="#888888", linewidth=1, label="source")
        for rule, color in COLORS.items():
            points = sorted((float(alpha), score) for alpha, score in cell[rule].items())
            axis.semilogx(*zip(*points, strict=True), "o-", color=color, markersize=4, label=f"Tent, {rule}")
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_ylim(0, 100)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    figure.supxlabel("initial rate α", fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main(Path(sys.argv[1]))
