"""1 images. Which unlabeled images wait in a folder, or arrive in it, and how is one of them read?

Looking at a folder reads names, and of DICOM files the few header values that say which series they belong to. What is
wrong with one case (a channel missing, two files of one name, a link out of the folder) is that case's `problem`, which
is raised when the case is read: the others go on. `docs/images.md` shows the folders.
"""

import hashlib
import os
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dltta.data.formats import dicom
from dltta.data.formats.format import Image, ending, endings, format_of
from dltta.data.formats.images import read_channels
from dltta.data.names import split_channel, stem
from dltta.errors import DataError

Order = Literal["name", "time"]

STOP = "STOP"  # a file of this name ends a watch
PROBABILITIES = "_probabilities"  # what `outputs.write_probabilities` adds to a case's name; never an image

_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, formatting, undecodable, line and paragraph separators
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Incoming:
    """One case that waits: nothing of it is read yet."""

    name: str  # unique in its folder and safe as a file name; of the file or folder, never from a header
    files: tuple[Path, ...]  # one per channel in their order, or one that holds all channels, or a DICOM series
    kind: str  # of its format: png, tiff, nifti, dicom, ...
    modified: float  # when its newest file was last written, seconds since 1970
    problem: str | None = None  # why it cannot be read, in one sentence


def find_incoming(path: Path | str, *, order: Order = "name") -> list[Incoming]:
    """The cases of a folder or a single file, by name or by time of modification.

    A folder holds files of any endings, DICOM series as sub-folders, or both. In a site folder (`dataset.json`) they
    are looked for in `imagesTs`, else in `imagesTr`; in any folder without images of its own, in `images`.
    """
    path = Path(path)
    if path.is_file():
        return [_single(path)]
    folder = _image_folder(path)
    cases = _list(folder)
    if not cases:
        raise DataError(f"{folder}: {_inventory(folder)}; give PNG, TIFF, NIfTI or DICOM images")
    return _sorted(cases, order)


def digest(case: Incoming) -> str:
    """SHA-256 of a case's contents, whatever its files are called.

    One file: that of its bytes, as `sha256sum` prints it. Several: that of the files' digests one after the other, in
    the order of the channels, or sorted for a DICOM series.
    """
    parts = [_digest(file) for file in _readable(case)]
    if len(parts) == 1:
        return parts[0].hex()
    return hashlib.sha256(b"".join(sorted(parts) if case.kind == "dicom" else parts)).hexdigest()


def read_incoming(case: Incoming) -> Image:
    """The image of a case, (C, *spatial) float32 in the file's units."""
    files = _readable(case)
    return dicom.read_series(files) if case.kind == "dicom" else read_channels(files)


def _readable(case: Incoming) -> tuple[Path, ...]:
    if case.problem is not None:
        raise DataError(case.problem)
    return case.files


def _digest(file: Path) -> bytes:
    found = hashlib.sha256()
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK):
                found.update(block)
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error}); check that it is still there") from error
    return found.digest()


# looking


def _image_folder(path: Path) -> Path:
    """Where the images of a folder lie."""
    if not path.is_dir():
        raise DataError(f"{path}: no such file or folder; check the path")
    if (path / "dataset.json").is_file():
        places = [path / "imagesTs", path / "imagesTr", path / "images", path]
    else:
        places = [path, path / "images"]
    chosen = next((place for place in places if place.is_dir() and _list(place)), None)
    chosen = chosen or next(place for place in reversed(places) if place.is_dir())
    if not chosen.resolve().is_relative_to(path.resolve()):
        raise DataError(f"{chosen}: leads out of {path}; give the folder that it leads to")
    return chosen


