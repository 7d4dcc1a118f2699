"""What `dltta demo` runs: synthetic hospitals, sized for two cores. A demonstration, not a benchmark."""

from dataclasses import replace

from dltta.data.phantom import SITES
from dltta.evaluation.experiment import Experiment
from dltta.recipes import MATCHED, RECOMMENDED, Recipe
from dltta.training import TrainingSettings

TASKS = ("oct", "histology", "prostate")

CHANGING = {"oct": (24, 6), "histology": (80, 32), "prostate": (12, 3)}  # images of each scanner, in full and quick

NOTES = (
    "All images are synthetic: anatomy drawn from simple shapes, seen by simulated scanners. "
    "The numbers show how the methods behave, not how they do on patients.",
)


def demo_experiment(task: str, output: str, *, seed: int, quick: bool) -> Experiment:
    """The experiment of one task; `quick` is for a first look, with fewer images and epochs and the paper's methods.

    Otherwise the default recipe of `dltta adapt`, which rehearses first, and the matched rate are run too.
    """
    make = {"oct": _oct, "histology": _histology, "prostate": _prostate}[task]
    experiment = make(f"{output}/{task}{'-quick' if quick else ''}", seed, quick)
    if quick:
        return experiment
    return replace(experiment, methods=(*experiment.methods, RECOMMENDED), rates=(*experiment.rates, MATCHED))


def changing_experiment(experiment: Experiment, *, quick: bool) -> Experiment:
    """The same model, when the scanner changes half-way: some images of its own site, then of the first target."""
    home, away = experiment.in_domain, experiment.targets[0]
    count = CHANGING[away.split(":")[1]][quick]
    methods = tuple(m for m in ("source", "ptbn", "tent", RECOMMENDED) if m in experiment.methods)
    return replace(
        experiment,
        targets=(f"sequence:{_counted(home, count)},{_counted(away, count)}",),
        in_domain="none",
        output=f"{experiment.output}/changing",
        work=experiment.output,
        methods=methods,
        rates=("dynamic",),
        examples=0 if quick else 12,
    )


def _counted(site: str, count: int) -> str:
    """The same synthetic site with another number of images; image i stays the same."""
    phantom, task, name, _, seed = site.split(":")
    return f"{phantom}:{task}:{name}:{count}:{seed}"


def _sites(task: str, count: int, seed: int, only: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The target sites; streams use other random numbers than training does."""
    return tuple(f"phantom:{task}:{site}:{count}:{seed + 1000}" for site in only or SITES[task][1:])


def _training(epochs: int, batch_size: int, rate: float | None, seed: int, quick: bool) -> TrainingSettings:
    """With all that TTT and ATTA need, at a quarter of ATTA's width; `rate` None is the paper's."""
    return TrainingSettings(
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=rate,
        validation=0.125,
        seed=seed,
        with_=("ttt", "atta"),
        autoencoder_epochs=1 if quick else 3,
        autoencoder_width=16,
    )


def _oct(output: str, seed: int, quick: bool) -> Experiment:
    return Experiment(
        source=(f"phantom:oct:spectralis:{24 if quick else 40}:{seed}",),
        targets=_sites("oct", 24 if quick else 40, seed),
        in_domain=f"phantom:oct:spectralis:16:{seed + 2000}",
        output=output,
        network_options={"width": 16},
        training=_training(6 if quick else 8, 4, 3e-3, seed, quick),
    )


def _histology(output: str, seed: int, quick: bool) -> Experiment:
    return Experiment(
        source=(f"phantom:histology:hospital_0:{160 if quick else 480}:{seed}",),
        targets=_sites("histology", 80 if quick else 160, seed, only=("hospital_2", "hospital_3")),
        in_domain=f"phantom:histology:hospital_0:200:{seed + 2000}",
        output=output,
        network="densenet_small",
        training=_training(4 if quick else 12, 16, None, seed, quick),
        adaptation=Recipe(batch_size=16),
    )


def _prostate(output: str, seed: int, quick: bool) -> Experiment:
    return Experiment(
        source=(f"phantom:prostate:RUNMC:{16 if quick else 28}:{seed}",),
        targets=_sites("prostate", 6 if quick else 24, seed, only=("I2CVB", "BIDMC")),
        in_domain=f"phantom:prostate:RUNMC:12:{seed + 2000}",
        output=output,
        network_options={"width": 8},
        training=_training(6 if quick else 12, 2, 3e-3, seed, quick),
    )
