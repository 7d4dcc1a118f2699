"""The paper's tables and figures, ours beside the published numbers: what `dltta reproduce` runs.

ROOT/
  work/TASK/…             models and streams that all names of a task share; never trained or run twice
  NAME/RUN/…              results.json, tables and report of each experiment
  NAME/table.md table.tex table.csv
  NAME/figure.png         for figures; figure-loss and figure-rates also have curves.json
Names end in `-phantom` on synthetic scanners.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from dltta import methods
from dltta.config import make_adapter, make_uda, open_dataset
from dltta.core.objectives import Objective, Tent
from dltta.data.case import Task
from dltta.data.check import check_published
from dltta.data.datasets.oct import LAYERS, SPECTRALIS_SPLIT
from dltta.data.datasets.prostate import OTHER_NAMES, SITES, VOLUMES, Prostate, sites_in
from dltta.errors import DataError, NonFiniteError, SettingError, require
from dltta.evaluation.bench import prepare, run_experiment
from dltta.evaluation.demo import NOTES, demo_experiment
from dltta.evaluation.examples import Array, Example
from dltta.evaluation.experiment import VALIDATION, Experiment, Job
from dltta.evaluation.listener import Listener
from dltta.evaluation.outputs import gather_shown
from dltta.evaluation.paper.figures import (
    Curve,
    Track,
    loss_figure,
    rates_figure,
    retrieval_figure,
    segmentation_figure,
)
from dltta.evaluation.paper.published import (
    NOT_PRINTED,
    RATE,
    Comparison,
    ComparisonCell,
    ComparisonRow,
    Derived,
    Number,
    Place,
    Published,
    compare,
    comparison_csv,
    comparison_latex,
    comparison_markdown,
    ours_only,
)
from dltta.evaluation.results import Results
from dltta.evaluation.run import CaseRecord
from dltta.evaluation.runners import Runner
from dltta.evaluation.stream_jobs import open_stream
from dltta.evaluation.tables import NAMES as METHOD_NAMES
from dltta.evaluation.tables import method_label
from dltta.evaluation.tracking import Tracker
from dltta.files import write_atomically
from dltta.metrics import CLASSIFICATION_METRICS
from dltta.models.predictions import entropy
from dltta.training import TrainingSettings
from dltta.training.settings import LEARNING_RATES
from dltta.training.uda import cyclegan, style, swav, udas

Bed = Literal["oct", "histology", "prostate"]
TASKS: dict[Bed, Task] = {"oct": "segmentation", "histology": "classification", "prostate": "segmentation"}
DATA_SETS: dict[Bed, str] = {"oct": "oct", "histology": "camelyon17", "prostate": "prostate"}
Files = dict[str, bytes | str]  # by name
ALIASES = {"camelyon17": "histology"}

RATES = (1e-3, 2e-3, 3e-3, 4e-3, 5e-3)
SIZES = (6, 8, 10, 12, 14, 20)  # 20 is in the paper's text, the others in its figure
STEPS = (1, 4, 8)
ORDERS = 5
PAPER_METHODS = tuple(map(str, methods.PAPER_METHODS))
PAPER_NEIGHBORS = 8  # of the OCT memory
ITERATIONS = 10  # of image-specific adaptation
ADAPTED = ("ttt", "tent", "atta")

WITH_TARGET: dict[Bed, tuple[str, ...]] = {  # rows of methods that learn with the images of the test site
    "oct": ("uda-st", "cyclegan", "udas"),
    "histology": ("uda-swav",),
    "prostate": ("udas",),
}
REDUCED: dict[str, dict[str, Any]] = {  # on phantoms: a minute or two for each target on two cores
    "uda-st": style.PHANTOM,
    "cyclegan": cyclegan.PHANTOM,
    "udas": udas.PHANTOM,
    "uda-swav": swav.PHANTOM,
}

HOSPITALS = ("center_1", "center_2")  # the paper's A and B, by the number of their patches
HOSPITALS_PHANTOM = ("hospital_1", "hospital_2")
SOURCE_HOSPITALS = ("hospital_0", "hospital_3", "hospital_4")
PROSTATE_TARGETS = tuple(site for letter, site in SITES.items() if letter != "A")

SMALL: dict[Bed, tuple[str, int]] = {"oct": ("128x48", 16), "prostate": ("32x32x16", 24)}  # pixels and epochs

ON_PHANTOMS = "Synthetic scanners, reduced size; not comparable with the published column."
ON_PUBLISHED_DATA = "Ours: the published data, read from disk."
EXAMPLES = 4  # kept of every stream; two of them are drawn


@dataclass(frozen=True)
class Setup:
    """What one call asks for. Without `data` the synthetic scanners are used."""

    root: Path
    data: Path | None = None
    seeds: int = 1
    seed: int = 0
    epochs: int | None = None  # None: the paper's 100, the demo's on phantoms
    weights: Path | None = None  # ImageNet weights of the histology network
    vgg: Path | None = None  # of the perceptual network of UDA-ST; None: the source model's encoder
    test_time_only: bool = False  # leave out the rows of methods that learn with target images
    small: bool = False  # smaller synthetic images still, for all names with several seeds

    def folder(self, name: str) -> Path:
        return self.root / (f"{name}-phantom" if self.data is None else name)


@dataclass(frozen=True)
class Runs:
    """The experiments behind one table or figure, by name, and where each column finds its number."""

    experiments: dict[str, Experiment]
    places: dict[str, Place]
    derived: tuple[Derived, ...] = ()
    cost: bool = False  # add a row with what each column costs
    may_diverge: frozenset[str] = frozenset()  # runs with steps so large that numbers may become infinite


# ---- what a reader must know first

PAPER_SIZES: dict[Bed, dict[str, str]] = {
    "oct": {
        "source images": "588 + 147",
        "images of each target": "48",
        "pixels": "128 x 1024",
        "network": "U-Net of width 16",
        "epochs": "100",
        "training rate": "1e-3",
        "test batch": "1",
        "pairs in memory": "20",
        "auto-encoder width": "64",
        "auto-encoder epochs": "20",
    },
    "histology": {
        "source images": "302,436",
        "source hospitals": "3",
        "images of each target": "34,904 and 85,054",
        "pixels": "96 x 96",
        "network": "DenseNet-121 with ImageNet weights",
        "epochs": "100",
        "training rate": "3e-4",
        "test batch": "200",
        "pairs in memory": "800",
        "auto-encoder width": "64",
        "auto-encoder epochs": "20",
    },
    "prostate": {
        "source images": "30",
        "images of each target": "30, 19, 13, 12 and 12",
        "pixels": "windows of 80 x 80 x 80",
        "network": "U-Net of width 16",
        "epochs": "100",
        "training rate": "1e-3",
        "test batch": "1",
        "pairs in memory": "20",
        "auto-encoder width": "64",
        "auto-encoder epochs": "20",
    },
}


def about(bed: Bed, setup: Setup) -> str:
    """What a reader must know before the first number: on synthetic scanners, what is smaller than in the paper."""
    if setup.data is not None:
        single = bed == "prostate" and _single_sites(_folder_of(bed, setup.data))
        return single or ON_PUBLISHED_DATA
    ours, papers = _phantom_sizes(bed, base_experiment(bed, setup)), PAPER_SIZES[bed]
    listed = ", ".join(f"{what} {ours[what]} ({papers[what]})" for what in papers if ours[what] != papers[what])
    return f"{ON_PHANTOMS} Ours (the paper's): {listed}."


def _single_sites(folder: Path) -> str:
    """Which columns of the prostate table single sites fill, with how many volumes; nothing when all are there."""
    found = sites_in(folder)
    if len(found) in (0, len(SITES)):
        return ""
    listed = {letter: f"{letter} {site}" for letter, site in SITES.items()}
    counts = [
        f"{listed[letter]} {len(Prostate(folder, site))} ({VOLUMES[site]})"
        for letter, site in SITES.items()
        if site in found
    ]
    filled = ", ".join(listed[letter] for letter, site in SITES.items() if site in found and letter != "A")
    empty = ", ".join(listed[letter] for letter, site in SITES.items() if site not in found)
    return (
        f"Ours: single sites of the paper's, read from disk; whether these are its patients is not known. "
        f"Columns filled: {filled or 'none'}; not at hand: {empty}, so there is no average. "
        f"Volumes, ours (the paper's): {', '.join(counts)}."
    )


def _phantom_sizes(bed: Bed, base: Experiment) -> dict[str, str]:
    width = base.network_options.get("width", 16)
    shape = open_dataset(base.targets[0])[0].image.shape[1:]
    rate = base.training.learning_rate or LEARNING_RATES[TASKS[bed]]
    return {
        "source images": f"{sum(_count(spec) for spec in base.source)}",
        "source hospitals": f"{len(base.source)}",
        "images of each target": f"{_count(base.targets[0])}",
        "pixels": f"{'' if bed != 'prostate' else 'whole volumes of '}{' x '.join(map(str, shape))}",
        "network": f"U-Net of width {width}" if TASKS[bed] == "segmentation" else str(base.network),
        "epochs": f"{base.training.epochs}",
        "training rate": f"{rate:.0e}".replace("e-0", "e-"),
        "test batch": f"{base.adaptation.batch_size}",
        "pairs in memory": f"{(base.adaptation.batches_kept or 0) * (base.adaptation.batch_size or 0)}",
        "auto-encoder width": f"{base.training.autoencoder_width}",
        "auto-encoder epochs": f"{base.training.autoencoder_epochs}",
    }


def _count(phantom: str) -> int:
    return int(phantom.split(":")[3])


# ---- what the paper's three tasks are


def base_experiment(bed: Bed, setup: Setup) -> Experiment:
    """The paper's comparison of methods on one task: every method, both rates, the paper's settings.

    All settings are written out, so that experiments which agree in what decides a stream share it.
    """
    if setup.data is None:
        base = _on_phantoms(bed, setup)
    else:
        base = _on_published_data(bed, _folder_of(bed, setup.data), setup)
    training = base.training if setup.epochs is None else replace(base.training, epochs=setup.epochs)
    return replace(
        base,
        work=str(setup.folder(f"work/{bed}{_other_than_usual(setup)}")),
        methods=PAPER_METHODS if setup.test_time_only else (*PAPER_METHODS, *WITH_TARGET[bed]),
        uda=_uda_settings(bed, setup),
        seeds=setup.seeds,
        examples=EXAMPLES,
        training=training,
        adaptation=base.adaptation.resolved(TASKS[bed], calibrated=False),
    )


def _uda_settings(bed: Bed, setup: Setup) -> dict[str, dict[str, Any]]:
    """What methods that learn with target images are given instead of their defaults."""
    settings = {method: dict(REDUCED[method]) for method in WITH_TARGET[bed]} if setup.data is None else {}
    if setup.vgg is not None and "uda-st" in WITH_TARGET[bed]:
        settings.setdefault("uda-st", {})["vgg"] = str(setup.vgg)
    return settings


def _on_phantoms(bed: Bed, setup: Setup) -> Experiment:
    """The demo's sizes, at the sites of the paper's table; histology learns from as many hospitals as in the paper."""
    demo = demo_experiment(bed, str(setup.root), seed=setup.seed, quick=False)
    sites = {"oct": ("cirrus",), "histology": HOSPITALS_PHANTOM, "prostate": PROSTATE_TARGETS}[bed]
    demo = replace(demo, targets=tuple(_phantom_at(demo.targets[0], site) for site in sites))
    if setup.small and bed in SMALL:
        demo = _smaller(demo, *SMALL[bed])
    if bed != "histology":
        return demo
    sources = tuple(_phantom_at(demo.source[0], site, len(SOURCE_HOSPITALS)) for site in SOURCE_HOSPITALS)
    in_domain = ",".join(_phantom_at(demo.in_domain, site, len(SOURCE_HOSPITALS)) for site in SOURCE_HOSPITALS)
    return replace(demo, source=sources, in_domain=f"sequence:{in_domain}")


def _smaller(demo: Experiment, pixels: str, epochs: int) -> Experiment:
    """With images of so many pixels; in more epochs, which then cost little."""
    return replace(
        demo,
        source=tuple(f"{spec}:{pixels}" for spec in demo.source),
        targets=tuple(f"{spec}:{pixels}" for spec in demo.targets),
        in_domain=f"{demo.in_domain}:{pixels}",
        training=replace(demo.training, epochs=epochs),
    )


def _phantom_at(spec: str, site: str, parts: int = 1) -> str:
    """The same synthetic cases at another site, or their share of one of so many sites."""
    phantom, task, _, count, seed = spec.split(":")
    return ":".join((phantom, task, site, str(int(count) // parts), seed))


def _on_published_data(bed: Bed, folder: Path, setup: Setup) -> Experiment:
    """Ours are the batch sizes of source training, and validation in prostate and histology; the paper has neither."""
    common = TrainingSettings(seed=setup.seed, with_=("ttt", "atta"))
    match bed:
        case "oct":
            return Experiment(
                source=(f"oct:spectralis:train+val@{folder}",),
                targets=(f"oct:cirrus@{folder}",),
                in_domain=f"oct:spectralis:test@{folder}",
                output=str(setup.root),
                training=replace(common, validation=SPECTRALIS_SPLIT["val"]),  # 588 and 147 slices
            )
        case "histology":
            return Experiment(
                source=(f"camelyon17:train@{folder}",),
                targets=tuple(f"camelyon17:{center}@{folder}" for center in HOSPITALS),
                in_domain=f"camelyon17:id_val@{folder}",
                output=str(setup.root),
                network_options={"weights": str(setup.weights)} if setup.weights else {},
                training=replace(common, batch_size=32, validation=0.0),
            )
        case "prostate":
            return Experiment(
                source=(f"prostate:A@{folder}",),
                targets=tuple(f"prostate:{site}@{folder}" for site in _prostate_targets(folder)),
                output=str(setup.root),
                training=replace(common, batch_size=4, patch=(80, 80, 80)),
            )


def _prostate_targets(folder: Path) -> tuple[str, ...]:
    """The paper's targets that are there; all of them when none is, so that what is missing is told."""
    return tuple(site for site in sites_in(folder) if site in PROSTATE_TARGETS) or PROSTATE_TARGETS


