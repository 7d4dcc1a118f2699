"""2 networks. Our images as MONAI's loader would have read them, and predictions on the grid of the file."""

import copy
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import (
    Compose,
    EnsureChannelFirst,
    EnsureChannelFirstd,
    InvertibleTransform,
    MapTransform,
    Randomizable,
    RandomizableTrait,
)
from monai.transforms.utils import convert_applied_interp_mode
from torch import Tensor

from dltta.data.formats.images import Image
from dltta.errors import InputError, SettingError
from dltta.models.io.grid import label_on_grid
from dltta.models.io.opened import Prepared, require_classes

FAILURES = (RuntimeError, ValueError, KeyError, IndexError, TypeError, AttributeError)
IGNORED = ("image_only", "dtype", "simple_keys", "prune_meta_pattern", "prune_meta_sep", "expanduser", "overwriting",
           "meta_keys", "meta_key_postfix", "allow_missing_keys")  # fmt: skip  # of MONAI's loader; none changes values


class FromImage(MapTransform):  # type: ignore[misc]  # MONAI has no types
    """Takes the place of MONAI's `LoadImaged`: an `Image` becomes the tensor that reading its file would have given.

    That is: without a channel axis if there is one channel, with it at the end in a color 2-D image and in front of
    several files; columns before rows in 2-D images unless `reverse_indexing` is off; the affine and the other entries
    that transforms look at beside it.
    """

    def __init__(self, keys: Any, reader: Any = None, ensure_channel_first: bool = False, **options: Any) -> None:
        super().__init__(keys, allow_missing_keys=True)
        described = reader if isinstance(reader, list) else [reader]
        for each in described:
            options.update({k: v for k, v in each.items() if k != "name"} if isinstance(each, Mapping) else {})
        names = [each.get("name", "") if isinstance(each, Mapping) else str(each or "") for each in described]
        self.reverse = options.pop("reverse_indexing", not any(name.endswith("WSIReader") for name in names))
        self.first = ensure_channel_first
        unknown = sorted(options.keys() - set(IGNORED))
        if unknown:
            raise SettingError(f"images are read by us, which knows no option {unknown[0]!r} of MONAI's loader")

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        return {**data, **{key: self.tensor(data[key]) for key in self.key_iterator(data)}}

    def tensor(self, image: Image) -> MetaTensor:
        array, geometry = image.array, image.geometry
        flat = _rows_first(image)
        if flat and self.reverse:
            array = array.swapaxes(1, 2)
        shape, channel = array.shape[1:], 0.0
        if len(array) == 1:
            array, channel = array[0], float("nan")  # MONAI's word for "no channel"
        elif flat and geometry.channels > 1:
            array, channel = np.moveaxis(array, 0, -1), -1
        affine = np.eye(4) if geometry.affine is None else geometry.affine
        meta = {
            "affine": affine.copy(),
            "original_affine": affine.copy(),
            "spatial_shape": np.array(shape),
            "space": "RAS",
            "original_channel_dim": channel,
            "filename_or_obj": "image",  # names may tell who the patient is
        }
        tensor = MetaTensor(torch.from_numpy(np.array(array)), meta=meta)
        return EnsureChannelFirst()(tensor) if self.first else tensor


