"""1 images. Which unlabeled images wait in a folder, and how is one of them read?

Looking at a folder reads names, the first bytes of files without a known ending, and of DICOM files the few header
values that say which series they belong to. What is wrong with one case (a channel missing, a damaged slice, two files
of one name, a link out of the folder) is that case's `problem`, which is raised when the case is read: the others go
on. What is no image is counted. `docs/images.md` shows the folders.
"""

import errno
import hashlib
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from dltta.data.formats import dicom
from dltta.data.formats.format import START, Geometry, Image, ending, endings, format_of, recognize
from dltta.data.formats.images import read_channels, read_geometry
from dltta.data.names import split_channel, stem
from dltta.errors import DataError

Order = Literal["name", "time"]

STOP = "STOP"  # a file of this name ends a watch
PROBABILITIES = "_probabilities"  # what `outputs.write_probabilities` adds to a case's name; never an image

_TEMPORARY = (".part", ".partial", ".filepart", ".tmp", ".temp", ".crdownload", ".download", "~")  # of other programs
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
    note: Mapping[str, Any] = field(
        default_factory=dict, hash=False
    )  # what its line in the log says besides, such as a request


@dataclass(frozen=True)
class Ignored:
    """What lies in a folder and was not taken for an image, counted by kind: nothing is left out silently."""

    kinds: Mapping[str, int] = field(default_factory=dict)  # {".jpg": 2, "hidden": 1}, most first

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def __str__(self) -> str:
        return "ignored: " + (", ".join(f"{count} {kind}" for kind, count in self.kinds.items()) or "nothing")


class Listing(list[Incoming]):
    """The cases of a folder, and what was ignored beside them."""

    def __init__(self, cases: Iterable[Incoming], ignored: Ignored) -> None:
        super().__init__(cases)
        self.ignored = ignored


def find_incoming(path: Path | str, *, order: Order = "name") -> Listing:
    """The cases of a folder or a single file, by name or by time of modification.

    A folder holds files of any endings, DICOM series as sub-folders, or both. In a site folder (`dataset.json`) they
    are looked for in `imagesTs`, else in `imagesTr`; in any folder without images of its own, in `images`.
    """
    path = Path(path)
    if is_file(path):
        return Listing([_single(path)], Ignored())
    folder = image_folder(path)
    found = look(folder)
    if not found:
        there = str(found.ignored).replace("ignored: ", "no images, found ") if found.ignored else "the folder is empty"
        raise DataError(f"{folder}: {there}; give PNG, TIFF, NIfTI or DICOM images")
    return Listing(in_order(found, order), found.ignored)


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


def geometries(case: Incoming) -> list[Geometry]:
    """Size and place of every file of a case, from the headers alone; none of a DICOM series, which has small files."""
    return [] if case.kind == "dicom" else [read_geometry(file) for file in _readable(case)]


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


def image_folder(path: Path) -> Path:
    """Where the images of a folder lie."""
    if not is_folder(path):
        raise DataError(_unreachable(path) if _is_link(path) else f"{path}: no such file or folder; check the path")
    if is_file(path / "dataset.json"):
        places = [path / "imagesTs", path / "imagesTr", path / "images", path]
    else:
        places = [path, path / "images"]
    there = [place for place in places if is_folder(place)]
    holding = (place for place in there if any(case.files[0] not in places for case in look(place)))
    chosen = next(holding, there[-1])
    if not chosen.resolve().is_relative_to(path.resolve()):
        raise DataError(f"{chosen}: leads out of {path}; give the folder that it leads to")
    return chosen


def look(folder: Path) -> Listing:
    """Every case in a folder, in no particular order."""
    found = _Look(folder)
    return Listing(_distinct(found.cases), Ignored(dict(found.ignored.most_common())))


def in_order(cases: Iterable[Incoming], order: Order) -> list[Incoming]:
    """By name, or by time of modification and then by name."""
    return sorted(cases, key=lambda case: (case.modified if order == "time" else 0, case.name))


def state_of(file: Path) -> os.stat_result | None:
    """None for a file that has gone since it was listed, or cannot be looked at; reading it will say so."""
    try:
        return file.stat()
    except OSError:
        return None


def is_file(place: Path) -> bool:
    """False also where it cannot be looked at."""
    status = state_of(place)
    return status is not None and stat.S_ISREG(status.st_mode)


def is_folder(place: Path) -> bool:
    """False also where it cannot be looked at."""
    status = state_of(place)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _has_gone(place: Path) -> bool:
    try:
        place.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _is_link(place: Path) -> bool:
    try:
        return place.is_symlink()
    except OSError:
        return False