def _folder_of(bed: Bed, data: Path) -> Path:
    """The data set's own folder, also when `data` holds several."""
    inside = data / DATA_SETS[bed]
    return inside if inside.is_dir() else data


def _other_than_usual(setup: Setup) -> str:
    """Models of other seeds, lengths, images or initial weights are kept apart."""
    seed = f"{'-small' if setup.small else ''}{f'-seed{setup.seed}' if setup.seed else ''}"
    files = "".join(f"-{file.stem}" for file in (setup.weights, setup.vgg) if file is not None)
    return f"{seed}{'' if setup.epochs is None else f'-epochs{setup.epochs}'}{files}"


def _require_data(bed: Bed, setup: Setup) -> None:
    """Nothing, or one line that says what is missing in the folder of published data."""
    if setup.data is None:
        return
    name, folder = DATA_SETS[bed], _folder_of(bed, setup.data)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; `dltta data card {name}` says how to get the data")
    if bed == "prostate":
        _require_roles(folder)
    base = base_experiment(bed, setup)
    homes = () if base.in_domain == VALIDATION else (base.in_domain,)
    try:
        for spec in (*base.source, *base.targets, *homes):
            open_dataset(spec)
    except DataError as error:
        problems = [str(problem) for problem in check_published(name, folder)] or [str(error)]
        more = f" | and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DataError(
            f"{folder} is not the {name} data set: {' | '.join(problems[:3])}{more} "
            f"(`dltta data check {folder} --as {name}` lists all)"
        ) from error