@dataclass(frozen=True)
class Pipeline:
    """A bundle's preprocessing for the image under `key`, and MONAI's own inversion of it.

    `traced` is the key whose transforms are inverted (`Invertd`'s `orig_keys`). `nearest` takes the nearest value on
    the way back instead of interpolating as on the way there.
    """

    compose: Compose
    key: str
    traced: str
    nearest: bool
    classes: tuple[str, ...]
    spatial_dims: int
    in_channels: int
    dense: bool  # whether predictions have positions

    def __call__(self, image: Image) -> Prepared:
        try:
            data = self.compose({self.key: image})
        except FAILURES as error:
            raise InputError(f"the bundle's preprocessing fails on this image: {reason(error)}") from error
        if not isinstance(data, Mapping) or not {self.key, self.traced} <= data.keys():
            raise InputError(f"the bundle's preprocessing does not give one image under the name {self.key!r}")
        x = data[self.key]
        if x.ndim != self.spatial_dims + 1 or len(x) != self.in_channels:
            raise InputError(
                f"the network takes {self.in_channels} channels and {self.spatial_dims} axes, "
                f"the bundle's preprocessing gives {tuple(x.shape)} for an image of {tuple(image.array.shape)}"
            )
        plain = torch.as_tensor(x.as_tensor() if isinstance(x, MetaTensor) else x, dtype=torch.float32)
        restore = self._way_back(image, data[self.traced])
        label = partial(label_on_grid, size=tuple(plain.shape[1:]), classes=len(self.classes), restore=restore)
        return Prepared(plain.contiguous().clone(), restore, label=label if self.dense else None)

    def _way_back(self, image: Image, traced: Any) -> Callable[[Tensor], Tensor]:
        if not self.dense:
            return lambda probability: probability
        operations, meta = self._trace(traced)
        loader = next(each for each in self.compose.flatten().transforms if isinstance(each, FromImage))
        swapped = _rows_first(image) and loader.reverse
        spatial = image.array.shape[1:]

        def restore(probability: Tensor) -> Tensor:
            require_classes(probability, self.classes)
            restored = self._invert(probability, operations, meta)
            restored = restored.swapaxes(1, 2) if swapped else restored
            if restored.shape[1:] != spatial:
                raise InputError(
                    f"MONAI brings the prediction back to {tuple(restored.shape[1:])}, the file has {spatial}: "
                    "a transform of the bundle's preprocessing cannot be inverted"
                )
            return restored.contiguous()

        return restore

    def _trace(self, traced: Any) -> tuple[list[Any], dict[str, Any]]:
        if isinstance(traced, MetaTensor):
            operations = copy.deepcopy(traced.applied_operations)
            if self.nearest:
                operations = convert_applied_interp_mode(operations, mode="nearest", align_corners=None)
            return operations, copy.deepcopy(traced.meta)
        if any(_moves_positions(each) for each in self.compose.flatten().transforms):
            raise InputError(
                "the bundle's preprocessing forgets what it did to the image; its type must track meta data"
            )
        return [], {}

    def _invert(self, probability: Tensor, operations: list[Any], meta: dict[str, Any]) -> Tensor:
        """Back to the file's grid; a channel of ones goes along to tell which positions the network saw."""
        seen = torch.ones_like(probability[:1])
        stacked = MetaTensor(torch.cat([probability, seen]).detach())
        stacked.applied_operations, stacked.meta = copy.deepcopy(operations), copy.deepcopy(meta)
        try:
            inverted = self.compose.inverse({self.traced: stacked})[self.traced] if operations else stacked
        except FAILURES as error:
            raise InputError(f"the bundle's preprocessing cannot be inverted: {reason(error)}") from error
        plain: Tensor = inverted.as_tensor().to(probability)
        restored = plain[:-1].clone()
        restored[0] += 1 - plain[-1]
        if (restored < 0).any():  # interpolation by splines overshoots
            restored = restored.clamp_min(0)
            restored /= restored.sum(dim=0, keepdim=True)
        return restored


def _rows_first(image: Image) -> bool:
    """Whether it is a 2-D image, with rows before columns; MONAI's readers turn those, and no others, around."""
    flat = image.geometry.kind in ("png", "tiff") or (image.geometry.kind == "dicom" and image.geometry.affine is None)
    return flat and image.array.ndim == 3


def as_pipeline(compose: Any, wanted: str | None, where: str) -> tuple[Compose, str]:
    """The preprocessing with a place for our image in front, if it has none, and the key that the image goes under."""
    steps = list(compose.flatten().transforms) if isinstance(compose, Compose) else [compose] if compose else []
    other = [each for each in steps if not isinstance(each, MapTransform)]
    if other:
        raise SettingError(f"{where}: {type(other[0]).__name__} is no dictionary transform, which we need")
    for each in steps:
        if isinstance(each, Randomizable | RandomizableTrait):
            raise SettingError(f"{where}: {type(each).__name__} is random; preprocessing must give the same every time")
        each.allow_missing_keys = True  # such as the label, which is never there
    loaders = [each for each in steps if isinstance(each, FromImage)]
    key = _image_key([key for each in loaders for key in each.keys], wanted, where)
    if not loaders:
        first = not any(isinstance(each, EnsureChannelFirstd) for each in steps)
        steps.insert(0, FromImage([key], ensure_channel_first=first))
    options = {"lazy": compose.lazy} if isinstance(compose, Compose) else {}
    return Compose(steps, **options), key


def _image_key(loaded: list[str], wanted: str | None, where: str) -> str:
    for key in (wanted, "image"):
        if key is not None and (not loaded or key in loaded):
            return key
    if len(loaded) == 1:
        return str(loaded[0])
    raise SettingError(f"{where} loads several images, {', '.join(map(str, loaded))}; one is supported")


def _moves_positions(transform: Any) -> bool:
    moving = ("monai.transforms.spatial.", "monai.transforms.croppad.", "monai.transforms.utility.")
    return isinstance(transform, InvertibleTransform) and type(transform).__module__.startswith(moving)


def reason(error: BaseException) -> str:
    """The innermost cause, in one line: MONAI wraps what went wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
