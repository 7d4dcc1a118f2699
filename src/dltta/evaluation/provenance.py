"""9 results. Which code, data and machine made these numbers?"""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dltta.data.case import Dataset
from dltta.version import __version__

PACKAGES = ("torch", "monai", "numpy", "scipy", "nibabel", "pillow", "tifffile")


@dataclass(frozen=True)
class Provenance:
    """What produced a file of results. It holds no date: the same run gives the same file."""

    version: str
    commit: str | None  # of the working copy the code ran from, with `-dirty` when it had changes
    seeds: tuple[int, ...]
    packages: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)  # site: checksum

    @classmethod
    def collect(cls, *, seeds: Iterable[int], data: Mapping[str, str]) -> "Provenance":
        """The provenance of a run in this process."""
        return cls(__version__, _commit(), tuple(seeds), _packages(), _machine(), dict(data))


def checksum(dataset: Dataset) -> str:
    """SHA-256 over names, images and labels of a site, in the data set's own order."""
    digest = hashlib.sha256()
    for index in range(len(dataset)):
        case = dataset[index]
        digest.update(f"{case.site}\0{case.name}\0{tuple(case.image.shape)}\0".encode())
        digest.update(np.ascontiguousarray(case.image.numpy()).tobytes())
        digest.update(b"unlabeled" if case.label is None else np.ascontiguousarray(case.label.numpy()).tobytes())
    return digest.hexdigest()


def _commit() -> str | None:
    """Commit of the repository this file lies in; None when it was installed from somewhere else."""
    package = Path(__file__).resolve().parents[1]
    top = _git("rev-parse", "--show-toplevel", folder=package)
    if top is None or Path(top).resolve() / "src" / package.name != package:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*", folder=package)


def _git(*arguments: str, folder: Path) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip() or None


def _packages() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
