"""Result folders of nnU-Net made by hand: plans, dataset and checkpoints in its layout, with random weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

LABELS = {"background": 0, "cord": 1, "grey": 2}


def plans(axes: int, *, channels: int = 1, spacing: Sequence[float] | None = None, **changes: Any) -> dict[str, Any]:
    """`plans.json` with a network of two stages and windows of 8 along each axis."""
    name = "2d" if axes == 2 else "3d_fullres"
    kernels = [[3] * axes] * 2
    configuration = {
        "data_identifier": f"nnUNetPlans_{name}",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": [8] * axes,
        "spacing": list(spacing or [1.0] * axes),
        "normalization_schemes": ["ZScoreNormalization"] * channels,
        "use_mask_for_norm": [False] * channels,
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_seg": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None},
        "resampling_fn_seg_kwargs": {"is_seg": True, "order": 1, "order_z": 0, "force_separate_z": None},
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": {"is_seg": False, "order": 1, "order_z": 0, "force_separate_z": None},
        "architecture": {
            "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
            "arch_kwargs": {
                "n_stages": 2,
                "features_per_stage": [4, 8],
                "conv_op": f"torch.nn.modules.conv.Conv{axes}d",
                "kernel_sizes": kernels,
                "strides": [[1] * axes, [2] * axes],
                "n_conv_per_stage": [1, 1],
                "n_conv_per_stage_decoder": [1],
                "conv_bias": True,
                "norm_op": f"torch.nn.modules.instancenorm.InstanceNorm{axes}d",
                "norm_op_kwargs": {"eps": 1e-05, "affine": True},
                "dropout_op": None,
                "dropout_op_kwargs": None,
                "nonlin": "torch.nn.LeakyReLU",
                "nonlin_kwargs": {"inplace": True},
            },
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
        "batch_dice": True,
        **changes,
    }
    return {
        "dataset_name": "Dataset001_phantom",
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {name: configuration},
        "foreground_intensity_properties_per_channel": {
            str(channel): {"mean": 0.0, "std": 1.0, "percentile_00_5": 0.0, "percentile_99_5": 1.0}
            for channel in range(channels)
        },
    }


def write_nnunet(
    folder: Path,
    axes: int,
    *,
    channels: int = 1,
    labels: Mapping[str, Any] = LABELS,
    folds: Sequence[str] = ("0",),
    planned: dict[str, Any] | None = None,
    ending: str = ".nii.gz",
    mirroring: tuple[int, ...] | None = None,
) -> Path:
    """A folder TRAINER__PLANS__CONFIGURATION with a checkpoint of random weights for every fold."""
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    planned = planned or plans(axes, channels=channels)
    (name,) = planned["configurations"]
    dataset = {
        "channel_names": {str(channel): "MR" for channel in range(channels)},
        "labels": dict(labels),
        "file_ending": ending,
        "numTraining": 2,
    }
    path = folder / f"nnUNetTrainer__nnUNetPlans__{name}"
    path.mkdir(parents=True)
    (path / "plans.json").write_text(json.dumps(planned))
    (path / "dataset.json").write_text(json.dumps(dataset))
    architecture = planned["configurations"][name]["architecture"]
    for number, fold in enumerate(folds):
        torch.manual_seed(number)
        network = get_network_from_plans(
            architecture["network_class_name"],
            architecture["arch_kwargs"],
            architecture["_kw_requires_import"],
            channels,
            len(labels),
            deep_supervision=True,
        )
        for parameter in network.parameters():  # so that classes differ from place to place
            parameter.data += 0.3 * torch.randn_like(parameter)
        checkpoint = {
            "network_weights": network.state_dict(),
            "optimizer_state": {},
            "grad_scaler_state": None,
            "logging": {"mean_fg_dice": [np.float64(0.5)], "train_losses": [np.float32(0.1)]},
            "_best_ema": np.float64(0.5),
            "current_epoch": 1,
            "init_args": {"plans": planned, "configuration": name, "fold": 0, "dataset_json": dataset},
            "trainer_name": "nnUNetTrainer",
            "inference_allowed_mirroring_axes": tuple(range(axes)) if mirroring is None else mirroring,
        }
        (path / f"fold_{fold}").mkdir()
        torch.save(checkpoint, path / f"fold_{fold}" / "checkpoint_final.pth")
    return path


def predicted_by_nnunet(model: Path, images: Path, output: Path, folds: Sequence[int] = (0,)) -> None:
    """What nnU-Net itself predicts for the images of a folder, mask by mask."""
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(device=torch.device("cpu"), allow_tqdm=False, perform_everything_on_device=False)
    predictor.initialize_from_trained_model_folder(str(model), use_folds=tuple(folds))
    output.mkdir(parents=True, exist_ok=True)
    predictor.predict_from_files_sequential(str(images), str(output))
