"""A network that nnU-Net planned and trained itself: adapted, exported, and predicted by nnU-Net again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

pytest.importorskip("nnunetv2", reason="the extra nnunet is not installed")

from commands import typed
from dltta.data.formats.images import read_mask

pytestmark = pytest.mark.slow
NAME = "Dataset900_Phantom"
TRAINING = """
import os, sys, torch
os.environ["nnUNet_n_proc_DA"] = "0"  # no processes of their own for augmentation
from nnunetv2.run.run_training import get_trainer_from_args
torch.manual_seed(0)
trainer = get_trainer_from_args("900", sys.argv[1], 0, device=torch.device("cpu"))
trainer.num_epochs, trainer.num_iterations_per_epoch, trainer.num_val_iterations_per_epoch = 1, 12, 1
trainer.run_training()
"""


def phantom(rng, shift):
    """A bright ball with a brighter core, in noise; its labels."""
    center = rng.uniform(12, 20, 3)
    distance = np.sqrt(sum((axis - c) ** 2 for axis, c in zip(np.indices((32, 32, 32)), center, strict=True)))
    label = (distance < 9).astype(np.uint8) + (distance < 4)
    return (100 * label + rng.normal(0, 20, label.shape) + shift).astype(np.float32), label


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """nnU-Net's folders after its own planning, preprocessing and training, 2-D and 3-D."""
    root = tmp_path_factory.mktemp("nnunet")
    raw = root / "raw" / NAME
    for part in ("imagesTr", "labelsTr", "imagesTs"):
        (raw / part).mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(6):
        image, label = phantom(rng, 0 if number < 5 else 60)
        affine = np.diag([1.0, 1.0, 1.2, 1.0])
        place = raw / ("imagesTr" if number < 5 else "imagesTs")
        nib.save(nib.Nifti1Image(image, affine), place / f"case{number}_0000.nii.gz")
        if number < 5:
            nib.save(nib.Nifti1Image(label, affine), raw / "labelsTr" / f"case{number}.nii.gz")
    description = {"channel_names": {"0": "MRI"}, "labels": {"background": 0, "ball": 1, "core": 2}}
    description |= {"numTraining": 5, "file_ending": ".nii.gz"}
    (raw / "dataset.json").write_text(json.dumps(description))
    run = Environment(root)
    run("nnUNetv2_plan_and_preprocess", "-d", "900", "-c", "2d", "3d_fullres", "-np", "1", "1", "-npfp", "1")
    _make_smaller(root / "preprocessed" / NAME / "nnUNetPlans.json")
    for configuration in ("2d", "3d_fullres"):
        run(sys.executable, "-c", TRAINING, configuration)
    return root, run


class Environment:
    """Commands with nnU-Net's folders in their environment and few processes."""

    def __init__(self, root):
        self.scripts = Path(sys.executable).parent
        folders = {f"nnUNet_{name}": str(root / name) for name in ("raw", "preprocessed", "results")}
        few = {"nnUNet_n_proc_DA": "1", "nnUNet_def_n_proc": "1", "nnUNet_compile": "f", "OMP_NUM_THREADS": "1"}
        self.variables = {**os.environ, **folders, **few}

    def __call__(self, program, *arguments):
        found = self.scripts / str(program)
        command = [str(found if found.exists() else program), *map(str, arguments)]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout


def _make_smaller(path):
    """Fewer channels: a training of seconds, not minutes."""
    plans = json.loads(path.read_text())
    for name in ("2d", "3d_fullres"):
        configuration = plans["configurations"][name]
        architecture = configuration["architecture"]["arch_kwargs"]
        architecture["features_per_stage"] = [min(8 * 2**i, 32) for i in range(architecture["n_stages"])]
        configuration["batch_size"] = 2
    path.write_text(json.dumps(plans))


@pytest.mark.parametrize("configuration", ["2d", "3d_fullres"])
def test_an_nnunet_is_adapted_exported_and_predicted_by_its_own_command_again(
    trained, tmp_path, monkeypatch, capsys, configuration
):
    root, run = trained
    model = root / "results" / NAME / f"nnUNetTrainer__nnUNetPlans__{configuration}"
    images = root / "raw" / NAME / "imagesTs"
    folder = ("-npp", "1", "-nps", "1", "-device", "cpu", "--disable_progress_bar")
    run("nnUNetv2_predict_from_modelfolder", "-m", model, "-i", images, "-o", tmp_path / "theirs", "-f", "0", *folder)
    theirs = read_mask(tmp_path / "theirs" / "case5.nii.gz")
    assert len(np.unique(theirs)) > 1

    def dltta(*arguments):
        code, out, err = typed(monkeypatch, capsys, *arguments)
        assert code == 0, err
        return out

    dltta("adapt", "-m", model, "-i", images, "-o", tmp_path / "off", "--method", "source")
    assert np.array_equal(theirs, read_mask(tmp_path / "off" / "case5.nii.gz"))

    dltta("adapt", "-m", model, "-i", images, "-o", tmp_path / "on", "--method", "tent", "--rate", "fixed:0.01")
    new = tmp_path / "new"
    out = dltta("state", "export", tmp_path / "on", "-m", model, "-o", new, "-i", images)
    assert "it predicts 0.00% of positions otherwise" in out  # instance normalization keeps no statistics
    run("nnUNetv2_predict_from_modelfolder", "-m", new, "-i", images, "-o", tmp_path / "adapted", "-f", "0", *folder)
    dltta("adapt", "-m", new, "-i", images, "-o", tmp_path / "frozen", "--mode", "frozen")
    adapted = read_mask(tmp_path / "adapted" / "case5.nii.gz")
    assert np.array_equal(adapted, read_mask(tmp_path / "frozen" / "case5.nii.gz"))
    weights = [
        torch.load(m / "fold_0" / "checkpoint_final.pth", weights_only=False)["network_weights"] for m in (model, new)
    ]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
