"""2 networks. An adapted network as a MONAI bundle, to be run without us.

The weights are written as they are given, stored normalization statistics included. A network that was adapted with
the statistics of each test batch (all methods but `source`) uses the stored ones again when it is run from its bundle;
whether that is wanted is for the caller to decide.
"""

import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import monai
import numpy as np
import torch
from torch import Tensor, nn

from dltta.data.preprocessing import IMAGENET_MEAN, IMAGENET_SD, Preprocessing
from dltta.errors import SettingError
from dltta.files import write_atomically
from dltta.models.io.bundle.archive import unpacked
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.io.opened import OpenedModel, Window
from dltta.models.io.weights import require_fit
from dltta.models.nets.architecture import BUILDERS, Architecture
from dltta.models.nets.densenet import DENSENET_121
from dltta.version import __version__

COPIED = ("configs", "docs", "scripts", "LICENSE", "README.md")  # of a bundle; not what runs have left in it


def export_bundle(folder: Path, opened: OpenedModel, model: nn.Module | None = None) -> None:
    """Write a bundle that MONAI's own tools load: `opened` with the weights of `model`, or with its own.

    A network that came as a bundle goes as that bundle, with other weights. The folder appears whole or not at all.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{folder} is there already; choose a folder that is new or empty")
    weights = {name: tensor.detach().cpu() for name, tensor in (model or opened.model).state_dict().items()}
    require_fit("the adapted network", weights, opened.model.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        _write(beside, opened, weights)
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(folder: Path, opened: OpenedModel, weights: Mapping[str, Tensor]) -> None:
    if opened.bundle is not None:
        with unpacked(opened.bundle, COPIED) as source:
            _copy(source, folder)
    elif opened.checkpoint is not None:
        window = opened.window if isinstance(opened.window, Window) else None
        for name, content in (
            ("inference", inference_config(opened.checkpoint, window)),
            ("metadata", metadata(opened)),
        ):
            write_atomically(folder / "configs" / f"{name}.json", json.dumps(content, indent=2) + "\n")
    else:
        raise SettingError(
            f"{opened.name} was built by code, which a MONAI bundle cannot hold; save its state dict instead"
        )
    buffer = io.BytesIO()
    torch.save(dict(weights), buffer)
    write_atomically(folder / "models" / "model.pt", buffer.getvalue())


def _copy(source: Path, folder: Path) -> None:
    for name in COPIED:
        found = source / name
        for path in sorted(found.rglob("*")) if found.is_dir() else [found]:
            inside = path.resolve().is_relative_to(source.resolve())
            if path.is_file() and inside and "__pycache__" not in path.parts:
                write_atomically(folder / path.relative_to(source), path.read_bytes())


def inference_config(checkpoint: Checkpoint, window: Window | None) -> dict[str, Any]:
    """`configs/inference.json` of a checkpoint: the same network, the same numbers going in."""
    resized = checkpoint.preprocessing.size is not None and checkpoint.architecture.spatial_dims == 2
    return {
        "imports": ["$import glob"],
        "bundle_root": ".",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "dataset_dir": "$@bundle_root + '/data'",
        "output_dir": "$@bundle_root + '/eval'",
        "datalist": "$list(sorted(glob.glob(@dataset_dir + '/*')))",
        "network_def": network_def(checkpoint.architecture),
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": preprocessing(checkpoint)},
        "dataset": {"_target_": "Dataset", "data": "$[{'image': i} for i in @datalist]", "transform": "@preprocessing"},
        "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0},
        "inferer": _inferer(window),
        "postprocessing": {
            "_target_": "Compose",
            "transforms": _postprocessing(checkpoint, "grid" if resized else "image"),
        },
        "handlers": [
            {
                "_target_": "CheckpointLoader",
                "load_path": "$@bundle_root + '/models/model.pt'",
                "load_dict": {"model": "@network"},
            }
        ],
        "evaluator": {
            "_target_": "SupervisedEvaluator",
            "device": "@device",
            "val_data_loader": "@dataloader",
            "network": "@network",
            "inferer": "@inferer",
            "postprocessing": "@postprocessing",
            "val_handlers": "@handlers",
        },
        "run": ["$@evaluator.run()"],
    }


def network_def(architecture: Architecture) -> dict[str, Any]:
    """The MONAI class and arguments that `Architecture.build` uses; parameters have the same names."""
    describe = _NETWORKS.get(architecture.name)
    if describe is None:
        raise SettingError(f"the architecture {architecture.name!r} has no description for MONAI")
    options = {**getattr(BUILDERS[architecture.name], "keywords", {}), **architecture.options}
    return {
        "spatial_dims": architecture.spatial_dims,
        "in_channels": architecture.in_channels,
        "out_channels": architecture.classes,
        **describe(options),
    }


def _unet(options: Mapping[str, Any]) -> dict[str, Any]:
    width = options.get("width", 16)
    return {
        "_target_": "BasicUNet",
        "features": [width, 2 * width, 4 * width, 8 * width, 16 * width, width],
        "act": "relu",
        "norm": "batch",
        "upsample": "deconv",
    }


def _densenet(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "_target_": "DenseNet",
        "init_features": options.get("width", 64),
        "growth_rate": options.get("growth", 32),
        "block_config": list(options.get("blocks", DENSENET_121)),
    }


_NETWORKS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "unet": _unet,
    "densenet121": _densenet,
    "densenet_small": _densenet,
}


def preprocessing(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Our `Preprocessing` as MONAI's transforms, after the image was read with rows before columns."""
    readers = [{"_target_": "PILReader", "reverse_indexing": False}, {"_target_": "NibabelReader"}]
    return [
        {"_target_": "LoadImaged", "keys": "image", "reader": readers},
        {"_target_": "EnsureChannelFirstd", "keys": "image"},
        *_resizing(checkpoint.preprocessing.size),
        *_intensities(checkpoint.preprocessing),
        {"_target_": "EnsureTyped", "keys": "image"},
    ]


