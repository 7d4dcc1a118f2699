"""2 networks. What a model learned at simulated sites, on disk: beside a checkpoint, or in a folder of its own.

FOLDER/
  rehearsal.json          what `evaluation.rehearsal.rehearse` found, and the fingerprint of the network
  rehearsal.safetensors   how source images look to the network's layers, where the model itself does not know it
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensors_to_bytes

from dltta.errors import StateError
from dltta.files import write_atomically
from dltta.models.calibration import Calibration

FORMAT = 2
FILE, LAYERS = "rehearsal.json", "rehearsal.safetensors"


def save_rehearsal(folder: Path, rehearsal: Mapping[str, Any], calibration: Calibration | None = None) -> None:
    """Write it, with the calibration where that has no place of its own; the description comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = dict(rehearsal)
    if calibration is not None:
        layers = calibration.layers.items()
        tensors = {f"{name}.{i}": part.contiguous() for name, parts in layers for i, part in enumerate(parts)}
        content = tensors_to_bytes(tensors)
        write_atomically(folder / LAYERS, content)
        saved["calibration"] = {
            "eps": dict(calibration.eps), "predictions": dict(calibration.predictions),
            "sha256": hashlib.sha256(content).hexdigest(),
        }  # fmt: skip
    write_atomically(folder / FILE, json.dumps(saved, indent=1) + "\n")


def load_rehearsal(folder: Path) -> dict[str, Any] | None:
    """What was saved in a folder; None if nothing was."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StateError(f"{path} is not JSON: {error}; run `dltta calibrate` again") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StateError(f"{path} has not the format {FORMAT} that this version reads; run `dltta calibrate` again")
    return found


def load_layers(folder: Path, rehearsal: Mapping[str, Any]) -> Calibration | None:
    """The calibration that was saved with a rehearsal, if one was."""
    part = rehearsal.get("calibration")
    if part is None:
        return None
    path = folder / LAYERS
    try:
        content = path.read_bytes()
        if hashlib.sha256(content).hexdigest() != part["sha256"]:
            raise StateError(f"{path} is not the file that {FILE} was written with; copy the whole folder")
        tensors = load_tensors(content)
        layers = {name: (tensors[f"{name}.0"], tensors[f"{name}.1"]) for name in part["eps"]}
        return Calibration(layers, part["eps"], part["predictions"])
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}; copy the whole folder") from error
    except (SafetensorError, KeyError) as error:
        raise StateError(f"{path} does not fit {FILE}: {error}; run `dltta calibrate` again") from error


def require_same_network(rehearsal: Mapping[str, Any], fingerprint: str, name: str) -> None:
    """Raise `StateError` unless it was this network that rehearsed."""
    if rehearsal.get("network") != fingerprint:
        raise StateError(f"{name}: {FILE} belongs to another network; run `dltta calibrate` again")
