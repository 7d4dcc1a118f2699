"""The labeled source cases that a model rehearses with, as its network takes them."""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dltta.config import open_target
from dltta.data.case import Dataset
from dltta.data.formats.images import Image
from dltta.data.sites import Slices
from dltta.errors import DataError
from dltta.evaluation.files import read_case
from dltta.evaluation.recorded import cut, framed
from dltta.evaluation.rehearsal import FORMAT, Elsewhere, Progress, Setup, rehearse, spread
from dltta.evaluation.runners import Runner, Task, Tell, threads_each
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint
from dltta.models.io.opened import OpenedModel, Prepared
from dltta.models.io.opening import ModelSource, open_checkpoint
from dltta.models.io.rehearsal import save_rehearsal
from dltta.models.normalization import stores_statistics
from dltta.predictor import load
from dltta.training.calibration import MOST, calibrate
from dltta.training.examples import Pair, gather, read_pairs, split_by_group
from dltta.training.settings import TrainingSettings

FEWEST = 8  # cases; fewer come again in other framings
PARTS = "rehearsal.parts"  # finished streams of an interrupted rehearsal


@dataclass(frozen=True)
class Home:
    """Labeled cases, and whether training had not seen them."""

    pairs: list[Pair]
    held_out: bool
    sliced: bool = False  # slices of volumes


def rehearse_checkpoint(
    folder: Path,
    sites: Sequence[Dataset],
    settings: TrainingSettings,
    *,
    device: torch.device,
    progress: Progress | None = None,
    elsewhere: Elsewhere | None = None,
) -> tuple[Checkpoint, Home]:
    """A trained model folder with what it learned at simulated sites; one that has rehearsed is only read."""
    checkpoint = load_checkpoint(folder)
    home = at_home(sites, settings, checkpoint)
    if checkpoint.rehearsal is None:
        checkpoint.model.to(device)
        opened = open_checkpoint(checkpoint, folder.name)
        found = rehearse(
            opened, home.pairs, sliced=home.sliced, seed=settings.seed, parts=folder / PARTS, progress=progress,
            elsewhere=elsewhere,
        )  # fmt: skip
        save_rehearsal(folder, found)
        forget_parts(folder)
    return load_checkpoint(folder), home


def calibrate_model(
    opened: OpenedModel,
    site: Dataset,
    folder: Path,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    elsewhere: Elsewhere | None = None,
) -> dict[str, Any]:
    """Rehearse any model with the labeled cases of a site, and write what it learned into a folder.

    A model that does not know how source images look to its layers gets that too; from images without labels it gets
    only that.
    """
    if (site.task, len(site.classes)) != (opened.task, len(opened.classes)):
        raise DataError(
            f"{site.site} has {site.task} of {len(site.classes)} classes, the model does {opened.task} of "
            f"{len(opened.classes)}"
        )
    if len(site) and site[0].label is None:
        return _calibrate_unlabeled(opened, site, folder)
    missing = opened.calibration is None
    opened, home = _calibrated(opened, site)
    found = rehearse(
        opened,
        home.pairs,
        sliced=home.sliced,
        seed=seed,
        parts=folder / PARTS,
        progress=progress,
        elsewhere=elsewhere,
    )
    save_rehearsal(folder, found, opened.calibration if missing else None)
    forget_parts(folder)
    return found


def _calibrated(opened: OpenedModel, site: Dataset) -> tuple[OpenedModel, Home]:
    """A model that knows how source images look to its layers, and the cases it rehearses with."""
    home = of_site(opened, site)
    if opened.calibration is None:
        opened = replace(opened, calibration=calibrate(opened.model, _alike([image for image, _ in home.pairs])))
    return opened, home


def streams_on(runner: Runner, prepare: Callable[[], Setup], folder: Path, *, done: Progress, lost: Tell) -> Elsewhere:
    """Runs streams of a rehearsal on a runner, as `rehearse` asks for them.

    `prepare` opens model and cases as `rehearse` has them; it can be pickled, and a worker calls it once.
    """
    packed = pickle.dumps(prepare)

    def run(waiting: Sequence[tuple[int, str]]) -> None:
        finished: list[Task] = []

        def tick(task: Task) -> None:
            finished.append(task)
            done(len(finished), len(waiting))

        tasks = [
            Task(f"rehearsal at {name}, batches of {size}", partial(record_part, packed, folder, size, name))
            for size, name in waiting
        ]
        if tasks:
            runner.run(tasks, threads=threads_each(runner, runner.jobs), done=tick, lost=lost)

    return run


def record_part(packed: bytes, folder: Path, size: int, name: str) -> None:
    """Run one stream and keep it, unless it is there."""
    setup = _prepared(packed)
    (stream,) = [each for each in setup.streams() if each.name == name]
    setup.recorded(stream, size, folder / PARTS)


@lru_cache(maxsize=1)
def _prepared(packed: bytes) -> Setup:
    """The same as the caller's; made once in a process."""
    prepare: Callable[[], Setup] = pickle.loads(packed)
    return prepare()


def site_setup(model: ModelSource, spec: str, seed: int, device: str) -> Setup:
    """Of `calibrate_model`."""
    opened = model.open()
    opened.model.to(device)
    opened, home = _calibrated(opened, open_target(spec))
    return Setup.of(opened, home.pairs, seed, sliced=home.sliced)


