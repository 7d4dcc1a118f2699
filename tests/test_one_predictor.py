"""What is measured is what ships: `bench` and `adapt` predict the same images bit for bit, with every recipe."""

import json
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from dltta.config import default_preprocessing, make_adapter, open_dataset
from dltta.data.case import Mapped
from dltta.data.inbox import find_incoming
from dltta.evaluation import rehearsal
from dltta.evaluation.home import rehearse_checkpoint
from dltta.evaluation.run import run_stream
from dltta.models.io.opened import OpenedModel, Window
from dltta.models.io.opening import open_checkpoint, open_model
from dltta.models.nets.architecture import Architecture
from dltta.models.predictions import probabilities
from dltta.predictor import Predictor
from dltta.recipes import paper, recommended
from dltta.serving.folder import Stream
from dltta.serving.settings import StreamSettings
from dltta.training import SourceTraining, TrainingSettings
from streams import lines, told, typed

RECIPES = {
    "source": paper("source"),
    "ptbn": paper("ptbn"),
    "tent, fixed": paper("tent", "fixed"),
    "tent, dynamic": paper("tent", "dynamic"),
    "tent, relative": paper("tent", "relative"),
    "ttt": paper("ttt"),
    "atta": paper("atta"),
    "recommended": recommended(),
}
SMALL = {"batches_kept": 2, "neighbors": 2}  # so that the memory is asked within a few images
pytestmark = pytest.mark.usefixtures("no_power_cut")


