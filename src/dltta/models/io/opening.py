"""2 networks. Any trained network by its name on the command line: ours, a bundle, nnU-Net's, one's own code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.data.case import Task
from dltta.data.formats.images import Image
from dltta.data.preprocessing import Preprocessing
from dltta.errors import SettingError, StateError
from dltta.models.compiled import program_kind
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint
from dltta.models.io.factories import call_factory, is_factory
from dltta.models.io.fingerprint import fingerprint
from dltta.models.io.opened import (
    OpenedModel,
    Prepared,
    Window,
    require_classes,
    require_count,
    require_shape,
)
from dltta.models.io.probing import class_names, probe
from dltta.models.io.rehearsal import load_layers, load_rehearsal, require_same_network
from dltta.models.io.weights import load_weights

__all__ = ["ModelSource", "OpenedModel", "Prepared", "Window", "open_model"]


@dataclass(frozen=True)
class ModelSource:
    """What somebody says about the network to open, as commands take it.

    `spec` is a checkpoint folder, a MONAI bundle (folder or zip), a result folder of nnU-Net, or
    `package.module:function`. All else is only for networks that cannot tell it themselves: `weights` for code, `task`
    and `classes` for code and bundles, `preprocessing`, `size` (known to fit), `channels`, `patch` and `overlap`
    (sliding window) for code. `fold` chooses among the networks of nnU-Net: `0`, `0,1` or `all`.
    `run_expressions` lets a bundle run the Python that is written in its configuration. `untrained` accepts code
    without `weights`, which would otherwise predict with random ones unnoticed. `calibration` is the folder that
    `dltta calibrate` wrote.
    """

    spec: str
    weights: Path | None = None
    task: str | None = None
    classes: tuple[str, ...] | None = None
    preprocessing: Preprocessing | None = None
    size: tuple[int, ...] | None = None
    channels: int | None = None
    patch: tuple[int, ...] | None = None
    overlap: float | None = None
    run_expressions: bool = False
    untrained: bool = False
    fold: str | None = None
    calibration: Path | None = None

    def __post_init__(self) -> None:
        if self.task not in (None, *get_args(Task)):
            raise SettingError(f"task must be segmentation or classification, got {self.task!r}")
        if self.classes is not None and (len(self.classes) < 2 or len(set(self.classes)) < len(self.classes)):
            raise SettingError(f"classes are two or more different names, got {', '.join(self.classes) or 'none'}")

    def open(self, *, predicting: bool = True) -> OpenedModel:
        """The network; whatever is wrong with it is one `DlttaError`. Only to look at it, weights do not matter."""
        opened = self._open(predicting=predicting)
        return opened if self.calibration is None else with_rehearsal(opened, self.calibration)

    def _open(self, *, predicting: bool) -> OpenedModel:
        path = Path(self.spec)
        if (path / "model.json").is_file():
            return self._checkpoint(path)
        from dltta.models.io.bundle import is_bundle  # here: bundles import all of MONAI

        if path.exists() and is_bundle(path):
            return self._bundle(path)
        from dltta.models.io.nnunet.folder import is_nnunet, misplaced

        if is_nnunet(path):
            return self._nnunet(path)
        if is_factory(self.spec) and not path.exists():
            return self._factory(predicting=predicting)
        if path.is_file():
            if (kind := program_kind(path)) is not None:
                raise SettingError(
                    f"{self.spec} is {kind}, which has no layers to adapt and may have no gradient; name the code that "
                    "builds the network: package.module:function --weights FILE"
                )
            raise SettingError(
                f"{self.spec} holds weights at most, but no network; name the code that builds it: "
                f"package.module:function --weights {self.spec}"
            )
        raise SettingError(
            misplaced(path)
            or f"{self.spec} is not a model: give a folder with model.json, a MONAI bundle, a result folder of "
            "nnU-Net, or package.module:function"
        )

    def _checkpoint(self, folder: Path) -> OpenedModel:
        described = ("weights", "task", "classes", "preprocessing", "channels")
        self._refuse("a checkpoint folder", *described, "run_expressions", "untrained", "fold")
        return self._windowed(open_checkpoint(load_checkpoint(folder), folder.resolve().name))

    def _bundle(self, path: Path) -> OpenedModel:
        from dltta.models.io.bundle import open_bundle

        self._refuse("a bundle", "preprocessing", "channels", "untrained", "fold")
        opened = open_bundle(
            path,
            weights=self.weights,
            task=self.task,
            classes=self.classes,
            size=self.size,
            run_expressions=self.run_expressions,
        )
        return self._windowed(opened)

    def _nnunet(self, path: Path) -> OpenedModel:
        from dltta.models.io.nnunet.opening import open_nnunet

        described = ("weights", "task", "classes", "preprocessing", "channels", "patch", "overlap")
        self._refuse("an nnU-Net folder, which its plans describe", *described, "run_expressions", "untrained")
        return open_nnunet(path, fold=self.fold)

    def _factory(self, *, predicting: bool) -> OpenedModel:
        self._refuse("code", "run_expressions", "fold")
        model = call_factory(self.spec)
        if self.weights is not None:
            load_weights(model, self.weights)
        model.eval()
        asked = self.patch or (self.preprocessing.size if self.preprocessing else None) or self.size
        seen = probe(model, in_channels=self.channels, size=asked)
        if self.task not in (None, seen.task):
            raise SettingError(f"{self.spec} gives a {seen.task}, not a {self.task}")
        classes = self.classes or class_names(seen.task, seen.channels)
        require_count(self.spec, classes, seen.channels)
        preprocessing = self.preprocessing or Preprocessing()
        opened = OpenedModel(
            model=model,
            task=seen.task,
            classes=classes,
            spatial_dims=seen.spatial_dims,
            in_channels=seen.in_channels,
            kind="factory",
            name=self.spec.rpartition(":")[2],
            fingerprint="",
            prepare=_preparation(preprocessing, seen.spatial_dims, seen.in_channels, seen.task, classes),
            activation="sigmoid" if seen.channels == 1 else "softmax",
            size=asked or seen.size,
        )
        opened = self._windowed(opened)
        if predicting and self.weights is None and not self.untrained:
            raise SettingError(
                f"{self.spec} without weights would predict with random ones; add --weights FILE, or --untrained if "
                "the code loads weights itself or random ones are meant"
            )
        return replace(opened, fingerprint=_fingerprint(opened, preprocessing, type(model).__name__))

    def _windowed(self, opened: OpenedModel) -> OpenedModel:
        """With the sliding window that was asked for instead of the network's own."""
        if self.patch is None:
            if self.overlap is None:
                return opened
            if not isinstance(opened.window, Window):
                raise SettingError(f"{opened.name} takes whole images, which do not overlap; give a patch too")
            return replace(opened, window=replace(opened.window, overlap=self.overlap))
        if len(self.patch) != opened.spatial_dims:
            raise SettingError(
                f"{opened.name} takes {opened.spatial_dims}-D images, a patch of {self.patch} does not fit"
            )
        window = opened.window if isinstance(opened.window, Window) else Window(self.patch)
        overlap = window.overlap if self.overlap is None else self.overlap
        return replace(opened, window=replace(window, patch=self.patch, overlap=overlap))

    def _refuse(self, what: str, *names: str) -> None:
        given = [name for name in names if getattr(self, name)]
        if given:
            option = given[0].replace("_", "-")
            raise SettingError(f"{self.spec} is {what}, for which --{option} has no meaning; leave it out")


