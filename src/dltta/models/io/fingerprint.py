"""2 networks. Which network was this? One checksum for checkpoints, opened models and resumed trainings."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def fingerprint(*modules: nn.Module, description: Mapping[str, Any] = {}) -> str:
    """sha256 over a description that fits in JSON and every parameter and buffer, by name."""
    digest = hashlib.sha256(json.dumps(description, sort_keys=True).encode())
    for module in modules:
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
