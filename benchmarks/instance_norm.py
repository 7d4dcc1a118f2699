"""What helps networks with instance normalization? `make bench-instance`; python benchmarks/instance_norm.py --quick

Trains small U-Nets with instance normalization on synthetic images (kept in runs/instance, so a second run starts at
once), runs every way of adapting at simulated sites made of held-out source images, at the source itself and at
synthetic scanners that nothing was chosen by, and writes docs/results/instance_norm.json and docs/instance-norm.md.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.instancenorm import _InstanceNorm

from dltta import Adapter, Fixed
from dltta.config import make_adapter
from dltta.core.objectives.vptta import NAME, VPTTA
from dltta.data.case import Mapped
from dltta.data.phantom import phantom
from dltta.data.preprocessing import Preprocessing
from dltta.data.shifts import SOURCE_SITE, draw_sites
from dltta.evaluation.provenance import Provenance
from dltta.evaluation.recorded import Stream
from dltta.evaluation.rehearsal import FRAMINGS, rehearse, strong_and_mild
from dltta.metrics import dice_per_class, mean_defined
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.io.opening import open_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.adaptors import insert_in_front
from dltta.models.parts.prompt import FrequencyPrompt
from dltta.models.predictions import most_likely, probabilities
from dltta.models.quantiles import SourceValues
from dltta.quality.candidates import ENTROPY, mixture_weights
from dltta.quality.measures import entropies
from dltta.recipes import recipe_for
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.examples import Pair
from instance_norm_page import write_page

ROOT = Path(__file__).resolve().parent.parent
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way to the source's values, which an InTEnt-like mixture averages over
DTTA_UPDATES = {2: 50, 3: 10}  # per image, by its axes; its authors take 500
PROMPTED = 0.08  # of each side: about as many frequencies as VPTTA's authors prompt in images of 512 × 512
IMAGES = 3  # of each stream, at other scanners two more
REHEARSED = 8  # source images that rehearsal and the source's values are measured with


class Predicting(Protocol):
    """A way of predicting a stream, image by image."""

    def __call__(self, x: Tensor) -> Tensor:
        """Probabilities (1, C, *positions) of one image x (1, C, *spatial)."""
        ...


@dataclass(frozen=True)
class Bed:
    """A trained network, held-out source images, and images of scanners that nothing is chosen by."""

    name: str
    title: str
    checkpoint: Checkpoint
    known: Sequence[Pair]  # source images for rehearsal
    held_out: Sequence[Pair]
    targets: Mapping[str, Sequence[Pair]]


def adapted(checkpoint: Checkpoint, method: str, rate: str | None = None, **changes: Any) -> Predicting:
    adapter = make_adapter(checkpoint, recipe_for(method, rate, **changes))
    return lambda x: probabilities(adapter.step(x).logits)


def matching(checkpoint: Checkpoint, values: SourceValues, shares: Sequence[float]) -> Predicting:
    """Input values so much of the way to the source's; several are averaged with InTEnt's weights."""
    model = checkpoint.model.eval()

    def predict(x: Tensor) -> Tensor:
        matched = values.match(x[0])[None]
        with torch.no_grad():
            found = torch.cat([probabilities(model(torch.lerp(x, matched, share))) for share in shares])
        return torch.tensordot(mixture_weights(entropies(found), ENTROPY), found, dims=1)[None]

    return predict


def matched_tent(checkpoint: Checkpoint, values: SourceValues) -> Predicting:
    adapter = make_adapter(checkpoint, recipe_for("tent", "fixed"))
    return lambda x: probabilities(adapter.step(values.match(x[0])[None]).logits)


class PromptedInstanceNorm(VPTTA):
    """VPTTA for instance normalization: what enters each layer is drawn to the means and deviations of source images.

    Its authors' method needs statistics that batch normalization stores; here they are measured on source images. The
    layers normalize as always, so that nothing warms up.
    """

    def __init__(self, moments: Mapping[str, tuple[Tensor, Tensor]], **settings: Any) -> None:
        super().__init__(**settings)
        self.moments = moments
        self._distances: list[Tensor] = []

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        dims, channels = self._image_form(model)
        for name, layer in model.named_modules():
            if name in self.moments:
                layer.register_forward_pre_hook(self._watch(*self.moments[name]))
        prompt = FrequencyPrompt(dims, channels, fraction=self.fraction, largest=self.largest)
        insert_in_front(model, NAME, prompt.to(next(model.parameters())))
        return [prompt.factors]

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        distances, self._distances = self._distances, []
        return torch.stack(distances).mean()

    def _watch(self, mean: Tensor, spread: Tensor) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                own_spread, own = torch.std_mean(inputs[0], [0, *range(2, inputs[0].ndim)])
                self._distances.append((own - mean).abs().mean() + (own_spread - spread).abs().mean())

        return hook


def source_moments(model: nn.Module, images: Sequence[Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """By layer: mean and deviation of what enters it, over source images."""
    found: dict[str, list[Tensor]] = {}

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: found.setdefault(name, []).append(
            torch.stack(torch.std_mean(inputs[0], [0, *range(2, inputs[0].ndim)]))
        )

    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _InstanceNorm)]
    handles = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers]
    with torch.no_grad():
        for image in images:
            model(image[None])
    for handle in handles:
        handle.remove()
    means = {name: torch.stack(rows).mean(0) for name, rows in found.items()}
    return {name: (mean, spread) for name, (spread, mean) in means.items()}


def prompted(checkpoint: Checkpoint, images: Sequence[Tensor]) -> Predicting:
    step = recipe_for("vptta").resolved("segmentation", calibrated=False)
    adapter = Adapter(
        checkpoint.model,
        PromptedInstanceNorm(source_moments(checkpoint.model.eval(), images), fraction=PROMPTED),
        Fixed(step.alpha or 0.0),
        optimizer=partial(torch.optim.Adam, betas=step.betas or (0.9, 0.99)),
    )
    return lambda x: probabilities(adapter.step(x).logits)


def recommended(checkpoint: Checkpoint, found: Mapping[str, Any]) -> Predicting:
    return adapted(replace(checkpoint, rehearsal=found), "recommended")


def ways(bed: Bed) -> dict[str, Callable[[], Predicting]]:
    """Everything that is tried, each begun anew for every stream."""
    network = bed.checkpoint
    images = [image for image, _ in bed.known]
    values = SourceValues.of(images)
    learned = cache(lambda: rehearse(open_checkpoint(network, bed.name), bed.known))
    return {  # in the order in which they are run
        "source": lambda: adapted(network, "source"),
        "grata": lambda: adapted(network, "grata"),
        "tent fixed": lambda: adapted(network, "tent", "fixed"),
        "matched": lambda: matching(network, values, (1.0,)),
        "matched mixture": lambda: matching(network, values, SHARES),
        "half matched": lambda: matching(network, values, (0.5,)),
        "sar": lambda: adapted(network, "sar"),
        "vptta": lambda: prompted(network, images),
        "tent adam:1e-3": lambda: adapted(network, "tent", "adam:1e-3"),
        "t3a": lambda: adapted(network, "t3a"),
        "cotta": lambda: adapted(network, "cotta"),
        "tent dynamic": lambda: adapted(network, "tent", "dynamic"),
        "eata": lambda: adapted(network, "eata"),
        "deyo": lambda: adapted(network, "deyo"),
        "matched, tent": lambda: matched_tent(network, values),
        "dtta's network": lambda: adapted(network.for_method("dtta"), "source"),
        "dtta": lambda: adapted(network, "dtta", steps=DTTA_UPDATES[network.architecture.spatial_dims]),
        "recommended": lambda: recommended(network, learned()),
    }


def streams(bed: Bed, sites: int) -> dict[str, list[Pair]]:
    """Of every place: the source, simulated sites of another draw than rehearsal's, and the other scanners."""
    channels, *spatial = bed.held_out[0][0].shape
    drawn = strong_and_mild(draw_sites(sites, seed=1, spatial_dims=len(spatial), channels=channels))
    found = {"source": Stream("source", (SOURCE_SITE,)).pairs(bed.held_out, 1)}
    for i, site in enumerate(drawn):
        found[f"simulated {i + 1}"] = Stream(site.name, (site,), framing=FRAMINGS[i % 4]).pairs(bed.held_out, 1)
    return found | {name: list(pairs) for name, pairs in bed.targets.items()}