def open_model(
    spec: str,
    *,
    weights: Path | None = None,
    task: str | None = None,
    classes: tuple[str, ...] | None = None,
    preprocessing: Preprocessing | None = None,
    size: tuple[int, ...] | None = None,
    channels: int | None = None,
    patch: tuple[int, ...] | None = None,
    overlap: float | None = None,
    run_expressions: bool = False,
    untrained: bool = False,
    fold: str | None = None,
    calibration: Path | None = None,
) -> OpenedModel:
    """The network that `spec` names, ready to run; see `ModelSource` for what the rest means."""
    return ModelSource(
        spec, weights, task, classes, preprocessing, size, channels, patch, overlap, run_expressions, untrained, fold,
        calibration,
    ).open()  # fmt: skip


def open_checkpoint(checkpoint: Checkpoint, name: str) -> OpenedModel:
    """A checkpoint of ours as a network to run; its window is the patch that it was trained on."""
    architecture, preprocessing = checkpoint.architecture, checkpoint.preprocessing
    patch = _trained_patch(checkpoint, name)
    opened = OpenedModel(
        model=checkpoint.model.eval(),
        task=checkpoint.task,
        classes=checkpoint.classes,
        spatial_dims=architecture.spatial_dims,
        in_channels=architecture.in_channels,
        kind="checkpoint",
        name=name,
        fingerprint="",
        prepare=_preparation(
            preprocessing, architecture.spatial_dims, architecture.in_channels, checkpoint.task, checkpoint.classes
        ),
        window=Window(patch) if patch else None,
        size=patch or preprocessing.size,
        rotation=checkpoint.rotation,
        contrast=checkpoint.contrast,
        reconstructions=checkpoint.reconstructions,
        denoiser=checkpoint.denoiser,
        calibration=checkpoint.calibration,
        rehearsal=checkpoint.rehearsal,
        checkpoint=checkpoint,
    )
    network, parts = architecture.as_json(), checkpoint.modules()
    opened = replace(opened, fingerprint=_fingerprint(opened, preprocessing, network, parts))
    if len(parts) > 1:
        opened = replace(opened, alone=_fingerprint(opened, preprocessing, network))
    if opened.rehearsal is not None:
        require_same_network(opened.rehearsal, opened.rehearser, name)
    return opened


