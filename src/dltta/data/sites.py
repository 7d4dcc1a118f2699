"""1 images. Which cases lie in a site's own folder, and how is one of them read?

Segmentation is nnU-Net's raw layout (version 2); classification is `images/` with `labels.csv`, or one folder per
class; `docs/data.md` shows each. Opening a site looks at names only and raises where something does not fit together;
an image is read when it is asked for.
"""

import csv
import difflib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from dltta.data.case import Case, Place, Task
from dltta.data.formats.images import (
    Geometry,
    Image,
    difference,
    ending,
    endings,
    read_channels,
    read_geometry,
    read_mask,
)
from dltta.data.names import split_channel, stem
from dltta.data.slices import slice_axis
from dltta.errors import DataError

Split = Literal["train", "test"]

GROUP_PATTERN = r"(.+)_(?:s|slice)\d+"  # strips and slices of one scan: scan7_s0, scan7_s1, scan7_slice012

_KNOWN_KEYS = ("channel_names", "labels", "file_ending", "task", "numTraining", "groups", "group_pattern", "name")
_OLD_KEYS = {
    "modality": "channel_names",
    "modalities": "channel_names",
    "classes": "labels",
    "file_extension": "file_ending",
}
_OTHER_ENDINGS = (".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".dcm", ".nrrd", ".mha", ".mhd")


@dataclass(frozen=True)
class Problem:
    """One thing that is missing or malformed: where, what was found, what to do."""

    path: Path
    what: str
    do: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}; {self.do}"


@dataclass(frozen=True)
class Description:
    """What a site's `dataset.json` says; for class folders without one, what their names say."""

    task: Task
    classes: tuple[str, ...]  # classes[i] names label value i
    channels: tuple[str, ...]
    ending: str | None  # None: any ending that we read, in class folders without dataset.json
    group_pattern: str = GROUP_PATTERN
    groups: Mapping[str, str] = field(default_factory=dict)
    cases: int | None = None  # numTraining

    def group(self, name: str) -> str:
        """The patient or volume of a case: from `groups`, else by `group_pattern`, else the case itself."""
        if name in self.groups:
            return self.groups[name]
        match = re.fullmatch(self.group_pattern, name)
        return name if match is None else (match[1] if match.re.groups else match[0]) or name


@dataclass(frozen=True)
class SiteEntry:
    """The files of one case; `label` is a mask, a class value, or None where a test case has none."""

    name: str
    group: str
    files: tuple[Path, ...]  # one per channel, or one that holds all channels
    label: Path | int | None


Found = tuple[list[SiteEntry], list[Problem]]  # cases, and what does not fit together