def checkpoint_setup(folder: Path, sites: Sequence[Dataset], settings: TrainingSettings, device: str) -> Setup:
    """Of `rehearse_checkpoint`."""
    checkpoint = load_checkpoint(folder)
    checkpoint.model.to(device)
    home = at_home(sites, settings, checkpoint)
    return Setup.of(open_checkpoint(checkpoint, folder.name), home.pairs, settings.seed, sliced=home.sliced)


def _calibrate_unlabeled(opened: OpenedModel, site: Dataset, folder: Path) -> dict[str, Any]:
    """How source images look to the layers, which needs no label: shrinkage statistics and the OOD score."""
    if not stores_statistics(opened.model):
        raise DataError("without labels only batch normalization can be calibrated, and this network has none")
    pairs = [pair for pairs in _cases(opened, site, labeled=False) for pair in pairs][:MOST]
    if (window := _window(opened)) is not None:
        pairs = [cut(pair, window, [i]) for i, pair in enumerate(pairs)]
    images = [image for image, _ in pairs]
    calibration = calibrate(opened.model, _alike(images))
    found: dict[str, Any] = {
        "format": FORMAT,
        "network": opened.rehearser,
        "cases": {"1": len(images)},
        "batch_sizes": {},
    }
    save_rehearsal(folder, found, calibration)
    return found


def forget_parts(folder: Path) -> None:
    """Remove what an interrupted rehearsal would have continued from."""
    parts = folder / PARTS
    for path in parts.glob("*.npz"):
        path.unlink()
    if parts.is_dir():
        parts.rmdir()


def at_home(sites: Sequence[Dataset], settings: TrainingSettings, checkpoint: Checkpoint) -> Home:
    """The cases that training kept for validation; all cases if it kept none."""
    cases = gather(sites)
    _, validation = split_by_group(cases, settings.validation, settings.seed)
    chosen = [cases[i] for i in validation] or cases
    pairs = read_pairs(chosen, checkpoint.preprocessing)
    return Home(enough(pairs, settings.patch), bool(validation), any(isinstance(site, Slices) for site in sites))


def of_site(opened: OpenedModel, site: Dataset) -> Home:
    """The labeled cases of a site as any opened model takes them, volumes slice by slice where its network is 2-D."""
    found = _cases(opened, site, labeled=True)
    sliced = isinstance(site, Slices) or any(len(pairs) > 1 for pairs in found)
    return Home(enough([pair for pairs in found for pair in pairs], _window(opened)), held_out=False, sliced=sliced)


def _window(opened: OpenedModel) -> tuple[int, ...] | None:
    """The size that the network is run on, if not on whole images."""
    return opened.window.patch if opened.window is not None and opened.task == "segmentation" else None


def _cases(opened: OpenedModel, site: Dataset, *, labeled: bool) -> list[list[Pair]]:
    """The pairs of each case, some cases of many; where no labels are needed, zeros stand in for them."""
    found = []
    for index in spread(len(site), MOST if _window(opened) is None else 3 * FEWEST):
        case, image = read_case(site, index)
        if labeled and case.label is None:
            raise DataError(f"{case.site}/{case.name} has no label; rehearsal needs one for every image")
        shape = image.array.shape[1:] if opened.task == "segmentation" else ()
        found.append(_pairs(opened, image, torch.zeros(shape).long() if case.label is None else case.label.long()))
    if not found:
        raise DataError(f"{site.site} has no cases to rehearse with")
    return found


def _pairs(opened: OpenedModel, image: Image, label: Tensor) -> list[Pair]:
    """A case as the network takes it: one pair, or one for each slice."""
    loaded = load(opened, image, "")
    labels = [label] if loaded.axis is None else list(label.unbind(loaded.axis))
    pairs = [(part.image, _label(part, each)) for part, each in zip(loaded.parts, labels, strict=True)]
    if opened.takes_volumes and opened.spatial_dims == 2:
        return [pair for volume, masks in pairs for pair in zip(volume.unbind(1), masks.unbind(0), strict=True)]
    return pairs


def _label(part: Prepared, label: Tensor) -> Tensor:
    """On the network's grid."""
    size = tuple(part.image.shape[1:])
    if label.ndim and part.label is not None:
        return part.label(label)
    if label.ndim and size != tuple(label.shape):
        return F.interpolate(label[None, None].float(), size=size, mode="nearest")[0, 0].long()
    return label


def enough(pairs: Sequence[Pair], patch: Sequence[int] | None) -> list[Pair]:
    """Crops of the size that the network is run on; of few whole images several framings each."""
    found = list(pairs)
    dense = bool(found[0][1].ndim)
    if patch is not None and dense:
        each = max(1, -(-3 * FEWEST // len(found)))
        return [cut(pair, patch, [i, k]) for k in range(each) for i, pair in enumerate(pairs)]
    missing = -(-FEWEST // len(found)) - 1 if dense else 0  # times that all cases come again
    for k in range(missing):
        found += [framed(pair, "anywhere" if k % 2 else "close", [7 + k, i]) for i, pair in enumerate(pairs)]
    return found


def _alike(images: Sequence[Tensor]) -> list[Tensor]:
    """Those of the most frequent shape, which a memory can compare."""
    shapes = [tuple(image.shape) for image in images]
    usual = max(dict.fromkeys(shapes), key=shapes.count)
    return [image for image, shape in zip(images, shapes, strict=True) if shape == usual]
