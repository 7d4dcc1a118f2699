"""Draws the README's picture and table from a finished `dltta demo`: python docs/figures/demo.py runs/demo/oct."""

import shutil
import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from dltta.config import open_dataset
from dltta.evaluation.formats import markdown
from dltta.evaluation.results import Results
from dltta.evaluation.tables import by_target

DOCS = Path(__file__).parent.parent
COLORS = ["#000000", "#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"]
SHOWN = {"source_none": "no adaptation", "tent_dynamic": "adapted (Tent, dynamic rate)"}


def main(run: Path) -> None:
    results = Results.load(run / "results.json")
    target = results.config["targets"][0]
    dataset = open_dataset(target)
    cases = {dataset[i].name: dataset[i] for i in range(len(dataset))}
    prefix = target.replace(":", "-")
    predictions = {kind: np.load(next((run / "examples").glob(f"{prefix}_{kind}_*.npz"))) for kind in SHOWN}
    name = sorted(predictions["source_none"].files)[1]
    case = cases[name]
    figure = Figure(figsize=(11, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["image", "truth", "before", "after"], ["rate", "rate", "gain", "gain"]])
    show = {"cmap": ListedColormap(COLORS), "vmin": 0, "vmax": 8, "interpolation": "nearest"}
    axes["image"].imshow(case.image[0], cmap="gray")
    axes["image"].set_title("synthetic image, new scanner", fontsize=9)
    axes["truth"].imshow(case.label, **show)
    axes["truth"].set_title("ground truth", fontsize=9)
    for place, kind in (("before", "source_none"), ("after", "tent_dynamic")):
        score = _stream(results, kind).cases[_position(results, kind, name)].metrics["dice"]
        axes[place].imshow(predictions[kind][name], **show)
        axes[place].set_title(f"{SHOWN[kind]}: Dice {100 * score:.0f}", fontsize=9)
    for place in ("image", "truth", "before", "after"):
        axes[place].set_axis_off()
    dynamic = _stream(results, "tent_dynamic").cases
    axes["rate"].plot([row.rate for row in dynamic], color="#0072b2", marker=".", linewidth=1)
    axes["rate"].set(xlabel="image", ylabel="learning rate", title="rate chosen for each image (20 fill the memory)")
    before, after = (
        {row.case: row.metrics["dice"] for row in _stream(results, k).cases} for k in ("source_none", "tent_dynamic")
    )
    axes["gain"].scatter([100 * before[n] for n in before], [100 * after[n] for n in before], s=12, color="#d55e00")
    axes["gain"].plot([0, 100], [0, 100], color="#888888", linewidth=0.8)
    axes["gain"].set(xlabel="Dice without adaptation", ylabel="adapted", title="every image above the line is better")
    for place in ("rate", "gain"):
        axes[place].title.set_fontsize(9)
        axes[place].spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "images" / "demo.png")
    _fill_readme(markdown(by_target(results)))
    shutil.copy(run / "results.json", DOCS / "results" / "demo_oct.json")


def _stream(results: Results, kind: str):
    method, rate = kind.split("_")
    return next(s for s in results.streams if (s.method, s.rate) == (method, rate) and s.target != s.source)


def _position(results: Results, kind: str, name: str) -> int:
    return [row.case for row in _stream(results, kind).cases].index(name)


def _fill_readme(table: str) -> None:
    readme = DOCS.parent / "README.md"
    text = readme.read_text()
    start, end = "<!-- demo table -->", "<!-- end of demo table -->"
    head, rest = text.split(start)
    readme.write_text(f"{head}{start}\n{table.strip()}\n{rest[rest.index(end) :]}")


main(Path(sys.argv[1]))
