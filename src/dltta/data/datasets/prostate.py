"""1 images. What is one volume of the six-site prostate data set, as the paper prepares it?

Each site is a folder of T2-weighted volumes `CaseNN.nii.gz` with `CaseNN_segmentation.nii.gz` beside them, or in
nnU-Net's layout, `imagesTr/NAME_0000.nii.gz` and `labelsTr/NAME.nii.gz`. Single sites will do. A volume is
normalized to zero mean and unit variance, then resized to 384 x 384 in the axial plane, images linearly and labels to
the nearest; label values above 0 (some sites tell zones apart) are prostate. Cropping 80 x 80 x 80 patches is left to
training and to the sliding window.

The axial plane is found from the image's affine: the axis nearest to head-foot is brought last, the other two keep
their order. A segmentation lies on its volume voxel by voxel, as the field reads this data set; its own affine is not
used.
"""

import re
from pathlib import Path

import numpy as np
import torch
from nibabel.orientations import io_orientation
from torch import Tensor
from torch.nn.functional import interpolate

from dltta.data.case import Case, Task
from dltta.data.formats.images import Geometry, read_image, read_mask
from dltta.errors import DataError

SITES = {"A": "RUNMC", "B": "BMC", "C": "I2CVB", "D": "UCL", "E": "BIDMC", "F": "HK"}
# of Liu et al. 2020, whom the paper follows; it gives no numbers itself
VOLUMES = {"RUNMC": 30, "BMC": 30, "I2CVB": 19, "UCL": 13, "BIDMC": 12, "HK": 12}
# of the folders, in other copies
OTHER_NAMES = {"RUNMC": ("ISBI", "RADBOUD"), "BMC": ("ISBI_1.5",), "I2CVB": ("HCRUDB",)}
PLANE = (384, 384)

_VOLUME = re.compile(r"(case\d+)\.nii(?:\.gz)?", re.IGNORECASE)
_LABEL = re.compile(r"(case\d+)_segmentation\.nii(?:\.gz)?", re.IGNORECASE)
_NNUNET_VOLUME = re.compile(r"(.+)_0000\.nii(?:\.gz)?", re.IGNORECASE)
_NNUNET_LABEL = re.compile(r"(.+)\.nii(?:\.gz)?", re.IGNORECASE)


