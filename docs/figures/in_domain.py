"""Writes docs/results/in_domain.json and docs/in_domain.md: python docs/figures/in_domain.py SITES WORK.

SITES holds the site folders, WORK a folder NAME/models/seed_N for every trained configs/real/NAME.toml. Scored
are the source cases that training held out, with the source model as it is. Volumes taken slice by slice are scored as
volumes. Nothing here sees a target site.
"""

import json
import sys
from pathlib import Path
from statistics import fmean, stdev

import torch

from dltta.config import build, read_toml
from dltta.data.sites import Slices
from dltta.evaluation.experiment import Experiment
from dltta.metrics import dice_per_class, mean_defined
from dltta.models.io.checkpoint import load_checkpoint
from dltta.models.predictions import most_likely
from dltta.training.examples import gather, read_pairs, split_by_group
from dltta.training.settings import TrainingSettings

DOCS = Path(__file__).parent.parent
CONFIGS = DOCS.parent / "configs" / "real"


def main(sites: Path, work: Path) -> None:
    found = {}
    for path in sorted(CONFIGS.glob("*.toml")):
        for folder in sorted((work / path.stem / "models").glob("seed_[0-9]*")):
            if (folder / "model.json").is_file() and not (folder / "resume.pt").is_file():
                found.setdefault(path.stem, {})[folder.name] = scored(read_toml(path), sites, folder)
    (DOCS / "results" / "in_domain.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    (DOCS / "in_domain.md").write_text(page(found))


def scored(table: dict, sites: Path, folder: Path) -> dict:
    """Scores of both networks of a model folder, how long they took and what they were trained on."""
    checkpoint = load_checkpoint(folder)
    cases, volumes = held_out(table, sites, checkpoint)
    record = checkpoint.record
    stages = {row["stage"]: row["seconds"] for row in record["history"]}  # the last row of each stage
    return {
        "source": record["sites"],
        "held_out": "volumes" if volumes else "images",
        "training": record["training"],
        "epochs": record["epoch"],
        "minutes": {stage: round(seconds / 60, 1) for stage, seconds in stages.items()},
        "task": score(checkpoint, cases, volumes),
        **({"ttt": score(checkpoint.joint, cases, volumes)} if checkpoint.joint else {}),
    }


def held_out(table: dict, sites: Path, checkpoint) -> tuple[list, bool]:
    """The cases that training did not see, and whether they are slices of volumes."""
    settings = build(TrainingSettings, table.pop("training"), "[training]")
    table.pop("adaptation", None)
    experiment = build(Experiment, {**table, "root": str(sites)}, "configs/real")
    opened = [experiment.open(spec) for spec in experiment.source]
    cases = gather(opened)
    _, chosen = split_by_group(cases, settings.validation, checkpoint.record["fingerprint"]["seed"])
    return [cases[i] for i in chosen], isinstance(opened[0], Slices)


@torch.no_grad()
def score(checkpoint, cases: list, volumes: bool) -> dict:
    """Mean over the held-out images or volumes, in points, and its parts."""
    model = checkpoint.model.eval()
    grouped: dict[str, list] = {}
    for case, (image, label) in zip(cases, read_pairs(cases, checkpoint.preprocessing), strict=True):
        prediction = most_likely(model(image[None])[0], dim=0)
        grouped.setdefault(case.group if volumes else case.name, []).append((prediction, label))
    whole = [tuple(map(torch.stack, zip(*parts, strict=True))) for parts in grouped.values()]
    if checkpoint.task == "classification":
        return summary([float(prediction[0] == label[0]) for prediction, label in whole], "accuracy")
    each = [dice_per_class(prediction, label, len(checkpoint.classes)) for prediction, label in whole]
    by_class = {
        name: round(100 * mean_defined([dice[index] for dice in each]), 2)
        for index, name in enumerate(checkpoint.classes[1:])
    }
    return {**summary([mean_defined(dice) for dice in each], "dice"), "classes": by_class}


def summary(scores: list[float], metric: str) -> dict:
    spread = {} if metric == "accuracy" or len(scores) < 2 else {"sd": round(100 * stdev(scores), 2)}
    return {"metric": metric, "mean": round(100 * fmean(scores), 2), **spread, "n": len(scores)}


def page(found: dict) -> str:
    rows = []
    for name, seeds in found.items():
        for seed, entry in seeds.items():
            joint = f"{entry['ttt']['mean']:.1f}" if "ttt" in entry else "–"
            parts = ", ".join(f"{key} {value:.1f}" for key, value in entry["task"].get("classes", {}).items())
            score = f"{entry['task']['metric']} {entry['task']['mean']:.1f}"
            cells = (
                name,
                " + ".join(entry["source"]),
                seed.removeprefix("seed_"),
                f"{entry['task']['n']} {entry['held_out']}",
                score,
                parts or "–",
                joint,
                f"{entry['minutes']['task']:.0f}",
            )
            rows.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join(rows) + "\n"


HEAD = """# How good are the source networks at home?

Written by `docs/figures/in_domain.py` from `docs/results/in_domain.json`. Each network of `configs/real` on patients of
its own site that it was not trained on; the weights are those of the last epoch, so these patients decided nothing.
Volumes that are taken slice by slice are scored as volumes. Minutes are those of the source model on two busy cores.

| configuration | source | seed | held out | score | by class | second network (TTT) | minutes |
|---|---|---|---|---|---|---|---|
"""

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
