"""DICOM series that arrive over the network, on the disk from their first slice on.

STATE/arriving/SERIES/          a folder for each series, named by a hash
  series.json                   {"uid": …, "patient": keyed hash, "expected": number of slices if somebody said}
  SLICE.dcm                     a slice, named by a hash of its SOP instance UID; whole or not there

A slice is acknowledged once it is on the disk. A series is complete when as many slices as expected are there, or when
nothing came for a while and no association is open that sent any of it. Slices that come later than that stay, and make
the series complete once more.
"""

import hashlib
import io
import json
import shutil
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dltta.errors import DataError, StateError
from dltta.files import PRIVATE, PRIVATE_FOLDER, make_folder, write_atomically
from dltta.serving.journal import on_disk
from dltta.serving.site_rule import SiteRule

DESCRIBED = "series.json"


class OtherPatientError(DataError):
    """A slice that claims to belong to a series of somebody else."""


@dataclass(frozen=True)
class Arrived:
    """A complete series on the disk, with the slices it had at that moment."""

    uid: str
    site: str
    folder: Path
    slices: tuple[str, ...]  # names of files, sorted

    @property
    def files(self) -> list[Path]:
        return [self.folder / name for name in self.slices]

    @property
    def request(self) -> str:
        """The same for the same slices: a series that is sent again is the same request, one that has grown another."""
        return f"{self.uid}-{_hash(' '.join(self.slices))[:12]}"


def packed(files: Iterable[Path]) -> bytes:
    """Slices as one archive, the same bytes for the same slices."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for file in files:
            archive.writestr(zipfile.ZipInfo(file.name), file.read_bytes())
    return buffer.getvalue()


@dataclass
class _Coming:
    """What is known of a series that is not complete."""

    latest: float  # when its newest slice came, on the monotonic clock
    associations: set[int] = field(default_factory=set)  # that sent slices and are open


class Inbound:
    """Takes slices; gives back complete series. Safe to use from several threads."""

    def __init__(self, root: Path, *, rule: SiteRule | None = None, quiet: float = 10.0) -> None:
        self.root, self.rule, self.quiet = root / "arriving", rule or SiteRule(), quiet
        self._lock = threading.Lock()
        self._coming: dict[str, _Coming] = {}
        with on_disk(self.root):
            make_folder(root, mode=PRIVATE_FOLDER)
            make_folder(self.root, mode=PRIVATE_FOLDER)
            for folder in self.root.iterdir():  # left by a killed process: quiet time begins anew
                if (folder / DESCRIBED).is_file():
                    self._coming[folder.name] = _Coming(time.monotonic())
                else:  # nothing of it was acknowledged, or all of it was dealt with
                    shutil.rmtree(folder)

    def take(self, dataset: Any, content: bytes, association: int) -> None:
        """A slice as it was sent; on return it is on the disk. Raises if it belongs to another patient's series."""
        uid = _required(dataset, "SeriesInstanceUID")
        instance = _required(dataset, "SOPInstanceUID")
        name = _hash(uid)
        folder = self.root / name
        with self._lock, on_disk(folder):
            make_folder(folder, mode=PRIVATE_FOLDER)
            described = self._described(folder, dataset, uid)
            if described["patient"] != _patient(dataset):
                raise OtherPatientError("the series began with another patient; slices of two patients are not mixed")
            target = folder / f"{_hash(instance)}.dcm"
            if target.is_file() and target.read_bytes() != content:
                raise DataError("a slice of this number came before with other content")
            write_atomically(target, content, mode=PRIVATE)
            coming = self._coming.setdefault(name, _Coming(0.0))
            coming.latest = time.monotonic()
            coming.associations.add(association)

    def ended(self, association: int) -> None:
        """An association is closed; nothing more comes from it."""
        with self._lock:
            for coming in self._coming.values():
                coming.associations.discard(association)

    def complete(self) -> Iterator[Arrived]:
        """Series that can be worked on now; each stays until `forget`."""
        for name in sorted(self._coming):
            with self._lock:
                coming = self._coming.get(name)
                done = coming is not None and self._is_complete(self.root / name, coming)
                slices = _slices(self.root / name) if done else ()
            if done:
                described = _read(self.root / name)
                yield Arrived(str(described["uid"]), str(described["site"]), self.root / name, slices)

    def forget(self, arrived: Arrived) -> None:
        """The series was dealt with; it stays if more slices came meanwhile."""
        with self._lock, on_disk(arrived.folder):
            if _slices(arrived.folder) != arrived.slices:
                return
            (arrived.folder / DESCRIBED).unlink()  # first: what is left without it is no series
            shutil.rmtree(arrived.folder)
            self._coming.pop(arrived.folder.name, None)

    def _is_complete(self, folder: Path, coming: _Coming) -> bool:
        expected = _read(folder).get("expected")
        count = len(_slices(folder))
        if expected is not None and count >= int(expected):
            return True
        return not coming.associations and time.monotonic() - coming.latest >= self.quiet and count > 0

    def _described(self, folder: Path, dataset: Any, uid: str) -> dict[str, Any]:
        if (folder / DESCRIBED).is_file():
            return _read(folder)
        described = {
            "uid": uid,
            "site": self.rule.site(dataset),
            "patient": _patient(dataset),
            "expected": _count(dataset),
        }
        write_atomically(folder / DESCRIBED, json.dumps(described), mode=PRIVATE)
        return described


def _slices(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(file.name for file in folder.glob("*.dcm")))


def _required(dataset: Any, name: str) -> str:
    value = str(getattr(dataset, name, "") or "")
    if not value or len(value) > 64 or not all(part.isdigit() for part in value.split(".")):
        raise DataError(f"the slice has no valid {name}")
    return value


def _count(dataset: Any) -> int | None:
    """How many slices the series has, if the header says."""
    value = str(getattr(dataset, "NumberOfSeriesRelatedInstances", "")).strip()
    return int(value) if value.isdigit() else None


def _patient(dataset: Any) -> str:
    """Tells patients and studies apart without naming them."""
    names = ("PatientID", "PatientName", "PatientBirthDate", "StudyInstanceUID")
    return _hash("\0".join(str(getattr(dataset, name, "")) for name in names))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / DESCRIBED).read_text("utf-8"))
        return found
    except (OSError, ValueError) as error:
        raise StateError(f"{folder / DESCRIBED} cannot be read; remove the folder and send the series again") from error