class Prostate:
    """The volumes of one site, by name ("RUNMC") or letter ("A"); upper and lower case do not matter."""

    task: Task = "segmentation"
    classes = ("background", "prostate")

    def __init__(self, folder: Path | str, site: str) -> None:
        self.site = site_name(site)
        self.folder = find_site(Path(folder), self.site)
        volumes, labels = list_volumes(self.folder)
        if not volumes:
            raise DataError(
                f"{self.folder}: no CaseNN.nii.gz and no imagesTr/NAME_0000.nii.gz; unpack the site's volumes there "
                "(docs/data.md)"
            )
        unlabeled = sorted(volumes.keys() - labels.keys())
        if unlabeled:
            raise DataError(
                f"{volumes[unlabeled[0]]}: {label_name(volumes[unlabeled[0]])} missing; unpack the site again"
            )
        self.files = tuple((volumes[name], labels[name]) for name in sorted(volumes))
        self.names = self.groups = tuple(_case_name(volume) for volume, _ in self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Case:
        volume, label = self.files[index]
        image = read_image(volume)
        labels = read_mask(label)
        if labels.shape != image.geometry.shape:
            raise DataError(
                f"{label}: size {labels.shape}, {volume.name} has {image.geometry.shape}; unpack the site again"
            )
        axis = axial_axis(image.geometry)
        values = torch.from_numpy(np.moveaxis(image.array[0], axis, -1).copy())  # (X, Y, Z)
        mask = torch.from_numpy(np.moveaxis(labels > 0, axis, -1).copy())
        return Case(
            name=self.names[index],
            site=self.site,
            group=self.groups[index],
            image=resize_axial(z_score(values, volume), "bilinear")[None],
            label=resize_axial(mask.float(), "nearest-exact").long(),
            spacing=resized_spacing(image.geometry, axis),
        )


def site_name(site: str) -> str:
    """The site's name, from its name or letter."""
    wanted = site.upper()
    if wanted in SITES:
        return SITES[wanted]
    if wanted in SITES.values():
        return wanted
    known = ", ".join(f"{letter} {name}" for letter, name in SITES.items())
    raise DataError(f"no prostate site {site!r}; use a name or letter of {known}")


def find_site(folder: Path, name: str) -> Path:
    """The folder of one site."""
    found = _site_folders(folder, name)
    if not found:
        raise DataError(f"{folder}: no folder {name}; unpack the data set there, one folder per site (docs/data.md)")
    return found[0]


def sites_in(folder: Path) -> tuple[str, ...]:
    """The names of the paper's sites that have a folder there, in the paper's order."""
    return tuple(name for name in SITES.values() if _site_folders(folder, name))


def _site_folders(folder: Path, name: str) -> list[Path]:
    names = {name, *OTHER_NAMES.get(name, ())}
    children = sorted(folder.iterdir()) if folder.is_dir() else []
    return [child for child in children if child.is_dir() and child.name.upper() in names]


def list_volumes(folder: Path) -> tuple[dict[str, Path], dict[str, Path]]:
    """The volumes and the segmentations of a site, each by case name in lower case."""
    if (folder / "imagesTr").is_dir():
        return _matching(folder / "imagesTr", _NNUNET_VOLUME), _matching(folder / "labelsTr", _NNUNET_LABEL)
    return _matching(folder, _VOLUME), _matching(folder, _LABEL)


def _matching(folder: Path, pattern: re.Pattern[str]) -> dict[str, Path]:
    files = sorted(file for file in folder.iterdir() if file.is_file()) if folder.is_dir() else []
    return {match[1].lower(): file for file in files if (match := pattern.fullmatch(file.name))}


def _case_name(volume: Path) -> str:
    match = _NNUNET_VOLUME.fullmatch(volume.name)
    return match[1] if match else volume.name.split(".")[0]


def label_name(volume: Path) -> str:
    """What the segmentation of a volume is called."""
    name = _case_name(volume)
    return f"labelsTr/{name}.nii.gz" if volume.parent.name == "imagesTr" else f"{name.lower()}_segmentation.nii.gz"


def axial_axis(geometry: Geometry) -> int:
    """The voxel axis nearest to head-foot."""
    if geometry.affine is None or len(geometry.shape) != 3:
        raise DataError(
            f"a prostate volume is 3-D NIfTI, found {geometry.kind} {geometry.shape}; use the published files"
        )
    return int(np.flatnonzero(io_orientation(geometry.affine)[:, 0] == 2)[0])


def z_score(volume: Tensor, path: Path) -> Tensor:
    """A volume with zero mean and unit variance."""
    std = volume.std(unbiased=False)
    if std == 0:
        raise DataError(f"{path}: all values are {volume.flatten()[0].item():g}; leave this volume out")
    return (volume - volume.mean()) / std


def resize_axial(volume: Tensor, mode: str) -> Tensor:
    """(X, Y, Z) to (384, 384, Z), slice by slice."""
    slices = volume.permute(2, 0, 1)[:, None]  # (Z, 1, X, Y)
    return interpolate(slices, size=PLANE, mode=mode)[:, 0].permute(1, 2, 0).contiguous()


def resized_spacing(geometry: Geometry, axis: int) -> tuple[float, ...]:
    """Spacing after `resize_axial`, in mm: the plane covers the same tissue with 384 x 384 positions."""
    spacing = geometry.spacing or (1.0, 1.0, 1.0)
    plane = [kept for kept in range(3) if kept != axis]
    inside = (spacing[kept] * geometry.shape[kept] / size for kept, size in zip(plane, PLANE, strict=True))
    return (*inside, spacing[axis])
