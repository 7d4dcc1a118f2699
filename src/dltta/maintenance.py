"""Looking after a stream on disk: what is there, go back, take the adapted network out, find alterations."""

import copy
import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from dltta.errors import SettingError, StateError
from dltta.journal import Journal, read_chain
from dltta.models.bundle.export import export_bundle
from dltta.models.loading import save_checkpoint
from dltta.models.opened import OpenedModel
from dltta.state import StateFolder


@dataclass(frozen=True)
class Listed:
    """One version that is still on disk and the case it answered last."""

    version: int
    case: str | None
    bytes: int
    current: bool


def list_versions(output: Path) -> list[Listed]:
    """The versions of a stream, oldest first."""
    folder, lines = StateFolder(output / "state"), _lines(output)
    cases = {line["state"]: line.get("case") for line in lines if "repeats" not in line and "error" not in line}
    now = lines[-1]["state"]
    return [Listed(number, cases.get(number), folder.size(number), number == now) for number in folder.numbers()]


def show_version(output: Path, number: int | None = None) -> dict[str, Any]:
    """What a version holds, in numbers."""
    folder = StateFolder(output / "state")
    number = _lines(output)[-1]["state"] if number is None else number
    version = folder.read(_known(folder, int(number)))
    extra = version.state["extra"]
    return {
        "version": version.number,
        "batches": extra["taken"],
        "adapted": {name: list(version.state["moving"][name].shape) for name in extra["adapted"]},
        "memory": sum(count for _, count in version.pairs),
        "settings": folder.description(),
    }


def roll_back(output: Path, number: int) -> int:
    """Go on from an older version; the log keeps what happened since. The number of the new version."""
    folder = StateFolder(output / "state")
    with folder.locked():
        journal = Journal(output / "stream.jsonl")
        new = int(journal.entries[-1]["state"]) + 1
        folder.copy(_known(folder, number), new, journal.head)
        journal.append([{"event": "rollback", "to": number, "state": new, "of": 1}])
    return new


def verify(output: Path) -> list[str]:
    """Everything about a stream's record that is not as it was written, a sentence each."""
    path = output / "stream.jsonl"
    if not path.is_file():
        raise StateError(f"{path} is missing; is {output} the output of dltta adapt?")
    entries, problem = read_chain(path)
    problems = [problem] if problem else []
    hashes = {"0" * 64, *(entry["hash"] for entry in entries)}
    folder = StateFolder(output / "state")
    for number in folder.numbers():
        try:
            if not problem and folder.read(number).head not in hashes:
                problems.append(f"{path}: lines that version {number} was written after are missing")
        except StateError as error:
            problems.append(str(error))
    for line in entries:
        if "sha256" in line and (missing := _altered(output / line["answer"], line["sha256"])):
            problems.append(missing)
    return problems


def export(output: Path, opened: OpenedModel, target: Path, *, bundle: bool = False) -> None:
    """The adapted network for frozen use: a checkpoint folder like the one it came from, or a MONAI bundle."""
    if target.exists() and any(target.iterdir()):
        raise SettingError(f"{target} is not empty; choose another folder")
    if not bundle and opened.checkpoint is None:
        raise SettingError("only a network of dltta train has a checkpoint folder; export a MONAI bundle with --bundle")
    model = adapted_network(output, opened)
    if bundle:
        export_bundle(target, opened, model)
    elif opened.checkpoint is not None:
        record = {**opened.checkpoint.record, "adapted": show_version(output)["version"]}
        save_checkpoint(target, replace(opened.checkpoint, model=model, record=record))


def adapted_network(output: Path, opened: OpenedModel) -> nn.Module:
    """The network with the parameters that a stream moved, its stored statistics as they were."""
    folder = StateFolder(output / "state")
    if folder.description()["network"] != opened.fingerprint:
        raise StateError(f"{output} adapted another network than this one; give the one it was begun with")
    version = folder.read(int(_lines(output)[-1]["state"]))
    model = copy.deepcopy(opened.model)
    own = dict(model.named_parameters())
    added = [name for name in version.state["extra"]["adapted"] if name not in own]
    if added:
        raise SettingError(f"the method put {added[0]!r} into the network, which a plain network cannot hold")
    for name in version.state["extra"]["adapted"]:
        own[name].data.copy_(version.state["moving"][name])
    return model


def _lines(output: Path) -> list[dict[str, Any]]:
    path = output / "stream.jsonl"
    if not path.is_file():
        raise StateError(f"{path} is missing; is {output} the output of dltta adapt?")
    entries, problem = read_chain(path)
    if problem or not entries:
        raise StateError(problem or f"{path} is empty")
    return entries


def _known(folder: StateFolder, number: int) -> int:
    if number not in folder.numbers():
        there = ", ".join(map(str, folder.numbers()))
        raise StateError(f"there is no version {number} any more; there are {there}")
    return number


def _altered(file: Path, expected: str) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    return None if hashlib.sha256(file.read_bytes()).hexdigest() == expected else f"{file} was altered"