def blob(seed: int, shape: tuple[int, ...], *, there: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Grey values and labels of one image with a bright box."""
    random = np.random.default_rng(seed)
    image, label = random.normal(90, 12, shape), np.zeros(shape, dtype=np.uint8)
    if there:
        corner = [int(random.integers(n // 8, n // 2)) for n in shape]
        box = tuple(slice(c, c + n // 3) for c, n in zip(corner, shape, strict=True))
        label[box] = 1
        image[box] += 70
    return image.clip(0, 255).astype(np.uint8), label


def describe(folder: Path, ending: str, **more) -> None:
    description = {"channel_names": {"0": "grey"}, "labels": {"background": 0, "blob": 1}, "file_ending": ending}
    (folder / "dataset.json").write_text(json.dumps({**description, **more}))


def png_site(folder: Path, shape: tuple[int, ...] = (32, 32)) -> Path:
    for place in ("imagesTr", "labelsTr"):
        (folder / place).mkdir(parents=True)
    for index in range(7):
        image, label = blob(index, shape)
        Pillow.fromarray(image).save(folder / "imagesTr" / f"case_{index}_0000.png")
        Pillow.fromarray(label).save(folder / "labelsTr" / f"case_{index}.png")
    describe(folder, ".png")
    return folder


def volume_site(folder: Path) -> Path:
    """Volumes whose slices lie along the first axis, which has the largest spacing."""
    for place in ("imagesTr", "labelsTr"):
        (folder / place).mkdir(parents=True)
    for index in range(3):
        image, label = blob(index, (5, 32, 32))
        for place, values in (("imagesTr", image), ("labelsTr", label)):
            name = f"case_{index}_0000.nii.gz" if place == "imagesTr" else f"case_{index}.nii.gz"
            nib.save(nib.Nifti1Image(values, np.diag([3.0, 1, 1, 1])), folder / place / name)
    describe(folder, ".nii.gz")
    return folder


def labeled_site(folder: Path) -> Path:
    (folder / "images").mkdir(parents=True)
    rows = ["image,label"]
    for index in range(10):
        image, _ = blob(index, (32, 32), there=index % 2 == 1)
        Pillow.fromarray(image).save(folder / "images" / f"case_{index}.png")
        rows.append(f"case_{index}.png,{('background', 'blob')[index % 2]}")
    (folder / "labels.csv").write_text("\n".join(rows) + "\n")
    describe(folder, ".png", task="classification")
    return folder


def train(site: str, folder: Path, patch: tuple[int, ...] | None = None) -> OpenedModel:
    """A tiny source model with all that the recipes need: rotation head, auto-encoders, calibration."""
    dataset = open_dataset(site)
    segmenting = dataset.task == "segmentation"
    network = Architecture("unet" if segmenting else "densenet_small", 2, 1, 2, {"width": 4 if segmenting else 8})
    settings = TrainingSettings(
        epochs=2, batch_size=4, learning_rate=1e-2, patch=patch, with_=("ttt", "atta"), rotation_hidden=8,
        autoencoder_epochs=1, autoencoder_width=8,
    )  # fmt: skip
    SourceTraining([dataset], network, default_preprocessing(dataset), settings, folder, torch.device("cpu")).run()
    rehearse_checkpoint(folder, [dataset], settings, device=torch.device("cpu"))
    return open_model(str(folder))


class Sites:
    """The four ways in which images reach a network, each with its site and its model, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, {}

    def __getitem__(self, name: str) -> tuple[str, Path, OpenedModel]:
        if name not in self.made:
            make = {"whole": png_site, "windows": lambda f: png_site(f, (32, 56)), "classes": labeled_site}
            site = make.get(name, volume_site)(self.folder / name)
            spec = f"slices:{site}" if name == "slices" else str(site)
            patch = (32, 32) if name == "windows" else None
            self.made[name] = spec, site, train(spec, self.folder / f"{name}_model", patch)
        return self.made[name]


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """Their models rehearse at two simulated sites with a few cases."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MOST_SITES", "FEWEST_SITES"):
            patch.setattr(rehearsal, name, 2)
        patch.setattr(rehearsal, "CASES", {"segmentation": {1: 3}, "classification": {4: 4}})
        yield Sites(tmp_path_factory.mktemp("sites"))


class Recording:
    """A predictor that keeps the probabilities of every image that it predicts."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor, self.probabilities = predictor, []

    def step(self, x, *, case):
        step = self.predictor.step(x, case=case)
        self.probabilities += [row.numpy() for row in probabilities(step.logits)]
        return step


def bench(opened, spec, recipe):
    """As `dltta bench` runs a stream: probabilities and a row per image."""
    recipe = recipe.resolved(opened.task, calibrated=opened.calibration is not None)
    dataset = Mapped(open_dataset(spec), opened.checkpoint.preprocessing.case)
    again = open_checkpoint(opened.checkpoint, opened.name)
    recording = Recording(Predictor(again, make_adapter(again, recipe)))
    record = run_stream(recording, dataset, range(len(dataset)), batch_size=recipe.batch_size)
    return recording.probabilities, record.cases


def adapt(opened, site, output, recipe):
    """As `dltta adapt` runs a stream of files: probabilities and a line per case."""
    with Stream(opened, output, StreamSettings(recipe, save_probabilities=True)) as stream:
        stream.run(find_incoming(site))
    found = [line for line in lines(output) if "prediction" in line]
    return [_probabilities(output, line) for line in found], found


def _probabilities(output, line):
    if "probabilities" in line:
        return np.array(line["probabilities"], dtype=np.float32)
    path = output / line["probabilities_file"]
    if path.suffix == ".npz":
        return np.load(path)["probabilities"]
    return np.moveaxis(np.asarray(nib.load(path).dataobj, dtype=np.float32), -1, 0)


def compare(sites, tmp_path, way, recipe):
    spec, site, opened = sites[way]
    recipe = replace(recipe, **SMALL, batch_size=4 if way == "classes" else 1)
    measured, rows = bench(opened, spec, recipe)
    shipped, found = adapt(opened, site, tmp_path / "out", recipe)
    if way == "slices":
        measured = [np.stack(measured[i : i + 5], axis=1) for i in range(0, len(measured), 5)]
    assert len(shipped) == len(measured) == len(found)
    assert all(np.array_equal(one, other) for one, other in zip(shipped, measured, strict=True))
    if way != "slices":
        for row, line in zip(rows, found, strict=True):
            assert (row.loss, row.discrepancy, row.rate) == (line["loss"], line["discrepancy"], line["rate"])
            if recipe.name == "recommended":
                told = tuple(line[key] for key in ("candidate", "quality", "quality_low", "quality_high", "review"))
                assert (row.candidate, row.quality, row.quality_low, row.quality_high, row.review) == told
    if recipe.rate in ("dynamic", "relative") and recipe.method != "source" and recipe.name != "recommended":
        assert found[-1]["discrepancy"] is not None
    return measured


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("way", ["whole", "windows", "slices", "classes"])
def test_bench_and_adapt_predict_the_same_bits(sites, tmp_path, way, recipe):
    compare(sites, tmp_path, way, recipe)


@pytest.mark.long
def test_other_windows_in_one_of_the_two_are_noticed(sites, tmp_path):
    """The comparison sees a difference where there is one."""
    spec, site, opened = sites["windows"]
    other = replace(opened, window=Window(opened.window.patch, overlap=0.5))
    measured, _ = bench(opened, spec, replace(paper("tent", "fixed"), **SMALL))
    shipped, _ = adapt(other, site, tmp_path / "out", replace(paper("tent", "fixed"), **SMALL))
    assert not any(np.array_equal(one, two) for one, two in zip(shipped, measured, strict=True))


@pytest.mark.long
def test_python_and_the_shell_have_the_same_defaults_and_record_what_ran(sites, tmp_path, monkeypatch, capsys):
    _, site, opened = sites["whole"]
    with Stream(opened, tmp_path / "python") as stream:
        stream.run(find_incoming(site))
    folder = sites.folder / "whole_model"
    code, _, _ = typed(monkeypatch, capsys, "adapt", "-m", folder, "-i", site, "-o", tmp_path / "shell")
    assert code == 0
    begun = lines(tmp_path / "python")[0]
    assert begun == lines(tmp_path / "shell")[0]
    expected = recommended().resolved("segmentation", calibrated=True)
    assert begun["recipe"] == expected.as_json()
    ran = (begun["recipe"]["method"], begun["recipe"]["rate"], begun["recipe"]["effort"], begun["rehearsed"])
    assert ran == ("recommended", "none", "default", True)
    assert told(tmp_path / "python") == told(tmp_path / "shell")
