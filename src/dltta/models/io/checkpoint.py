"""2 networks. A trained network on disk: what is in a checkpoint folder, written and read without running code.

MODEL/
  model.json           architecture, task, classes, preprocessing, training record, auxiliary parts, checksums
  model.safetensors    the weights of the source model, trained with the task loss alone
  atta.safetensors     auto-encoders, if trained
  memory.safetensors   features and predictions of source images, if kept
  calibration.safetensors   how source images look to its layers, if measured
  rehearsal.json       what to expect of candidates at other sites, if rehearsed (`rehearsal.py`)
  ttt/                 the network that TTT starts from, if trained: a checkpoint folder with its own calibration and
                       memory, and rotation.safetensors, the head that was trained jointly with it
  ttt++/               the same for TTT++, with contrast.safetensors: projection head and moments of source features
  dtta/                the network that DTTA starts from, if trained: a checkpoint folder with its own calibration and
                       memory, and denoiser.safetensors; its weights hold an image normalizer in front of it
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from dltta.data.case import Task
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DlttaError, SettingError, StateError
from dltta.files import write_atomically
from dltta.methods import METHODS
from dltta.models.calibration import Calibration
from dltta.models.io.rehearsal import load_layers, load_rehearsal
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.adaptors import insert_in_front
from dltta.models.parts.autoencoders import AutoEncoders, Levels
from dltta.models.parts.contrast import FeatureMoments, ProjectionHead
from dltta.models.parts.denoiser import Denoiser
from dltta.models.parts.normalizer import NAME, ImageNormalizer
from dltta.models.parts.rotation import RotationHead

FORMAT = 2
FISHER = "fisher/"  # begins the names of the Fisher information in calibration.safetensors; models may lack it
MISSING = {
    "ttt": "this model has no rotation head, which TTT needs; train it with `--with ttt`",
    "ttt++": "this model has no projection head, which TTT++ needs; train it with `--with ttt++`",
    "dtta": "this model has no image normalizer and denoiser, which DTTA needs; train it with `--with dtta`",
}
LARGEST, LONGEST = 4096, 64  # numbers in the description of a network, and how many of them in a row
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError, RecursionError)


def missing_part(method: str, task: Task) -> SettingError:
    """Why a model has no network for this method: it was not trained with it, or cannot be."""
    facts = METHODS[method].facts
    if task not in facts.tasks:
        return SettingError(f"{facts.title} is for {' and '.join(facts.tasks)}, and this model is for {task}")
    return SettingError(MISSING[method])


def training_words(losses: Sequence[str]) -> str:
    """What the `losses` of a checkpoint's record say: "the task loss alone" or "the task and rotation losses"."""
    return f"the {losses[0]} loss alone" if len(losses) == 1 else f"the {' and '.join(losses)} losses"


@dataclass(frozen=True)
class Rotation:
    """The rotation head, the layer it reads and the parameters in front of that layer."""

    head: RotationHead
    layer: str
    shared: tuple[str, ...]


@dataclass(frozen=True)
class Contrast:
    """The projection head, the layer it reads, the parameters in front of it, and source moments of both outputs."""

    head: ProjectionHead
    layer: str
    shared: tuple[str, ...]
    features: FeatureMoments | None = None  # None until training is done
    projections: FeatureMoments | None = None


@dataclass(frozen=True)
class Reconstructions:
    """The auto-encoders, where they look, and the channels of the layers that adaptors follow."""

    autoencoders: AutoEncoders
    levels: Levels
    channels: tuple[int, ...]


@dataclass(frozen=True)
class SourcePairs:
    """Features of source images and the network's predictions for them: a memory that is ready at the first image."""

    layer: str
    features: Tensor  # (N, C, *positions)
    predictions: Tensor  # (N, classes, *positions), probabilities


