"""Labels of a file on the grid of a network, whatever a bundle's preprocessing does to its images."""

import nibabel as nib
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bundles import CONFIG, config, make_bundle, transforms
from dltta.data.formats.images import read_image
from dltta.errors import InputError
from dltta.models.io.grid import label_on_grid
from dltta.models.io.opening import open_model

AFFINE = np.array([[0.0, -1.5, 0.0, 4], [2.0, 0.0, 0.0, -7], [0.0, 0.0, -2.0, 1], [0, 0, 0, 1]])
CROP = {"_target_": "CropForegroundd", "keys": "@image_key", "source_key": "@image_key", "allow_smaller": True}


def test_a_label_goes_where_a_bundle_moves_its_image(tmp_path):
    label = np.zeros((20, 24, 18), np.uint8)
    label[4:11, 5:16, 3:9] = 1
    label[12:16, 15:21, 10:16] = 2
    values = np.where(label > 0, 100.0 * label, 1.0).astype(np.float32)
    values[:2] = 0  # cropped away
    nib.save(nib.Nifti1Image(values, AFFINE), tmp_path / "image.nii.gz")
    steps = CONFIG["preprocessing"]["transforms"]
    make_bundle(tmp_path / "bundle", config(preprocessing=transforms(*steps[:4], CROP, *steps[4:])))
    prepared = open_model(str(tmp_path / "bundle")).prepare(read_image(tmp_path / "image.nii.gz"))
    moved = prepared.label(torch.from_numpy(label))
    assert moved.shape == prepared.image.shape[1:] != label.shape
    shown = (prepared.image[0] * 400 - 100) / 100  # ScaleIntensityRanged from -100..300
    sure = (shown - shown.round()).abs() < 0.02  # not between two tissues
    assert {0, 1, 2} == set(moved[sure].tolist())
    assert (moved[sure] == shown[sure].round().long()).float().mean() > 0.99


def test_a_resized_label_is_the_nearest():
    label = torch.zeros(12, 8).long()
    label[3:9, 2:6] = 1

    def restore(chances):
        return F.interpolate(chances[None], size=(12, 8), mode="bilinear", align_corners=False)[0]

    wanted = F.interpolate(label[None, None].float(), size=(24, 16), mode="nearest")[0, 0].long()
    assert torch.equal(label_on_grid(label, (24, 16), 3, restore), wanted)


def test_an_image_that_is_bent_is_refused():
    def restore(chances):
        place = torch.linspace(-1, 1, 32)
        grid = torch.stack(torch.meshgrid(place.pow(3), place, indexing="ij")[::-1], -1)
        return F.grid_sample(chances[None], grid[None], align_corners=False, padding_mode="border")[0]

    with pytest.raises(InputError, match="its preprocessing bends the image"):
        label_on_grid(torch.zeros(32, 32).long(), (32, 32), 2, restore)
