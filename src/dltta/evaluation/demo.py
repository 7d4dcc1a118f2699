"""What `dltta demo` runs: synthetic hospitals, sized for two cores. A demonstration, not a benchmark."""

from dltta.data.phantom import SITES
from dltta.evaluation.experiment import Experiment
from dltta.recipes import Recipe
from dltta.training import TrainingSettings

TASKS = ("oct", "histology", "prostate")

NOTES = (
    "All images are synthetic: anatomy drawn from simple shapes, seen by simulated scanners. "
    "The numbers show how the methods behave, not how they do on patients.",
)


def demo_experiment(task: str, output: str, *, seed: int, quick: bool) -> Experiment:
    """The experiment of one task; `quick` is for a first look, with fewer images and epochs."""
    make = {"oct": _oct, "histology": _histology, "prostate": _prostate}[task]
    return make(f"{output}/{task}{'-quick' if quick else ''}", seed, quick)


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
