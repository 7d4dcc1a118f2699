"""What do harmful streams do, with the guard and without? `make bench-harm`, or: python benchmarks/harm.py --quick

Trains two small networks on synthetic images (kept in runs/harm, so a second run starts at once), runs every stream
without adaptation, unguarded and guarded, and writes docs/results/harm.json, docs/guard.md and docs/images/guard_*.png.
With --model and --site your own network and site take the place of the synthetic ones, and everything goes to --output.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dltta.config import make_adapter, open_dataset
from dltta.data.case import Case, Mapped
from dltta.data.phantom import phantom
from dltta.data.phantom.oct import OCT
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DlttaError
from dltta.evaluation.provenance import Provenance
from dltta.metrics import dice_per_class, mean_defined
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.quality.guarded import decision_of
from dltta.recipes import Ready, Recipe, Rule, Statistics, Task, paper
from dltta.training import SourceTraining, TrainingSettings
from harm_page import write_page

ROOT = Path(__file__).resolve().parent.parent
TOO_HIGH = 1000


@dataclass(frozen=True)
class Item:
    """One image of a stream; without a label it is not scored."""

    image: Tensor
    label: Tensor | int | None


@dataclass(frozen=True)
class Bed:
    """A source model, images of a target site, of the source site, and what a useless image looks like."""

    name: str
    title: str
    checkpoint: Checkpoint
    genuine: Sequence[Item]
    source: Sequence[Item]
    empty: Sequence[Tensor] | None  # images in which there is nothing to segment
    recipe: Recipe
    block: int  # genuine images between two blocks of useless ones

    def range(self) -> tuple[float, float]:
        images = [item.image for item in self.source]
        return min(image.min().item() for image in images), max(image.max().item() for image in images)


def streams(bed: Bed) -> dict[str, list[Item]]:
    """Every stream by name; all but that of the source hold the same genuine images in the same order."""
    low, high = bed.range()
    shape, count = bed.genuine[0].image.shape, len(bed.genuine)
    noise = [low + (high - low) * torch.rand(shape, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    constant = [torch.full(shape, low + (high - low) * i / max(count - 1, 1)) for i in range(count)]
    inverted = [replace(item, image=low + high - item.image) for item in bed.genuine]
    unscored = [replace(item, label=None) for item in inverted]
    third, half = count // 3, count // 2
    found = {
        "nothing harmful": list(bed.genuine),
        "images of the source": list(bed.source),
        "noise between": between(bed.genuine, noise, bed.block),
        "constant images between": between(bed.genuine, constant, bed.block),
        "rate 1000 × too high": list(bed.genuine),
        "contrast inverted for a third": [
            *bed.genuine[:third],
            *unscored[third : 2 * third],
            *bed.genuine[2 * third :],
        ],
        "contrast inverted halfway": [*bed.genuine[:half], *inverted[half:]],
    }
    if bed.empty is not None:
        found["scans that missed between"] = between(bed.genuine, bed.empty, bed.block)
    if bed.checkpoint.task == "classification":
        found["one class after the other"] = sorted(bed.genuine, key=lambda item: int(item.label or 0))
    return found


def between(genuine: Sequence[Item], useless: Sequence[Tensor], block: int) -> list[Item]:
    """Blocks of genuine and of useless images in turn."""
    found: list[Item] = []
    for start in range(0, len(genuine), block):
        found += genuine[start : start + block]
        found += [Item(image, None) for image in useless[start : start + block]]
    return found


STRENGTHS = {
    "default": "shrinkage statistics, relative rate, the paper's α: what the guard's limits were chosen with",
    "strong": "batch statistics, relative rate, α = 1: an engineer who wants to see something move",
}


def run(bed: Bed, items: Sequence[Item], strength: str, *, factor: float, guard: bool) -> dict[str, Any]:
    """Scores by position (None where there is nothing to score), the guard's decisions and their reasons."""
    alpha = bed.recipe.alpha if strength == "default" else 1.0
    recipe = replace(
        bed.recipe,
        alpha=(alpha or 0.0) * factor,
        guard=guard,
        statistics=Statistics.SHRINKAGE if strength == "default" else Statistics.BATCH,
    )
    adapter = make_adapter(bed.checkpoint, recipe)
    scores: list[float | None] = []
    outcomes: list[str | None] = []
    reasons: list[str | None] = []
    for batch in batches(items, recipe.batch_size or 1):
        x = torch.stack([item.image for item in batch])
        try:
            step = adapter.step(x)
        except DlttaError as error:  # without the guard: a loss that is no number
            predictions = [None] * len(batch)
            outcomes += [type(error).__name__] * len(batch)
            reasons += [None] * len(batch)
        else:
            predictions = list(step.logits.argmax(1))
            decision = decision_of(step)
            found = [None if decision is None else decision.of(i) for i in range(len(batch))]
            outcomes += [None if each is None else str(each.outcome) for each in found]
            reasons += [None if each is None or each.reason is None else str(each.reason) for each in found]
        scores += [score(bed, prediction, item.label) for prediction, item in zip(predictions, batch, strict=True)]
    return {"scores": scores, "decisions": outcomes, "reasons": reasons}