def measure(bed: Bed, sites: int, kept: Path, without: Sequence[str]) -> dict[str, Any]:
    """Mean Dice in percent by way and place; what is in `kept` is not run again."""
    done: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    places = streams(bed, sites)
    for way, begin in ways(bed).items():
        if way in done or way in without:
            continue
        found = {place: mean_score(begin(), pairs) for place, pairs in places.items()}
        simulated = fmean(value for place, value in found.items() if place.startswith("simulated"))
        print(f"{bed.name}: {way}: simulated {simulated:.1f}, source {found['source']:.1f}", flush=True)
        done[way] = found
        kept.write_text(json.dumps(done))
    return done


def mean_score(predict: Predicting, pairs: Sequence[Pair]) -> float:
    """Mean foreground Dice in percent, image by image in order."""
    found = []
    for image, label in pairs:
        prediction = predict(image[None]).cpu()
        found.append(mean_defined(dice_per_class(most_likely(prediction)[0], label, prediction.shape[1])))
    return 100 * fmean(found)


# ---- what is run


def synthetic(task: str, seed: int, *, quick: bool) -> Bed:
    """A small U-Net at the first site of a synthetic task."""
    source, *others = TARGETS[task]
    size, train, epochs = SIZES[task]
    train, epochs = (8, 1) if quick else (train, epochs)
    site = phantom(task, source, train, seed=1000 * seed, size=size)
    settings = TrainingSettings(
        epochs=epochs, batch_size=4, learning_rate=3e-3, validation=0.25, seed=seed, loss="ce+dice",
        with_=("dtta",), denoiser_epochs=10, denoiser_widths=(8, 16, 32),
    )  # fmt: skip
    network = Architecture("unet", len(size), 1, len(site.classes), {"width": 8, "norm": "instance"})
    folder = ROOT / "runs" / ("instance_quick" if quick else "instance") / f"{task}_{seed}"
    preprocessing = Preprocessing("zscore")  # as nnU-Net takes images
    training = SourceTraining([site], network, preprocessing, settings, folder, torch.device("cpu"), resume=True)
    checkpoint = training.run()
    count = 2 if quick else IMAGES

    def pairs(name: str, count: int, first: int) -> list[Pair]:
        cases = Mapped(phantom(task, name, count, seed=first + 1000 * seed, size=size), preprocessing.case)
        return [(case.image, case.label) for case in map(cases.__getitem__, range(count)) if case.label is not None]

    return Bed(
        f"{task}, seed {seed}",
        TITLES[task],
        checkpoint,
        pairs(source, REHEARSED, 200),
        pairs(source, count, 400),
        {name: pairs(name, count + 2, 600) for name in others},
    )