def _require_roles(folder: Path) -> None:
    """Single sites must have the paper's source and a target among them."""
    found = sites_in(folder)
    known = ", ".join(f"{letter} {site}" for letter, site in SITES.items() if site in found)
    if found and SITES["A"] not in found:
        names = ", ".join((SITES["A"], *OTHER_NAMES[SITES["A"]]))
        raise DataError(f"{folder} has {known}, but not the source A; add it as one of the folders {names}")
    if found == (SITES["A"],):
        raise DataError(f"{folder} has only the source, {known}; add a target: {', '.join(PROSTATE_TARGETS)}")


# ---- what each table and figure needs


def _oct(base: Experiment, setup: Setup) -> Runs:
    places = {layer: Place("paper", f"dice_{layer}", ("cirrus",)) for layer in LAYERS}
    return Runs({"paper": base}, {**places, "Average": Place("paper", "dice", ("cirrus",))})


def _histology(base: Experiment, setup: Setup) -> Runs:
    sites = HOSPITALS_PHANTOM if setup.data is None else HOSPITALS
    titles = {"auc": "AUC", "f1": "F1"}
    places = {
        f"{letter} {titles.get(metric, metric.capitalize())}": Place("paper", metric, (site,))
        for letter, site in zip("AB", sites, strict=True)
        for metric in CLASSIFICATION_METRICS
    }
    return Runs({"paper": base}, places)