def unadapted(bed: Bed, items: Sequence[Item]) -> dict[str, Any]:
    """Scores of the source model."""
    adapter = make_adapter(bed.checkpoint, paper("source"))
    predictions = [adapter.step(item.image[None]).logits.argmax(1)[0] for item in items]
    return {"scores": [score(bed, given, item.label) for given, item in zip(predictions, items, strict=True)]}


def batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def score(bed: Bed, prediction: Tensor | None, label: Tensor | int | None) -> float | None:
    """Mean Dice over the classes, or 1 and 0 for right and wrong, in percent; no prediction is worth nothing."""
    if label is None:
        return None
    if prediction is None:
        return 0.0
    if bed.checkpoint.task == "classification":
        return 100.0 * (int(prediction) == int(label))
    assert isinstance(label, Tensor)
    return 100 * mean_defined(dice_per_class(prediction, label, len(bed.checkpoint.classes)))


def measure(bed: Bed, wanted: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"title": bed.title, "task": bed.checkpoint.task, "streams": {}}
    for name, items in streams(bed).items():
        if wanted and name not in wanted:
            continue
        factor = TOO_HIGH if name.startswith("rate") else 1
        source = unadapted(bed, items)
        found["streams"][name] = {}
        for strength in STRENGTHS:
            free = run(bed, items, strength, factor=factor, guard=False)
            guarded = run(bed, items, strength, factor=factor, guard=True)
            entry = {"source": source, "unguarded": free, "guarded": guarded}
            found["streams"][name][strength] = entry
            means = {way: fmean(s for s in part["scores"] if s is not None) for way, part in entry.items()}
            print(bed.name, name, strength, {way: round(mean, 1) for way, mean in means.items()}, flush=True)
            print("   ", dict(Counter(guarded["decisions"])), flush=True)
    return found


# ---- what is run


def synthetic_oct(quick: bool) -> Bed:
    train, test, size, epochs = (64, 48, (128, 64), 16) if not quick else (16, 12, (96, 64), 2)
    site = phantom("oct", "spectralis", train, seed=0, size=size)
    training = TrainingSettings(epochs=epochs, batch_size=4, learning_rate=3e-3, validation=0.25)
    checkpoint = trained("oct", site, Architecture("unet", 2, 1, 9, {"width": 8}), training, quick)
    return Bed(
        "oct",
        "Synthetic OCT, spectralis → cirrus, U-Net, one image at a time",
        checkpoint,
        items(phantom("oct", "cirrus", test, seed=1000, size=size)),
        items(phantom("oct", "spectralis", test, seed=2000, size=size)),
        [missed_retina(number, size) for number in range(test)],
        recipe_of("segmentation", 1),
        8,
    )