TARGETS = {"oct": ("spectralis", "cirrus"), "prostate": ("RUNMC", "I2CVB", "BIDMC", "HK")}
SIZES: dict[str, tuple[tuple[int, ...], int, int]] = {"oct": ((96, 32), 48, 20), "prostate": ((32, 32, 16), 24, 20)}
SEEDS = {"oct": 3, "prostate": 2}  # networks trained for each task
TITLES = {
    "oct": "Synthetic OCT, 96 × 32, nine classes; trained at spectralis",
    "prostate": "Synthetic prostate MRI, 32 × 32 × 16, two classes; trained at RUNMC",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny, to try the program; writes to runs/instance_quick")
    parser.add_argument("--sites", type=int, default=6, help="simulated sites")
    parser.add_argument("--tasks", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--without", nargs="+", default=[], metavar="WAY", help="ways that are not run, by their name")
    parser.add_argument("--collect", action="store_true", help="write the page from what is measured so far")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = ROOT / "runs" / ("instance_quick" if chosen.quick else "instance")
    output = folder if chosen.quick else ROOT / "docs"
    tasks: dict[str, Any] = {task: {"title": TITLES[task], "seeds": {}} for task in chosen.tasks}
    for task, seed in [(name, seed) for name in tasks for seed in range(1 if chosen.quick else SEEDS[name])]:
        kept, sites = folder / f"{task}_{seed}.json", 2 if chosen.quick else chosen.sites
        found = json.loads(kept.read_text()) if chosen.collect else None
        if found is None:
            found = measure(synthetic(task, seed, quick=chosen.quick), sites, kept, chosen.without)
        tasks[task]["seeds"][str(seed)] = found
    results = {
        "quick": chosen.quick,
        "dtta_updates": {str(axes): count for axes, count in DTTA_UPDATES.items()},
        "sites": chosen.sites,
        "images": IMAGES,
        "provenance": asdict(Provenance.collect(seeds=tuple(range(max(SEEDS.values()))), data={})),
        "tasks": tasks,
    }
    (output / "results").mkdir(parents=True, exist_ok=True)
    (output / "results" / "instance_norm.json").write_text(json.dumps(results, indent=1) + "\n")
    write_page(results, output)


if __name__ == "__main__":
    main()
