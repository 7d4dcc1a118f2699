"""1 images. What is missing or malformed in a data set on disk, one line each?

Names first, then headers, then pixels: a folder of a thousand scans with one label too few says so at once, and every
file is opened only when its name made sense.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dltta.data.datasets import camelyon17, oct, prostate
from dltta.data.formats.images import difference, read_geometry, read_image, read_mask
from dltta.data.sites import (
    GROUP_PATTERN,
    Description,
    Problem,
    SiteEntry,
    Split,
    find_entries,
    read_description,
    values_problem,
)
from dltta.errors import DataError

__all__ = ["PUBLISHED", "Problem", "check_published", "check_site"]

Progress = Callable[[int, int], None]  # files looked at, files in all


def _silent(done: int, total: int) -> None:
    pass


def check_site(folder: Path | str, *, progress: Progress = _silent) -> list[Problem]:
    """Everything that is wrong in a site's own folder, in the order of looking; empty when it can be used."""
    folder = Path(folder)
    try:
        description = read_description(folder)
    except DataError as error:
        return [_problem(error, folder)]
    splits: list[Split] = ["train"]
    if (folder / "imagesTs").is_dir():
        splits.append("test")
        if not (folder / "imagesTr").is_dir() and description.task == "segmentation":
            splits.remove("train")
    found = [find_entries(folder, description, split) for split in splits]
    problems = [problem for _, named in found for problem in named]
    entries = [entry for listed, _ in found for entry in listed]
    if splits[0] == "train":
        problems += _description_problems(folder, description, found[0][0], named=not found[0][1])
    total = 2 * len(entries)
    sound = []
    for done, entry in enumerate(entries, start=1):
        in_header = list(_header_problems(entry, len(description.channels)))
        problems += in_header
        if not in_header:
            sound.append(entry)
        progress(done, total)
    for done, entry in enumerate(sound, start=total - len(sound) + 1):
        problems += _pixel_problems(entry, description.classes)
        progress(done, total)
    return problems


def check_published(name: str, folder: Path | str, *, progress: Progress = _silent) -> list[Problem]:
    """Everything that is wrong in a copy of one of the paper's data sets: "oct", "camelyon17" or "prostate"."""
    if name not in PUBLISHED:
        raise DataError(f"no data set {name!r}; use one of {', '.join(PUBLISHED)}")
    return PUBLISHED[name](Path(folder), progress)


def _problem(error: DataError, path: Path) -> Problem:
    """The sentence of an error, taken apart at its separators."""
    where, _, rest = str(error).partition(": ")
    what, _, do = rest.rpartition("; ")
    return Problem(Path(where), what, do) if what else Problem(path, str(error), "correct it")


def _description_problems(
    folder: Path, description: Description, entries: Sequence[SiteEntry], *, named: bool
) -> Iterator[Problem]:
    path = folder / "dataset.json"
    if named and description.cases is not None and description.cases != len(entries):
        yield Problem(path, f"numTraining {description.cases}, found {len(entries)} cases", "correct the number")
    unknown = sorted(description.groups.keys() - {entry.name for entry in entries})
    if unknown and named:
        yield Problem(
            path, f"groups name {unknown[0]!r}, which is no case", "use case names without channel and ending"
        )
    own_pattern = description.group_pattern != GROUP_PATTERN
    if own_pattern and entries and all(entry.group == entry.name for entry in entries):
        yield Problem(path, f"group_pattern {description.group_pattern!r} finds no group", "match the whole case name")


def _header_problems(entry: SiteEntry, channels: int) -> Iterator[Problem]:
    try:
        geometries = [read_geometry(file) for file in entry.files]
        for file, geometry in zip(entry.files[1:], geometries[1:], strict=True):
            found = difference(geometries[0], geometry)
            if found is not None:
                yield Problem(file, f"{found} in {entry.files[0].name}", "bring the channels onto one grid")
        held = sum(geometry.channels for geometry in geometries)
        if held != channels:
            yield Problem(entry.files[0], f"{held} channels, dataset.json names {channels}", "correct channel_names")
        if isinstance(entry.label, Path):
            found = difference(geometries[0], read_geometry(entry.label))
            if found is not None:
                yield Problem(entry.label, f"{found} in {entry.files[0].name}", "export it on its image's grid")
    except DataError as error:
        yield _problem(error, entry.files[0])


def _pixel_problems(entry: SiteEntry, classes: Sequence[str]) -> Iterator[Problem]:
    try:
        for file in entry.files:
            read_image(file)
    except DataError as error:
        yield _problem(error, entry.files[0])
    if isinstance(entry.label, Path):
        try:
            beyond = values_problem(entry.label, read_mask(entry.label), classes)
        except DataError as error:
            yield _problem(error, entry.label)
        else:
            if beyond is not None:
                yield beyond


