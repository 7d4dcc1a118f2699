"""1 images. Synthetic cases as a site's folder on disk, as somebody with images of his own has one (`docs/data.md`)."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dltta.data.case import Case
from dltta.data.phantom import Phantom
from dltta.errors import DataError, SettingError
from dltta.files import csv_table

Values = NDArray[np.float32 | np.uint8]
Progress = Callable[[int, int], None]  # cases written, cases in all


def write_site(cases: Phantom, folder: Path, *, progress: Progress = lambda done, total: None) -> None:
    """A new folder with images and labels, whole or not at all: 8-bit PNG, volumes as NIfTI."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SettingError(f"{folder} is there already; choose a new folder")
    place = folder.resolve()
    beside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        beside.mkdir(parents=True)
        _write(cases, beside, progress)
        beside.replace(place)
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error.strerror or error}); choose another folder") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _write(cases: Phantom, folder: Path, progress: Progress) -> None:
    segmentation, first = cases.task == "segmentation", cases[0].image
    images, labels = folder / ("imagesTr" if segmentation else "images"), folder / "labelsTr"
    ending = ".png" if first.ndim == 3 else ".nii.gz"
    images.mkdir()
    rows = [("image", "label", "group")]
    for index in range(len(cases)):
        case = cases[index]
        if segmentation:
            labels.mkdir(exist_ok=True)
            _save(_image_values(case), images / f"{case.name}_0000{ending}", case.spacing)
            _save(_label_values(case), labels / f"{case.name}{ending}", case.spacing)
        else:
            file = f"{case.site}-{index:04d}{ending}"  # _0000 at the end of a name would be a channel
            _save(_image_values(case), images / file, case.spacing)
            rows.append((file, cases.classes[int(_label_values(case))], case.group))
        progress(index + 1, len(cases))
    if not segmentation:
        (folder / "labels.csv").write_text(csv_table(rows))
    description = {
        "task": cases.task,
        "channel_names": {str(i): name for i, name in enumerate("RGB" if len(first) == 3 else ("grey",))},
        "labels": {name: value for value, name in enumerate(cases.classes)},
        "numTraining": len(cases),
        "file_ending": ending,
    }
    (folder / "dataset.json").write_text(json.dumps(description, indent=2) + "\n")


def _image_values(case: Case) -> Values:
    """(rows, columns) or (rows, columns, RGB) of 0..255; volumes, which are standardized, (X, Y, Z) as they are."""
    if case.image.ndim == 4:
        return case.image[0].numpy()
    pixels = (case.image * 255).round().numpy().astype(np.uint8)  # (C, rows, columns)
    return pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1)


def _label_values(case: Case) -> Values:
    if case.label is None:
        raise DataError(f"{case.name} has no label; a site's folder holds labeled cases")
    return case.label.numpy().astype(np.uint8)


def _save(values: Values, path: Path, spacing: tuple[float, ...] | None) -> None:
    if path.suffix == ".png":
        Pillow.fromarray(values).save(path)
    else:
        nib.save(nib.Nifti1Image(values, np.diag([*(spacing or (1.0, 1.0, 1.0)), 1.0])), path)
