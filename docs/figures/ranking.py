"""Does rehearsal rank candidates as the target does, and is what should be flagged flagged? docs/results/ranking.json.

    python docs/figures/ranking.py --data SITES cells=runs/real/cells/look/results.json …
    python docs/figures/recommended.py cells=runs/real/cells/look/results.json …

The arguments are those of recommended.py, which shows both in docs/recommended.md. Source models and what they
rehearsed lie beside the results, as `--work runs/real/cells` puts them; `--data` is that of `dltta bench`. Finished
pieces are kept in the work folder (`ranking/`), so the same command continues; other models or images make new ones.

Candidates are all arms alone, without the flip, and those of the plan that the model runs. Labels of the target are
used here to see whether the choice was right, never to choose.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from dltta.config import build, make_adapter, nearest_rehearsed
from dltta.data.case import Dataset, Mapped, without_label
from dltta.data.shifts import HARMFUL, SimulatedStream
from dltta.data.sites import Slices, evenly
from dltta.errors import StateError
from dltta.evaluation.experiment import VALIDATION, Experiment, Job
from dltta.evaluation.home import at_home
from dltta.evaluation.recorded import cut
from dltta.evaluation.rehearsal import Setup
from dltta.evaluation.run import run_stream
from dltta.evaluation.stream_jobs import open_stream
from dltta.files import write_atomically
from dltta.models.io.opened import OpenedModel
from dltta.models.io.opening import open_checkpoint
from dltta.predictor import Predictor
from dltta.quality.candidates import Plan
from dltta.recipes import NO_RATE, RECOMMENDED, Recipe
from dltta.training import TrainingSettings
from dltta.training.examples import Pair

DOCS = Path(__file__).parent.parent
REFUSED = ("noise", "negative")  # harmful sites whose images must be flagged
PIECES = "ranking"  # folder of finished pieces
MEASURED = 1  # how a piece is measured; another number measures it again


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", metavar="TASK=RESULTS", help="results.json of dltta bench, with a name")
    parser.add_argument("--data", metavar="FOLDER", help="the folder that site folders are in")
    parser.add_argument("--cases", type=int, default=40, metavar="N", help="at most so many of a target [%(default)s]")
    given = parser.parse_args()
    rows = []
    for task, _, path in (each.partition("=") for each in given.results):
        rows += of_task(task, Path(path), given.data, given.cases)
    write_atomically(DOCS / "results" / "ranking.json", json.dumps(rows, indent=1) + "\n")


def of_task(task: str, results: Path, root: str | None, cases: int) -> list[dict[str, Any]]:
    """A row per target; what is measured of each seed's model is read where it is there already."""
    saved = json.loads(results.read_text())
    experiment, data = experiment_of(saved["config"], results, root), saved["provenance"]["data"]
    found: dict[str, list[dict[str, Any]]] = {target: [] for target in experiment.targets}
    for seed in experiment.every_seed:
        model: Model | None = None
        for target in (VALIDATION, *experiment.targets):
            path, began = piece_file(experiment, seed, target, cases, data), time.monotonic()
            print(f"{task}, seed {seed}, {target}: ", end="", flush=True)
            if path.is_file():
                print(f"as in {path}")
            else:
                model = model or Model.of(experiment, seed)
                write_atomically(path, json.dumps(model.measured(target, cases), indent=1) + "\n")
                print(f"{time.monotonic() - began:.0f} s, kept in {path}", flush=True)
            piece = json.loads(path.read_text())
            if target == VALIDATION:
                home = piece
            else:
                found[target].append({"seed": seed, **piece, "flagged": {**home["flagged"], **piece["flagged"]}})
    shared = ("target", "metric", "sliced", "batch_size", "cases")
    return [
        {"task": task, **{key: seeds[0][key] for key in shared}, "seeds": [_without(seed, shared) for seed in seeds]}
        for seeds in found.values()
    ]


def _without(piece: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in piece.items() if key not in keys}


def experiment_of(config: dict[str, Any], results: Path, root: str | None) -> Experiment:
    """As `dltta bench` ran it, from what its results say; models lie in the folder above that of the results."""
    described = _without(config, ["trained_with", "training", "adaptation"])
    training = {key.rstrip("_"): value for key, value in config["training"].items()}
    places = {"output": str(results.parent), "work": str(results.parents[1]), "root": root}
    parts = {
        "training": build(TrainingSettings, training, f"training of {results}"),
        "adaptation": build(Recipe, config["adaptation"], f"adaptation of {results}"),
    }
    return build(Experiment, {**described, **places, **parts}, str(results))


def piece_file(experiment: Experiment, seed: int, target: str, cases: int, data: dict[str, str]) -> Path:
    """Where a piece is kept; its name changes with all that decides it: model, rehearsal, images, how many."""
    folder = experiment.work_folder / "models" / f"seed_{seed}"
    rehearsal = folder / "rehearsal.json"  # has the fingerprint of the network
    if not rehearsal.is_file():
        raise StateError(f"{folder} has not rehearsed; run dltta bench with the method {RECOMMENDED}")
    batch_size = experiment.adaptation.batch_size
    decisive = [sha256(rehearsal.read_bytes()).hexdigest(), target, cases, data, batch_size, MEASURED]
    digest = sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]
    return experiment.work_folder / PIECES / f"{re.sub(r'[^A-Za-z0-9]+', '-', target)}_seed{seed}_{digest}.json"