@dataclass(frozen=True)
class Checkpoint:
    """A trained network and everything needed to run and adapt it."""

    model: nn.Module  # the source model, or in `joint` the network trained jointly with rotation
    architecture: Architecture
    task: Task
    classes: tuple[str, ...]
    preprocessing: Preprocessing
    record: Mapping[str, Any] = field(default_factory=dict)  # how it was trained
    rotation: Rotation | None = None
    reconstructions: Reconstructions | None = None
    calibration: Calibration | None = None
    pairs: SourcePairs | None = None
    joint: "Checkpoint | None" = None  # what TTT starts from; it has the rotation head
    contrast: Contrast | None = None
    contrastive: "Checkpoint | None" = None  # what TTT++ starts from; it has the projection head
    denoiser: Denoiser | None = None
    normalized: "Checkpoint | None" = None  # what DTTA starts from; with a normalizer in front; it has the denoiser
    rehearsal: Mapping[str, Any] | None = None  # what was learned at simulated sites, see `evaluation.rehearsal`

    def modules(self) -> list[nn.Module]:
        """Every network and part that was trained."""
        parts = [self.model]
        parts += [self.rotation.head] if self.rotation else []
        parts += [self.reconstructions.autoencoders] if self.reconstructions else []
        parts += [self.contrast.head] if self.contrast else []
        parts += [self.denoiser] if self.denoiser else []
        return [*parts, *(module for other in self.others().values() for module in other.modules())]

    def others(self) -> "dict[str, Checkpoint]":
        """Networks of methods that start from one of their own, by method."""
        found = {"ttt": self.joint, "ttt++": self.contrastive, "dtta": self.normalized}
        return {name: other for name, other in found.items() if other is not None}

    def for_method(self, method: str) -> "Checkpoint":
        """The checkpoint whose `model` the method starts from: of `others` for TTT, TTT++ and DTTA, else this one."""
        part = {"ttt": self.rotation, "ttt++": self.contrast, "dtta": self.denoiser}
        if method not in part or part[method] is not None:
            return self
        if method not in self.others():
            raise missing_part(method, self.task)
        return self.others()[method]


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint folder; `model.json` comes last and names the other files' checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, other in checkpoint.others().items():
        save_checkpoint(folder / name, other)
    files = {"model": dict(checkpoint.model.state_dict())}
    auxiliary: dict[str, Any] = {}
    if (rotation := checkpoint.rotation) is not None:
        files["rotation"] = dict(rotation.head.state_dict())
        auxiliary["rotation"] = {
            "layer": rotation.layer,
            "shared": list(rotation.shared),
            "channels": rotation.head.channels,
            "hidden": rotation.head.hidden,
        }
    if (contrast := checkpoint.contrast) is not None:
        files["contrast"], auxiliary["contrast"] = _contrast_parts(contrast)
    if (reconstructions := checkpoint.reconstructions) is not None:
        files["atta"] = dict(reconstructions.autoencoders.state_dict())
        auxiliary["atta"] = {
            "shapes": reconstructions.autoencoders.shapes,
            "width": reconstructions.autoencoders.width,
            "watched": reconstructions.levels.watched,
            "adapted": reconstructions.levels.adapted,
            "output": reconstructions.levels.output,
            "channels": reconstructions.channels,
        }
    if (denoiser := checkpoint.denoiser) is not None:
        files["denoiser"] = dict(denoiser.state_dict())
        auxiliary["denoiser"] = {
            "spatial_dims": denoiser.spatial_dims, "classes": denoiser.classes, "widths": denoiser.widths,
        }  # fmt: skip
    if isinstance(normalizer := getattr(checkpoint.model, NAME, None), ImageNormalizer):  # among the model's weights
        auxiliary["normalizer"] = {"width": normalizer.width, "kernel": normalizer.kernel}
    if (calibration := checkpoint.calibration) is not None:
        layers = calibration.layers.items()
        files["calibration"] = {f"{name}.{i}": part for name, parts in layers for i, part in enumerate(parts)}
        files["calibration"] |= {f"{FISHER}{name}": part for name, part in calibration.fisher.items()}
        auxiliary["calibration"] = {"eps": dict(calibration.eps), "predictions": dict(calibration.predictions)}
    if (pairs := checkpoint.pairs) is not None:
        files["memory"] = {"features": pairs.features, "predictions": pairs.predictions}
        auxiliary["memory"] = {"layer": pairs.layer}
    checksums = {name: _write_tensors(folder / f"{name}.safetensors", tensors) for name, tensors in files.items()}
    description = {
        "format": FORMAT,
        "task": checkpoint.task,
        "classes": list(checkpoint.classes),
        "architecture": checkpoint.architecture.as_json(),
        "preprocessing": checkpoint.preprocessing.as_json(),
        "auxiliary": auxiliary,
        "record": dict(checkpoint.record),
        "sha256": checksums,
        "joint": _checksum_of(folder / "ttt") if checkpoint.joint else None,
        "contrastive": _checksum_of(folder / "ttt++") if checkpoint.contrastive else None,
        "normalized": _checksum_of(folder / "dtta") if checkpoint.normalized else None,
    }
    write_atomically(folder / "model.json", json.dumps(description, indent=1) + "\n")


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder; a missing, altered or foreign file is one clear `StateError`."""
    description = _read_description(folder)
    rehearsal = load_rehearsal(folder)
    try:
        return _load(folder, description, rehearsal)
    except DlttaError:
        raise
    except MALFORMED as error:
        reason = " ".join(str(error).split())[:160]
        raise StateError(f"{folder / 'model.json'} is malformed: {reason}; train the model again") from error


def _load(folder: Path, description: dict[str, Any], rehearsal: Mapping[str, Any] | None) -> Checkpoint:
    architecture = Architecture(**description["architecture"])
    classes, task = description["classes"], description["task"]
    if task not in get_args(Task) or not _are_names(classes) or len(classes) != max(architecture.classes, 2):
        raise StateError(f"{folder / 'model.json'} is malformed: task and classes do not fit its network")
    if not isinstance(description["record"], dict):
        raise StateError(f"{folder / 'model.json'} is malformed: it has no record of the training")
    model = _built(folder, architecture, description)
    return Checkpoint(
        model=model.eval(),
        architecture=architecture,
        task=task,
        classes=tuple(classes),
        preprocessing=Preprocessing.from_json(description["preprocessing"]),
        record=description["record"],
        rotation=_load_rotation(folder, description),
        reconstructions=_load_reconstructions(folder, description),
        calibration=_load_calibration(folder, description) or load_layers(folder, rehearsal or {}),
        pairs=_load_pairs(folder, description),
        joint=_load_other(folder / "ttt", description["joint"]),
        contrast=_load_contrast(folder, description),
        contrastive=_load_other(folder / "ttt++", description.get("contrastive")),
        denoiser=_load_denoiser(folder, description),
        normalized=_load_other(folder / "dtta", description.get("normalized")),
        rehearsal=rehearsal if rehearsal and rehearsal["batch_sizes"] else None,
    )


def _are_names(classes: object) -> bool:
    return isinstance(classes, list) and all(isinstance(name, str) and name for name in classes)


def _built(folder: Path, architecture: Architecture, description: dict[str, Any]) -> nn.Module:
    """The network with its weights; built only if its weights are there, whatever size the description says."""
    where = folder / "model.json"
    shape = [architecture.spatial_dims, architecture.in_channels, architecture.classes]
    if not _is_modest([shape, architecture.options]) or "weights" in architecture.options:
        raise StateError(f"{where} is malformed: it describes no network that dltta train makes")
    tensors = _tensors(folder, "model", description)
    with torch.device("meta"):
        sizes = {name: tensor.shape for name, tensor in _empty(architecture, description).state_dict().items()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if sizes != found:
        other = next(iter(name for name in (*sizes, *found) if sizes.get(name) != found.get(name)))
        raise StateError(
            f"{folder / 'model.safetensors'} does not fit the network in model.json: {other} is "
            f"{_shape(found.get(other))}, not {_shape(sizes.get(other))}"
        )
    model = _empty(architecture, description)
    model.load_state_dict(tensors)
    return model


def _empty(architecture: Architecture, description: dict[str, Any]) -> nn.Module:
    """The network as it was trained, with any weights."""
    model = architecture.build(seed=0)
    if (part := description["auxiliary"].get("normalizer")) is not None:
        insert_in_front(model, NAME, ImageNormalizer(architecture.spatial_dims, architecture.in_channels, **part))
    return model


def _shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape)) or "a number"


def _is_modest(value: object) -> bool:
    """Whether all sizes in it (whole numbers) are such as a network that somebody trained has."""
    if isinstance(value, dict):
        return _is_modest(list(value.values()))
    if isinstance(value, list | tuple):
        return len(value) <= LONGEST and all(map(_is_modest, value))
    return not isinstance(value, int) or 0 <= value <= LARGEST


def _load_rotation(folder: Path, description: dict[str, Any]) -> Rotation | None:
    part = description["auxiliary"].get("rotation")
    if part is None:
        return None
    head = RotationHead(part["channels"], part["hidden"])
    _fill(head, folder, "rotation", description)
    return Rotation(head.eval(), part["layer"], tuple(part["shared"]))


def _load_reconstructions(folder: Path, description: dict[str, Any]) -> Reconstructions | None:
    part = description["auxiliary"].get("atta")
    if part is None:
        return None
    autoencoders = AutoEncoders({name: tuple(shape) for name, shape in part["shapes"].items()}, width=part["width"])
    _fill(autoencoders, folder, "atta", description)
    levels = Levels(tuple(map(tuple, part["watched"])), tuple(part["adapted"]), part["output"])
    return Reconstructions(autoencoders.eval(), levels, tuple(part["channels"]))


def _load_calibration(folder: Path, description: dict[str, Any]) -> Calibration | None:
    part = description["auxiliary"].get("calibration")
    if part is None:
        return None
    tensors = _tensors(folder, "calibration", description)
    layers = {name: (tensors[f"{name}.0"], tensors[f"{name}.1"]) for name in part["eps"]}
    if not isinstance(part["predictions"], dict) or not all(isinstance(eps, float) for eps in part["eps"].values()):
        raise StateError(f"{folder / 'model.json'} is malformed: its calibration is not one; train the model again")
    fisher = {name.removeprefix(FISHER): each for name, each in tensors.items() if name.startswith(FISHER)}
    return Calibration(layers, part["eps"], part["predictions"], fisher)


def _load_pairs(folder: Path, description: dict[str, Any]) -> SourcePairs | None:
    part = description["auxiliary"].get("memory")
    if part is None:
        return None
    tensors = _tensors(folder, "memory", description)
    return SourcePairs(part["layer"], tensors["features"], tensors["predictions"])


def _contrast_parts(contrast: Contrast) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of a projection head with its moments."""
    tensors = {f"head.{name}": value for name, value in contrast.head.state_dict().items()}
    described: dict[str, Any] = {
        "layer": contrast.layer,
        "shared": list(contrast.shared),
        "channels": contrast.head.channels,
        "size": contrast.head.size,
        "distances": {},
    }
    for name, moments in (("features", contrast.features), ("projections", contrast.projections)):
        if moments is not None:
            tensors |= {f"{name}.mean": moments.mean, f"{name}.covariance": moments.covariance}
            described["distances"][name] = [moments.mean_distance, moments.covariance_distance]
    return tensors, described