def _prostate(base: Experiment, setup: Setup) -> Runs:
    places = {letter: Place("paper", "dice", (site,)) for letter, site in SITES.items() if letter != "A"}
    return Runs({"paper": base}, {**places, "Average": Place("paper", "dice", PROSTATE_TARGETS)})


def _initial_rates(base: Experiment, setup: Setup) -> Runs:
    """The paper's initial rates; at the first of them also Eq. (4) summed over positions, a run for each method."""
    first = replace(_with(base, alpha=RATES[0], positions="sum"), rates=("dynamic",))
    summed = {
        f"sum-{method}": replace(first, methods=("source", method)) for method in base.methods if method in ADAPTED
    }
    at_sum = replace(_average("sum"), by_method=True)
    places = {
        **{_written(alpha): _average(_alpha_run(alpha)) for alpha in RATES},
        f"{_written(RATES[0])}, sum over positions": at_sum,
        f"mean rate x 1000 at {_written(RATES[0])}": replace(_average(_alpha_run(RATES[0])), metric=RATE),
        "mean rate x 1000, sum over positions": replace(at_sum, metric=RATE),
    }
    experiments = {_alpha_run(alpha): _with(base, alpha=alpha) for alpha in RATES} | summed
    return Runs(experiments, places, may_diverge=frozenset(summed))


