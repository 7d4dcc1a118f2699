"""2 networks. A MONAI bundle: network, weights, preprocessing and windows as its configuration says."""

from pathlib import Path
from typing import Any

from monai.inferers import SimpleInferer, SlidingWindowInferer
from torch import nn

from dltta.errors import SettingError, StateError
from dltta.models.io.bundle.archive import OPENED, unpacked
from dltta.models.io.bundle.config import BundleConfig
from dltta.models.io.bundle.images import Pipeline, as_pipeline
from dltta.models.io.bundle.meaning import Described, Postprocessing
from dltta.models.io.fingerprint import fingerprint
from dltta.models.io.opened import OpenedModel, Window, require_count
from dltta.models.io.probing import axes_of, probe
from dltta.models.io.weights import load_weights


def open_bundle(
    path: Path,
    *,
    weights: Path | None = None,
    task: str | None = None,
    classes: tuple[str, ...] | None = None,
    size: tuple[int, ...] | None = None,
    run_expressions: bool = False,
) -> OpenedModel:
    """The bundle in a folder or zip; what in its configuration cannot be honored is one `SettingError`."""
    with unpacked(path, None if run_expressions else OPENED) as folder:
        try:
            return _open(path, BundleConfig(folder, run_expressions=run_expressions), weights, task, classes, size)
        except RecursionError as error:
            raise StateError(f"{path}: the configuration is nested without end") from error


def _open(
    path: Path,
    config: BundleConfig,
    weights: Path | None,
    task: str | None,
    classes: tuple[str, ...] | None,
    size: tuple[int, ...] | None,
) -> OpenedModel:
    model = _network(config, weights)
    described = Described.read(config.metadata, f"{config.folder / 'configs' / 'metadata.json'}")
    window = _window(config, len(described.size) if described.size else axes_of(model))
    size = size or (window.patch if window and all(window.patch) else described.size)
    seen = probe(model, in_channels=described.in_channels, size=size)
    if task not in (None, seen.task):
        raise SettingError(f"{path} gives a {seen.task}, not a {task}")
    classes = classes or described.classes(seen, str(path))
    require_count(str(path), classes, seen.channels)
    postprocessing = Postprocessing.read(
        _build(config, "postprocessing"), seen.channels, f"{config.file}: postprocessing"
    )
    compose, key = as_pipeline(_build(config, "preprocessing"), described.image, f"{config.file}: preprocessing")
    pipeline = Pipeline(
        compose=compose,
        key=key,
        traced=postprocessing.traced or key,
        nearest=postprocessing.nearest,
        classes=classes,
        spatial_dims=seen.spatial_dims,
        in_channels=seen.in_channels,
        dense=seen.task == "segmentation",
    )
    return OpenedModel(
        model=model,
        task=seen.task,
        classes=classes,
        spatial_dims=seen.spatial_dims,
        in_channels=seen.in_channels,
        kind="bundle",
        name=path.resolve().stem if path.is_file() else path.resolve().name,
        fingerprint=fingerprint(model, description={"config": config.content, "classes": classes}),
        prepare=pipeline,
        window=window,
        activation="sigmoid" if seen.channels == 1 else "softmax",
        threshold=0.5 if postprocessing.threshold is None else postprocessing.threshold,
        size=size or seen.size,
        bundle=path,
    )


def _build(config: BundleConfig, part: str) -> Any:
    return config.build(part) if config.has(part) else None


def _network(config: BundleConfig, weights: Path | None) -> nn.Module:
    model = _build(config, "network_def")
    if not isinstance(model, nn.Module):
        raise SettingError(f"{config.file}: network_def must describe a network, found {type(model).__name__}")
    file = weights or config.folder / "models" / "model.pt"
    if not file.is_file():
        raise StateError(f"{file} is missing; give the weights with --weights")
    load_weights(model, file)
    return model.eval()


def _window(config: BundleConfig, axes: int) -> Window | None:
    """The windows that the bundle's inferer takes an image in."""
    inferer = _build(config, "inferer")
    if inferer is None or type(inferer) is SimpleInferer:
        return None
    if not isinstance(inferer, SlidingWindowInferer):
        raise SettingError(
            f"{config.file}: {type(inferer).__name__} is not supported; use SimpleInferer or SlidingWindowInferer"
        )
    patch, overlaps = _per_axis(inferer.roi_size, axes), set(_per_axis(inferer.overlap, axes))
    if len(patch) != axes or len(overlaps) != 1 or inferer.with_coord:
        raise SettingError(
            f"{config.file}: windows of {inferer.roi_size} with overlap {inferer.overlap} are not supported for a "
            f"{axes}-D network; give one size per axis and one overlap"
        )
    patch = tuple(max(size or 0, 0) for size in patch)  # MONAI: nothing, 0 and -1 stand for the whole axis
    if not any(patch):
        return None
    return Window(
        patch,
        overlaps.pop(),
        str(inferer.mode.value),  # type: ignore[arg-type]  # Window checks it
        inferer.sigma_scale,
        str(getattr(inferer.padding_mode, "value", inferer.padding_mode)),
        inferer.cval,
        inferer.sw_batch_size,
    )


def _per_axis(value: Any, axes: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (value,) * axes