def _load_contrast(folder: Path, description: dict[str, Any]) -> Contrast | None:
    part = description["auxiliary"].get("contrast")
    if part is None:
        return None
    tensors = _tensors(folder, "contrast", description)
    head = ProjectionHead(part["channels"], part["size"])
    head.load_state_dict(
        {name.removeprefix("head."): value for name, value in tensors.items() if name.startswith("head.")}
    )
    moments = {
        name: FeatureMoments(tensors[f"{name}.mean"], tensors[f"{name}.covariance"], *distances)
        for name, distances in part["distances"].items()
    }
    return Contrast(
        head.eval(), part["layer"], tuple(part["shared"]), moments.get("features"), moments.get("projections")
    )


def _load_denoiser(folder: Path, description: dict[str, Any]) -> Denoiser | None:
    part = description["auxiliary"].get("denoiser")
    if part is None:
        return None
    denoiser = Denoiser(part["spatial_dims"], part["classes"], part["widths"])
    _fill(denoiser, folder, "denoiser", description)
    return denoiser.eval()


def _load_other(folder: Path, checksum: str | None) -> Checkpoint | None:
    """The network of a method that has one of its own, which must be the one that was saved with this one."""
    if checksum is None:
        return None
    _read_checked(folder / "model.json", checksum)
    return load_checkpoint(folder)