def _orders(base: Experiment, setup: Setup) -> Runs:
    places = {f"Order {'ABCDE'[order]}": replace(_average("orders"), order=order) for order in range(ORDERS)}
    spread = Derived("Largest difference", tuple(places), lambda means: max(means) - min(means))
    return Runs({"orders": replace(base, orders=ORDERS)}, places, derived=(spread,))


def _image_specific(base: Experiment, setup: Setup) -> Runs:
    specific = _with(base, mode="image-specific", steps=ITERATIONS)
    return Runs(
        {"image-specific": specific, "continual": base},
        {"Image-specific": _average("image-specific"), "Image-continual": _average("continual")},
        cost=True,
    )


def _steps(base: Experiment, setup: Setup) -> Runs:
    dynamic = replace(base, rates=("dynamic",))
    return Runs(
        {f"steps-{steps}": _with(dynamic, steps=steps) for steps in STEPS},
        {f"{steps}": _average(f"steps-{steps}") for steps in STEPS},
        cost=True,
    )


def _retrieval_size(base: Experiment, setup: Setup) -> Runs:
    places = {f"D = {size}": _average(f"neighbors-{size}") for size in SIZES}
    fixed = replace(_average(f"neighbors-{PAPER_NEIGHBORS}"), rate="fixed")
    return Runs({f"neighbors-{size}": _with(base, neighbors=size) for size in SIZES}, {"fixed rate": fixed, **places})


def _similarity(base: Experiment, setup: Setup) -> Runs:
    difference = Derived("Difference", ("L2", "cosine"), lambda means: abs(means[0] - means[1]))
    return Runs(
        {"l2": base, "cosine": _with(base, distance="cosine")},
        {"L2": _average("l2"), "cosine": _average("cosine")},
        derived=(difference,),
    )


def _static_rates(base: Experiment, setup: Setup) -> Runs:
    tent = replace(base, methods=("source", "tent"), rates=("fixed",))
    static = {_alpha_run(alpha): _with(tent, alpha=alpha) for alpha in RATES}
    return Runs({**static, "dynamic": replace(tent, rates=("dynamic",))}, {})


def _tent(base: Experiment, setup: Setup) -> Runs:
    return Runs({"tent": replace(base, methods=("source", "tent"))}, {})


def _with(experiment: Experiment, **changed: Any) -> Experiment:
    """The same experiment with other settings of adaptation."""
    return replace(experiment, adaptation=replace(experiment.adaptation, **changed))


def _alpha_run(alpha: float) -> str:
    return f"alpha-{alpha:g}"


def _written(alpha: float) -> str:
    """As the paper writes it: 1e-3."""
    return f"{1000 * alpha:.0f}e-3"


def _average(run: str) -> Place:
    return Place(run, "dice", ("cirrus",))


# ---- figures


@dataclass
class Spread:
    """Tent's objective, remembering the mean and sd of the entropy over the positions of each image."""

    inner: Objective
    means: list[float] = field(default_factory=list)
    sds: list[float] = field(default_factory=list)

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        return self.inner.prepare(model)

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        values = entropy(logits.detach())
        self.means.append(values.mean().item())
        self.sds.append(values.std(unbiased=False).item())
        return self.inner(model, x, logits)


def loss_curve(experiment: Experiment, rate: str, device: str) -> Curve:
    """The loss of Tent for each image of the first stream, before its update: mean and sd over positions."""
    job = Job(experiment.targets[0], "tent", rate, 0, 0)
    checkpoint, dataset, order = open_stream(experiment, job, device)
    adapter = make_adapter(checkpoint, experiment.recipe(job))
    watched = Spread(Tent())
    adapter.objective = watched
    for index in order:
        case = dataset[index]
        adapter.step(case.image[None], case=case.name)
    return Curve(tuple(watched.means), tuple(watched.sds))


