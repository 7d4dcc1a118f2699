"""2 networks. A network that somebody brought: what it takes as input and what its output means."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import Tensor, nn

from dltta.data.case import Task
from dltta.data.formats.images import Image
from dltta.errors import InputError, SettingError
from dltta.models.calibration import Calibration
from dltta.models.io.checkpoint import Checkpoint, Contrast, Reconstructions, Rotation, missing_part
from dltta.models.parts.denoiser import Denoiser
from dltta.models.predictions import most_likely

if TYPE_CHECKING:
    from dltta.models.io.nnunet.folder import NNUNetFolder

Kind = Literal["checkpoint", "bundle", "factory", "nnunet"]
Activation = Literal["softmax", "sigmoid"]
Blend = Literal["constant", "gaussian"]


class Views(Protocol):
    """What windows ask of a network: the prediction (1, C, *patch) of one, and of other views of the same window."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def again(self, x: Tensor) -> Tensor:
        """Of the window that was called last, mirrored: nothing is learned from it."""
        ...


class Sliding(Protocol):
    """How an image goes through a network in windows; a dataclass of plain values, which the log records."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def patch(self) -> tuple[int, ...]: ...

    def whole(self, spatial: tuple[int, ...]) -> bool:
        """Whether an image of this size is one window, and goes through the network as it is."""
        ...

    def slide(self, x: Tensor, network: Views) -> Tensor:
        """The blended logits of images x (B, C, *spatial), window by window in order."""
        ...


@dataclass(frozen=True)
class Window:
    """The part of an image that the network takes at a time, as MONAI's sliding window inference names it.

    `patch` is its size along each axis; 0 stands for the whole axis. `mode` says how the logits of overlapping windows
    are averaged, `batch` how many windows go through the network together when nothing is adapted.
    """

    patch: tuple[int, ...]
    overlap: float = 0.25
    mode: Blend = "constant"
    sigma_scale: float = 0.125  # of the gaussian, as a share of the patch
    padding_mode: str = "constant"  # for images smaller than the patch
    cval: float = 0.0
    batch: int = 1

    def __post_init__(self) -> None:
        if not self.patch or min(self.patch) < 0:
            raise SettingError(f"a window has a size along each axis, 0 for the whole, got {self.patch}")
        if not 0 <= self.overlap < 1:
            raise SettingError(f"overlap must be a fraction from 0 to below 1, got {self.overlap}")
        if self.mode not in ("constant", "gaussian"):
            raise SettingError(f"windows are blended constant or gaussian, got {self.mode!r}")

    def size(self, spatial: tuple[int, ...]) -> tuple[int, ...]:
        """The window for an image of this size: `patch` with the image's size where it says 0."""
        return tuple(want or have for want, have in zip(self.patch, spatial, strict=True))

    def whole(self, spatial: tuple[int, ...]) -> bool:
        if len(spatial) != len(self.patch):
            raise InputError(f"windows of {self.patch} do not fit images of {spatial}")
        return spatial == self.size(spatial)

    def count(self, spatial: tuple[int, ...]) -> int:
        """How many windows an image of this size has."""
        numbers = []
        for side, length in zip(self.size(spatial), spatial, strict=True):
            stride = max(int(side * (1 - self.overlap)), 1) if side < length else side
            numbers.append(max(math.ceil((length - side) / stride), 0) + 1)
        return math.prod(numbers)

    def slide(self, x: Tensor, network: Callable[[Tensor], Tensor]) -> Tensor:
        """The blended logits of a network that sees images x (B, C, *spatial) one window at a time, in order."""
        from monai.inferers import sliding_window_inference

        blended: Tensor = sliding_window_inference(
            x,
            self.size(tuple(x.shape[2:])),
            1,
            network,
            overlap=self.overlap,
            mode=self.mode,
            sigma_scale=self.sigma_scale,
            padding_mode=self.padding_mode,
            cval=self.cval,
        )
        return blended


@dataclass(frozen=True)
class Prepared:
    """An image as the network takes it, and the way back.

    `restore` takes class probabilities (classes, *network size), which sum to one, to (classes, *size of the file),
    each on the voxel it belongs to. What the preprocessing had cut away comes back as background. Of a classification
    it gives back what it got. `segment` is for models that have a way back of their own, from logits. `label` takes a
    label (*size of the file) to the network's grid, where that takes more than the nearest position.
    """

    image: Tensor  # (C, *network size) float32
    restore: Callable[[Tensor], Tensor]
    segment: Callable[[Tensor], "Segmented"] | None = None
    label: Callable[[Tensor], Tensor] | None = None


