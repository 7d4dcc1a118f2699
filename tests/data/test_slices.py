import json
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch

from dltta.config import default_architecture, default_preprocessing, open_dataset
from dltta.data.formats.images import Geometry
from dltta.data.sites import Slices, evenly
from dltta.data.slices import from_slices, slice_axis, to_slices
from dltta.data.streams import SiteStream, stream_order
from dltta.errors import DataError, SettingError
from dltta.evaluation.bench import run_experiment
from dltta.evaluation.experiment import Experiment
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


def test_slices_of_a_volume_come_in_a_row_and_volumes_in_any_order(tmp_path):
    opened = open_dataset(f"slices:{site(tmp_path / 'a', 2.0)}")
    orders = {tuple(stream_order(opened, np.random.default_rng(seed))) for seed in range(8)}
    assert orders == {(0, 1, 2, 3, 4, 5, 6, 7), (4, 5, 6, 7, 0, 1, 2, 3)}
    twice = SiteStream((opened, opened))
    orders = {tuple(stream_order(twice, np.random.default_rng(seed))) for seed in range(20)}
    assert len(orders) == 4
    assert (0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15, 8, 9, 10, 11) in orders


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
    fewer = run_experiment(replace(experiment, cases=1))
    assert {row.case for stream in fewer.streams if stream.target == "b" for row in stream.volumes} == {"v0"}
    assert fewer.config["cases"] == 1


def test_targets_may_be_cut_to_some_cases_evenly_spread(tmp_path):
    site(tmp_path / "a", 2.0)
    site(tmp_path / "b", 1.0)
    experiment = Experiment(("slices:a",), ("slices:b",), "out", root=str(tmp_path), cases=1)
    assert len(experiment.open("slices:b")) == 8
    assert set(experiment.open_target("slices:b").volume_of) == {0}
    assert len(experiment.open_target("slices:b")) == 4
    assert [part.names for part in experiment.open_target("sequence:a,b").parts] == [("v0",), ("v0",)]
    assert evenly(9, 3) == [0, 4, 8]
    assert evenly(2, 3) == [0, 1]
    with pytest.raises(SettingError, match="cases limits site folders, and phantom:oct:cirrus:4 is none; leave it out"):
        experiment.open_target("phantom:oct:cirrus:4")
    with pytest.raises(SettingError, match="cases must be at least 1, got 0"):
        replace(experiment, cases=0)
