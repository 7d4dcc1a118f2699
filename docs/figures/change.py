"""Draws docs/images/change.png: what notices that the site changes? python docs/figures/change.py

A synthetic stream goes from the source's scanner to another and back, twice. Needs the OCT network of `make bench-harm`
(runs/harm/oct); what was measured is kept in docs/results/change.json.
"""

import json
from pathlib import Path
from statistics import fmean, median

import torch
from matplotlib.figure import Figure

from dltta.config import AdaptationSettings, make_adapter
from dltta.data.phantom import changing
from dltta.metrics import dice_per_class, mean_defined
from dltta.models.calibration import LayerSamples, OODScore
from dltta.models.io.checkpoint import load_checkpoint
from dltta.quality.guard import Limits

DOCS = Path(__file__).parent.parent
SITES = ("spectralis", "cirrus", "spectralis", "cirrus")
BLOCK = 24
AFTER = 4  # images after a change that are compared with the others
RULES = {
    "dynamic": ("Eq. (6)", "#c0392b", AdaptationSettings(ready="neighbors")),
    "relative": ("relative, recommended", "#1f6fb4", AdaptationSettings(ready="neighbors", statistics="shrinkage")),
}


def main() -> None:
    torch.set_num_threads(2)
    checkpoint = load_checkpoint(DOCS.parent / "runs" / "harm" / "oct")
    stream = changing("oct", SITES, BLOCK * len(SITES), seed=3000, size=(128, 64))
    cases = [stream[i] for i in range(len(stream))]
    found = {"sites": SITES, "block": BLOCK, "streams": {}}
    for rate, (_, _, settings) in RULES.items():
        adapter = make_adapter(checkpoint, "tent", rate, settings)
        rows = []
        for case in cases:
            step = adapter.step(case.image[None])
            dice = mean_defined(dice_per_class(step.logits.argmax(1)[0], case.label, len(checkpoint.classes)))
            rows.append({"discrepancy": step.discrepancy, "rate": step.rate, "dice": 100 * dice})
        found["streams"][rate] = {"rows": rows, **summary(rows)}
        print(rate, found["streams"][rate]["after"], found["streams"][rate]["otherwise"])
    source = make_adapter(checkpoint, "source", "none", AdaptationSettings())
    predictions = [source.step(case.image[None]).logits.argmax(1)[0] for case in cases]
    scores = [
        mean_defined(dice_per_class(a, c.label, len(checkpoint.classes)))
        for a, c in zip(predictions, cases, strict=True)
    ]
    found["source"] = [100 * score for score in scores]
    found["ood_score"], found["in_distribution"] = ood_score(checkpoint, cases)
    (DOCS / "results" / "change.json").write_text(json.dumps(found) + "\n")
    draw(found).savefig(DOCS / "images" / "change.png", dpi=120)


@torch.no_grad()
def ood_score(checkpoint, cases) -> tuple[list[float], float]:
    """Of every image at the first normalization, and up to where the guard takes an image for one of the source."""
    measure, samples = OODScore(checkpoint.calibration), LayerSamples()
    with samples.watching(checkpoint.model):
        for case in cases:
            checkpoint.model(case.image[None])
    return measure(samples.stacked())[0].tolist(), Limits.calibrated(checkpoint.calibration.predictions).home[0]


def summary(rows: list[dict]) -> dict:
    """Median rate in the first images after a change (but the very first block) and in all others with a memory."""
    near = [row["rate"] for i, row in enumerate(rows) if i >= BLOCK and i % BLOCK < AFTER]
    rest = [row["rate"] for i, row in enumerate(rows) if i >= AFTER and not (i >= BLOCK and i % BLOCK < AFTER)]
    return {"after": median(near), "otherwise": median(rest), "dice": fmean(row["dice"] for row in rows)}


def draw(found: dict) -> Figure:
    figure = Figure(figsize=(9, 7), layout="constrained")
    top, upper, middle, lower = figure.subplots(4, 1, sharex=True)
    for axis in (top, upper, middle, lower):
        for number, site in enumerate(SITES):
            if site != SITES[0]:
                axis.axvspan(number * BLOCK - 0.5, (number + 1) * BLOCK - 0.5, color="#f0e2c0", linewidth=0)
        axis.spines[["top", "right"]].set_visible(False)
    for rate, (label, color, _) in RULES.items():
        rows = found["streams"][rate]["rows"]
        first = next(i for i, row in enumerate(rows) if row["discrepancy"] is not None)
        places = range(first, len(rows))
        upper.plot(places, [rows[i]["discrepancy"] for i in places], color=color, label=label)
        middle.semilogy(places, [rows[i]["rate"] for i in places], color=color)
        lower.plot(range(len(rows)), [row["dice"] for row in rows], color=color)
    top.semilogy(found["ood_score"], color="#2c7a4b")
    top.axhline(found["in_distribution"], color="#2c7a4b", linewidth=0.8, linestyle=":")
    top.set_ylabel("OOD score")
    top.text(0, found["in_distribution"] * 1.2, "in-distribution below", fontsize=8, color="#2c7a4b")
    lower.plot(found["source"], color="#888888", linewidth=1, label="not adapted")
    upper.set_ylabel("discrepancy")
    middle.set_ylabel("rate")
    lower.set(ylabel="Dice", xlabel="image of the stream; shaded: another scanner", ylim=(0, 100))
    upper.legend(frameon=False, ncols=2)
    lower.legend(frameon=False, loc="lower left")
    return figure


main()