def _resizing(size: tuple[int, ...] | None) -> list[dict[str, Any]]:
    """Linear interpolation; in 2-D with torch's filter against aliasing, which no transform of MONAI has.

    There the image goes through torch's functions, and a copy of it, the grid, through MONAI's transform, which keeps
    the record that inversion needs.
    """
    if size is None:
        return []
    if len(size) != 2:
        return [{"_target_": "Resized", "keys": "image", "spatial_size": list(size), "mode": "trilinear"}]
    filtered = {"size": list(size), "mode": "bilinear", "align_corners": False, "antialias": True}
    return [
        {"_target_": "CopyItemsd", "keys": "image", "times": 1, "names": ["grid"]},
        {"_target_": "Resized", "keys": "grid", "spatial_size": list(size), "mode": "bilinear"},
        _by_torch("torch.unsqueeze", dim=0),
        _by_torch("torch.nn.functional.interpolate", **filtered),
        _by_torch("torch.squeeze", dim=0),
    ]


def _by_torch(function: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": "Lambdad", "keys": "image", "func": {"_target_": function, "_mode_": "callable", **arguments}}


def _intensities(described: Preprocessing) -> list[dict[str, Any]]:
    def normalized(**arguments: Any) -> dict[str, Any]:
        return {"_target_": "NormalizeIntensityd", "keys": "image", **arguments}

    if described.intensity == "zscore":
        return [normalized(channel_wise=True)]
    if described.intensity == "none":
        return []
    scaled = normalized(subtrahend=0.0, divisor=described.maximum)
    if described.intensity == "scale":
        return [scaled]
    return [scaled, normalized(subtrahend=list(IMAGENET_MEAN), divisor=list(IMAGENET_SD), channel_wise=True)]


def _inferer(window: Window | None) -> dict[str, Any]:
    if window is None:
        return {"_target_": "SimpleInferer"}
    return {
        "_target_": "SlidingWindowInferer",
        "roi_size": list(window.patch),
        "sw_batch_size": window.batch,
        "overlap": window.overlap,
        "mode": window.mode,
        "sigma_scale": window.sigma_scale,
        "padding_mode": window.padding_mode,
        "cval": window.cval,
    }


def _postprocessing(checkpoint: Checkpoint, traced: str) -> list[dict[str, Any]]:
    activation = {"_target_": "Activationsd", "keys": "pred", "softmax": True}
    if checkpoint.task == "classification":
        return [activation]
    inversion = {"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing", "orig_keys": traced}
    return [
        activation,
        {**inversion, "nearest_interp": False},
        {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
        *_saving(checkpoint.architecture.spatial_dims),
    ]


def _saving(axes: int) -> list[dict[str, Any]]:
    """Volumes as NIfTI, on the file's grid already; 2-D images as PNG, for which MONAI's writer wants columns first."""
    saving = {"_target_": "SaveImaged", "output_dir": "@output_dir", "output_dtype": "uint8", "resample": False}
    if axes == 3:
        return [{**saving, "keys": "pred"}]
    return [
        {"_target_": "CopyItemsd", "keys": "pred", "times": 1, "names": ["saved"]},
        {"_target_": "Transposed", "keys": "saved", "indices": [0, 2, 1]},
        {**saving, "keys": "saved", "output_ext": ".png"},
    ]


def metadata(opened: OpenedModel) -> dict[str, Any]:
    """`configs/metadata.json`: what goes in and what comes out."""
    size: list[Any] = list(opened.size) if opened.size else ["16*n"] * opened.spatial_dims
    dense = opened.task == "segmentation"
    return {
        "version": "1.0.0",
        "changelog": {"1.0.0": f"written by dltta {__version__}"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.split("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {"nibabel": "5.2", "pytorch-ignite": "0.4.11"},
        "task": f"{opened.task} of {', '.join(opened.classes)}",
        "description": f"The network {opened.name}, as trained or adapted by dltta.",
        "authors": "the trainer of the network",
        "copyright": "as for the network and the images it was trained on",
        "network_data_format": {
            "inputs": {
                "image": {
                    "type": "image",
                    "format": "magnitude",
                    "num_channels": opened.in_channels,
                    "spatial_shape": size,
                    "dtype": "float32",
                    "is_patch_data": opened.window is not None,
                    "channel_def": {str(number): f"channel_{number}" for number in range(opened.in_channels)},
                }
            },
            "outputs": {
                "pred": {
                    "type": "image" if dense else "probabilities",
                    "format": "segmentation" if dense else "classes",
                    "num_channels": len(opened.classes),
                    "spatial_shape": size if dense else [1, len(opened.classes)],
                    "dtype": "float32",
                    "is_patch_data": opened.window is not None,
                    "channel_def": {str(number): name for number, name in enumerate(opened.classes)},
                }
            },
        },
    }
