"""2 networks. An adapted network as a result folder of nnU-Net, for `nnUNetv2_predict` and without us."""

import io
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn

from dltta.errors import SettingError
from dltta.files import write_atomically
from dltta.models.folds import each
from dltta.models.io.nnunet.folder import CHECKPOINT, DESCRIBED, NNUNetFolder, read_checkpoint
from dltta.models.io.weights import require_fit

COPIED = (*DESCRIBED, "dataset_fingerprint.json")


def export_nnunet(folder: Path, came: NNUNetFolder, model: nn.Module) -> None:
    """Write the folder that the model came from with the weights of `model`, fold by fold.

    All else in a checkpoint stays as it was. The folder appears whole or not at all.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{folder} is there already; choose a folder that is new or empty")
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        for name in COPIED:
            if (came.path / name).is_file():
                write_atomically(beside / name, (came.path / name).read_bytes())
        for fold, network in zip(came.folds, each(model), strict=True):
            weights = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
            _write(beside / f"fold_{fold}" / CHECKPOINT, came.checkpoint(fold), weights)
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(path: Path, came: Path, weights: dict[str, Tensor]) -> None:
    checkpoint = read_checkpoint(came)
    wrapped = all(name.startswith("module.") for name in checkpoint["network_weights"])
    own = {f"module.{name}" if wrapped else name: tensor for name, tensor in weights.items()}
    require_fit("the adapted network", own, checkpoint["network_weights"])
    buffer = io.BytesIO()
    torch.save({**checkpoint, "network_weights": own}, buffer)
    write_atomically(path, buffer.getvalue())