def _draw_rates(drawing: "Drawing") -> tuple[Files, Comparison]:
    """Along the first stream: discrepancy, rate and Dice; above, images from the least discrepancy to the largest."""
    experiment, results = drawing.runs.experiments["tent"], drawing.results["tent"]
    rows = {rate: _tent_stream(results, rate) for rate in ("fixed", "dynamic")}
    tracks = {method_label("tent", rate): _track(found) for rate, found in rows.items()}
    compared = sorted((row for row in rows["dynamic"] if row.discrepancy is not None), key=_discrepancy)
    shown = [compared[i] for i in sorted({round(i) for i in np.linspace(0, len(compared) - 1, min(4, len(compared)))})]
    _, dataset, _ = open_stream(experiment, Job(experiment.targets[0], "tent", "dynamic", 0, 0), drawing.device)
    cases = {case.name: case for case in (dataset[i] for i in range(len(dataset)))}
    images = {
        f"discrepancy {_discrepancy(row):.3f}\nrate {row.rate:.1e}": Example(
            row.case, np.array(cases[row.case].image), None, {}
        )
        for row in shown
    }
    table_rows = [
        ComparisonRow(
            label,
            "tent",
            rate,
            tuple(ComparisonCell(number, instead=NOT_PRINTED) for number in _summary(tracks[label])),
        )
        for rate, label in zip(rows, tracks, strict=True)
    ]
    columns = ("Dice, points", "Mean rate x 1000", "Least", "Largest", "Mean discrepancy")
    table = ours_only(drawing.published, columns, table_rows, drawing.about, digits=3)
    values = json.dumps({label: asdict(track) for label, track in tracks.items()}, indent=1, ensure_ascii=False) + "\n"
    return {"figure.png": rates_figure(images, tracks, drawing.about), "curves.json": values}, table


def _discrepancy(row: CaseRecord) -> float:
    return row.discrepancy or 0.0


def _track(rows: Sequence[CaseRecord]) -> Track:
    return Track(
        rates=tuple(row.rate for row in rows),
        discrepancies=tuple(row.discrepancy for row in rows),
        dice=tuple(100 * row.metrics["dice"] for row in rows),
    )


def _summary(track: Track) -> tuple[Number | None, ...]:
    """Mean Dice, then of the images with a discrepancy (all, with a fixed rate) mean, least and largest rate."""
    known = [value for value in track.discrepancies if value is not None]
    rates = [
        1000 * rate
        for rate, found in zip(track.rates, track.discrepancies, strict=True)
        if rate is not None and (found is not None or not known)
    ]
    spread = [Number(value) for value in (fmean(rates), min(rates), max(rates))] if rates else [None] * 3
    return Number(fmean(track.dice)), *spread, Number(fmean(known)) if known else None


def _draw_loss(drawing: "Drawing") -> tuple[Files, Comparison]:
    experiment = drawing.runs.experiments["tent"]
    curves = {rate: loss_curve(experiment, rate, drawing.device) for rate in ("fixed", "dynamic")}
    rows = [
        ComparisonRow(
            method_label("tent", rate), "tent", rate, tuple(ComparisonCell(Number(value)) for value in _moves(curve))
        )
        for rate, curve in curves.items()
    ]
    columns = ("Mean loss", "Sd from image to image", "Mean change from image to image", "Mean sd over pixels")
    table = ours_only(drawing.published, columns, rows, drawing.about, digits=4)
    labels = {method_label("tent", rate): curve for rate, curve in curves.items()}
    values = json.dumps({label: asdict(curve) for label, curve in labels.items()}, indent=1, ensure_ascii=False) + "\n"
    return {"figure.png": loss_figure(labels, drawing.about), "curves.json": values}, table


def _moves(curve: Curve) -> tuple[float, ...]:
    """How high the curve is and how much it moves."""
    changes = [abs(after - before) for before, after in pairwise(curve.means)]
    return fmean(curve.means), pstdev(curve.means), fmean(changes) if changes else 0.0, fmean(curve.sds)


def _draw_retrieval(drawing: "Drawing") -> tuple[Files, Comparison]:
    table = compare(drawing.published, drawing.runs.places, drawing.results, drawing.about)
    values = {row.method: [cell.ours.mean for cell in row.cells if cell.ours] for row in table.rows}
    lines = {METHOD_NAMES[method]: (found[0], found[1:]) for method, found in values.items() if found}
    return {"figure.png": retrieval_figure(SIZES, lines, drawing.about)}, table