@dataclass(frozen=True)
class Segmented:
    """A segmentation on the grid of the file."""

    labels: Tensor  # (*spatial) int64
    probabilities: Tensor  # (classes, *spatial)


@dataclass(frozen=True)
class OpenedModel:
    """A trained network and everything needed to run it on image files, whoever trained it.

    The network gives one channel of logits per class, or with `activation` sigmoid a single channel for the second of
    two classes. `threshold` is the probability from which that class is predicted.
    """

    model: nn.Module  # in evaluation mode
    task: Task
    classes: tuple[str, ...]
    spatial_dims: int
    in_channels: int
    kind: Kind
    name: str
    fingerprint: str  # sha256 of weights and description: which network was this?
    prepare: Callable[[Image], Prepared]
    window: Sliding | None = None  # None: whole images
    activation: Activation = "softmax"
    threshold: float = 0.5
    size: tuple[int, ...] | None = None  # a spatial size that the network is known to take
    rotation: Rotation | None = None  # what TTT needs beside its network, see `for_method`
    contrast: Contrast | None = None  # what TTT++ needs, likewise
    reconstructions: Reconstructions | None = None  # what ATTA needs
    denoiser: Denoiser | None = None  # what DTTA needs beside its network
    calibration: Calibration | None = None  # how source images look to its layers
    rehearsal: Mapping[str, Any] | None = None  # what was learned at simulated sites
    checkpoint: Checkpoint | None = None  # where it came from, if it is one of ours
    bundle: Path | None = None  # where it came from, if it is a bundle: the folder or zip
    nnunet: "NNUNetFolder | None" = None  # where it came from, if it is nnU-Net's
    takes_volumes: bool = False  # a 2-D network whose `prepare` and `window` take volumes themselves, as nnU-Net's
    alone: str = ""  # the fingerprint without the parts of methods, where there are any

    @property
    def rehearser(self) -> str:
        """Whose rehearsal is it? Parts of methods that are trained later do not change the network that rehearsed."""
        return self.alone or self.fingerprint

    def for_method(self, method: str) -> "OpenedModel":
        """The same model with the network that the method starts from; see `Checkpoint.for_method`."""
        has = {"ttt": self.rotation, "ttt++": self.contrast, "dtta": self.denoiser}
        if method not in has or has[method] is not None:
            return self
        if self.checkpoint is None:
            raise missing_part(method, self.task)
        chosen = self.checkpoint.for_method(method)
        return replace(
            self,
            model=chosen.model.to(next(self.model.parameters()).device).eval(),
            rotation=chosen.rotation,
            contrast=chosen.contrast,
            reconstructions=chosen.reconstructions,
            denoiser=chosen.denoiser,
            calibration=chosen.calibration,
            checkpoint=chosen,
        )

    def labels(self, probability: Tensor) -> Tensor:
        """Class numbers (*positions) from class probabilities (classes, *positions)."""
        require_classes(probability, self.classes)
        if self.activation == "sigmoid":
            return (probability[1] >= self.threshold).long()
        return most_likely(probability, dim=0)


def require_shape(image: Image, spatial_dims: int, in_channels: int) -> None:
    """Raise `InputError` unless the image has the axes and channels that the network takes."""
    channels, *spatial = image.array.shape
    if len(spatial) != spatial_dims:
        raise InputError(f"the network takes {spatial_dims}-D images, this one is {len(spatial)}-D {tuple(spatial)}")
    if channels != in_channels:
        do = {(1, 3): "; save it as grey", (3, 1): "; save it as RGB"}.get((in_channels, channels), "")
        raise InputError(f"the network takes images of {in_channels} channels, this one has {channels}{do}")


def require_classes(probability: Tensor, classes: tuple[str, ...]) -> None:
    """Raise `InputError` unless there is one channel per class: a sigmoid channel must have become two."""
    if len(probability) != len(classes):
        raise InputError(
            f"{len(classes)} class probabilities are expected, got {len(probability)} channels; "
            "apply dltta.models.predictions.probabilities first"
        )


def require_count(spec: str, classes: tuple[str, ...], channels: int) -> None:
    """Raise `SettingError` unless the network has a channel for each class, or one for two classes."""
    if len(classes) != max(channels, 2):
        raise SettingError(
            f"{spec} gives {channels} channels, that is {max(channels, 2)} classes, but {len(classes)} are named: "
            f"{', '.join(classes)}"
        )