# the paper's data sets


def _check_oct(folder: Path, progress: Progress) -> list[Problem]:
    problems: list[Problem] = []
    sites = []
    for site in ("spectralis", "cirrus"):
        try:
            sites.append((site, oct.find_site(folder, site)))
        except DataError as error:
            problems.append(_problem(error, folder))
    for site, where in sites:
        try:
            entries = oct.list_slices(where)
        except DataError as error:
            problems.append(_problem(error, where))
            continue
        problems += _oct_counts(site, where, entries)
        for done, entry in enumerate(entries, start=1):
            try:
                _, boundaries, _ = oct.read_slice(entry, None)
                problems += _order_problems(entry.label, boundaries)
            except DataError as error:
                if str(error) not in map(str, problems):  # one delineation serves 49 slices
                    problems.append(_problem(error, entry.image))
            progress(done, len(entries))
    return problems


def _oct_counts(site: str, where: Path, entries: Sequence[oct.SliceEntry]) -> Iterator[Problem]:
    if site == "cirrus":
        subjects = {entry.group for entry in entries}
        if (len(entries), len(subjects)) != (48, 6):
            yield Problem(where, f"{len(entries)} slices of {len(subjects)} subjects", "the paper has 48 of 6")
        return
    for split, subjects_of in oct.SPECTRALIS_SPLIT.items():
        missing = sorted(set(subjects_of) - {entry.group for entry in entries})
        if missing:
            yield Problem(where, f"subjects of {split} missing: {' '.join(missing)}", "add them")


def _order_problems(path: Path, boundaries: oct.Floats) -> Iterator[Problem]:
    crossing = int(np.count_nonzero((np.diff(boundaries, axis=0) < -0.5).any(axis=0)))
    if crossing:
        yield Problem(path, f"boundaries cross in {crossing} columns", "correct their order, top to bottom")


def _check_camelyon17(folder: Path, progress: Progress) -> list[Problem]:
    try:
        where = camelyon17.find_folder(folder)
        patches = list(camelyon17.read_metadata(where / "metadata.csv"))
    except DataError as error:
        return [_problem(error, folder)]
    problems = []
    for split, published in camelyon17.PUBLISHED_SIZES.items():
        found = sum(patch.split == split for patch in patches)
        if found != published:
            what = f"{found} patches of {split}, published are {published}"
            problems.append(Problem(where / "metadata.csv", what, "load the data set again"))
    missing = 0
    for done, patch in enumerate(patches, start=1):
        path = where / patch.file
        if not path.is_file():
            missing += 1
        else:
            try:
                geometry = read_geometry(path)
                if (geometry.channels, *geometry.shape) != camelyon17.PATCH:
                    what = f"{geometry.channels} channels of {geometry.shape}"
                    problems.append(Problem(path, what, "patches are RGB of 96 x 96; unpack the archive again"))
            except DataError as error:
                problems.append(_problem(error, path))
        progress(done, len(patches))
    if missing:
        problems.append(Problem(where / "patches", f"{missing} patches missing", "unpack the archive again"))
    return problems


def _check_prostate(folder: Path, progress: Progress) -> list[Problem]:
    problems: list[Problem] = []
    pairs = []
    for site in prostate.SITES.values():
        try:
            where = prostate.find_site(folder, site)
        except DataError as error:
            problems.append(_problem(error, folder))
            continue
        volumes, labels = prostate.list_volumes(where)
        if not volumes:
            what = "no CaseNN.nii.gz and no imagesTr/NAME_0000.nii.gz"
            problems.append(Problem(where, what, "unpack the site's volumes there"))
        for name in sorted(volumes.keys() - labels.keys()):
            missing = prostate.label_name(volumes[name])
            problems.append(Problem(volumes[name], f"{missing} missing", "unpack the site again"))
        for name in sorted(labels.keys() - volumes.keys()):
            problems.append(Problem(labels[name], "label without an image", f"add {name}.nii.gz"))
        pairs += [(volumes[name], labels[name]) for name in sorted(volumes.keys() & labels.keys())]
    for done, (volume, label) in enumerate(pairs, start=1):
        try:
            shapes = read_image(volume).geometry.shape, read_mask(label).shape
            if shapes[0] != shapes[1]:
                problems.append(Problem(label, f"size {shapes[1]} instead of {shapes[0]}", "unpack the site again"))
        except DataError as error:
            problems.append(_problem(error, volume))
        progress(done, len(pairs))
    return problems


PUBLISHED: dict[str, Callable[[Path, Progress], list[Problem]]] = {
    "oct": _check_oct,
    "camelyon17": _check_camelyon17,
    "prostate": _check_prostate,
}
