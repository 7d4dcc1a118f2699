import json

import nibabel as nib
import numpy as np
import pytest
import torch

from dltta.config import default_architecture, default_preprocessing, open_dataset
from dltta.data.formats.images import Geometry
from dltta.data.sites import Slices
from dltta.data.slices import from_slices, slice_axis, to_slices
from dltta.errors import DataError
from dltta.evaluation.experiment import Experiment, run_experiment
from dltta.recipes import Recipe
from dltta.training import TrainingSettings


@pytest.mark.parametrize(
    ("spacing", "axis"),
    [((1, 1, 3), 2), ((4, 1, 3), 0), ((1, 5, 3), 1), ((2, 2, 2), 2), ((3, 1, 3), 2), ((3, 3, 1), 0), (None, 2)],
)
def test_volumes_are_cut_across_their_widest_spacing_the_last_on_ties(spacing, axis):
    assert slice_axis(Geometry("nifti", (4, 5, 6), spacing=spacing)) == axis


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_are_the_volumes_planes_and_go_back_where_they_were(axis):
    volume = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    slices = to_slices(volume, axis)
    assert len(slices) == (3, 4, 5)[axis]
    for number, plane in enumerate(slices):
        assert np.array_equal(plane, np.take(volume.numpy(), number, axis=1 + axis))
    assert torch.equal(from_slices(slices, axis), volume)
    predictions = slices.sum(1, keepdim=True)  # another number of channels
    assert torch.equal(from_slices(predictions, axis), volume.sum(0, keepdim=True))


def site(folder, bright):
    """Two volumes of four slices with a bright box."""
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True)
    description = {"channel_names": {"0": "T2"}, "labels": {"background": 0, "box": 1}, "file_ending": ".nii.gz"}
    (folder / "dataset.json").write_text(json.dumps(description))
    affine = np.diag([1.0, 1.0, 5.0, 1.0])
    for number in range(2):
        labels = np.zeros((32, 32, 4), np.uint8)
        labels[8:20, 10 + number : 24] = 1
        image = labels * bright + np.random.default_rng(number).normal(0, 0.1, labels.shape)
        nib.save(nib.Nifti1Image(image.astype(np.float32), affine), folder / "imagesTr" / f"v{number}_0000.nii.gz")
        nib.save(nib.Nifti1Image(labels, affine), folder / "labelsTr" / f"v{number}.nii.gz")
    return folder


def test_a_site_is_opened_slice_by_slice_by_name(tmp_path):
    site(tmp_path / "a", 2.0)
    opened = open_dataset(f"slices:{tmp_path / 'a'}")
    assert isinstance(opened, Slices)
    assert len(opened) == 8
    assert opened[5].name == "v1_slice001"
    assert opened[5].image.shape == (1, 32, 32)
    assert default_architecture(opened).spatial_dims == 2
    assert default_preprocessing(opened).intensity == "zscore"
    assert open_dataset(str(tmp_path / "a"))[0].image.shape == (1, 32, 32, 4)
    with pytest.raises(DataError, match="there is no folder nowhere"):
        open_dataset("slices:nowhere")


@pytest.mark.long
def test_an_experiment_takes_volumes_slice_by_slice_below_its_root(tmp_path):
    site(tmp_path / "a", 2.0)
    site(tmp_path / "b", 1.0)
    experiment = Experiment(
        source=("slices:a",),
        targets=("slices:b",),
        output=str(tmp_path / "out"),
        root=str(tmp_path),
        methods=("source", "tent"),
        rates=("fixed",),
        network_options={"width": 4},
        examples=1,
        training=TrainingSettings(epochs=1, batch_size=2, validation=0.5),
        adaptation=Recipe(batches_kept=2, neighbors=1),
    )
    results = run_experiment(experiment)
    adapted = [stream for stream in results.streams if stream.target == "b"]
    assert [stream.method for stream in adapted] == ["source", "tent"]
    assert {row.case for row in adapted[0].volumes} == {row.case for row in adapted[1].volumes} == {"v0", "v1"}
    scores = [row.metrics["dice"] for row in adapted[1].volumes]
    assert adapted[1].metrics["dice"] == pytest.approx(sum(scores) / 2)
    assert adapted[1].unit == "mm"
    assert all(not row.metrics and row.volume and row.group for row in adapted[1].cases)
    assert sorted(case.case for case in adapted[1].cases) == [f"v{v}_slice00{s}" for v in range(2) for s in range(4)]
