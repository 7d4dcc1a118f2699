"""Maintenance of a stream on disk: list its versions, roll back, export the adapted network."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor, nn

from dltta.config import make_adapter
from dltta.core.ensemble import AnyAdapter, Ensemble
from dltta.data.formats.format import Image
from dltta.errors import SettingError, StateError
from dltta.files import write_atomically
from dltta.methods import Method
from dltta.models.folds import each
from dltta.models.io.bundle.export import export_bundle
from dltta.models.io.checkpoint import save_checkpoint
from dltta.models.io.opened import OpenedModel
from dltta.models.io.probing import SIZES, noise
from dltta.models.predictions import probabilities
from dltta.predictor import Predictor, load
from dltta.recipes import Recipe, paper
from dltta.serving.index import StreamIndex
from dltta.serving.journal import Fields, Journal, on_disk, walk
from dltta.serving.record import LOG, STATE, require_schema
from dltta.serving.signing import Signer
from dltta.serving.state import StateFolder, Version

STORED = {  # what layers keep along a stream, and what torch calls it
    "test_mean": "running_mean", "test_variance": "running_var",  # `Running`, NOTE
    "robust_mean": "running_mean", "robust_variance": "running_var",  # RoTTA
}  # fmt: skip


@dataclass(frozen=True)
class Listed:
    """One version that is still on disk, and the batch that led to it."""

    version: int
    cases: tuple[str, ...]  # of that batch
    event: str | None  # start, or a rollback
    bytes: int
    current: bool


def list_versions(output: Path) -> list[Listed]:
    """The versions of a stream, oldest first."""
    folder = StateFolder(output / STATE)
    there = set(folder.numbers())
    made: dict[int, list[Fields]] = {}
    for line in _entries(output):
        if "state_sha256" in line and line["state"] in there:
            made.setdefault(line["state"], []).append(line)
    return [
        Listed(
            number,
            tuple(line["case"] for line in lines if "case" in line),
            next((_event(line) for line in lines if "event" in line), None),
            folder.size(number),
            number == max(made),
        )
        for number, lines in sorted(made.items())
    ]


def predicted_names(output: Path) -> set[str]:
    """Names of the cases that have a prediction; none where there is no stream yet."""
    return {line["case"] for line in _lines(output) if "prediction" in line}


def logged_cases(output: Path) -> list[Fields]:
    """What the log says of each case, in the order in which they came; a case that was skipped has an `error`."""
    return [line for line in _entries(output) if "case" in line]


def show_version(output: Path, number: int | None = None) -> dict[str, Any]:
    """What a version holds: sizes, counts and settings."""
    folder, version = _version(output, number)
    extra = version.state["extra"]
    return {
        "version": version.number,
        "batches": extra["batches_seen"],
        "adapted": {name: list(version.state["moving"][name].shape) for name in extra["adapted"]},
        "memory": sum(pairs.count for pairs in version.pairs),
        "settings": {key: value for key, value in folder.description().items() if key != "key"},
    }


class UnknownVersionError(StateError):
    """A version that the stream never had, or does not keep any more."""


def roll_back(
    output: Path,
    number: int,
    key: Path | None = None,
    note: Mapping[str, Any] | None = None,
    *,
    may_write: Callable[[], None] = lambda: None,
) -> int:
    """Continue from an older version; the log keeps what happened since. Returns the number of the new version.

    A signed stream needs the file with its key. `note` is what the line says besides. `may_write` is asked before the
    first write; it raises when the stream belongs to somebody else by now.
    """
    require_log(output)
    folder = StateFolder(output / STATE)
    signer = require_key(output, folder, key)
    with folder.locked():
        index = StreamIndex(Journal(output / LOG, folder.head_file, signer))
        sha256 = _made(output)[_known(folder, number, index.version)]
        new = index.version + 1
        may_write()
        folder.copy(number, sha256, new)
        oldest = folder.oldest()
        line = {"event": "rollback", "to": number, "state": new, "state_sha256": sha256, "oldest_state": oldest}
        index.append([{**line, **(note or {})}])
        folder.forget(oldest)
    return new


def require_key(output: Path, folder: StateFolder, key: Path | None) -> Signer | None:
    """What signs the lines of this stream; None if it is not signed."""
    signed = folder.description().get("signed", False)
    if signed and key is None:
        raise SettingError(f"{output} is signed; give the file with its key: --sign KEYFILE")
    if not signed and key is not None:
        raise SettingError(f"{output} is not signed; leave --sign out")
    return None if key is None else Signer.from_file(key, output)


@dataclass(frozen=True)
class Exported:
    """What was written, and what it lost by no longer adapting."""

    opened: OpenedModel
    version: int
    method: str
    moved: tuple[str, ...]  # tensors that differ from the source model's; none: it was written again
    difference: float  # share of predictions that are otherwise than the adapter's


def export(
    output: Path,
    opened: OpenedModel,
    target: Path,
    *,
    number: int | None = None,
    bundle: bool = False,
    images: Sequence[Image] = (),
) -> Exported:
    """Write the adapted network for frozen use, in the form that the model came in, or as a MONAI bundle.

    It is compared with the adapter on `images` before anything is written.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingError(f"{target} is there already and not empty; choose another folder")
    if bundle and opened.nnunet is not None:
        raise SettingError(f"{opened.name} is nnU-Net's, whose preprocessing no bundle holds; leave --bundle out")
    folder, version = _version(output, number)
    begun = folder.description()
    if begun.get("network") != opened.fingerprint:
        raise StateError(f"{output} adapted another network than this one; give the model that it was begun with")
    method, live = _method(folder, begun), live_adapter(output, opened, number)
    source = opened.for_method(method)
    adapted = _adapted(source, version, live)
    moved = _moved(source.model, adapted.model)
    found = Exported(adapted, version.number, method, moved, difference(live, adapted, images))
    with on_disk(target):
        if bundle or opened.kind == "bundle":
            export_bundle(target, adapted)
        elif adapted.nnunet is not None:
            from dltta.models.io.nnunet.export import export_nnunet

            export_nnunet(target, adapted.nnunet, adapted.model)
        elif adapted.checkpoint is not None:
            record = {**adapted.checkpoint.record, "adapted": {"version": version.number, "state": version.sha256}}
            save_checkpoint(target, replace(adapted.checkpoint, model=adapted.model, record=record))
        else:
            state = adapted.model.state_dict()
            weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
            write_atomically(target / "model.safetensors", tensors_to_bytes(weights))
    return found


