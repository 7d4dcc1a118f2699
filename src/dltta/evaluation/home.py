"""The labeled source cases that a model rehearses with, as its network takes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dltta.data.case import Case, Dataset
from dltta.data.formats.images import Geometry, Image
from dltta.data.sites import Slices
from dltta.errors import DataError
from dltta.evaluation.rehearsal import FORMAT, Progress, cut, framed, rehearse
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint
from dltta.models.io.opened import OpenedModel
from dltta.models.io.opening import open_checkpoint
from dltta.models.io.rehearsal import save_rehearsal
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
) -> tuple[Checkpoint, Home]:
    """A trained model folder with what it learned at simulated sites; one that has rehearsed is only read."""
    checkpoint = load_checkpoint(folder)
    home = at_home(sites, settings, checkpoint)
    if checkpoint.rehearsal is None:
        checkpoint.model.to(device)
        opened = open_checkpoint(checkpoint, folder.name)
        found = rehearse(
            opened, home.pairs, sliced=home.sliced, seed=settings.seed, parts=folder / PARTS, progress=progress
        )
        save_rehearsal(folder, found)
        forget_parts(folder)
    return load_checkpoint(folder), home


def calibrate_model(
    opened: OpenedModel, site: Dataset, folder: Path, *, seed: int = 0, progress: Progress | None = None
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
    pairs = of_site(opened, site)
    missing = opened.calibration is None
    if missing:
        opened = replace(opened, calibration=calibrate(opened.model, _alike([image for image, _ in pairs])))
    sliced = isinstance(site, Slices)
    found = rehearse(opened, pairs, sliced=sliced, seed=seed, parts=folder / PARTS, progress=progress)
    save_rehearsal(folder, found, opened.calibration if missing else None)
    forget_parts(folder)
    return found


def _calibrate_unlabeled(opened: OpenedModel, site: Dataset, folder: Path) -> dict[str, Any]:
    """How source images look to the layers, which needs no label: shrinkage statistics and the OOD score."""
    images = [_image(opened, site[i]) for i in range(min(len(site), MOST))]
    calibration = calibrate(opened.model, _alike(images))
    if not calibration.layers:
        raise DataError("without labels only batch normalization can be calibrated, and this network has none")
    found: dict[str, Any] = {
        "format": FORMAT,
        "network": opened.fingerprint,
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


def of_site(opened: OpenedModel, site: Dataset) -> list[Pair]:
    """The labeled cases of a site as any opened model takes them."""
    pairs = [_prepared(opened, site[i]) for i in range(len(site))]
    if not pairs:
        raise DataError(f"{site.site} has no cases to rehearse with")
    window = None if opened.window is None else opened.window.patch
    return enough(pairs, window if opened.task == "segmentation" else None)


def _prepared(opened: OpenedModel, case: Case) -> Pair:
    if case.label is None:
        raise DataError(f"{case.site}/{case.name} has no label; rehearsal needs one for every image")
    image = _image(opened, case)
    label, size = case.label.long(), tuple(image.shape[1:])
    if label.ndim and size != tuple(label.shape):
        label = F.interpolate(label[None, None].float(), size=size, mode="nearest")[0, 0].long()
    return image, label


def _image(opened: OpenedModel, case: Case) -> Tensor:
    """As the network takes it."""
    channels, *shape = case.image.shape
    geometry = Geometry("png", tuple(shape), channels, case.limit, case.spacing)
    return opened.prepare(Image(case.image.numpy(), geometry)).image


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
