"""What do a change of scanner and source images in the memory do? python docs/figures/change.py [runs/changing [SEEDS]]

Synthetic OCT, the images and networks of `dltta reproduce oct --phantom --small`, SEEDS source trainings. Streams go
from the source's scanner to another and back, take turns, or stay at the other one; the memory begins empty, or with
source images. Writes docs/results/change.json, the table of docs/changing.md and docs/images/change.png.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev

import torch
from matplotlib.figure import Figure

from dltta.evaluation.bench import run_sweep
from dltta.evaluation.experiment import Experiment, Job
from dltta.evaluation.paper.tasks import Setup, base_experiment
from dltta.evaluation.results import Results
from dltta.evaluation.stream_jobs import open_stream
from dltta.evaluation.tables import method_label
from dltta.models.calibration import LayerSamples, OODScore
from dltta.quality.guard import Limits

DOCS = Path(__file__).parent.parent
HOME, OTHER = "spectralis", "cirrus"
BLOCK = 24  # images until the site changes; the memory holds 20
AFTER = 4  # images after a change that are compared with the others
HIGH = 0.1  # besides the paper's 1e-3, with which predictions hardly change
TITLES = {
    f"{HOME}+{OTHER}+{HOME}+{OTHER}": f"{HOME}, {OTHER}, {HOME}, {OTHER}; {BLOCK} images each",
    f"{HOME}/{OTHER}": f"{HOME} and {OTHER} in turn, {2 * BLOCK} images each",
    OTHER: f"{OTHER} alone, {2 * BLOCK} images",
}
MEMORIES = {"empty": False, "source images": True}
COLORS = {"empty": "#c0392b", "source images": "#1f6fb4"}


def experiment(folder: str, seeds: int) -> Experiment:
    """Three streams, each image in one of them only once."""
    base = base_experiment("oct", Setup(Path(folder), small=True, seeds=seeds))
    pixels = base.targets[0].rpartition(":")[2]

    def site(name: str, count: int, seed: int) -> str:
        return f"phantom:oct:{name}:{count}:{seed}:{pixels}"

    blocks = ",".join(site(name, BLOCK, 3000 + part) for part, name in enumerate((HOME, OTHER, HOME, OTHER)))
    turns = ",".join(site(name, 2 * BLOCK, 3010) for name in (HOME, OTHER))
    return replace(
        base,
        output=folder,
        work=None,
        targets=(f"sequence:{blocks}", f"interleave:{turns}", site(OTHER, 2 * BLOCK, 3020)),
        in_domain="none",
        methods=("source", "ptbn", "tent"),
        rates=("fixed", "dynamic", *(f"{rule}:{HIGH:g}" for rule in ("fixed", "dynamic"))),
        uda={},
        examples=1,
        training=replace(base.training, with_=("memory",)),
    )


def main(folder: str = "runs/changing", seeds: str = "3") -> None:
    planned = experiment(folder, int(seeds))
    points = {name.replace(" ", "-"): replace(planned.adaptation, prefill=full) for name, full in MEMORIES.items()}
    found = dict(zip(MEMORIES, run_sweep(planned, points).values(), strict=True))
    known = {
        "provenance": {"version": found["empty"].provenance.version, "commit": found["empty"].provenance.commit},
        "table": rows(found),
        "curves": {memory: curve(results) for memory, results in found.items()} | strangeness(planned),
    }
    (DOCS / "results" / "change.json").write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    fill(table(known["table"]))
    draw(known["curves"]).savefig(DOCS / "images" / "change.png", dpi=100)


def rows(found: dict[str, Results]) -> list[dict]:
    """For every stream and method: Dice at both sites and the rate near a change and elsewhere, one value per seed."""
    made = []
    for target, title in TITLES.items():
        for method, rate, memory in (
            ("source", "none", "empty"),
            ("ptbn", "none", "empty"),
            *(
                ("tent", f"{rule}{alpha}", memory)
                for alpha in ("", f":{HIGH:g}")
                for rule, memory in (("fixed", "empty"), ("dynamic", "empty"), ("dynamic", "source images"))
            ),
        ):
            wanted = (target, method, rate)
            streams = [s for s in found[memory].streams if (s.target, s.method, s.rate) == wanted]
            near, rest = zip(*(near_and_rest(s.cases, target) for s in streams), strict=True)
            made.append(
                {"stream": title, "method": method, "rate": rate, "memory": memory}
                | {site: [dice_at(s.cases, site) for s in streams] for site in (HOME, OTHER)}
                | {"rate after a change": list(near), "rate otherwise": list(rest)}
            )
    return made


def dice_at(cases, site: str) -> float | None:
    scores = [100 * case.metrics["dice"] for case in cases if case.site == site]
    return fmean(scores) if scores else None


def near_and_rest(cases, target: str) -> tuple[float | None, float | None]:
    """Mean rate x 1000 in the first images after a change of site, and in all others, of images with a discrepancy."""
    changes = "+" in target
    known = [(i, 1000 * case.rate) for i, case in enumerate(cases) if case.discrepancy is not None]
    near = [rate for i, rate in known if changes and i >= BLOCK and i % BLOCK < AFTER]
    rest = [rate for i, rate in known if not (changes and i >= BLOCK and i % BLOCK < AFTER)]
    return fmean(near) if near else None, fmean(rest) if rest else None


def table(found: list[dict]) -> str:
    heads = ["Stream", "Method", "Memory begins", f"Dice at {HOME}", f"Dice at {OTHER}", "Rate x 1000 after a change"]
    lines = [*heads, "otherwise"]
    lines = [f"| {' | '.join(lines)} |", "|:--|:--|:--|--:|--:|--:|--:|"]
    for row in found:
        memory = row["memory"] if row["rate"].startswith("dynamic") else "–"
        values = [shown(row[HOME], 1), shown(row[OTHER], 1), shown(row["rate after a change"], 3)]
        cells = [row["stream"], method_label(row["method"], row["rate"]), memory, *values]
        lines.append(f"| {' | '.join([*cells, shown(row['rate otherwise'], 3)])} |")
    seeds = len(found[0][OTHER])
    said = f"Mean ± sd over {seeds} source trainings." if seeds > 1 else "One source training, so no sd."
    return "\n".join([*lines, "", said])


def shown(values: list[float | None], digits: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    spread = f" ± {stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{fmean(known):.{digits}f}{spread}"


def fill(text: str) -> None:
    page = DOCS / "changing.md"
    head, rest = page.read_text().split("<!-- result -->")
    page.write_text(f"{head}<!-- result -->\n{text}\n{rest[rest.index('<!-- end of result -->') :]}")


def curve(results: Results) -> dict:
    """Along the first stream of the first training, Tent with the dynamic rate; Dice of the source model beside it."""
    first = next(iter(TITLES))
    by_method = {
        s.method: s.cases for s in results.streams if (s.target, s.seed) == (first, 0) and s.rate in ("none", "dynamic")
    }
    cases = by_method["tent"]
    return {
        "discrepancy": [case.discrepancy for case in cases],
        "rate": [case.rate for case in cases],
        "dice": [100 * case.metrics["dice"] for case in cases],
        "source": [100 * case.metrics["dice"] for case in by_method["source"]],
    }


@torch.no_grad()
def strangeness(planned: Experiment) -> dict:
    """OOD score of every image of that stream, and up to where the guard takes an image for one of the source."""
    checkpoint, dataset, order = open_stream(planned, Job(planned.targets[0], "source", "none", 0, 0), "cpu")
    measure, samples = OODScore(checkpoint.calibration), LayerSamples()
    with samples.watching(checkpoint.model.eval()):
        for index in order:
            checkpoint.model(dataset[index].image[None])
    limits = Limits.calibrated(checkpoint.calibration.predictions)
    return {"ood_score": measure(samples.stacked())[0].tolist(), "in_distribution": limits.in_distribution[0]}


def draw(curves: dict) -> Figure:
    figure = Figure(figsize=(9, 7), layout="constrained")
    top, upper, middle, lower = figure.subplots(4, 1, sharex=True)
    for axis in (top, upper, middle, lower):
        for block in (1, 3):
            axis.axvspan(block * BLOCK - 0.5, (block + 1) * BLOCK - 0.5, color="#f0e2c0", linewidth=0)
        axis.spines[["top", "right"]].set_visible(False)
    for memory, color in COLORS.items():
        along = curves[memory]
        known = [i for i, value in enumerate(along["discrepancy"]) if value is not None]
        upper.plot(known, [along["discrepancy"][i] for i in known], color=color, label=f"memory begins: {memory}")
        middle.semilogy(along["rate"], color=color)
        lower.plot(along["dice"], color=color, linewidth=1)
    top.semilogy(curves["ood_score"], color="#2c7a4b")
    top.axhline(curves["in_distribution"], color="#2c7a4b", linewidth=0.8, linestyle=":")
    top.text(0, curves["in_distribution"] * 1.2, "in-distribution below", fontsize=8, color="#2c7a4b")
    lower.plot(curves["empty"]["source"], color="#888888", linewidth=1, label="not adapted")
    top.set_ylabel("OOD score")
    upper.set_ylabel("discrepancy")
    middle.set_ylabel("rate")
    lower.set(ylabel="Dice", xlabel=f"image of the stream; shaded: {OTHER}", ylim=(0, 100))
    upper.legend(frameon=False, ncols=2)
    lower.legend(frameon=False, loc="lower left")
    return figure


if __name__ == "__main__":
    main(*sys.argv[1:])