def _adapted(source: OpenedModel, version: Version, live: AnyAdapter) -> OpenedModel:
    """The network that the stream's method starts from, with the parameters that the stream moved, a teacher's first.

    Statistics that went along with the stream (`running`, NOTE, RoTTA) are stored in it; else those of the source stay.
    """
    model = copy.deepcopy(source.model)
    own = dict(model.named_parameters())
    added = [name for name in version.state["extra"]["adapted"] if name not in own]
    if added:
        raise SettingError(f"the method put {added[0]!r} into the network, which a plain network cannot hold")
    pairs = zip(each(model), live.members, strict=True) if isinstance(live, Ensemble) else [(model, live)]
    for plain, adapter in pairs:
        _take_over(plain, getattr(adapter.objective, "teacher", None) or adapter.model)
    return replace(source, model=model)


def live_adapter(output: Path, opened: OpenedModel, number: int | None = None) -> AnyAdapter:
    """The adapter as it was after a version, with its memory; nothing on the disk changes."""
    folder, version = _version(output, number)
    adapter = make_adapter(opened, Recipe(**folder.description()["recipe"]))
    folder.restore(version, adapter)
    return adapter


def difference(live: AnyAdapter, adapted: OpenedModel, images: Sequence[Image] = ()) -> float:
    """Share of positions (of images, in classification) that the exported model predicts otherwise than the adapter.

    Both as they are, without learning; on one image of noise where no images are given.
    """
    exported = make_adapter(adapted, paper(Method.SOURCE))
    if not images:
        x = noise(adapted.in_channels, adapted.size or (SIZES[adapted.spatial_dims][0],) * adapted.spatial_dims)
        return _differing(probabilities(live.predict(x)), probabilities(exported.predict(x)))
    pair = [Predictor(adapted, adapter, learning=False) for adapter in (live, exported)]
    shares = []
    for image in images:
        loaded = load(adapted, image, "")
        if adapted.task == "classification":
            given = [each.classify(["image"], [loaded])[0] for each in pair]
        else:
            given = [each.segment("image", loaded) for each in pair]
        one, other = (prediction.labels(adapted) for prediction in given)
        shares.append((one != other).float().mean().item())
    return fmean(shares)


