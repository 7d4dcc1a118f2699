"""MONAI bundles for tests, in the folder structure that MONAI's own tool makes."""

import copy

import torch
from monai.bundle import ConfigParser, init_bundle

from networks import trained

UNET = {
    "_target_": "UNet",
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 3,
    "channels": [4, 8],
    "strides": [2],
    "norm": "batch",
}
METADATA = {
    "version": "0.1.0",
    "network_data_format": {
        "inputs": {"image": {"num_channels": 1, "spatial_shape": [16, 16, 16]}},
        "outputs": {
            "pred": {
                "format": "segmentation",
                "num_channels": 3,
                "channel_def": {"0": "background", "1": "left", "2": "right"},
            }
        },
    },
}
SAVE = {
    "_target_": "SaveImaged",
    "_disabled_": "$not @save",
    "keys": "pred",
    "output_dir": "$@bundle_root + '/eval'",
}
CONFIG = {
    "imports": ["$import glob", "$import os"],
    "image_key": "image",
    "save": True,
    "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
    "datalist": "$list(sorted(glob.glob(@dataset_dir + '/*.nii.gz')))",
    "network_def": UNET,
    "network": "$@network_def.to(@device)",
    "preprocessing": {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "LoadImaged", "keys": "@image_key"},
            {"_target_": "EnsureChannelFirstd", "keys": "@image_key"},
            {"_target_": "Orientationd", "keys": "@image_key", "axcodes": "RAS"},
            {"_target_": "Spacingd", "keys": "@image_key", "pixdim": [2.0, 2.0, 2.0], "mode": "bilinear"},
            {"_target_": "ScaleIntensityRanged", "keys": "@image_key", "a_min": -100, "a_max": 300, "b_min": 0.0,
             "b_max": 1.0, "clip": True},
            {"_target_": "EnsureTyped", "keys": "@image_key", "device": "@device"},
        ],
    },
    "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [16, 16, 16], "sw_batch_size": 4, "overlap": 0.5,
                "mode": "gaussian"},
    "postprocessing": {
        "_target_": "Compose",
        "transforms": [
            {"_target_": "Activationsd", "keys": "pred", "softmax": True},
            {"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing", "orig_keys": "@image_key",
             "nearest_interp": False, "to_tensor": True},
            {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
            SAVE,
        ],
    },
}  # fmt: skip


def config(**parts):
    """The usual inference configuration with some parts replaced; `None` takes a part away."""
    merged = {**copy.deepcopy(CONFIG), **parts}
    return {name: part for name, part in merged.items() if part is not None}


def network(definition=UNET, seed=0):
    return trained(ConfigParser({"net": copy.deepcopy(definition)}).get_parsed_content("net"), seed)


def transforms(*steps):
    return {"_target_": "Compose", "transforms": list(steps)}


def make_bundle(folder, inference=None, *, model=None, metadata=METADATA):
    """A bundle written by MONAI; its network's weights come along."""
    inference = config() if inference is None else inference
    model = network(inference["network_def"]) if model is None else model
    init_bundle(folder, network=model, metadata_str=metadata, inference_str=inference)
    return model


def probabilities(classes, size, seed=0):
    return torch.rand(classes, *size, generator=torch.Generator().manual_seed(seed)).mul(6).softmax(dim=0)