def _single(file: Path) -> Incoming:
    """A file that was named itself: its neighbors do not matter, nor where it lies."""
    if ending(file) is None and not dicom.looks_like(file):
        raise DataError(f"{file}: neither DICOM nor one of {' '.join(endings())}; convert it")
    name, channel = split_channel(file)
    safe = _safe(name if channel == 0 and ending(file) else stem(file))
    return Incoming(safe, (file,), _kind(file), file.stat().st_mtime, _refused_name(file.name))


def _list(folder: Path) -> list[Incoming]:
    """Every case in a folder, in no particular order."""
    images, others, folders = [], [], []
    for entry in _entries(folder):
        if entry.is_dir():
            folders.append(entry)
        elif ending(entry) is None:
            others.append(entry)
        elif not stem(entry).endswith(PROBABILITIES):
            images.append(entry)
    cases = [*_file_cases(folder, images), *_dicom_cases(folder, folder, others)]
    for child in folders:
        cases += _folder_cases(folder, child)
    return _distinct(cases)


def _folder_cases(root: Path, child: Path) -> list[Incoming]:
    """The DICOM cases of a sub-folder; it may have gone since it was listed."""
    try:
        files = [entry for entry in _entries(child) if ending(entry) is None and not entry.is_dir()]
    except DataError as error:
        return [_case(root, child.name, [child], str(error))] if child.is_dir() else []
    return _dicom_cases(root, child, files)


def _entries(folder: Path) -> list[Path]:
    """What is not hidden in a folder, by name; pipes and devices are not looked at."""
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed ({error.strerror or error}); check its permissions") from error
    return [e for e in found if not e.name.startswith(".") and (e.is_file() or e.is_dir() or e.is_symlink())]


def _inventory(folder: Path) -> str:
    """What is there instead of images, in words."""
    entries = _entries(folder)
    if not entries:
        return "the folder is empty"
    folders = sum(entry.is_dir() for entry in entries)
    endings = Counter(entry.suffix or "file without ending" for entry in entries if not entry.is_dir())
    found = [f"{count} {suffix}" for suffix, count in endings.most_common(3)] + [f"{folders} folders"] * (folders > 0)
    return "no images, found " + ", ".join(found)


def _file_cases(root: Path, files: list[Path]) -> list[Incoming]:
    """Files by case. Four digits at the end are a channel where any file is channel 0000, else part of the name."""
    numbered = any(split_channel(file)[1] == 0 for file in files)
    groups: dict[str, list[Path]] = {}
    for file in files:
        groups.setdefault(split_channel(file)[0] if numbered else stem(file), []).append(file)
    return [_case(root, name, group, _channels_problem(group, numbered)) for name, group in groups.items()]


def _channels_problem(files: list[Path], numbered: bool) -> str | None:
    """Why files of one name are not the channels of one case."""
    numbers = [split_channel(file)[1] if numbered else None for file in files]
    if len(files) > 1 and (None in numbers or len(set(numbers)) < len(numbers)):
        return _two_of_one_name([files[0], files[1]])
    found = [number for number in numbers if number is not None]
    if found != [*range(len(found))]:
        missing = min(set(range(len(found))) - set(found))
        return f"{files[0]}: channel {missing:04d} of this case is missing; add it or rename the file"
    if len({ending(file) for file in files}) > 1:
        return f"{files[1]}: another ending than {files[0].name}; save all channels of a case in one format"
    return None


def _dicom_cases(root: Path, folder: Path, files: list[Path]) -> list[Incoming]:
    """The volume of a folder, named by it, and images that belong to no volume, named by their files.

    An image alone in its sub-folder has the sub-folder's name. A file that cannot be read may be a slice of the volume,
    which then has that problem.
    """
    volumes, alone, broken = _dicom_groups(files)
    prefix, name = ("", folder.resolve().name) if folder == root else (f"{folder.name}_", folder.name)
    cases = []
    if len(volumes) > 1:
        counts = " and ".join(str(len(volume)) for volume in volumes)
        problem = f"{folder}: {len(volumes)} DICOM series of {counts} files; put each in a folder of its own"
        cases.append(_case(root, name, [file for volume in volumes for file in volume], problem))
    elif volumes:
        cases.append(_case(root, name, volumes[0], next(iter(broken.values()), None)))
    elif folder != root and len(alone) == 1 and not broken:
        return [_case(root, name, alone, None)]
    if not volumes:
        cases += [_case(root, prefix + dicom.stem(file), [file], problem) for file, problem in broken.items()]
    return cases + [_case(root, prefix + dicom.stem(file), [file], None) for file in alone]