class SiteFolder:
    """The cases of one site on disk, each read when it is asked for."""

    def __init__(self, site: str, description: Description, entries: Sequence[SiteEntry]) -> None:
        self.site, self.task, self.classes = site, description.task, description.classes
        self.description = description
        self.entries = tuple(entries)
        self.names = tuple(entry.name for entry in self.entries)
        self.groups = tuple(entry.group for entry in self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Case:
        return self.read(index)[0]

    def some(self, count: int) -> "SiteFolder":
        """At most so many of the cases, evenly spread."""
        return SiteFolder(self.site, self.description, [self.entries[i] for i in evenly(len(self), count)])

    def read(self, index: int) -> tuple[Case, Image]:
        """A case, and its image with all that its file says of where it lies."""
        entry = self.entries[index]
        image = read_named_channels(entry.files, len(self.description.channels))
        label = read_label(entry, image.geometry, self.classes)
        case = Case(
            name=entry.name,
            site=self.site,
            group=entry.group,
            image=torch.from_numpy(image.array),
            label=None if label is None else torch.from_numpy(label),
            spacing=image.geometry.spacing,
            limit=image.geometry.limit,
        )
        return case, image


class Slices:
    """The volumes of a site taken slice by slice, across the axis of the largest spacing, else the last.

    A slice is named `<volume>_slice<number>`, stays in its volume's group and knows its place there.
    """

    def __init__(self, volumes: SiteFolder) -> None:
        self.volumes = volumes
        self.site, self.task, self.classes = volumes.site, volumes.task, volumes.classes
        self._axes: list[int] = []
        self._index: list[tuple[int, int]] = []  # (volume, slice)
        self._last: tuple[int, Case] | None = None  # neighboring slices are mostly asked for in a row
        for volume, entry in enumerate(volumes.entries):
            geometry = read_geometry(entry.files[0])
            if len(geometry.shape) != 3:
                raise DataError(
                    f"{entry.files[0]}: slices are taken from volumes, found {geometry.shape}; open it without"
                )
            self._axes.append(slice_axis(geometry))
            self._index += [(volume, position) for position in range(geometry.shape[self._axes[-1]])]
        self.volume_of = tuple(volume for volume, _ in self._index)  # by slice; slices of a volume follow one another
        self.names = tuple(f"{volumes.names[volume]}_slice{position:03d}" for volume, position in self._index)
        self.groups = tuple(volumes.groups[volume] for volume, _ in self._index)

    def some(self, count: int) -> "Slices":
        """The slices of at most so many volumes, evenly spread."""
        return Slices(self.volumes.some(count))

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Case:
        volume, position = self._index[index]
        last = self._last
        if last is None or last[0] != volume:
            last = self._last = (volume, self.volumes[volume])
        whole, axis = last[1], self._axes[volume]
        spacing = whole.spacing
        return Case(
            name=f"{whole.name}_slice{position:03d}",
            site=whole.site,
            group=whole.group,
            image=whole.image.select(1 + axis, position).clone(),
            label=None if whole.label is None else whole.label.select(axis, position).clone(),
            spacing=None if spacing is None else (*spacing[:axis], *spacing[axis + 1 :]),
            limit=whole.limit,
            place=Place(
                whole.name, position, whole.image.shape[1 + axis], axis, None if spacing is None else spacing[axis]
            ),
        )


def evenly(count: int, wanted: int) -> list[int]:
    """At most `wanted` of `count` positions, evenly spread, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(wanted, count))})


def open_site(folder: Path | str, *, split: Split = "train", slices: bool = False) -> SiteFolder | Slices:
    """The cases of a site folder. Train cases have labels; test cases have them where `labelsTs` does.

    With `slices`, 3-D volumes are taken slice by slice.
    """
    folder = Path(folder)
    description = read_description(folder)
    entries, problems = find_entries(folder, description, split)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise DataError(f"{problems[0]}{more}")
    site = SiteFolder(folder.resolve().name, description, entries)
    return Slices(site) if slices else site


def read_named_channels(files: Sequence[Path], channels: int) -> Image:
    """The channels of one case as (C, *spatial), as many as `dataset.json` names."""
    image = read_channels(files)
    if len(image.array) != channels:
        raise DataError(
            f"{files[0]}: {len(image.array)} channels, dataset.json names {channels}; correct channel_names"
        )
    return image


def read_label(entry: SiteEntry, image: Geometry, classes: Sequence[str]) -> NDArray[np.int64] | None:
    """The label of one case: (*spatial) in segmentation, () in classification."""
    if not isinstance(entry.label, Path):
        return None if entry.label is None else np.array(entry.label, dtype=np.int64)
    found = difference(image, read_geometry(entry.label))
    if found is not None:
        raise DataError(f"{entry.label}: {found} in {entry.files[0].name}; export the label on its image's grid")
    labels = read_mask(entry.label)
    problem = values_problem(entry.label, labels, classes)
    if problem is not None:
        raise DataError(str(problem))
    return labels


def values_problem(path: Path, labels: NDArray[np.int64], classes: Sequence[str]) -> Problem | None:
    """A mask's values that no class has."""
    values = np.unique(labels)
    beyond = values[values >= len(classes)].tolist()
    if not beyond:
        return None
    shown = " ".join(map(str, beyond[:5])) + (" ..." if len(beyond) > 5 else "")
    return Problem(path, f"label value {shown} out of range 0..{len(classes) - 1}", "correct the mask or add the class")


# dataset.json


def read_description(folder: Path) -> Description:
    """What `dataset.json` says, or the class folders when there is none."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; check the path")
    path = folder / "dataset.json"
    if path.is_file():
        return parse_description(path, _load_json(path))
    classes = tuple(sorted(child.name for child in folder.iterdir() if _holds_images(child)))
    if not classes or {"images", "imagesTr", "imagesTs", "labelsTr", "labelsTs"} & set(classes):
        raise DataError(
            f"{path}: missing; write one with channel_names, labels and file_ending (`dltta help sites` shows one)"
        )
    first = min(file for name in classes for file in _images(folder / name))
    channels = read_geometry(first).channels
    return Description("classification", classes, tuple(map(str, range(channels))), None)


def parse_description(path: Path, content: Mapping[str, Any]) -> Description:
    """Checks the keys and values of `dataset.json`."""
    task = content.get("task", "segmentation")
    if task not in ("segmentation", "classification"):
        raise DataError(f'{path}: task {task!r}; use "segmentation" or "classification"')
    for key in ("channel_names", "labels", "file_ending"):
        if key not in content:
            raise DataError(f"{path}: key {key!r} missing{_hint(key, content)}; `dltta help sites` shows one")
    found_ending = content["file_ending"]
    if found_ending not in endings():
        raise DataError(f"{path}: file_ending {found_ending!r}; use one of {' '.join(endings())}")
    groups, pattern = content.get("groups", {}), content.get("group_pattern", GROUP_PATTERN)
    if not isinstance(groups, dict) or not all(isinstance(group, str) for group in groups.values()):
        raise DataError(f'{path}: groups must map cases to patients, {{"case1": "patient7"}}; correct it')
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise DataError(f"{path}: group_pattern {pattern!r} is no regular expression ({error}); correct it") from error
    cases = content.get("numTraining")
    return Description(
        task=task,
        classes=_classes(path, content["labels"]),
        channels=_channels(path, content["channel_names"]),
        ending=found_ending,
        group_pattern=pattern,
        groups=groups,
        cases=cases if isinstance(cases, int) else None,
    )


def _load_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); correct it") from error
    if not isinstance(content, dict):
        raise DataError(
            f"{path}: holds a {type(content).__name__}; write an object with channel_names, labels, file_ending"
        )
    return content


def _hint(key: str, content: Mapping[str, Any]) -> str:
    """The misspelled or outdated key that was meant, if one is there."""
    unknown = [found for found in content if found not in _KNOWN_KEYS]
    old = [found for found in unknown if _OLD_KEYS.get(found.lower()) == key]
    similar = old or difflib.get_close_matches(key, unknown, n=1)
    return f", found {similar[0]!r}" if similar else ""


def _classes(path: Path, labels: Any) -> tuple[str, ...]:
    if not isinstance(labels, dict) or not labels:
        raise DataError(f'{path}: labels must map names to values, {{"background": 0, "tumor": 1}}; correct it')
    if all(isinstance(value, str) for value in labels.values()):
        raise DataError(f'{path}: labels map values to names as in nnU-Net 1; turn them round, {{"background": 0}}')
    regions = [name for name, value in labels.items() if isinstance(value, list)]
    if regions:
        raise DataError(f"{path}: label {regions[0]!r} is a region {labels[regions[0]]}; give every class one value")
    if "ignore" in labels:
        raise DataError(f"{path}: an ignore label is not supported; leave its cases out or give it a class")
    values = list(labels.values())
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if not whole or sorted(values) != list(range(len(values))):
        raise DataError(f"{path}: label values must be 0, 1, 2 ... without gaps, found {values}; renumber the classes")
    return tuple(sorted(labels, key=lambda name: labels[name]))


def _channels(path: Path, names: Any) -> tuple[str, ...]:
    if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))) or not names:
        raise DataError(f'{path}: channel_names must be {{"0": "name", "1": ...}}, found {names}; correct it')
    return tuple(str(names[str(channel)]) for channel in range(len(names)))


# names on disk


def find_entries(folder: Path, description: Description, split: Split) -> Found:
    """The cases of one split, and what does not fit together; looks at names, opens no image."""
    if description.task == "segmentation":
        entries, problems = _segmentation_entries(folder, description, split)
    elif split == "test" or (folder / "images").is_dir() or (folder / "labels.csv").is_file():
        entries, problems = _listed_entries(folder, description, split)
    else:
        entries, problems = _class_folder_entries(folder, description)
    if not entries and not problems:
        problems = [Problem(folder, f"no {split} cases", "add images or choose the other split")]
    return entries, problems


def _segmentation_entries(
    folder: Path, description: Description, split: Split
) -> tuple[list[SiteEntry], list[Problem]]:
    suffix = "Tr" if split == "train" else "Ts"
    images, labels = folder / f"images{suffix}", folder / f"labels{suffix}"
    if not images.is_dir():
        return [], [Problem(images, "missing", "put the images there as case_0000" + str(description.ending))]
    problems = [*_foreign(images, description), *_foreign(labels, description)]
    by_case, misnamed = case_files(images, description.ending or "")
    problems += misnamed
    masks = {stem(file): file for file in _images(labels, description.ending)}
    labeled = split == "train" or labels.is_dir()
    entries = []
    for name, files in by_case.items():
        missing = set(range(len(description.channels))) - set(files)
        if len(files) > 1 and (missing or len(files) > len(description.channels)):
            what = f"channels {sorted(files)} of {name!r}, dataset.json names {len(description.channels)}"
            problems.append(Problem(images, what, "add the missing files or correct channel_names"))
        elif 0 not in files:
            problems.append(Problem(images, f"{name}_0000{description.ending} missing", "channels count from 0000"))
        elif labeled and name not in masks:
            problems.append(
                Problem(labels / f"{name}{description.ending}", "label missing", "add it or remove the image")
            )
        else:
            paths = tuple(files[channel] for channel in sorted(files))
            entries.append(SiteEntry(name, description.group(name), paths, masks.get(name)))
    for name, file in masks.items():
        if name not in by_case:
            problems.append(
                Problem(file, "label without an image", f"add {images.name}/{name}_0000{description.ending}")
            )
    return entries, [*problems, *_same_names(images, by_case)]


def case_files(images: Path, wanted: str) -> tuple[dict[str, dict[int, Path]], list[Problem]]:
    """Files named `<case>_<channel, four digits><ending>`, by case and channel."""
    cases: dict[str, dict[int, Path]] = {}
    problems = []
    for file in _images(images, wanted):
        name, channel = split_channel(file)
        if channel is None:
            problems.append(Problem(file, "no channel number", f"name it {name}_0000{wanted}"))
        else:
            cases.setdefault(name, {})[channel] = file
    return cases, problems


def _listed_entries(folder: Path, description: Description, split: Split) -> Found:
    images = folder / ("images" if split == "train" else "imagesTs")
    table = folder / ("labels.csv" if split == "train" else "labelsTs.csv")
    if not images.is_dir():
        return [], [Problem(images, "missing", "put the images there")]
    problems = _foreign(images, description)
    files = {file.name: file for file in _images(images, description.ending)}
    if not table.is_file():
        if split == "train":
            return [], [*problems, Problem(table, "missing", "write one with the columns image,label")]
        names = [stem(file) for file in files.values()]
        return [
            SiteEntry(n, description.group(n), (f,), None) for n, f in zip(names, files.values(), strict=True)
        ], problems
    rows, unreadable = _read_table(table)
    problems += unreadable
    entries = []
    for name, label, group in rows:
        if name not in files:
            problems.append(
                Problem(table, f"image {name!r} is not in {images.name}/", "add the image or remove the row")
            )
        elif label not in description.classes:
            problems.append(
                Problem(table, f"class {label!r} of {name!r} is not in dataset.json", _right_class(label, description))
            )
        else:
            case, value = stem(files[name]), description.classes.index(label)
            entries.append(SiteEntry(case, group or description.group(case), (files[name],), value))
    for name, count in Counter(name for name, _, _ in rows).items():
        if count > 1:
            problems.append(Problem(table, f"image {name!r} is listed {count} times", "keep one row"))
    if not unreadable:
        for name in sorted(files.keys() - {name for name, _, _ in rows}):
            problems.append(Problem(images / name, "label missing", f"add a row to {table.name} or remove the image"))
    return entries, [*problems, *_same_names(images, [entry.name for entry in entries])]


def _class_folder_entries(folder: Path, description: Description) -> Found:
    problems, entries = [], []
    for child in sorted(folder.iterdir()):
        if _holds_images(child) and child.name not in description.classes:
            problems.append(
                Problem(child, "folder of a class not in dataset.json", _right_class(child.name, description))
            )
    for value, name in enumerate(description.classes):
        problems += _foreign(folder / name, description)
        for file in _images(folder / name, description.ending):
            case = stem(file)
            entries.append(SiteEntry(case, description.group(case), (file,), value))
    return entries, [*problems, *_same_names(folder, [entry.name for entry in entries])]


def _read_table(table: Path) -> tuple[list[tuple[str, str, str]], list[Problem]]:
    """Rows (image, label, group or "") of a labels table."""
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = [name.strip() for name in reader.fieldnames or ()]
            reader.fieldnames = columns
            if not {"image", "label"} <= set(columns):
                found = ",".join(columns) or "nothing"
                return [], [Problem(table, f"columns {found}", "the first line must be image,label")]
            rows = [tuple((row.get(key) or "").strip() for key in ("image", "label", "group")) for row in reader]
    except (OSError, ValueError, csv.Error) as error:
        return [], [Problem(table, f"cannot be read ({error})", "save it as UTF-8 text with commas")]
    return [(image, label, group) for image, label, group in rows], []


def _right_class(label: str, description: Description) -> str:
    close = difflib.get_close_matches(label, description.classes, n=1)
    return f"did you mean {close[0]!r}?" if close else "classes are " + ", ".join(description.classes)


def _foreign(folder: Path, description: Description) -> list[Problem]:
    """Images whose ending is not the site's."""
    wanted, problems = description.ending, []
    for file in sorted(folder.iterdir()) if folder.is_dir() else []:
        if file.suffix.lower() in _OTHER_ENDINGS:
            problems.append(Problem(file, "unsupported ending", f"convert it to one of {' '.join(endings())}"))
        elif wanted is not None and _is_image(file) and not file.name.endswith(wanted):
            twin = file.with_name(stem(file) + wanted)
            what = f"two cases of one name: {twin.name} is there too" if twin.exists() else f"file_ending is {wanted}"
            problems.append(Problem(file, what, "convert or remove it, or correct dataset.json"))
    return problems


def _same_names(folder: Path, names: Iterable[str]) -> list[Problem]:
    """Cases that would overwrite each other where upper and lower case, or folders, are not told apart."""
    spelled: dict[str, list[str]] = {}
    for name in names:
        spelled.setdefault(name.casefold(), []).append(name)
    return [
        Problem(folder, f"two cases of one name: {' and '.join(sorted(found))}", "rename one")
        for found in spelled.values()
        if len(found) > 1
    ]


def _holds_images(folder: Path) -> bool:
    return folder.is_dir() and not folder.name.startswith(".") and any(_images(folder))


def _images(folder: Path, wanted: str | None = None) -> list[Path]:
    """The image files of a folder by name, of one ending or of any that we read."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return [file for file in files if _is_image(file) and file.name.endswith(wanted or "")]


def _is_image(file: Path) -> bool:
    return ending(file) is not None and not file.name.startswith(".") and file.is_file()