@dataclass(frozen=True)
class Model:
    """The source model of one seed, and how it rehearsed."""

    experiment: Experiment
    seed: int
    opened: OpenedModel
    setup: Setup

    @classmethod
    def of(cls, experiment: Experiment, seed: int) -> "Model":
        job = Job(experiment.targets[0], RECOMMENDED, NO_RATE, seed, 0)
        checkpoint = open_stream(experiment, job, "cpu")[0]
        settings = replace(experiment.training, seed=experiment.training.seed + seed)
        home = at_home([experiment.open(spec) for spec in experiment.source], settings, checkpoint)
        opened = open_checkpoint(checkpoint, job.model)
        return cls(experiment, seed, opened, Setup.of(opened, home.pairs, settings.seed, sliced=home.sliced))

    @property
    def recipe(self) -> Recipe:
        job = Job(self.experiment.targets[0], RECOMMENDED, NO_RATE, self.seed, 0)
        return self.experiment.recipe(job).resolved(self.opened.task, calibrated=self.opened.calibration is not None)

    @property
    def batch_size(self) -> int:
        return self.recipe.batch_size or 1

    def measured(self, target: str, cases: int) -> dict[str, Any]:
        """Of held-out source images what is flagged; of a target's the scores of candidates too."""
        _, dataset, order = open_stream(self.experiment, Job(target, RECOMMENDED, NO_RATE, self.seed, 0), "cpu")
        count = math.ceil(cases / self.batch_size) * self.batch_size  # whole batches
        images = _kept(order, evenly(len(dataset), count))
        if target == VALIDATION:
            return {"flagged": {"source": self.flagged(dataset, images)}}
        site = self.experiment.open_target(target)
        stream = whole_volumes(site, order, count) if isinstance(site, Slices) else images
        refused = {each.name: SimulatedStream(dataset, (each,)) for each in HARMFUL if each.name in REFUSED}
        return {
            "target": dataset.site,
            "metric": "dice" if self.opened.task == "segmentation" else "accuracy",
            "sliced": self.setup.sliced,
            "batch_size": self.batch_size,
            "cases": min(count, len(site.volumes)) if isinstance(site, Slices) else len(stream),
            **self.ranked([self.pair(dataset, i) for i in stream]),
            "flagged": {name: self.flagged(changed, images) for name, changed in refused.items()},
        }

    def pair(self, dataset: Dataset, index: int) -> Pair:
        """An image and its label as rehearsal has them: a window where the network takes windows."""
        case = dataset[index]
        if case.label is None:
            raise StateError(f"{case.site}/{case.name} has no label; candidates cannot be scored there")
        patch = self.experiment.training.patch
        return cut((case.image, case.label), patch, [index]) if patch and case.label.ndim else (case.image, case.label)

    def ranked(self, pairs: Sequence[Pair]) -> dict[str, Any]:
        """The mean score of every candidate here and at the simulated sites, and the one that all images are given."""
        rehearsal = self.opened.rehearsal
        if rehearsal is None:
            raise StateError(f"{self.opened.name} has not rehearsed; run dltta bench with the method {RECOMMENDED}")
        size = nearest_rehearsed(rehearsal, self.batch_size)
        found = rehearsal["batch_sizes"][size][self.recipe.effort.value]
        plan, alone = Plan(tuple(found["plan"]["arms"]), found["plan"]["flip"]), Plan(self.setup.arms)
        plans = list(dict.fromkeys([alone, plan]))  # they may be the same
        recorded = replace(self.setup, flip=plan.flip).record(pairs, self.batch_size, plans)
        here = {arm: mean for arm, mean in recorded.means(alone).items() if arm in alone.arms} | recorded.means(plan)
        simulated = rehearsal.get("candidates", {}).get(size) or plan_means(plan, found["scores"])
        policy = found["policy"]
        given = plan.full_names[plan.candidates.index(policy["default"])] if policy["default_margin"] > 1 else None
        return {
            "simulated": {name: simulated[name] for name in here if name in simulated},
            "here": {name: mean for name, mean in here.items() if name in simulated},
            "given": given,
        }

    def flagged(self, dataset: Dataset, order: Sequence[int]) -> float:
        """The share of images that somebody should review, as one stream through the adapter of `dltta adapt`."""
        predictor = Predictor(self.opened, make_adapter(self.opened, self.recipe))
        record = run_stream(predictor, Mapped(dataset, without_label), order, batch_size=self.batch_size)
        return fmean(bool(row.review) for row in record.cases)


def plan_means(plan: Plan, scores: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of the candidates of one plan over all sites but harmful ones: older rehearsals keep no others."""
    kept = [row["candidates"] for row in scores if not row["harmful"]]
    return {full: fmean(row[name] for row in kept) for full, name in zip(plan.full_names, plan.candidates, strict=True)}


def whole_volumes(site: Slices, order: Sequence[int], count: int) -> list[int]:
    """All slices of so many volumes, evenly spread, in this order."""
    kept = set(evenly(len(site.volumes), count))
    return [i for i in order if site.volume_of[i] in kept]


def _kept(order: Sequence[int], chosen: Sequence[int]) -> list[int]:
    return [i for i in order if i in set(chosen)]


if __name__ == "__main__":
    main()