def _dicom_groups(files: list[Path]) -> tuple[list[list[Path]], list[Path], dict[Path, str]]:
    """Slices by series; images that are not one of several slices; files that cannot be read, and why."""
    series: dict[str, list[Path]] = {}
    alone: list[Path] = []
    broken: dict[Path, str] = {}
    for file in files:
        try:
            found = dicom.peek(file)
        except DataError as error:
            broken[file] = str(error)
            continue
        if found is not None:
            (series.setdefault(found.series, []) if found.placed else alone).append(file)
    alone += [group[0] for group in series.values() if len(group) == 1]
    return [group for group in series.values() if len(group) > 1], sorted(alone), broken


def _case(root: Path, name: str, files: list[Path], problem: str | None) -> Incoming:
    refused = next(filter(None, (_refused(root, file) for file in files)), None)
    modified = max((status.st_mtime for file in files if (status := _status(file))), default=0.0)
    return Incoming(_safe(name), tuple(files), _kind(files[0]), modified, refused or problem)


def _distinct(cases: list[Incoming]) -> list[Incoming]:
    """Cases that would overwrite each other's predictions, where upper and lower case are one, become a problem."""
    named: dict[str, list[Incoming]] = {}
    for case in cases:
        named.setdefault(case.name.casefold(), []).append(case)
    return [same[0] if len(same) == 1 else _clash(same) for same in named.values()]


def _clash(cases: list[Incoming]) -> Incoming:
    files = tuple(file for case in cases for file in case.files)
    problem = _two_of_one_name([cases[0].files[0], cases[1].files[0]])
    return replace(cases[0], files=files, modified=max(case.modified for case in cases), problem=problem)


def _two_of_one_name(files: list[Path]) -> str:
    return f"{files[0]}: {files[1].name} is another case of the same name; rename one of them"


def _refused(root: Path, file: Path) -> str | None:
    """Why a file is not touched: its name, or a link that leads out of the folder."""
    linked = [place for place in (file, file.parent) if place != root and place.is_symlink()]
    if linked and not file.resolve().is_relative_to(root.resolve()):
        return f"{linked[0]}: a link that leads out of the folder; copy what it leads to"
    if linked and not file.exists():
        return f"{linked[0]}: a link that leads nowhere; remove it"
    return _refused_name(*file.relative_to(root).parts)


def _refused_name(*parts: str) -> str | None:
    for part in parts:
        if _safe(part) != part:
            return f"{part!a}: a name with control characters, a backslash or two dots in a row; rename it"
    return None


def _safe(name: str) -> str:
    """A name that is one line of text and one part of a path; where it had to be changed, with a mark of its own."""
    kept = "".join("_" if unicodedata.category(c) in _UNPRINTABLE or c in "/\\" else c for c in name)
    kept = kept.replace("..", "__")
    return kept if kept == name else f"{kept}-{hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"


def _kind(file: Path) -> str:
    return "dicom" if ending(file) is None else format_of(file).name.lower()


def _status(file: Path) -> os.stat_result | None:
    """None for a file that has gone since it was listed; reading it will say so."""
    try:
        return file.stat()
    except OSError:
        return None


def _sorted(cases: Iterable[Incoming], order: Order) -> list[Incoming]:
    return sorted(cases, key=lambda case: (case.modified if order == "time" else 0, case.name))


# watching