def _read_description(folder: Path) -> dict[str, Any]:
    path = folder / "model.json"
    if not path.is_file():
        raise StateError(f"{folder} is not a model: it has no model.json; `dltta train` writes such folders")
    try:
        description = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} is not JSON: {error}") from error
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise StateError(f"{path} has not the format {FORMAT} that this version reads; train it again")
    return description


def _fill(module: nn.Module, folder: Path, name: str, description: dict[str, Any]) -> None:
    tensors = _tensors(folder, name, description)
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise StateError(_misfit(folder, name, error)) from error


def _tensors(folder: Path, name: str, description: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of one file, which must be the one that the description was written with."""
    content = _read_checked(folder / f"{name}.safetensors", description["sha256"].get(name))
    try:
        return load_tensors(content)
    except SafetensorError as error:
        raise StateError(_misfit(folder, name, error)) from error


def _read_checked(path: Path, expected: str | None) -> bytes:
    if not path.is_file():
        raise StateError(f"{path} is missing; copy the whole model folder")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror or error}); check its permissions") from error
    if _sha256(content) != expected:
        raise StateError(f"{path} is not the file that model.json was written with; copy the whole model folder")
    return content


def _misfit(folder: Path, name: str, error: Exception) -> str:
    return f"{folder / f'{name}.safetensors'} does not fit the network in model.json: {str(error).splitlines()[0]}"


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    content = tensors_to_bytes({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    write_atomically(path, content)
    return _sha256(content)


def _checksum_of(folder: Path) -> str:
    """Of a checkpoint folder, by the file that names the others' checksums."""
    return _sha256((folder / "model.json").read_bytes())


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
