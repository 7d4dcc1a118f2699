"""Makes what README shows of a finished `dltta demo`: python docs/figures/demo.py runs/demo/oct

The animation of the stream whose scanner changes half-way (docs/images/demo.gif), its last frame as a picture
(docs/images/demo.png), the results behind them (docs/results/demo_*.json), and the numbers that pages quote.
"""

import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from PIL import Image

import concepts
import numbers_of_pages
from dltta.config import open_dataset
from dltta.data.streams import SiteStream, split_stream
from dltta.evaluation.parts import parts
from dltta.evaluation.results import Results, StreamResult

DOCS = Path(__file__).parent.parent
LAYERS = ["#000000", "#56b4e9", "#e69f00", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999"]
METHODS = {  # drawn along the stream
    "source": ("no adaptation", "#888888"),
    "ptbn": ("statistics only (PTBN)", "#0072b2"),
    "recommended": ("recommended", "#d55e00"),
}
LARGEST = 600_000  # bytes of the animation
SECONDS = 1.3  # for each image


def main(run: Path) -> None:
    results = Results.load(run / "changing" / "results.json")
    frames = [_picture(figure) for figure in _frames(run, results)]
    save(frames, DOCS / "images" / "demo.gif")
    frames[-1].save(DOCS / "images" / "demo.png", optimize=True)
    for name, source in (("demo_oct", run), ("demo_changing", run / "changing")):
        shutil.copy(source / "results.json", DOCS / "results" / f"{name}.json")
    concepts.main()
    numbers_of_pages.main()


def save(frames: list[Image.Image], path: Path) -> None:
    """All frames with one palette, the last one shown longer."""
    palette = frames[-1].quantize(colors=96)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    times = [round(1000 * SECONDS)] * (len(frames) - 1) + [4000]
    small[0].save(path, save_all=True, append_images=small[1:], duration=times, loop=0, optimize=True)
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {LARGEST}; draw fewer frames")


def _frames(run: Path, results: Results) -> Iterator[Figure]:
    """One for each image whose predictions were kept, in the order of the stream."""
    turns, sites = split_stream(results.config["targets"][0])
    stream = SiteStream(tuple(map(open_dataset, sites)), turns)
    cases = {stream[i].name: stream[i] for i in range(len(stream))}
    streams = {each.method: each for each in results.streams}
    kept = {method: _predictions(run, results, method) for method in ("source", "recommended")}
    order = [row.case for row in streams["source"].cases]
    for place, name in enumerate(order):
        if name in kept["source"]:
            shown = {method: kept[method][name] for method in kept}
            yield _draw(cases[name], shown, streams, place)


def _predictions(run: Path, results: Results, method: str) -> dict[str, np.ndarray]:
    prefix = "-".join(results.config["targets"][0].split(",")).replace(":", "-")
    (path,) = (run / "examples").glob(f"{prefix}_{method}_*.npz")
    with np.load(path) as saved:
        return dict(saved)


def _draw(case, shown: dict[str, np.ndarray], streams: dict[str, StreamResult], place: int) -> Figure:
    figure = Figure(figsize=(8.8, 4.3), dpi=100, layout="constrained")
    axes = figure.subplot_mosaic(
        [["image", "truth"], ["source", "recommended"], ["along", "along"]], height_ratios=[1, 1, 1.25]
    )
    colors = {"cmap": ListedColormap(LAYERS), "vmin": 0, "vmax": 8, "interpolation": "nearest", "aspect": "auto"}
    axes["image"].imshow(case.image[0], cmap="gray", aspect="auto")
    axes["image"].set_title(f"image {place + 1}, scanner {case.site}", fontsize=10, loc="left")
    axes["truth"].imshow(case.label, **colors)
    axes["truth"].set_title("truth (the methods never see it)", fontsize=10, loc="left")
    for method, prediction in shown.items():
        row = streams[method].cases[place]
        said = "" if row.quality is None else f", expected {100 * row.quality:.0f}"
        axes[method].imshow(prediction, **colors)
        title = f"{METHODS[method][0]}: Dice {100 * row.metrics['dice']:.0f}{said}"
        axes[method].set_title(title, fontsize=10, loc="left", color=METHODS[method][1], fontweight="bold")
    for name in ("image", "truth", "source", "recommended"):
        axes[name].set_axis_off()
    _along(axes["along"], streams, place)
    return figure


def _along(axes, streams: dict[str, StreamResult], place: int) -> None:
    """Dice up to this image; where the scanner changes."""
    cases = streams["source"].cases
    for method, (label, color) in METHODS.items():
        values = [100 * row.metrics["dice"] for row in streams[method].cases[: place + 1]]
        axes.plot(range(1, len(values) + 1), values, color=color, label=label, marker=".", markersize=4, linewidth=1.3)
    for part in parts(cases, "dice"):
        if part.first > 1:
            axes.axvline(part.first - 0.5, color="#333333", linewidth=1)
        axes.text(part.first, 3, f"scanner {part.site}", fontsize=9, color="#555555")
    axes.set(xlim=(0.5, len(cases) + 0.5), ylim=(0, 103), xlabel="image of the stream", ylabel="Dice")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="center left")


def _picture(figure: Figure) -> Image.Image:
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Image.open(buffer).convert("RGB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