def watch_incoming(
    path: Path | str,
    *,
    order: Order = "name",
    poll: float = 1.0,
    settle: float = 10.0,
    idle: float | None = None,
    seen: Collection[str] = (),
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] | None = None,
) -> "Watch":
    """Cases as they appear in a folder, each once, looked for every `poll` seconds.

    A case is taken when its files are as large and as old as at the look before; where more files may belong to it (a
    DICOM series, numbered channels), when nothing came for `settle` seconds. It ends after `idle` seconds without
    anything new, when a file named STOP appears in the folder, or by `close`. Cases named in `seen` are left out.
    """
    if Path(path).is_file():
        raise DataError(f"{path}: a single file does not grow; watch a folder")
    folder = _image_folder(Path(path))
    stops = (Path(path) / STOP, folder / STOP)
    if any(stop.exists() for stop in stops):
        raise DataError(f"{path}: holds a file named {STOP}, which ends watching; remove it to start")
    return Watch(folder, order, poll, settle, idle, seen, stops, clock, sleep)


class Watch(Iterator[Incoming]):
    """What `watch_incoming` gives; `close`, from any thread, wakes and ends it."""

    def __init__(
        self,
        folder: Path,
        order: Order,
        poll: float,
        settle: float,
        idle: float | None,
        seen: Collection[str],
        stops: Collection[Path],
        clock: Callable[[], float],
        sleep: Callable[[float], object] | None,
    ) -> None:
        self._closed = threading.Event()
        self._folder, self._order, self._poll, self._settle, self._idle = folder, order, poll, settle, idle
        self._stops, self._clock, self._sleep = stops, clock, sleep or self._closed.wait
        self._taken: dict[str, set[Path] | None] = dict.fromkeys(seen)  # files; None: not known, from before
        self._standing: dict[str, tuple[object, float]] = {}  # not taken yet: how it looks, and since when
        self._cases = self._watch()

    def __next__(self) -> Incoming:
        return next(self._cases)

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> Iterator[Incoming]:
        news = self._clock()
        while not self._ended():
            for case in _sorted(self._complete(), self._order):
                if self._ended():
                    return
                if _look(case) == self._standing[case.name][0]:  # else it changed or went while others were read
                    self._taken[case.name] = set(case.files) | (self._taken.get(case.name) or set())
                    del self._standing[case.name]
                    yield case
                    news = self._clock()
            news = self._clock() if self._standing else news
            if self._idle is not None and self._clock() - news >= self._idle:
                return
            self._sleep(self._poll)

    def _ended(self) -> bool:
        return self._closed.is_set() or any(stop.exists() for stop in self._stops)

    def _complete(self) -> list[Incoming]:
        """New cases that have stood still for long enough."""
        now, standing = self._clock(), {}
        complete = []
        for case in filter(None, map(self._new, _list(self._folder))):
            look = _look(case)
            before, since = self._standing.get(case.name, (None, now))
            standing[case.name] = (look, since if look == before else now)
            if look == before and now - since >= self._patience(case):
                complete.append(case)
        self._standing = standing
        return complete

    def _new(self, case: Incoming) -> Incoming | None:
        """A case not taken yet, or one that was and has got a file since, which is a problem."""
        if case.name not in self._taken:
            return case
        taken = self._taken[case.name]
        late = next((file for file in case.files if taken is not None and file not in taken), None)
        if late is None:
            return None
        problem = f"{late}: arrived after its case was taken; wait longer for a case's files (settle) and run it again"
        return replace(case, problem=case.problem or problem)

    def _patience(self, case: Incoming) -> float:
        several = case.kind == "dicom" or any(split_channel(file)[1] is not None for file in case.files)
        return self._settle if several else 0.0


def _look(case: Incoming) -> object:
    """What changes while a file is being written."""
    found = [(file, _status(file)) for file in case.files]
    return [(file, status and (status.st_size, status.st_mtime_ns)) for file, status in found]