def synthetic_histology(quick: bool) -> Bed:
    train, test, epochs = (480, 320, 12) if not quick else (64, 64, 2)
    site = phantom("histology", "hospital_0", train, seed=0)
    training = TrainingSettings(epochs=epochs, batch_size=16, validation=0.125)
    checkpoint = trained("histology", site, Architecture("densenet_small", 2, 3, 2), training, quick)
    return Bed(
        "histology",
        "Synthetic histology, hospital_0 → hospital_3, DenseNet, batches of 16, of which blocks of 8 are useless",
        checkpoint,
        items(phantom("histology", "hospital_3", test, seed=1000)),
        items(phantom("histology", "hospital_0", test, seed=2000)),
        None,
        recipe_of("classification", 16),
        8,
    )


def recipe_of(task: Task, batch_size: int) -> Recipe:
    """The paper's values but for the rate, and a memory that is asked as soon as it can be."""
    recipe = Recipe("tent", Rule.RELATIVE, ready=Ready.NEIGHBORS, batch_size=batch_size)
    return recipe.resolved(task, calibrated=True)


def own(model: Path, site: str, count: int) -> Bed:
    """A network of one's own on a site of one's own; its own site is not at hand, so its images stand for the range."""
    checkpoint = load_checkpoint(model)
    found = items(Mapped(open_dataset(site), checkpoint.preprocessing.case), count)
    recipe = recipe_of(checkpoint.task, 1 if checkpoint.task == "segmentation" else 16)
    return Bed(
        model.name,
        f"{model.name} on {Path(site).name}",
        checkpoint,
        found,
        found,
        None,
        recipe,
        8,
    )


def trained(name: str, site: Any, network: Architecture, settings: TrainingSettings, quick: bool) -> Checkpoint:
    folder = ROOT / "runs" / ("harm_quick" if quick else "harm") / name
    if (folder / "model.json").is_file() and load_checkpoint(folder).record.get("finished"):
        return load_checkpoint(folder)
    print("training", name, flush=True)
    return SourceTraining([site], network, Preprocessing(), settings, folder, torch.device("cpu"), resume=True).run()


def items(cases: Any, count: int | None = None) -> list[Item]:
    found: list[Case] = [cases[i] for i in range(min(len(cases), count or len(cases)))]
    return [Item(case.image, case.label) for case in found]


def missed_retina(number: int, size: tuple[int, ...]) -> Tensor:
    """What the target's scanner makes of a scan without a retina: background, speckle, noise."""
    generator = np.random.default_rng([7, number])
    scanner = OCT.sites["cirrus"].draw(generator)
    anatomy = OCT.anatomy(generator, size, scanner.spacing(size))
    anatomy = replace(
        anatomy,
        reflectivity=np.full_like(anatomy.reflectivity, 0.02),
        depth=np.zeros_like(anatomy.depth),
        transmission=np.ones_like(anatomy.transmission),
    )
    return torch.from_numpy(scanner.acquire(anatomy, generator))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, to try the program; writes to runs/harm_quick")
    parser.add_argument("--beds", nargs="+", choices=list(BEDS), default=list(BEDS))
    parser.add_argument("--streams", nargs="+", default=[], help="only these, by name; writes no page")
    parser.add_argument("--model", type=Path, help="a folder of `dltta train`")
    parser.add_argument("--site", help="labelled images of a new site, as `dltta bench` takes them")
    parser.add_argument("--images", type=int, default=48, help="of the site")
    parser.add_argument("--output", type=Path, help="where result, page and figures go; docs by default")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    output = chosen.output or (ROOT / "runs" / "harm_quick" if chosen.quick else ROOT / "docs")
    beds = (
        [own(chosen.model, chosen.site, chosen.images)]
        if chosen.model
        else [BEDS[n](chosen.quick) for n in chosen.beds]
    )
    results = {
        "quick": chosen.quick,
        "strengths": STRENGTHS,
        "provenance": asdict(Provenance.collect(seeds=(0,), data={})),
        "beds": {bed.name: measure(bed, chosen.streams) for bed in beds},
    }
    if not chosen.streams:
        (output / "results").mkdir(parents=True, exist_ok=True)
        (output / "results" / "harm.json").write_text(json.dumps(results) + "\n")
        write_page(results, output)


BEDS: dict[str, Callable[[bool], Bed]] = {"oct": synthetic_oct, "histology": synthetic_histology}

if __name__ == "__main__":
    main()
