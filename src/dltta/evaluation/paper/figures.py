"""9 figures. The paper's figures, drawn from our own streams, each as the bytes of a PNG file."""

import io
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dltta.evaluation.examples import Example
from dltta.evaluation.rendering import CLASS_COLORS, absolute_error, class_color, render_image, render_overlay


def _unit(color: tuple[int, int, int]) -> tuple[float, float, float]:
    return color[0] / 255, color[1] / 255, color[2] / 255


COLORS = [_unit(CLASS_COLORS[number]) for number in (4, 5, 2)]
LETTERS_PER_INCH = 15  # of the heading
STYLE: dict[Any, Any] = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}


@dataclass(frozen=True)
class Curve:
    """The test-time loss of every image of a stream: its mean and sd over the image's positions."""

    means: tuple[float, ...]
    sds: tuple[float, ...]


@dataclass(frozen=True)
class Track:
    """What one rate did along a stream, image by image; None where there is no such number."""

    rates: tuple[float | None, ...]
    discrepancies: tuple[float | None, ...]
    dice: tuple[float, ...]  # points


def rates_figure(images: Mapping[str, Example], tracks: Mapping[str, Track], about: str) -> bytes:
    """Some images by caption above; below, image by image: discrepancy, learning rate and Dice, a line per rate."""
    with _style():
        figure = Figure(figsize=(8, 7.2), layout="constrained")
        above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1, 4))[:, 0]
        for axes, (caption, example) in zip(
            above.subplots(1, len(images), squeeze=False)[0], images.items(), strict=True
        ):
            axes.imshow(render_image(example), aspect="auto")
            axes.set_title(caption, fontsize=8)
            axes.set_axis_off()
        plots = below.subplots(3, 1, sharex=True)
        for number, (label, track) in enumerate(tracks.items()):
            width, alpha = (4.0, 0.35) if number == 0 else (1.4, 1.0)  # the first stays visible where lines agree
            for axes, values in zip(plots, (track.discrepancies, track.rates, track.dice), strict=True):
                known = [(place, value) for place, value in enumerate(values, start=1) if value is not None]
                if known:
                    axes.plot(
                        *zip(*known, strict=True), ".-", color=COLORS[number], label=label, linewidth=width, alpha=alpha
                    )
        for axes, name in zip(plots, ("discrepancy", "learning rate", "Dice, points"), strict=True):
            axes.set_ylabel(name)
        plots[1].set_yscale("log")
        plots[2].legend(fontsize=7, ncols=len(tracks))
        filling = sum(
            all(values) for values in zip(*(map(_missing, t.discrepancies) for t in tracks.values()), strict=True)
        )
        for axes in plots:
            axes.axvspan(0.5, filling + 0.5, color="#eeeeee", linewidth=0)
            axes.set_xlim(0.5, len(next(iter(tracks.values())).dice) + 0.5)
        if filling:
            plots[0].text(0.02, 0.5, "the memory is filling", transform=plots[0].transAxes, fontsize=7)
        _whole(plots[-1], "image of the stream")
        return _png(figure, about)


def segmentation_figure(examples: Sequence[Example], captions: Sequence[Mapping[str, str]], about: str) -> bytes:
    """Two rows per image: image and predictions above, ground truth and absolute errors below.

    `captions` go by prediction. The legend names the structures, the bar the distance in class values.
    """
    columns = 1 + max(len(example.predictions) for example in examples)
    classes = examples[0].classes
    with _style():
        figure = Figure(figsize=(1.9 * columns, 1.0 + 3.0 * len(examples)), layout="constrained")
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
                errors = below[place].imshow(
                    absolute_error(example, prediction), aspect="auto", cmap="magma", vmin=0, vmax=len(classes) - 1
                )
        for axes in grid.flat:
            axes.set_axis_off()
        figure.colorbar(errors, ax=grid, shrink=0.6, label="absolute error, |predicted − true class|")
        patches = [Patch(color=_unit(class_color(value)), label=name) for value, name in enumerate(classes) if value]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8)
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


def _missing(value: float | None) -> bool:
    return value is None


def _whole(axes: Axes, name: str) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(name)


def _style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(STYLE)


def _png(figure: Figure, about: str) -> bytes:
    figure.suptitle(textwrap.fill(about, int(LETTERS_PER_INCH * figure.get_figwidth())), fontsize=8)
    FigureCanvasAgg(figure)
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()
