"""Source side. Labeled images as training sees them: preprocessed, split by patient, augmented repeatably."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from dltta.data.case import Case, Dataset
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError

if TYPE_CHECKING:
    from monai.transforms import Compose

Pair = tuple[Tensor, Tensor]  # image (C, *spatial), label (*spatial) or ()


class Examples(TorchDataset[Pair]):
    """Pairs of preprocessed image and label, kept in memory once read.

    `epoch` chooses the random numbers: example i of epoch e of a seed is the same whatever was drawn before it, so a
    resumed training sees what an uninterrupted one would have seen. An epoch has `repeats` examples of every pair.
    """

    def __init__(
        self, pairs: Sequence[Pair], augment: "Compose | None" = None, *, seed: int = 0, repeats: int = 1
    ) -> None:
        self.pairs, self.augment, self.seed, self.epoch, self.repeats = pairs, augment, seed, 0, repeats

    def __len__(self) -> int:
        return self.repeats * len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        image, label = self.pairs[index % len(self.pairs)]
        if self.augment is None:
            return image, label
        self.augment.set_random_state(derived_seed(self.seed, self.epoch, index))
        dense = label.ndim > 0
        with _no_history():
            drawn = self.augment({"image": image, "label": label[None]} if dense else {"image": image})
        return without_history(drawn["image"]), without_history(drawn["label"])[0].to(label.dtype) if dense else label


@contextmanager
def _no_history() -> Iterator[None]:
    """Without MONAI's record of what is done to an image: the same numbers in three quarters of the time."""
    from monai.data import get_track_meta, set_track_meta  # here: importing any part of MONAI imports all of it

    before = get_track_meta()
    set_track_meta(False)
    try:
        yield
    finally:
        set_track_meta(before)


def derived_seed(*numbers: int) -> int:
    """A seed that these numbers decide; neighboring numbers give unrelated seeds."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def without_history(image: Tensor) -> Tensor:
    """A plain tensor: MONAI's remember what was done to them, which slows every operation and cannot be saved."""
    return torch.as_tensor(image).as_subclass(Tensor)


def read_pairs(cases: Sequence[Case], preprocessing: Preprocessing) -> list[Pair]:
    """Image and label of every case, preprocessed; all of one size, or a `DataError` that names two that differ."""
    pairs = []
    for case in cases:
        if case.label is None:
            raise DataError(f"{case.site}/{case.name} has no label; source training needs one for every image")
        pairs.append((preprocessing.image(case.image, case.limit), preprocessing.label(case.label).long()))
    return pairs


def require_one_size(cases: Sequence[Case], pairs: Sequence[Pair]) -> None:
    """Whole images of different size cannot share a batch."""
    for case, (image, _) in zip(cases, pairs, strict=True):
        if image.shape != pairs[0][0].shape:
            raise DataError(
                f"{case.site}/{case.name} is {tuple(image.shape[1:])} but {cases[0].name} is "
                f"{tuple(pairs[0][0].shape[1:])}; give --size to resize all or --patch to train on crops"
            )


def split_by_group(cases: Sequence[Case], share: float | tuple[str, ...], seed: int) -> tuple[list[int], list[int]]:
    """Positions for training and validation; all cases of a patient on the same side.

    `share` is how many of the patients validate, drawn with the seed, or which: their names.
    """
    if isinstance(share, tuple):
        return _named_split(cases, share)
    groups = sorted({(case.site, case.group) for case in cases})
    if share == 0:
        return list(range(len(cases))), []
    if len(groups) < 2:
        raise DataError(
            f"all {len(cases)} cases belong to one patient, none is left to validate on; use --validation 0"
        )
    order = np.random.default_rng([seed, 1]).permutation(len(groups))
    chosen = {groups[i] for i in order[: max(1, round(share * len(groups)))]}
    chosen = chosen if len(chosen) < len(groups) else set(sorted(chosen)[:-1])
    validation = [i for i, case in enumerate(cases) if (case.site, case.group) in chosen]
    return [i for i in range(len(cases)) if i not in set(validation)], validation


def _named_split(cases: Sequence[Case], names: tuple[str, ...]) -> tuple[list[int], list[int]]:
    held = {i for i, case in enumerate(cases) if case.group in names}
    if not 0 < len(held) < len(cases):
        whose = "none" if not held else "all"
        raise DataError(f"{whose} of the {len(cases)} cases are of {', '.join(names)}; name some of the patients")
    return [i for i in range(len(cases)) if i not in held], sorted(held)


def gather(sites: Sequence[Dataset]) -> list[Case]:
    """Every case of every site; task and classes must agree."""
    first = sites[0]
    for site in sites[1:]:
        if (site.task, site.classes) != (first.task, first.classes):
            raise DataError(
                f"{site.site} has {site.task} of {site.classes}, {first.site} {first.task} of {first.classes}"
            )
    cases = [site[i] for site in sites for i in range(len(site))]
    if not cases:
        raise DataError(f"{first.site} has no cases to train on")
    return cases
