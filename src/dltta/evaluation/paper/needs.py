"""The experiments behind each table and figure of the paper, and where each of its columns finds its number."""

from dataclasses import dataclass, replace
from typing import Any

from dltta.data.datasets.oct import LAYERS
from dltta.data.datasets.prostate import SITES
from dltta.evaluation.experiment import Experiment
from dltta.evaluation.paper.published import (
    RATE,
    Derived,
    Place,
)
from dltta.evaluation.paper.tasks import HOSPITALS, HOSPITALS_PHANTOM, PROSTATE_TARGETS, Setup
from dltta.metrics import CLASSIFICATION_METRICS

RATES = (1e-3, 2e-3, 3e-3, 4e-3, 5e-3)

SIZES = (6, 8, 10, 12, 14, 20)  # 20 is in the paper's text, the others in its figure

STEPS = (1, 4, 8)

ORDERS = 5

PAPER_NEIGHBORS = 8  # of the OCT memory

ITERATIONS = 10  # of image-specific adaptation

ADAPTED = ("ttt", "tent", "atta")


@dataclass(frozen=True)
class Runs:
    """The experiments behind one table or figure, by name, and where each column finds its number."""

    experiments: dict[str, Experiment]
    places: dict[str, Place]
    derived: tuple[Derived, ...] = ()
    cost: bool = False  # add a row with what each column costs
    may_diverge: frozenset[str] = frozenset()  # runs with steps so large that numbers may become infinite


def oct(base: Experiment, setup: Setup) -> Runs:
    places = {layer: Place("paper", f"dice_{layer}", ("cirrus",)) for layer in LAYERS}
    return Runs({"paper": base}, {**places, "Average": Place("paper", "dice", ("cirrus",))})


def histology(base: Experiment, setup: Setup) -> Runs:
    sites = HOSPITALS_PHANTOM if setup.data is None else HOSPITALS
    titles = {"auc": "AUC", "f1": "F1"}
    places = {
        f"{letter} {titles.get(metric, metric.capitalize())}": Place("paper", metric, (site,))
        for letter, site in zip("AB", sites, strict=True)
        for metric in CLASSIFICATION_METRICS
    }
    return Runs({"paper": base}, places)


def prostate(base: Experiment, setup: Setup) -> Runs:
    places = {letter: Place("paper", "dice", (site,)) for letter, site in SITES.items() if letter != "A"}
    return Runs({"paper": base}, {**places, "Average": Place("paper", "dice", PROSTATE_TARGETS)})


def initial_rates(base: Experiment, setup: Setup) -> Runs:
    """The paper's initial rates; at the first of them also Eq. (4) summed over positions, a run for each method."""
    first = replace(_with(base, alpha=RATES[0], positions="sum"), rates=("dynamic",))
    summed = {
        f"sum-{method}": replace(first, methods=("source", method)) for method in base.methods if method in ADAPTED
    }
    at_sum = replace(_average("sum"), by_method=True)
    places = {
        **{written(alpha): _average(alpha_run(alpha)) for alpha in RATES},
        f"{written(RATES[0])}, sum over positions": at_sum,
        f"mean rate x 1000 at {written(RATES[0])}": replace(_average(alpha_run(RATES[0])), metric=RATE),
        "mean rate x 1000, sum over positions": replace(at_sum, metric=RATE),
    }
    experiments = {alpha_run(alpha): _with(base, alpha=alpha) for alpha in RATES} | summed
    return Runs(experiments, places, may_diverge=frozenset(summed))


def orders(base: Experiment, setup: Setup) -> Runs:
    places = {f"Order {'ABCDE'[order]}": replace(_average("orders"), order=order) for order in range(ORDERS)}
    spread = Derived("Largest difference", tuple(places), lambda means: max(means) - min(means))
    return Runs({"orders": replace(base, orders=ORDERS)}, places, derived=(spread,))


def image_specific(base: Experiment, setup: Setup) -> Runs:
    specific = _with(base, mode="image-specific", steps=ITERATIONS)
    return Runs(
        {"image-specific": specific, "continual": base},
        {"Image-specific": _average("image-specific"), "Image-continual": _average("continual")},
        cost=True,
    )


def steps(base: Experiment, setup: Setup) -> Runs:
    dynamic = replace(base, rates=("dynamic",))
    return Runs(
        {f"steps-{steps}": _with(dynamic, steps=steps) for steps in STEPS},
        {f"{steps}": _average(f"steps-{steps}") for steps in STEPS},
        cost=True,
    )


def retrieval_size(base: Experiment, setup: Setup) -> Runs:
    places = {f"D = {size}": _average(f"neighbors-{size}") for size in SIZES}
    fixed = replace(_average(f"neighbors-{PAPER_NEIGHBORS}"), rate="fixed")
    return Runs({f"neighbors-{size}": _with(base, neighbors=size) for size in SIZES}, {"fixed rate": fixed, **places})


def similarity(base: Experiment, setup: Setup) -> Runs:
    difference = Derived("Difference", ("L2", "cosine"), lambda means: abs(means[0] - means[1]))
    return Runs(
        {"l2": base, "cosine": _with(base, distance="cosine")},
        {"L2": _average("l2"), "cosine": _average("cosine")},
        derived=(difference,),
    )


def static_rates(base: Experiment, setup: Setup) -> Runs:
    tent = replace(base, methods=("source", "tent"), rates=("fixed",))
    static = {alpha_run(alpha): _with(tent, alpha=alpha) for alpha in RATES}
    return Runs({**static, "dynamic": replace(tent, rates=("dynamic",))}, {})


def tent(base: Experiment, setup: Setup) -> Runs:
    return Runs({"tent": replace(base, methods=("source", "tent"))}, {})


def _with(experiment: Experiment, **changed: Any) -> Experiment:
    """The same experiment with other settings of adaptation."""
    return replace(experiment, adaptation=replace(experiment.adaptation, **changed))


def alpha_run(alpha: float) -> str:
    return f"alpha-{alpha:g}"


def written(alpha: float) -> str:
    """As the paper writes it: 1e-3."""
    return f"{1000 * alpha:.0f}e-3"


def _average(run: str) -> Place:
    return Place(run, "dice", ("cirrus",))