def first_bytes(file: Path) -> bytes:
    """What a file's format is recognized by, read once per version of the file."""
    try:
        status = file.stat()
        return _start(file, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise DataError(_unreachable(file) or f"{file}: cannot be read ({error.strerror}); check it") from error


@lru_cache(maxsize=1 << 16)
def _start(file: Path, size: int, changed: int) -> bytes:
    with file.open("rb") as stream:
        return stream.read(START)


def _single(file: Path) -> Incoming:
    """A file that was named itself: its neighbors do not matter, nor where it lies."""
    if ending(file) is None and not dicom.looks_like(file, first_bytes(file)):
        raise DataError(f"{file}: neither DICOM nor one of {' '.join(endings())}; convert it")
    name, channel = split_channel(file)
    safe = _safe(name if channel == 0 and ending(file) else stem(file))
    return Incoming(safe, (file,), _kind(file), file.stat().st_mtime, _refused_name(file.name))


class _Look:
    """One look at a folder: cases, and what is none."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cases: list[Incoming] = []
        self.ignored: Counter[str] = Counter()
        images: list[Path] = []
        others: list[Path] = []
        for entry in self._entries(root):
            if is_folder(entry):
                self._look_into(entry)
            elif ending(entry) is None or is_temporary(entry):
                others.append(entry)
            elif stem(entry).endswith(PROBABILITIES):
                self.ignored["probabilities"] += 1
            else:
                images.append(entry)
        self._take_images(images)
        self._take_others(root, others)

    def _entries(self, folder: Path) -> list[Path]:
        """What may be an image or a folder, by name; links that lead nowhere are there too, what has gone is not."""
        try:
            listed = sorted(folder.iterdir())
        except OSError as error:
            raise DataError(f"{folder}: cannot be listed ({error.strerror or error}); check its permissions") from error
        found = []
        for entry in listed:
            if entry.name.startswith("."):
                self.ignored["hidden"] += 1
            elif entry.name == STOP:
                continue
            elif (status := state_of(entry)) and not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                self.ignored["pipe or device"] += 1
            elif not _has_gone(entry):
                found.append(entry)
        return found

    def _look_into(self, child: Path) -> None:
        """The DICOM cases of a sub-folder."""
        refused = self._refused(child)
        if refused is not None:
            self._add(child.name, [child], refused)
            return
        try:
            entries = self._entries(child)
        except DataError as error:
            self._add(child.name, [child], str(error))
            return
        others = []
        for entry in entries:
            found = ending(entry)
            if is_folder(entry):
                self.ignored["folder in a sub-folder"] += 1
            elif found is not None and not is_temporary(entry):
                self.ignored[f"{found} in a sub-folder"] += 1
            else:
                others.append(entry)
        self._take_others(child, others)

    def _take_images(self, files: list[Path]) -> None:
        """Files by case. Four digits at the end are a channel where any file is channel 0000, else part of the name."""
        numbered = any(split_channel(file)[1] == 0 for file in files)
        groups: dict[str, list[Path]] = {}
        for file in files:
            groups.setdefault(split_channel(file)[0] if numbered else stem(file), []).append(file)
        for name, group in groups.items():
            self._add(name, group, _channels_problem(group, numbered))

    def _take_others(self, folder: Path, files: list[Path]) -> None:
        """Files without an ending that we read: DICOM images, images under a wrong name, and what is no image."""
        slices: dict[Path, dicom.Peek] = {}
        unknown: dict[Path, bytes] = {}
        unfinished = [file for file in files if is_temporary(file)]
        for file in files:
            if file in unfinished:
                continue
            try:
                start = first_bytes(file)
            except DataError as error:
                slices[file] = dicom.Peek(None, False, str(error))
                continue
            if not dicom.looks_like(file, start):
                unknown[file] = start
            elif (found := dicom.peek(file)) is not None:
                slices[file] = found
            else:
                self.ignored["DICOM without an image"] += 1
        named_so = [file for file, found in slices.items() if found.problem is None]
        for file, start in unknown.items():
            format = recognize(start)
            if _among(named_so, file, plain=format is not None or _is_text(start)):
                problem = f"{file}: lies among DICOM images and is not DICOM; copy it again or take it out"
                slices[file] = dicom.Peek(None, False, problem, complete=any(start))
            elif format is not None:
                wanted = " or ".join(format.endings)
                self._add(file.name, [file], f"{file}: begins like {format.name}; let its name end in {wanted}")
            else:
                self.ignored[_other_kind(file)] += 1
        for file in unfinished:
            if _among(named_so, file.with_name(_final(file)), plain=True):
                problem = f"{file}: a slice that is not finished; wait until it is renamed, or take it out"
                slices[file] = dicom.Peek(None, False, problem, complete=False)
            else:
                self.ignored["unfinished"] += 1
        self._take_dicom(folder, slices)

    def _take_dicom(self, folder: Path, found: Mapping[Path, dicom.Peek]) -> None:
        """The volume of a folder, named by it, and images that belong to no volume, named by their files.

        An image alone in its sub-folder has the sub-folder's name. A file that cannot be read may be a slice of any
        volume beside it, which then has that problem.
        """
        prefix, name = ("", folder.resolve().name) if folder == self.root else (f"{folder.name}_", folder.name)
        volumes, alone, lost = _series(found)
        problems = [peek.problem for peek in found.values() if peek.problem is not None]
        if len(volumes) > 1:
            counts = " and ".join(str(len(volume)) for volume in volumes)
            problem = f"{folder}: {len(volumes)} DICOM series of {counts} files; put each in a folder of its own"
            self._add(name, [file for volume in [*volumes, lost] for file in volume], problem)
        elif volumes:
            own = [found[file].problem for file in (*volumes[0], *lost) if found[file].problem]
            mixed = f"{folder}: slices with and without a place in one series; export the whole series again"
            placed = {found[file].placed for file in volumes[0]}
            self._add(name, [*volumes[0], *lost], next(iter(own), mixed if len(placed) > 1 else None))
        elif folder != self.root and len(found) == 1:
            self._add(name, [*found], next(iter(problems), None))
            return
        else:
            for file in lost:
                self._add(prefix + dicom.stem(file), [file], found[file].problem)
        for file in alone:
            shared = found[lost[0]].problem if found[file].placed and lost and not volumes else None
            self._add(prefix + dicom.stem(file), [file], found[file].problem or shared)

    def _add(self, name: str, files: Sequence[Path], problem: str | None) -> None:
        refused = next(filter(None, map(self._refused, files)), None)
        modified = max((status.st_mtime for file in files if (status := state_of(file))), default=0.0)
        self.cases.append(Incoming(_safe(name), tuple(files), _kind(files[0]), modified, refused or problem))

    def _refused(self, place: Path) -> str | None:
        """Why a file or folder is not touched: its name, or where a link leads."""
        unreachable = _unreachable(place)
        if unreachable is not None:
            return unreachable
        linked = [part for part in (place, place.parent) if part != self.root and _is_link(part)]
        if linked and not place.resolve().is_relative_to(self.root.resolve()):
            return f"{linked[0]}: a link that leads out of the folder; copy what it leads to"
        return _refused_name(*place.relative_to(self.root).parts)


def _series(found: Mapping[Path, dicom.Peek]) -> tuple[list[list[Path]], list[Path], list[Path]]:
    """Files of series with a place in the patient; images of their own; damaged files of no known series."""
    series: dict[str, list[Path]] = {}
    for file, peek in found.items():
        if peek.series is not None:
            series.setdefault(peek.series, []).append(file)
    volumes = [group for group in series.values() if len(group) > 1 and any(found[file].placed for file in group)]
    lost = [file for file, peek in found.items() if peek.series is None]
    taken = {file for group in [*volumes, lost] for file in group}
    return volumes, sorted(file for file in found if file not in taken), lost


def is_temporary(file: Path) -> bool:
    """Whether its name says that somebody still writes it."""
    return file.name.startswith("~") or file.name.lower().endswith(_TEMPORARY)


def _final(file: Path) -> str:
    """The name that a file with a temporary one will have."""
    found = next((e for e in _TEMPORARY if file.name.lower().endswith(e)), "")
    return file.name[: len(file.name) - len(found)].lstrip("~") or file.name


def _among(slices: Sequence[Path], file: Path, *, plain: bool) -> bool:
    """Whether a file that is not DICOM may be a damaged slice: it has no other ending than the slices have.

    One that is `plain`, text or an image of another format, only if it is named as they are.
    """
    suffix = file.suffix.lower()
    other = re.fullmatch(r"\.[a-z]\w*", suffix) and suffix not in {slice_.suffix.lower() for slice_ in slices}
    return bool(slices) and not other and (not plain or _pattern(file) in set(map(_pattern, slices)))


def _pattern(file: Path) -> str:
    """A name without its numbers: IM0001 and IM0020 are one, so are 1.2.840.7.1 and 1.2.840.7.12."""
    return re.sub(r"\d+(\.\d+)*", "#", file.name.lower())


def _is_text(start: bytes) -> bool:
    return bool(start) and all(byte >= 32 or byte in b"\t\n\r\f" for byte in start)


def _other_kind(file: Path) -> str:
    """What a file that is no image is counted as: its ending, if it looks like one."""
    suffix = file.suffix.lower()
    if not suffix:
        return "without ending"
    return suffix if re.fullmatch(r"\.[a-z0-9]{1,8}", suffix) else "with an unusual ending"


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


def _unreachable(place: Path) -> str | None:
    """Why a link or file cannot be followed or looked at."""
    try:
        place.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return f"{place}: a link that leads in a circle; remove it"
        if _is_link(place) and error.errno in (errno.ENOENT, errno.ENOTDIR):
            return f"{place}: a link that leads nowhere; remove it"
        return f"{place}: cannot be looked at ({error.strerror or error}); check its permissions"
    return None


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
