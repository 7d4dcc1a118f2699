"""9 figures. The paper's figures, drawn from our own streams, each as the bytes of a PNG file."""

import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dltta.evaluation.examples import Example
from dltta.evaluation.rendering import CLASS_COLORS, render_errors, render_image, render_overlay

COLORS = [tuple(part / 255 for part in CLASS_COLORS[number]) for number in (4, 5, 2)]
STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


@dataclass(frozen=True)
class Curve:
    """The test-time loss of every image of a stream: its mean and sd over the image's positions."""

    means: tuple[float, ...]
    sds: tuple[float, ...]


def segmentation_figure(examples: Sequence[Example], captions: Sequence[Mapping[str, str]], about: str) -> bytes:
    """Two rows per image: image and predictions above, ground truth and error maps below; `captions` by prediction."""
    columns = 1 + max(len(example.predictions) for example in examples)
    with _style():
        figure = Figure(figsize=(1.9 * columns, 0.5 + 3.0 * len(examples)), layout="constrained")
        grid = figure.subplots(2 * len(examples), columns, squeeze=False)
        for number, (example, said) in enumerate(zip(examples, captions, strict=True)):
            above, below = grid[2 * number], grid[2 * number + 1]
            above[0].set_title(f"{example.name}\nimage, ground truth", fontsize=8)
            above[0].imshow(render_image(example), aspect="auto")
            if example.label is not None:
                below[0].imshow(render_overlay(example, example.label), aspect="auto")
            for place, (label, prediction) in enumerate(example.predictions.items(), start=1):
                above[place].set_title(said[label], fontsize=8)
                above[place].imshow(render_overlay(example, prediction), aspect="auto")
                below[place].imshow(render_errors(example, prediction), aspect="auto")
        for axes in grid.flat:
            axes.set_axis_off()
        return _png(figure, about)


def loss_figure(curves: Mapping[str, Curve], about: str) -> bytes:
    """A plot per method, one above the other with the same axes: mean as a line, one sd to both sides as a band."""
    with _style():
        figure = Figure(figsize=(6, 0.6 + 2.2 * len(curves)), layout="constrained")
        plots = figure.subplots(len(curves), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        for axes, color, (label, curve) in zip(plots, COLORS, curves.items(), strict=False):
            places = range(1, len(curve.means) + 1)
            band = [(mean - sd, mean + sd) for mean, sd in zip(curve.means, curve.sds, strict=True)]
            axes.fill_between(places, *zip(*band, strict=True), color=color, alpha=0.2, linewidth=0)
            axes.plot(places, curve.means, color=color)
            axes.set_title(label, loc="left")
            axes.set_ylabel("test-time loss")
        _whole(plots[-1], "image of the stream")
        return _png(figure, about)


def retrieval_figure(sizes: Sequence[int], lines: Mapping[str, tuple[float, Sequence[float]]], about: str) -> bytes:
    """Dice over the retrieval size D, a line per method; dashed: the same method with the fixed rate."""
    with _style():
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        for color, (label, (fixed, dynamic)) in zip(COLORS, lines.items(), strict=False):
            axes.plot(sizes, dynamic, "o-", color=color, label=f"{label} + dynamic")
            axes.axhline(fixed, color=color, linestyle="--", label=f"{label}, fixed rate")
        axes.set_ylabel("Dice, points")
        axes.legend(fontsize=7, ncols=len(lines))
        _whole(axes, "retrieval size D")
        axes.set_xticks(sizes)
        return _png(figure, about)


def _whole(axes: Axes, name: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(name)


def _style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(STYLE)


def _png(figure: Figure, about: str) -> bytes:
    figure.suptitle(about, fontsize=8)
    FigureCanvasAgg(figure)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()
