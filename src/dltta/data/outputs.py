"""7 prediction. How does the prediction for a case become a file that lies on its image?

A prediction has the format, size, spacing and orientation of the image: `NAME.png`, `NAME.tif`, `NAME.nii.gz`, or a
DICOM segmentation `NAME.dcm`. It appears whole or not at all.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from dltta.data.formats import dicom
from dltta.data.formats.dicom import Anonymous
from dltta.data.formats.format import Geometry, Identity, ending, format_of
from dltta.data.formats.images import reading, without_identity, write_mask, writing
from dltta.data.formats.nifti import write_volume
from dltta.data.inbox import PROBABILITIES, Incoming
from dltta.errors import DataError


def write_prediction(
    folder: Path | str,
    case: Incoming,
    labels: ArrayLike,
    geometry: Geometry,
    classes: Sequence[str],
    *,
    anonymous: Anonymous | None = None,
) -> Path:
    """Writes class values (*spatial) for a case and says where; `classes[i]` names value i, 0 is background.

    `anonymous` leaves out what would name the patient; the file's own name is the case's in any case.
    """
    path = _apart(Path(folder), case) / f"{case.name}{ending(case.files[0]) or '.dcm'}"
    highest = int(np.asarray(labels).max(initial=0))
    if highest >= len(classes):
        raise DataError(f"{path}: class value {highest} has no name among {len(classes)}; name all classes")
    if case.kind == "dicom":
        dicom.write_segmentation(path, labels, geometry, classes, anonymous)
    else:
        write_mask(path, labels, geometry if anonymous is None else without_identity(path, geometry))
    return path


def write_probabilities(
    folder: Path | str,
    case: Incoming,
    probabilities: ArrayLike,
    geometry: Geometry,
    *,
    anonymous: Anonymous | None = None,
) -> Path:
    """Writes probabilities (C, *spatial) for a case and says where.

    A NIfTI image gets a 4-D NIfTI file, classes along the last axis, on the image's grid. Others get nnU-Net's `.npz`
    with the key `probabilities`, axes as given. Both hold float32.
    """
    values = np.asarray(probabilities, dtype=np.float32)
    nifti = case.kind == "nifti"
    path = _apart(Path(folder), case) / f"{case.name}{PROBABILITIES}{'.nii.gz' if nifti else '.npz'}"
    if values.shape[1:] != geometry.shape:
        raise DataError(
            f"{path}: probabilities have their image's size {geometry.shape}, found {values.shape[1:]}; resize them"
        )
    with writing(path) as file:
        if nifti:
            volume = values if values.ndim == 4 else values[..., None]
            like = geometry if anonymous is None else without_identity(path, geometry)
            write_volume(file, np.moveaxis(volume, 0, -1), like, compressed=True)
        else:
            np.savez_compressed(file, probabilities=values)
    return path


def identifying(case: Incoming) -> tuple[str, ...]:
    """Names of the fields of a case's files that may name the patient, people, places or times; never their values."""
    found: list[str] = []
    for file in case.files:
        format = None if case.kind == "dicom" else format_of(file)
        if format is None:
            found += dicom.identifying(file)
        elif isinstance(format, Identity):
            with reading(file, format):
                found += format.identifying(file)
    return tuple(dict.fromkeys(found))


def still_identifying(case: Incoming, anonymous: Anonymous) -> tuple[str, ...]:
    """The same for a prediction of that case that is written anonymously."""
    if case.kind != "dicom" or anonymous.uids == "new":
        return ()
    return tuple(name for name in identifying(case) if name.endswith("UID"))


def _apart(folder: Path, case: Incoming) -> Path:
    """The folder for predictions: not one that images come from, where they would be taken for images."""
    if folder.exists() and any(file.parent.exists() and folder.samefile(file.parent) for file in case.files):
        raise DataError(f"{folder}: images come from this folder; choose another one for the predictions")
    return folder