def _draw_segmentation(drawing: "Drawing") -> tuple[Files, Comparison]:
    """The first two kept images for which the memory was ready; when it never was, simply the first two."""
    shown = {run: _shown(experiment, drawing.device) for run, experiment in drawing.runs.experiments.items()}
    rows = {run: _tent_rows(results) for run, results in drawing.results.items()}
    labels = {_alpha_run(alpha): _written(alpha) for alpha in RATES} | {"dynamic": "dynamic"}
    names = sorted(shown["dynamic"], key=lambda name: rows["dynamic"][name].discrepancy is None)[:2]
    examples = [
        replace(
            shown["dynamic"][name], predictions={said: _prediction(shown[run][name]) for run, said in labels.items()}
        )
        for name in names
    ]
    captions = [{said: _caption(said, rows[run][name]) for run, said in labels.items()} for name in names]
    table_rows = [
        ComparisonRow(
            f"Tent, {said}",
            "tent",
            "dynamic" if run == "dynamic" else "fixed",
            tuple(cell for name in names for cell in _dice_and_rate(rows[run][name])),
        )
        for run, said in labels.items()
    ]
    columns = [f"{name} {what}" for name in names for what in ("Dice, points", "rate x 1000")]
    table = ours_only(drawing.published, columns, table_rows, drawing.about, digits=2)
    return {"figure.png": segmentation_figure(examples, captions, drawing.about)}, table


def _shown(experiment: Experiment, device: str) -> dict[str, Example]:
    """Tent's predictions for the kept images of the first stream, by image."""
    bench, models = prepare(replace(experiment, in_domain=experiment.targets[0]), device)
    jobs = [job for job in experiment.jobs() if job.method == "tent"]
    return {example.name: example for example in gather_shown(bench, jobs, models[0])}


def _tent_stream(results: Results, rate: str) -> tuple[CaseRecord, ...]:
    """Tent's first stream with this rate."""
    wanted = ("tent", rate, 0, 0)
    return next(s.cases for s in results.streams if (s.method, s.rate, s.seed, s.order) == wanted)


def _tent_rows(results: Results) -> dict[str, CaseRecord]:
    """Each image in Tent's first stream."""
    first = next(stream for stream in results.streams if (stream.method, stream.seed, stream.order) == ("tent", 0, 0))
    return {row.case: row for row in first.cases}


def _prediction(example: Example) -> Array:
    return next(iter(example.predictions.values()))


def _dice_and_rate(row: CaseRecord) -> tuple[ComparisonCell, ComparisonCell]:
    return ComparisonCell(Number(100 * row.metrics["dice"])), ComparisonCell(Number(1000 * (row.rate or 0.0)))


def _caption(label: str, row: CaseRecord) -> str:
    chosen = f" {row.rate:.1e}" if label == "dynamic" else ""
    return f"{label}{chosen}\nDice {100 * row.metrics['dice']:.2f}"


# ---- names


@dataclass(frozen=True)
class Drawing:
    """What a figure is drawn from."""

    published: Published
    runs: Runs
    results: Mapping[str, Results]
    about: str
    device: str


@dataclass(frozen=True)
class Reproduction:
    """One table or figure of the paper. `numbers` names the published file when it is another one's."""

    bed: Bed
    runs: Callable[[Experiment, Setup], Runs]
    draw: Callable[[Drawing], tuple[Files, Comparison]] | None = None
    numbers: str | None = None


REPRODUCTIONS: dict[str, Reproduction] = {
    "oct": Reproduction("oct", _oct),
    "histology": Reproduction("histology", _histology),
    "prostate": Reproduction("prostate", _prostate),
    "initial-rates": Reproduction("oct", _initial_rates),
    "orders": Reproduction("oct", _orders),
    "image-specific": Reproduction("oct", _image_specific),
    "steps": Reproduction("oct", _steps),
    "retrieval-size": Reproduction("oct", _retrieval_size),
    "similarity": Reproduction("oct", _similarity),
    "figure-rates": Reproduction("oct", _tent, _draw_rates),
    "figure-segmentation": Reproduction("oct", _static_rates, _draw_segmentation),
    "figure-loss": Reproduction("oct", _tent, _draw_loss),
    "figure-retrieval": Reproduction("oct", _retrieval_size, _draw_retrieval, "retrieval-size"),
}


def chosen(name: str) -> list[str]:
    """The names that one argument stands for."""
    require("table or figure", name, (*REPRODUCTIONS, *ALIASES, "all"))
    return list(REPRODUCTIONS) if name == "all" else [ALIASES.get(name, name)]


