"""Source and target together. Labeled source images, and target images without their labels, as training sees them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from dltta.data.case import Dataset, Mapped, without_label
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError
from dltta.training.augmentation import typical_spread
from dltta.training.examples import (
    Examples,
    Pair,
    derived_seed,
    gather,
    read_pairs,
    require_one_size,
    split_by_group,
    without_history,
)
from dltta.training.settings import TrainingSettings

if TYPE_CHECKING:
    from monai.transforms import Compose

Triple = tuple[Tensor, Tensor, Tensor]  # source image, source label, target image


class Images(TorchDataset[Tensor]):
    """Preprocessed images without labels; `epoch` chooses the random numbers as in `Examples`."""

    def __init__(self, images: Sequence[Tensor], augment: "Compose | None" = None, *, seed: int = 0) -> None:
        self.images, self.augment, self.seed, self.epoch = images, augment, seed, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        if self.augment is None:
            return self.images[index]
        self.augment.set_random_state(derived_seed(self.seed, 5, self.epoch, index))
        return without_history(self.augment({"image": self.images[index]})["image"])


class Mixed(TorchDataset[Triple]):
    """A source pair and a target image at a time; one epoch sees every image of the larger side once.

    Which images meet is drawn anew in every epoch, from seed and epoch alone.
    """

    def __init__(self, source: Examples, target: Images, *, seed: int = 0) -> None:
        self.source, self.target, self.seed = source, target, seed
        self.epoch = 0

    @property
    def epoch(self) -> int:
        return self.source.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self.source.epoch = self.target.epoch = epoch

    def __len__(self) -> int:
        return max(len(self.source), len(self.target))

    def __getitem__(self, index: int) -> Triple:
        image, label = self.source[self._drawn(len(self.source), 3, index)]
        return image, label, self.target[self._drawn(len(self.target), 4, index)]

    def _drawn(self, count: int, side: int, index: int) -> int:
        order = np.random.default_rng([self.seed, side, self.epoch]).permutation(count)
        return int(order[index % count])


@dataclass(frozen=True)
class Domains:
    """What a method may learn from: labeled source pairs, some kept for validation, and target images."""

    source: Examples
    validation: list[Pair]
    target: Images

    @property
    def mixed(self) -> Mixed:
        return Mixed(self.source, self.target, seed=self.source.seed)

    @property
    def counts(self) -> dict[str, int]:
        training, validation = len(self.source), len(self.validation)
        return {"cases": training + validation, "training": training, "validation": validation}


def read_domains(
    sites: Sequence[Dataset], targets: Sequence[Dataset], preprocessing: Preprocessing, settings: TrainingSettings
) -> Domains:
    """Every image once, of targets nothing else; the validation split is the one that source training makes."""
    cases, unlabeled = gather(sites), gather([Mapped(site, without_label) for site in targets])
    if (sites[0].task, sites[0].classes) != (targets[0].task, targets[0].classes):
        raise DataError(
            f"{targets[0].site} has {targets[0].task} of {targets[0].classes}, "
            f"{sites[0].site} {sites[0].task} of {sites[0].classes}"
        )
    pairs = read_pairs(cases, preprocessing)
    images = [preprocessing.image(case.image, case.limit) for case in unlabeled]
    if settings.patch is None:
        require_one_size(cases, pairs)
        require_one_size(unlabeled, [(image, torch.tensor(0)) for image in images])
    if len(images[0]) != len(pairs[0][0]):
        raise DataError(f"{targets[0].site} has {len(images[0])} channels, {sites[0].site} {len(pairs[0][0])}")
    training, validation = split_by_group(cases, settings.validation, settings.seed)
    channels, dims, dense = len(pairs[0][0]), pairs[0][0].ndim - 1, sites[0].task == "segmentation"
    spread = typical_spread([pairs[i][0] for i in training])
    return Domains(
        Examples(
            [pairs[i] for i in training],
            settings.changes.compose(dims, channels, dense=dense, spread=spread),
            seed=settings.seed,
        ),
        [pairs[i] for i in validation],
        Images(images, settings.changes.compose(dims, channels, dense=False, spread=spread), seed=settings.seed),
    )
