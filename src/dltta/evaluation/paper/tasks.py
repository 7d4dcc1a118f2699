"""The paper's three tasks, on the published data and on synthetic scanners, and what a reader must know first."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dltta import methods
from dltta.config import open_dataset
from dltta.data.case import Task
from dltta.data.check import check_published
from dltta.data.datasets.oct import SPECTRALIS_SPLIT
from dltta.data.datasets.prostate import OTHER_NAMES, SITES, VOLUMES, Prostate, sites_in
from dltta.errors import DataError
from dltta.evaluation.demo import demo_experiment
from dltta.evaluation.experiment import VALIDATION, Experiment
from dltta.training import TrainingSettings
from dltta.training.settings import LEARNING_RATES
from dltta.training.uda import cyclegan, style, swav, udas

Bed = Literal["oct", "histology", "prostate"]

TASKS: dict[Bed, Task] = {"oct": "segmentation", "histology": "classification", "prostate": "segmentation"}

DATA_SETS: dict[Bed, str] = {"oct": "oct", "histology": "camelyon17", "prostate": "prostate"}

PAPER_METHODS = tuple(map(str, methods.PAPER_METHODS))

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


def require_data(bed: Bed, setup: Setup) -> None:
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