def runs_of(name: str, setup: Setup) -> Runs:
    """The experiments of one name, each with its own folder for results and the task's folder for work."""
    reproduction = REPRODUCTIONS[name]
    base = base_experiment(reproduction.bed, setup)
    if name not in TASKS:  # the paper's comparison of all methods
        base = replace(base, methods=tuple(method for method in base.methods if method in PAPER_METHODS), uda={})
    runs = reproduction.runs(base, setup)
    experiments = {
        run: replace(experiment, output=str(setup.folder(name) / run)) for run, experiment in runs.experiments.items()
    }
    return replace(runs, experiments=experiments)


def check(name: str, setup: Setup) -> Runs:
    """The experiments of one name, once all that can be wrong before they run has been looked at."""
    for file, network in ((setup.weights, "densenet121"), (setup.vgg, "vgg19")):
        if file is not None and not file.is_file():
            raise SettingError(f"there is no file {file}; give torchvision's state dict of {network}")
    runs = runs_of(name, setup)
    _require_data(REPRODUCTIONS[name].bed, setup)
    return runs


def reproduce(
    name: str,
    setup: Setup,
    *,
    device: str = "cpu",
    runner: Runner | None = None,
    listener: Listener | None = None,
    tracker: Tracker | None = None,
) -> list[Path]:
    """Run what one table or figure needs and write it; the files written, the table in Markdown first."""
    reproduction = REPRODUCTIONS[name]
    runs = check(name, setup)
    said = about(reproduction.bed, setup)
    notes = (said, *NOTES) if setup.data is None else (said,)
    results = {}
    for run, experiment in runs.experiments.items():
        try:
            results[run] = run_experiment(
                experiment, device=device, runner=runner, listener=listener, tracker=tracker, notes=notes
            )
        except NonFiniteError:
            if run not in runs.may_diverge:
                raise
    drawn_on = device if runner is None or runner.here(1) else "cpu"  # workers may have what this machine has not
    return write_reproduction(name, setup, runs, results, drawn_on)


def write_reproduction(
    name: str, setup: Setup, runs: Runs, results: Mapping[str, Results], device: str = "cpu"
) -> list[Path]:
    """The table or figure of one name from finished runs."""
    reproduction = REPRODUCTIONS[name]
    if reproduction.draw is None:
        return _write(setup.folder(name), make_table(name, setup, runs, results), {})
    published, said = Published.load(reproduction.numbers or name), about(reproduction.bed, setup)
    files, table = reproduction.draw(Drawing(published, runs, results, said, device))
    return _write(setup.folder(name), table, files)


def make_table(name: str, setup: Setup, runs: Runs, results: Mapping[str, Results]) -> Comparison:
    """The table of one name, ours beside the published numbers."""
    published, said = Published.load(name), about(REPRODUCTIONS[name].bed, setup)
    diverged = runs.may_diverge - results.keys()
    table = compare(published, runs.places, results, said, derived=runs.derived, diverged=diverged)
    table = replace(table, notes=(*table.notes, *_reductions(runs)))
    return _with_cost(table, runs) if runs.cost else table


def _with_cost(table: Comparison, runs: Runs) -> Comparison:
    """With a last row: what each column costs, as passes of the network, against one update per image."""
    costs = {
        column: step_cost(runs.experiments[place.run].adaptation.steps or 1) for column, place in runs.places.items()
    }
    row = ComparisonRow("Cost, x one update", "", "", tuple(ComparisonCell(Number(cost)) for cost in costs.values()))
    note = "Cost: n updates take n + 1 forward and n backward passes; a backward pass counts as two forward ones."
    return replace(table, rows=(*table.rows, row), notes=(*table.notes, note))


def step_cost(updates: int) -> float:
    """Passes of the network for so many updates of one image, against one update: 2 forward and 1 backward."""
    return (updates + 1 + 2 * updates) / 4


def _reductions(runs: Runs) -> list[str]:
    """What methods that learn with target images were given instead of their defaults; a line for each."""
    settings = {method: given for run in runs.experiments.values() for method, given in run.uda.items()}
    lines = []
    for method, given in settings.items():
        usual = asdict(make_uda(method))
        changed = ", ".join(f"{name} {value} (usually {usual[name]})" for name, value in given.items())
        lines.append(f"{METHOD_NAMES[method]}: {changed}.")
    return lines


def _write(folder: Path, table: Comparison, files: Files) -> list[Path]:
    tables: Files = {
        "table.md": comparison_markdown(table),
        "table.tex": comparison_latex(table),
        "table.csv": comparison_csv(table),
    }
    for name, content in (tables | files).items():
        write_atomically(folder / name, content)
    return [folder / name for name in tables | files]
