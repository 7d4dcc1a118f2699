"""How much does the initial rate matter? python docs/figures/sweep.py

Draws docs/images/sweep.png from docs/results/sweep.json: Tent at several rates, fixed and with the default of an
earlier version (a relative rate and the guard), which this version does not have. docs/figures/real.py puts the table
on its page.
"""

import json
import math
from pathlib import Path

from matplotlib.figure import Figure

DOCS = Path(__file__).parent.parent
COLORS = {"fixed": "#c0392b", "recommended": "#1f6fb4"}
LABELS = {"fixed": "Tent, fixed rate", "recommended": "Tent, an earlier default"}


def main() -> None:
    found = json.loads((DOCS / "results" / "sweep.json").read_text())
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
            axis.semilogx(*zip(*points, strict=True), "o-", color=color, markersize=4, label=LABELS[rule])
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
    main()
