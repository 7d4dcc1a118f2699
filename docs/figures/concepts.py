"""Draws the pictures of docs/concepts.md from the demo's results: python docs/figures/concepts.py

docs/images/memory.png: discrepancy and rate of Tent along the stream whose scanner changes.
docs/images/quality.png: expected against true Dice of the default recipe.
"""

from pathlib import Path

from matplotlib.figure import Figure

from dltta.evaluation.expected import quality_streams
from dltta.evaluation.parts import parts
from dltta.evaluation.results import Results

DOCS = Path(__file__).parent.parent
BLUE, RED, GRAY = "#0072b2", "#c0392b", "#888888"


def main() -> None:
    demo, changing = (Results.load(DOCS / "results" / f"{name}.json") for name in ("demo_oct", "demo_changing"))
    memory(changing).savefig(DOCS / "images" / "memory.png", dpi=110)
    quality(demo).savefig(DOCS / "images" / "quality.png", dpi=110)


def memory(results: Results) -> Figure:
    """What the memory notices: nothing until it is full, then how unusual each prediction is."""
    cases = next(stream for stream in results.streams if (stream.method, stream.rate) == ("tent", "dynamic")).cases
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    places = range(1, len(cases) + 1)
    top.plot(places, [row.discrepancy for row in cases], color=BLUE, marker=".")
    top.set(ylabel="discrepancy")
    bottom.plot(places, [row.rate for row in cases], color=RED, marker=".")
    bottom.set(ylabel="learning rate", xlabel="image of the stream")
    ready = next(i for i, row in enumerate(cases, start=1) if row.discrepancy is not None)
    for axes in (top, bottom):
        axes.axvspan(1, ready - 0.5, color="#f0f0f0", linewidth=0)
        for part in parts(cases, "dice")[1:]:
            axes.axvline(part.first - 0.5, color="#333333", linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    top.text(1.3, top.get_ylim()[1] * 0.85, "the memory fills: initial rate", fontsize=9, color="#555555")
    for part in parts(cases, "dice")[1:]:
        top.text(part.first, top.get_ylim()[1] * 0.85, f"scanner {part.site}", fontsize=9, color="#555555")
    return figure


def quality(results: Results) -> Figure:
    """Dots on the line were expected rightly; red ones lie outside of their interval."""
    (stream,) = quality_streams(results)
    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 100], [0, 100], color=GRAY, linewidth=1)
    for row in stream.cases:
        low, middle, high, true = (
            100 * value for value in (row.quality_low, row.quality, row.quality_high, row.metrics["dice"])
        )
        color = BLUE if low <= true <= high else RED
        axes.plot([low, high], [true, true], color=color, linewidth=1, alpha=0.4)
        axes.plot(middle, true, "o", color=color, markersize=4)
    axes.set(xlim=(0, 101), ylim=(0, 101), xlabel="expected Dice and its 90 % interval", ylabel="true Dice")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