def _moved(before: nn.Module, after: nn.Module) -> tuple[str, ...]:
    own = after.state_dict()
    return tuple(name for name, tensor in before.state_dict().items() if not torch.equal(tensor, own[name]))


def _differing(one: Tensor, other: Tensor) -> float:
    return (one.argmax(dim=1) != other.argmax(dim=1)).float().mean().item()


@torch.no_grad()
def _take_over(plain: nn.Module, network: nn.Module) -> None:
    """The parameters of the network that predicts, and mean and variance that it kept along the stream."""
    own = dict(plain.named_parameters())
    for name, parameter in network.named_parameters():
        if name in own:
            own[name].copy_(parameter)
    for name, layer in network.named_modules():
        for kept, stored in STORED.items():
            if (value := layer._buffers.get(kept)) is not None:
                getattr(plain.get_submodule(name), stored).copy_(value)


def _method(folder: StateFolder, begun: Mapping[str, Any]) -> str:
    recipe = begun.get("recipe")
    if not isinstance(recipe, dict) or "method" not in recipe:
        raise StateError(f"{folder.folder / 'stream.json'} was altered: it names no method")
    return str(recipe["method"])


def _entries(output: Path) -> Iterator[Fields]:
    """The lines of a stream, which must have some; raises at the first altered one."""
    require_log(output)
    if next(_lines(output), None) is None:
        raise StateError(f"{output / LOG} is empty: no stream was begun here")
    yield from _lines(output)


def _lines(output: Path) -> Iterator[Fields]:
    return (line.entry for group in walk(output / LOG) for line in group)


def require_log(output: Path) -> None:
    """Raise unless there is a log that this version can read."""
    if not (output / LOG).is_file():
        raise StateError(f"{output} is not the output of dltta adapt: there is no {LOG}; give the folder of its -o")
    try:
        description = StateFolder(output / STATE).description()
    except StateError:
        return  # reported by whoever needs it
    require_schema(description, output)


def _version(output: Path, number: int | None) -> tuple[StateFolder, Version]:
    """A version, by default the current one; its file must have the hash that the log names."""
    folder, made = StateFolder(output / STATE), _made(output)
    chosen = max(made) if number is None else _known(folder, number, max(made))
    return folder, folder.read(chosen, made[chosen])


def _made(output: Path) -> dict[int, str]:
    """Every version that the log names, and the hash of its file."""
    return {line["state"]: line["state_sha256"] for line in _entries(output) if "state_sha256" in line}


def _known(folder: StateFolder, number: int, newest: int) -> int:
    there = [each for each in folder.numbers() if each <= newest]
    if number not in there:
        raise UnknownVersionError(f"there is no version {number}; there are {_ranges(there)}")
    return number


def _ranges(numbers: list[int]) -> str:
    """1, 2, 3, 7 as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def _event(line: Fields) -> str:
    return f"rollback to {line['to']}" if line["event"] == "rollback" else str(line["event"])