def with_rehearsal(opened: OpenedModel, folder: Path) -> OpenedModel:
    """The model with what `dltta calibrate` wrote into a folder."""
    rehearsal = load_rehearsal(folder)
    if rehearsal is None:
        raise SettingError(f"{folder} holds no calibration; `dltta calibrate -o {folder}` writes one")
    require_same_network(rehearsal, opened.rehearser, str(folder))
    known = load_layers(folder, rehearsal) or opened.calibration
    return replace(opened, rehearsal=rehearsal if rehearsal["batch_sizes"] else None, calibration=known)


def _trained_patch(checkpoint: Checkpoint, name: str) -> tuple[int, ...] | None:
    """The patch that the network was trained on, from the record of its training; None for whole images."""
    trained = checkpoint.record.get("fingerprint", {})
    patch = trained.get("patch") if isinstance(trained, dict) else trained
    if not patch:
        return None
    axes = checkpoint.architecture.spatial_dims
    if not isinstance(patch, list) or len(patch) != axes or not all(isinstance(n, int) and n > 0 for n in patch):
        raise StateError(f"{name}: model.json is malformed: its patch is {str(patch)[:60]}; train the model again")
    return tuple(patch)


def _fingerprint(
    opened: OpenedModel, preprocessing: Preprocessing, network: Any, parts: Sequence[nn.Module] | None = None
) -> str:
    """Of the network, or of it and its `parts`."""
    description = {
        "task": opened.task,
        "classes": opened.classes,
        "network": network,
        "preprocessing": preprocessing.as_json(),
        "activation": opened.activation,
    }
    return fingerprint(*(parts or [opened.model]), description=description)


def _preparation(
    preprocessing: Preprocessing, spatial_dims: int, in_channels: int, task: Task, classes: tuple[str, ...]
) -> Callable[[Image], Prepared]:
    """Our own preprocessing, and linear interpolation back to the size of the file."""

    def prepare(image: Image) -> Prepared:
        require_shape(image, spatial_dims, in_channels)
        spatial = image.array.shape[1:]

        def restore(probability: Tensor) -> Tensor:
            if task == "classification":
                return probability
            require_classes(probability, classes)
            return _interpolated(probability, spatial)

        return Prepared(preprocessing.image(torch.from_numpy(image.array), image.geometry.limit), restore)

    return prepare


def _interpolated(probability: Tensor, size: tuple[int, ...]) -> Tensor:
    """Linearly and without a filter against aliasing, as MONAI inverts a resizing: an exported bundle agrees."""
    if probability.shape[1:] == size:
        return probability
    mode = {2: "bilinear", 3: "trilinear"}[len(size)]
    return F.interpolate(probability[None], size=size, mode=mode, align_corners=False)[0]
