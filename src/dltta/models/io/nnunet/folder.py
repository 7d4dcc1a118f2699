"""2 networks. A result folder of nnU-Net on disk: plans, folds and checkpoints, of which nothing is run."""

import errno
import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy._core.multiarray import scalar

from dltta.errors import SettingError, StateError

CHECKPOINT = "checkpoint_final.pth"
DESCRIBED = ("plans.json", "dataset.json")
NEEDED = ("network_weights", "trainer_name", "init_args")
# Beside tensors and plain values nnU-Net saves single numbers of numpy (losses, scores), by names of numpy 2 or 1.
ALLOWED: list[Any] = [
    scalar,
    (scalar, "numpy.core.multiarray.scalar"),
    np.dtype,
    *(type(np.dtype(kind)) for kind in (np.float16, np.float32, np.float64, np.int32, np.int64, np.bool_)),
]


@dataclass(frozen=True)
class NNUNetFolder:
    """Where a model came from: the folder and the folds that are used, in order."""

    path: Path
    folds: tuple[str, ...]

    def checkpoint(self, fold: str) -> Path:
        return self.path / f"fold_{fold}" / CHECKPOINT


def is_nnunet(path: Path) -> bool:
    """Whether this is a folder as `nnUNetv2_train` fills it."""
    return all((path / name).is_file() for name in DESCRIBED) and any(path.glob("fold_*/"))


def misplaced(path: Path) -> str | None:
    """What to give instead of a folder that lies above or below one of nnU-Net's; None for any other."""
    if path.name.startswith("fold_") and is_nnunet(path.resolve().parent):
        return f"{path} is one fold; give the folder above it, with --fold {path.name.removeprefix('fold_')}"
    inside = sorted(child.name for child in path.iterdir() if is_nnunet(child)) if path.is_dir() else []
    return f"{path} holds nnU-Net's {', '.join(inside)}; give one of these folders" if inside else None


def choose_folds(path: Path, asked: str | None) -> NNUNetFolder:
    """`0`, `0,1` or `all`; nothing stands for every fold that is there.

    As in nnU-Net, `all` is the network trained on all cases (`fold_all`); where there is none it is every fold.
    """
    there = sorted(found.parent.name.removeprefix("fold_") for found in path.glob(f"fold_*/{CHECKPOINT}"))
    numbered = tuple(sorted((fold for fold in there if fold.isdigit()), key=int))
    if not there:
        raise StateError(f"{path} has no fold_*/{CHECKPOINT}; finish the training with nnUNetv2_train")
    if asked is None:
        return NNUNetFolder(path, numbered or tuple(there))
    if asked == "all":
        return NNUNetFolder(path, ("all",) if "all" in there else numbered)
    wanted = tuple(part.strip() for part in asked.split(","))
    missing = [fold for fold in wanted if fold not in there]
    if missing or len(set(wanted)) < len(wanted):
        wrong = f"fold {missing[0]!r}, which is not there" if missing else "one fold twice"
        raise SettingError(f"--fold {asked} names {wrong}; {path} has {', '.join(there)}")
    return NNUNetFolder(path, wanted)


def read_json(path: Path) -> dict[str, Any]:
    """plans.json or dataset.json."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(f"{path} cannot be read ({error}); copy it from the training again") from error
    if not isinstance(found, dict):
        raise StateError(f"{path} holds no JSON object; copy it from the training again")
    return found


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What nnU-Net saved. A file that would run code when loaded is refused."""
    try:
        with torch.serialization.safe_globals(ALLOWED):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        if error.errno == errno.EINVAL:  # torch seeks to before the beginning of a file that was cut off
            raise StateError(f"{path} is damaged (cut off); copy it from the training again") from error
        raise StateError(f"{path} cannot be read: {error.strerror or error}") from error
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{path} is damaged or holds more than weights and numbers, which would run code when loaded; "
            "it is not a checkpoint as nnU-Net writes it"
        ) from error
    except (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:90] or type(error).__name__
        raise StateError(f"{path} is damaged ({reason}); copy it from the training again") from error
    if not isinstance(found, Mapping) or any(name not in found for name in NEEDED):
        raise StateError(f"{path} is no checkpoint of nnU-Net 2: it lacks one of {', '.join(NEEDED)}")
    return dict(found)
