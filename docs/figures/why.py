"""Why adaptation helps or hurts on real sites: python docs/figures/why.py runs/real SITES [TASK …]

With the first source model of each task in runs/real, nothing learned: what normalization by one image costs at
the source site, where there is nothing to adapt to, and what it gives at target sites; and how large
the discrepancy usually is. Without arguments: draws the numbers of docs/results/why.json again.
Writes docs/results/why.json and docs/images/why.png; docs/figures/real.py puts the table on its page.
"""

import copy
import json
import sys
from pathlib import Path
from statistics import fmean

import torch
from matplotlib.figure import Figure

from dltta.config import read_toml
from dltta.data.case import Mapped
from dltta.evaluation.experiment import Experiment
from dltta.metrics import dice_per_class, mean_defined
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint
from dltta.models.normalization import use_test_statistics
from dltta.models.statistics import InstanceStatistics, Shrinkage
from dltta.training.examples import gather, split_by_group

DOCS = Path(__file__).parent.parent
MOST = 24  # images of a site
WAYS = {"source": "stored", "shrinkage": "shrinkage", "instance": "instance"}
TASKS = {  # of images that are no slices of volumes
    "nuclei_tissue": "nuclei in tissue",
    "nuclei_fluo": "nuclei in fluorescence",
    "oct_layers": "retinal layers",
    "wbc_cells": "white blood cells",
    "wbc_types": "cell types",
}
COLORS = {"source": "#888888", "shrinkage": "#1f6fb4", "instance": "#c0392b"}


def main(runs: Path, sites: str, tasks: list[str]) -> None:
    torch.set_num_threads(2)
    found = {}
    for name in tasks or TASKS:
        folder = next(iter(sorted((runs / name / "models").glob("seed_[0-9]*"))), None)
        if folder is None or not (folder / "model.json").is_file():
            print(f"{name}: no source model in {runs / name / 'models'}")
            continue
        checkpoint = load_checkpoint(folder)
        found[name] = measured(checkpoint, read_toml(DOCS.parent / "configs" / "real" / f"{name}.toml"), sites)
        print(name, found[name], flush=True)
    (DOCS / "results" / "why.json").write_text(json.dumps(found, indent=1) + "\n")
    redraw()


def redraw() -> None:
    found = json.loads((DOCS / "results" / "why.json").read_text())
    draw(found).savefig(DOCS / "images" / "why.png", dpi=150)


def measured(checkpoint: Checkpoint, config: dict, root: str) -> dict:
    """Mean score by site and statistics, one image at a time, and the usual discrepancy at the source site."""
    experiment = Experiment(tuple(config["source"]), tuple(config["targets"]), "", root=root)
    networks = {"source": checkpoint.model.eval()}
    for way, statistics in (
        ("shrinkage", Shrinkage(checkpoint.calibration.moments(1))),
        ("instance", InstanceStatistics()),
    ):
        networks[way] = copy.deepcopy(checkpoint.model)
        use_test_statistics(networks[way], statistics)
    found = {"task": checkpoint.task, "discrepancy": checkpoint.calibration.predictions["discrepancy"], "sites": {}}
    for name, pairs in (at_source(checkpoint, experiment) | at_targets(checkpoint, experiment)).items():
        found["sites"][name] = {way: score(network, pairs, checkpoint) for way, network in networks.items()}
    return found


def at_source(checkpoint: Checkpoint, experiment: Experiment) -> dict:
    """Source images that were kept for validation."""
    cases = gather([experiment.open(site) for site in experiment.source])
    trained = checkpoint.record["fingerprint"]
    share = trained["validation"]
    _, held = split_by_group(cases, tuple(share) if isinstance(share, list) else share, trained["seed"])
    prepare = checkpoint.preprocessing
    return {"source site": [(prepare.image(cases[i].image), prepare.label(cases[i].label)) for i in held[:MOST]]}


def at_targets(checkpoint: Checkpoint, experiment: Experiment) -> dict:
    found = {}
    for target in experiment.targets:
        site = Mapped(experiment.open(target), checkpoint.preprocessing.case)
        step = max(1, len(site) // MOST)
        cases = [site[i] for i in range(0, len(site), step)][:MOST]
        found[Path(target).name] = [(case.image, case.label) for case in cases]
    return found


@torch.no_grad()
def score(network: torch.nn.Module, pairs: list, checkpoint: Checkpoint) -> float:
    predictions = [network(image[None]).argmax(1)[0] for image, _ in pairs]
    if checkpoint.task == "classification":
        return 100 * fmean(float(int(a) == int(label)) for a, (_, label) in zip(predictions, pairs, strict=True))
    classes = len(checkpoint.classes)
    return 100 * fmean(
        mean_defined(dice_per_class(a, label, classes)) for a, (_, label) in zip(predictions, pairs, strict=True)
    )


def draw(found: dict) -> Figure:
    rows = [(task, site, scores) for task, entry in found.items() for site, scores in entry["sites"].items()]
    figure = Figure(figsize=(6.2, 0.36 * len(rows) + 1.2), layout="constrained")
    axis = figure.subplots()
    for place, (_, _, scores) in enumerate(rows):
        axis.plot([min(scores.values()), max(scores.values())], [place, place], color="#dddddd", linewidth=2, zorder=1)
        for way, value in scores.items():
            axis.scatter(value, place, color=COLORS[way], s=36, zorder=2, label=WAYS[way] if place == 0 else None)
    axis.set_yticks(range(len(rows)), [f"{TASKS.get(task, task)}, {site}" for task, site, _ in rows])
    axis.invert_yaxis()
    axis.set(xlim=(0, 100), xlabel="Dice or accuracy, nothing learned")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, title="statistics of normalization")
    return figure


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    else:
        redraw()
