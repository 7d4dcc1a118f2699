"""`dltta adapt` and `dltta state` as somebody types them, on every format, predictions read by other programs.

The model calls bright what is brighter than its image's mean: what to predict is known for every position.
"""

import csv
import json
import re
import signal
import subprocess
import sys

import nibabel as nib
import numpy as np
import pydicom
import pytest
import tifffile
import torch
from PIL import Image as Pillow

from bundles import config, make_bundle, network, transforms
from dicoms import tilted, write_series
from dltta.data.preprocessing import Preprocessing
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.serving.journal import Journal
from networks import trained
from streams import SEGMENTS, lines, told, typed, write_images

CODE = """
import torch
from torch import nn


class Bright(nn.Module):
    def __init__(self, axes, channels, dense):
        super().__init__()
        self.norm = {2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[axes](channels)
        self.head = {2: nn.Conv2d, 3: nn.Conv3d}[axes](channels, 1, 1)
        self.head.weight.data[:] = 0
        self.head.weight.data[:, 0] = 6
        self.head.bias.data[:] = 0
        self.dense = dense

    def forward(self, x):
        logits = self.head(self.norm(x))
        return logits if self.dense else torch.cat([-logits, logits], 1).amax((2, 3))


def grey(): return Bright(2, 1, True)
def color(): return Bright(2, 3, True)
def volume(): return Bright(3, 1, True)
def pair(): return Bright(3, 2, True)
def classifier(): return Bright(2, 3, False)
"""


FIXED = """

class Fixed(Bright):
    def forward(self, x):
        if x.shape[-2:] != (20, 20):
            raise ValueError("images of 20x20 only")
        return super().forward(x)


def fixed(): return Fixed(2, 1, True)
"""


pytestmark = pytest.mark.usefixtures("no_power_cut")


@pytest.fixture
def dltta(monkeypatch, capsys):
    """The command; the code of these tests needs no weights and says so."""

    def run(*arguments):
        own = any(".py:" in str(argument) for argument in arguments) and "--weights" not in arguments
        return typed(monkeypatch, capsys, *arguments, *(["--untrained"] if own else []))

    return run


@pytest.fixture
def code(tmp_path):
    (tmp_path / "bright.py").write_text(CODE)
    return lambda name: f"{tmp_path / 'bright.py'}:{name}"


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in", tmp_path / "out"


def random(*shape, seed=0):
    return np.random.default_rng(seed).integers(1, 250, shape)


def first(out):
    """Line of what was printed: the counts of the run. The next one has those of the stream."""
    return out.splitlines()[0]


def above_mean(values):
    return values > values.astype(np.float64).mean()


@pytest.fixture
def checkpoint(tmp_path):
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    preprocessing = Preprocessing("scale", 255.0, (32, 32))
    model = trained(architecture.build(seed=3))
    save_checkpoint(tmp_path / "model", Checkpoint(model, architecture, "segmentation", SEGMENTS, preprocessing))
    return tmp_path / "model"


def test_code_without_weights_is_refused(code, folders, monkeypatch, capsys):
    """Random weights would look like predictions."""
    images, output = folders
    Pillow.fromarray(random(8, 8).astype(np.uint8)).save(images / "a.png")
    done, _, err = typed(monkeypatch, capsys, "adapt", "-m", code("grey"), "-i", images, "-o", output)
    assert done == 2
    assert "without weights would predict with random ones; add --weights FILE, or --untrained" in err
    assert not output.exists()


class TestFormats:
    """With adaptation on: batch statistics make the mean the border, small rates leave it there."""

    GENTLE = ("--method", "tent", "--alpha", "1e-6")

    def test_rgb_png(self, dltta, code, folders):
        images, output = folders
        for index in range(3):
            Pillow.fromarray(random(20, 31, 3, seed=index).astype(np.uint8)).save(images / f"smear{index}.png")
        done, out, err = dltta("adapt", "-m", code("color"), "-i", images, "-o", output, *self.GENTLE)
        assert (done, out) == (0, f"{output}: 3 predicted\n"), err
        for index in range(3):
            values = np.asarray(Pillow.open(images / f"smear{index}.png"))
            found = Pillow.open(output / f"smear{index}.png")
            assert (found.mode, found.size) == ("L", (31, 20))
            assert np.array_equal(np.asarray(found), above_mean(values[..., 0]))
        assert [line["rate"] for line in lines(output)[1:]] == [1e-6] * 3

    def test_16_bit_tiff(self, dltta, code, folders):
        images, output = folders
        values = (random(18, 25) * 250).astype(np.uint16)
        tifffile.imwrite(images / "slide.tiff", values)
        assert dltta("adapt", "-m", code("grey"), "-i", images, "-o", output, *self.GENTLE)[0] == 0
        found = tifffile.imread(output / "slide.tiff")
        assert found.dtype == np.uint8
        assert np.array_equal(found, above_mean(values))

    def oblique(self):
        """Anisotropic, turned about all axes, first axis to the left."""
        turn = nib.eulerangles.euler2mat(0.3, -0.2, 0.25)
        return nib.affines.from_matvec(turn @ np.diag([-0.7, 0.9, 4.0]), [12.0, -30.0, 55.0])

    def volume(self, path, values, affine):
        image = nib.Nifti1Image(values, affine)
        image.header.set_xyzt_units("mm")
        image.header["descrip"] = b"scanner B"
        image.set_qform(affine, code=1)
        image.set_sform(affine, code=2)
        nib.save(image, path)

    def check_volume(self, image, prediction, expected):
        image, prediction = nib.load(image), nib.load(prediction)
        assert np.array_equal(np.asarray(prediction.dataobj), expected)
        assert np.array_equal(prediction.affine, image.affine)
        assert prediction.header.get_zooms() == image.header.get_zooms()
        assert (prediction.get_qform(coded=True)[1], prediction.get_sform(coded=True)[1]) == (1, 2)
        assert bytes(prediction.header["descrip"]).startswith(b"scanner B")

    def nnunet(self, images, channels):
        """A raw data set as nnU-Net has it; its second channel, if any, is all noise."""
        (images / "imagesTs").mkdir()
        names = {str(number): f"T{number}" for number in range(channels)}
        described = {"channel_names": names, "labels": {"background": 0, "x": 1}, "numTraining": 0}
        (images / "dataset.json").write_text(json.dumps({**described, "file_ending": ".nii.gz"}))
        kept = {}
        for index in range(2):
            for channel in range(channels):
                values = random(9, 12, 5, seed=10 * index + channel).astype(np.int16) - 100
                self.volume(images / "imagesTs" / f"p{index}_{channel:04d}.nii.gz", values, self.oblique())
                kept.setdefault(f"p{index}", values)
        return kept

    @pytest.mark.parametrize(("name", "channels"), [("volume", 1), ("pair", 2)])
    def test_oblique_anisotropic_nifti_in_an_nnunet_folder(self, dltta, code, folders, name, channels):
        images, output = folders
        kept = self.nnunet(images, channels)
        model = ("-m", code(name), "--channels", str(channels))
        done, _, err = dltta("adapt", *model, "-i", images, "-o", output, "--save-probabilities", *self.GENTLE)
        assert done == 0, err
        for case, values in kept.items():
            image = images / "imagesTs" / f"{case}_0000.nii.gz"
            self.check_volume(image, output / f"{case}.nii.gz", above_mean(values))
            found = nib.load(output / f"{case}_probabilities.nii.gz")
            assert found.shape == (9, 12, 5, 2)
            assert np.array_equal(found.affine, nib.load(image).affine)
            assert np.array_equal(np.asarray(found.dataobj)[..., 1] >= 0.5, above_mean(values))

    def test_windows_over_a_volume(self, dltta, code, folders):
        """Each window has its own mean; frozen, the border is where the network has it."""
        images, output = folders
        values = random(20, 12, 9).astype(np.float32)
        self.volume(images / "v.nii.gz", values, self.oblique())
        model = ("-m", code("volume"), "--patch", "8x8x8", "--intensity", "zscore")
        assert dltta("adapt", *model, "-i", images, "-o", output, "--mode", "frozen")[0] == 0
        self.check_volume(images / "v.nii.gz", output / "v.nii.gz", above_mean(values))

    def test_a_2d_model_takes_volumes_slice_by_slice(self, dltta, code, folders):
        """Across the axis of the largest spacing, wherever it is; every slice has its own mean."""
        images, output = folders
        wanted = {}
        for axis in range(3):
            values = random(8, 7, 6, seed=axis).astype(np.int16)
            spacing = [1.0, 1.1, 0.9]
            spacing[axis] = 3.0
            turn = nib.eulerangles.euler2mat(0.3, -0.2, 0.25)
            affine = nib.affines.from_matvec(turn @ np.diag(spacing), [1, 2, 3])
            self.volume(images / f"v{axis}.nii.gz", values, affine)
            across = tuple(a for a in range(3) if a != axis)
            wanted[f"v{axis}"] = values > values.mean(axis=across, keepdims=True)
        done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output, *self.GENTLE, "--pool", "4")
        assert done == 0, err
        for case, expected in wanted.items():
            self.check_volume(images / f"{case}.nii.gz", output / f"{case}.nii.gz", expected)

    def frames(self, segmentation):
        """Masks (rows, columns) of a DICOM segmentation by the image that each frame names as its source."""
        found = pydicom.dcmread(segmentation)
        assert found.SOPClassUID == "1.2.840.10008.5.1.4.1.1.66.4"
        groups = found.PerFrameFunctionalGroupsSequence
        sources = [g.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID for g in groups]
        places = [list(map(float, g.PlanePositionSequence[0].ImagePositionPatient)) for g in groups]
        pixels = found.pixel_array.reshape(len(groups), found.Rows, found.Columns)
        return found, {source: (place, mask) for source, place, mask in zip(sources, places, pixels, strict=True)}

    @pytest.mark.parametrize("name", ["volume", "grey"])
    def test_a_dicom_series_becomes_a_dicom_segmentation(self, dltta, code, folders, name):
        images, output = folders
        values = random(5, 8, 9).astype(np.int16)  # (slices, rows, columns)
        order = [3, 0, 4, 1, 2]
        names = [f"IM{order.index(i)}.dcm" for i in range(5)]
        write_series(images / "study", values, directions=tilted(), names=names)
        done, _, err = dltta("adapt", "-m", code(name), "-i", images, "-o", output, *self.GENTLE)
        assert done == 0, err
        found, frames = self.frames(output / "study.dcm")
        mean = values.mean() if name == "volume" else values.mean(axis=(1, 2), keepdims=True)
        expected = values > mean
        assert len(frames) == 5
        for number, file in enumerate(names):
            source = pydicom.dcmread(images / "study" / file)
            place, mask = frames[source.SOPInstanceUID]
            assert np.array_equal(mask, expected[number])
            assert np.allclose(place, list(map(float, source.ImagePositionPatient)))
        plane = found.SharedFunctionalGroupsSequence[0]
        orientation = plane.PlaneOrientationSequence[0].ImageOrientationPatient
        assert np.allclose(list(map(float, orientation)), tilted(), atol=1e-6)
        assert list(plane.PixelMeasuresSequence[0].PixelSpacing) == [0.8, 0.6]
        assert (found.PatientID, found.StudyInstanceUID) == (source.PatientID, source.StudyInstanceUID)
        assert b"ecret" not in (output / "stream.jsonl").read_bytes()

    def test_a_classification_is_a_table_that_evaluate_reads(self, dltta, code, folders, tmp_path):
        images, output = folders
        labels = []
        for index in range(5):
            values = random(6, 7, 3, seed=index).astype(np.uint8)
            values[2, 3, 0] = 255 if index % 2 else values[2, 3, 0]
            Pillow.fromarray(values).save(images / f"cell{index}.png")
            labels.append((f"cell{index}.png", "dark" if index < 2 else "bright"))
        given = ("--classes", "dark,bright", "--batch-size", "2", "--mode", "frozen", "--intensity", "scale:255")
        done, out, err = dltta("adapt", "-m", code("classifier"), "-i", images, "-o", output, *given)
        assert (done, out) == (0, f"{output}: 5 predicted\n"), err
        rows = list(csv.DictReader((output / "predictions.csv").open()))
        for row, (name, _) in zip(rows, labels, strict=True):
            x = np.asarray(Pillow.open(images / name))[..., 0] / 255 / np.sqrt(1 + 1e-5)  # the network's statistics
            logits = np.array([-6 * x.min(), 6 * x.max()])
            expected = np.exp(logits) / np.exp(logits).sum()
            assert row["image"] == name
            assert [float(row["dark"]), float(row["bright"])] == pytest.approx(expected, abs=1e-5)
            assert row["prediction"] == ("dark", "bright")[expected.argmax()]
        with (tmp_path / "labels.csv").open("w") as file:
            csv.writer(file).writerows([("image", "label"), *labels])
        right = np.mean([row["prediction"] == label for row, (_, label) in zip(rows, labels, strict=True)])
        for predictions in (output / "predictions.csv", output):
            done, out, _ = dltta("evaluate", "-p", predictions, "-l", tmp_path / "labels.csv", "--json")
            assert json.loads(out)["metrics"]["accuracy"] == pytest.approx(right)

    def test_a_single_image(self, dltta, code, folders):
        images, output = folders
        Pillow.fromarray(random(8, 9).astype(np.uint8)).save(images / "one.png")
        assert dltta("adapt", "-m", code("grey"), "-i", images / "one.png", "-o", output, *self.GENTLE)[0] == 0
        assert (output / "one.png").is_file()


class TestModels:
    def test_a_monai_bundle_with_a_window(self, dltta, folders, tmp_path):
        """Frozen: what MONAI's own inferer and inversion give."""
        images, output = folders
        steps = (
            {"_target_": "LoadImaged", "keys": "image"},
            {"_target_": "EnsureChannelFirstd", "keys": "image"},
            {"_target_": "ScaleIntensityRanged", "keys": "image", "a_min": 0, "a_max": 250, "b_min": 0.0, "b_max": 1.0},
        )
        make_bundle(tmp_path / "bundle", config(preprocessing=transforms(*steps)))
        values = random(18, 20, 17).astype(np.float32)
        affine = np.diag([-1.0, 1.5, 2.0, 1.0])
        nib.save(nib.Nifti1Image(values, affine), images / "scan.nii.gz")
        done, _, err = dltta("adapt", "-m", tmp_path / "bundle", "-i", images, "-o", output, "--mode", "frozen")
        assert done == 0, err
        from monai.inferers import sliding_window_inference

        x = torch.from_numpy(values)[None, None] / 250
        with torch.no_grad():
            logits = sliding_window_inference(x, (16, 16, 16), 1, network(), overlap=0.5, mode="gaussian")
        found = nib.load(output / "scan.nii.gz")
        assert np.array_equal(np.asarray(found.dataobj), logits[0].argmax(0))
        assert np.array_equal(found.affine, affine)

    def test_a_monai_bundle_adapts_goes_on_and_is_exported(self, dltta, folders, tmp_path):
        images, output = folders
        make_bundle(tmp_path / "bundle")
        for index in range(2):
            values = random(20, 18, 16, seed=index).astype(np.float32)
            nib.save(nib.Nifti1Image(values, np.diag([2.0, 2.0, 2.0, 1.0])), images / f"scan{index}.nii.gz")
        given = ("adapt", "-m", tmp_path / "bundle", "-o", output, "--method", "tent", "--no-guard")
        assert dltta(*given, "-i", images / "scan0.nii.gz")[0] == 0
        done, out, _ = dltta(*given, "-i", images, "--resume")
        assert (done, out) == (0, f"{output}: 1 predicted, 1 had a prediction\n")
        target = tmp_path / "adapted"
        assert dltta("state", "export", output, "-m", tmp_path / "bundle", "-o", target)[0] == 0
        before = torch.load(tmp_path / "bundle" / "models" / "model.pt", weights_only=True)
        after = torch.load(target / "models" / "model.pt", weights_only=True)
        assert any(not torch.equal(before[name], after[name]) for name in before)
        frozen = ("adapt", "-m", target, "-i", images, "-o", tmp_path / "frozen", "--mode", "frozen")
        assert dltta(*frozen)[0] == 0

    def test_ones_own_network_adapts_and_its_weights_are_exported(self, dltta, code, folders, tmp_path):
        images, output = folders
        write_images(images, 3)
        model = ("-m", code("grey"), "--intensity", "scale:255")
        assert dltta("adapt", *model, "-i", images, "-o", output, "--method", "tent", "--alpha", "0.1")[0] == 0
        assert dltta("state", "export", output, *model, "-o", tmp_path / "new")[0] == 0
        weights = tmp_path / "new" / "model.safetensors"
        frozen = ("adapt", *model, "--weights", weights, "-i", images, "-o", tmp_path / "frozen", "--mode", "frozen")
        assert dltta(*frozen)[0] == 0
        done, _, err = dltta("state", "export", output, "-m", code("grey"), "-o", tmp_path / "other")
        assert (done, "adapted another network than this one" in err) == (2, True)

    def test_a_network_for_one_size_is_tried_out_with_the_size_that_is_said(self, dltta, folders, tmp_path):
        images, output = folders
        write_images(images, 2, size=(20, 20))
        (tmp_path / "fixed.py").write_text(CODE + FIXED)
        given = ("adapt", "-m", f"{tmp_path / 'fixed.py'}:fixed", "-i", images, "-o", output)
        done, _, err = dltta(*given)
        assert (done, err.count("\n")) == (2, 1)
        assert "cannot be tried out (images of 20x20 only); say what it takes: --channels 3, --resize 128x128" in err
        assert dltta(*given, "--resize", "20x20")[0] == 0

    def test_a_checkpoint_adapts_and_is_exported_in_both_ways(self, dltta, checkpoint, folders, tmp_path):
        images, output = folders
        write_images(images, 3, size=(20, 24))
        assert dltta("adapt", "-m", checkpoint, "-i", images, "-o", output, "--method", "tent")[0] == 0
        for target, more in (("plain", ()), ("bundle", ("--bundle",))):
            new = tmp_path / target
            done, out, _ = dltta("state", "export", output, "-m", checkpoint, "-o", new, "--version", "2", *more)
            assert (done, out.splitlines()[0]) == (0, f"{new}: the model as adapted in {output}")
            frozen = ("adapt", "-m", new, "-i", images, "-o", tmp_path / f"{target}_out", "--mode", "frozen")
            assert dltta(*frozen)[0] == 0
        for index in range(3):
            one, other = (
                np.asarray(Pillow.open(tmp_path / f"{t}_out" / f"case_{index}.png")) for t in ("plain", "bundle")
            )
            assert np.array_equal(one, other)

    def test_an_export_says_whether_anything_moved(self, dltta, checkpoint, folders, tmp_path):
        images, _ = folders
        write_images(images, 2, size=(20, 24))
        said = {
            "tent": "the model as adapted in {}",
            "recommended": "the source model again; recommended moved no weights and no statistics in {}",
        }
        for method, words in said.items():
            output, new = tmp_path / f"{method}_out", tmp_path / method
            assert dltta("adapt", "-m", checkpoint, "-i", images, "-o", output, "--method", method)[0] == 0
            done, out, _ = dltta("state", "export", output, "-m", checkpoint, "-o", new, "-i", images)
            assert (done, out.splitlines()[0]) == (0, f"{new}: {words.format(output)}")
            again = ("-o", tmp_path / f"{method}_again", "-i", images, "--json")
            found = json.loads(dltta("state", "export", output, "-m", checkpoint, *again)[1])
            assert (found["method"], found["version"], found["images"], found["unit"]) == (method, 2, 2, "positions")
            assert (found["moved"] > 0) == (method == "tent")
            assert f"it predicts {found['difference']:.2%} of positions otherwise" in out
            before, after = (load_checkpoint(folder).model.state_dict() for folder in (checkpoint, new))
            assert sum(not torch.equal(before[name], after[name]) for name in before) == found["moved"]

    def test_an_export_compared_on_images_of_another_kind_writes_nothing(self, dltta, checkpoint, folders, tmp_path):
        images, output = folders
        write_images(images, 1, size=(20, 24))
        assert dltta("adapt", "-m", checkpoint, "-i", images, "-o", output)[0] == 0
        (tmp_path / "colors").mkdir()
        Pillow.fromarray(np.zeros((20, 24, 3), np.uint8)).save(tmp_path / "colors" / "a.png")
        compared = ("-o", tmp_path / "new", "-i", tmp_path / "colors")
        done, _, err = dltta("state", "export", output, "-m", checkpoint, *compared)
        assert (done, err.count("\n")) == (2, 1)
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("method", ["source", "ptbn", "tent"])
    @pytest.mark.parametrize("mode", ["continual", "image-specific", "shadow", "frozen"])
    def test_every_method_runs_in_every_mode(self, dltta, checkpoint, folders, method, mode):
        images, output = folders
        write_images(images, 2, size=(20, 24))
        given = ("-m", checkpoint, "-i", images, "-o", output, "--method", method, "--mode", mode)
        done, _, err = dltta("adapt", *given)
        assert done == 0, err
        assert len(lines(output)) == 3


BAD = {
    "truncated.png": ("cannot be read as PNG", lambda path: path.write_bytes(png(random(8, 12))[:70])),
    "text.nii.gz": ("cannot be read as NIfTI", lambda path: path.write_text("this is text")),
    "nan.nii.gz": ("values are NaN or infinite", lambda path: nifti(path, np.full((4, 4, 4), np.nan))),
    "time.nii.gz": ("4-D NIfTI (4, 4, 4, 2)", lambda path: nifti(path, np.zeros((4, 4, 4, 2)))),
    "color.png": ("this one has 3", lambda path: path.write_bytes(png(random(8, 12, 3)))),
    "empty.png": ("cannot be read as PNG", lambda path: path.write_bytes(b"")),
    "cmyk.tif": (
        "CMYK images are not supported",
        lambda path: tifffile.imwrite(path, random(8, 12, 4).astype(np.uint8), photometric="separated"),
    ),
}


def png(values):
    from io import BytesIO

    Pillow.fromarray(values.astype(np.uint8)).save(stream := BytesIO(), format="PNG")
    return stream.getvalue()


def nifti(path, values):
    nib.save(nib.Nifti1Image(values.astype(np.float32), np.eye(4)), path)


class TestErrors:
    @pytest.mark.parametrize("name", BAD)
    def test_a_bad_image_is_one_line_and_the_stream_stops_or_goes_on(self, dltta, code, folders, name):
        images, output = folders
        words, make = BAD[name]
        write_images(images, 2, seed=3)
        (images / "case_0.png").rename(images / "a.png")
        (images / "case_1.png").rename(images / "z.png")
        make(images / name)
        given = ("adapt", "-m", code("grey"), "-i", images, "-o", output)
        done, out, err = dltta(*given)
        notice, bar, sentence = err.splitlines()
        assert (done, out) == (2, "")
        assert notice.startswith("warning: the model was not rehearsed with: ")
        assert bar.startswith("adapt ")
        assert sentence.startswith("error: ")
        assert words in sentence
        assert name.split(".")[0] in sentence
        assert [line.get("case") for line in lines(output)] == [None, "a"]
        done, out, err = dltta(*given, "--resume", "--on-error", "skip")
        assert (done, first(out)) == (1, f"{output}: 1 predicted, 1 had a prediction, 1 skipped")
        sentence = err.splitlines()[2]
        assert (sentence.startswith("skipped: "), err.count("\n")) == (True, 4)  # the last names the log's end
        assert words in sentence
        assert sorted(path.name for path in output.glob("*.png")) == ["a.png", "z.png"]

    def test_skipped_cases_are_told_to_machines(self, dltta, code, folders):
        images, output = folders
        write_images(images, 2)
        (images / "bad.png").write_bytes(b"")
        given = ("adapt", "-m", code("grey"), "-i", images, "-o", output, "--on-error", "skip", "--json")
        done, out, _ = dltta(*given)
        found = json.loads(out)
        assert (done, found["predicted"], found["output"]) == (1, 2, str(output))
        assert "bad.png: cannot be read as PNG" in found["failed"][0]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (("--method", "tents"), "did you mean 'tent'?"),
            (("--rate", "dynamik"), "did you mean 'dynamic'?"),
            (("--mode", "frosen"), "'frosen' is not one of 'continual', 'image-specific', 'shadow', 'frozen'"),
            (("--on-error", "halt"), "Invalid value for '--on-error': 'halt' is not one of 'stop', 'skip'. Try --help"),
            (("--order", "size"), "'size' is not one of 'name', 'time'"),
            (("--method", "tents.entropy:Tent"), "there is no module 'tents'"),
            (("--rate", "fixed"), "recommended chooses its own rate; name a method"),
            (("--idle", "3"), "--idle ends a watch; add --watch"),
            (("--patch", "8by8"), "'8by8' is not a size"),
            (("--patch", "8x8x8"), "cannot be tried out (expected 4D input (got 5D input))"),
            (("--intensity", "scale"), "write zscore, scale:255 or imagenet:255"),
            (("--intensity", "scale:white"), "is not the largest value of an image"),
            (("--intensity", "zcore"), "did you mean 'zscore'?"),
            (("--method", "ttt"), "this model has no rotation head"),
            (("--method", "tent", "--statistics", "shrinkage"), "need a calibrated model"),
            (("--batch-size", "3"), "segmentations are adapted to one by one"),
            (("--method", "tent", "--steps", "0"), "steps must be at least 1"),
            (("--device", "quantum"), "device 'quantum' cannot be used"),
            (("--method", "tent", "--alpha", "-1"), "must be a finite number"),
        ],
    )
    def test_wrong_options_are_one_line_and_nothing_is_written(self, dltta, code, folders, change, words):
        images, output = folders
        write_images(images, 1)
        done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output, *change)
        assert (done, err.count("\n")) == (2, 1), err
        assert words in err
        assert not output.exists()

    def test_an_empty_folder(self, dltta, code, folders):
        images, output = folders
        done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output)
        assert (done, err) == (2, f"error: {images}: the folder is empty; give PNG, TIFF, NIfTI or DICOM images\n")
        assert not output.exists()

    def test_an_output_that_cannot_be_written(self, dltta, code, folders):
        images, _ = folders
        write_images(images, 1)
        done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", "/sys/predictions")
        assert (done, err.count("\n")) == (2, 1)
        assert "error: /sys/predictions: cannot be written" in err

    def test_an_output_that_is_no_folder(self, dltta, code, folders):
        images, output = folders
        write_images(images, 1)
        output.symlink_to(output)
        done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output)
        assert (done, err) == (
            2,
            f"error: {output}: a link that leads in a circle; choose another folder for the predictions\n",
        )
        output.unlink()
        output.write_text("mine")
        done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output)
        assert (done, err) == (2, f"error: {output} is a file; choose a folder for the predictions\n")
        assert output.read_text() == "mine"

    def test_images_numbered_from_0000_are_told_that_they_count_as_channels(self, dltta, code, folders):
        images, output = folders
        for path in write_images(images, 3).iterdir():
            path.rename(images / path.name.replace("case_", "frame_000"))
        done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output)
        assert (done, err.splitlines()[-1]) == (
            2,
            "error: the network takes images of 1 channels, this one has 3; frame_0000.png to frame_0002.png "
            "count as its channels: end names otherwise than in _0000 if they are cases of their own",
        )

    @pytest.mark.parametrize("inside", [".", "predictions", "images", "new/deeper"])
    def test_predictions_do_not_lie_among_the_images(self, dltta, code, folders, inside):
        images, output = folders
        write_images(images, 1)
        output.symlink_to(images / inside)
        for place in (images / inside, output):
            done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", place)
            assert (done, err.count("\n")) == (2, 1)
            assert f"error: {place} lies in {images}, where images are looked for; choose a folder outside" in err
        assert [path.name for path in images.iterdir()] == ["case_0.png"]

    def test_predictions_of_a_site_never_become_its_test_images(self, dltta, code, folders):
        """Without imagesTs its images are those of imagesTr, with it those of imagesTs."""
        site, _ = folders
        write_images(site / "imagesTr", 1)
        (site / "dataset.json").write_text("{}")
        done, _, err = dltta("adapt", "-m", code("grey"), "-i", site, "-o", site / "imagesTs")
        assert (done, "lies in" in err, (site / "imagesTs").exists()) == (2, True, False)

    def test_images_do_not_lie_among_the_predictions(self, dltta, code, folders):
        images, _ = folders
        write_images(images, 1)
        for given in (images, images / "case_0.png"):
            done, _, err = dltta("adapt", "-m", code("grey"), "-i", given, "-o", images.parent)
            assert (done, err.count("\n")) == (2, 1)
            assert f"error: {given} lies in {images.parent}; choose a folder for the predictions" in err
        assert not (images.parent / "state").exists()

    def test_a_single_image_may_lie_beside_the_folder_of_its_prediction(self, dltta, code, folders):
        images, _ = folders
        write_images(images, 2)
        given = ("-i", images / "case_0.png", "-o", images / "predictions")
        assert dltta("adapt", "-m", code("grey"), *given)[0] == 0
        assert (images / "predictions" / "case_0.png").is_file()

    def test_a_second_stream_into_the_same_folder(self, dltta, code, folders):
        images, output = folders
        write_images(images, 1)
        assert dltta("adapt", "-m", code("grey"), "-i", images, "-o", output)[0] == 0
        done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output)
        assert (done, "already holds a stream; add --resume to continue it" in err) == (2, True)


CAN_MOUNT = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not CAN_MOUNT, reason="this machine lets nobody mount a disk of his own")
class TestRealDisks:
    """A disk of half a megabyte, and one that is read-only, in a namespace of their own."""

    def adapt(self, folder, checkpoint, images, *, size, before="true", after=""):
        python = f"{sys.executable} -m dltta"
        command = f"{python} adapt -m {checkpoint} -i {images} -o {folder}/out --resume"
        script = f'mount -t tmpfs -o size={size} x {folder} && {{ {before}; {command}; echo "ended $?" >&2; {after} }}'
        return subprocess.run(["unshare", "-rm", "sh", "-c", script], capture_output=True, text=True, check=False)

    def test_a_disk_that_fills_up_and_gets_room_again(self, checkpoint, folders, tmp_path):
        images, _ = folders
        write_images(images, 12, size=(40, 48))
        disk = tmp_path / "disk"
        disk.mkdir()
        dltta = f"{sys.executable} -m dltta"
        again = f"{dltta} adapt -m {checkpoint} -i {images} -o {disk}/out --resume; {dltta} state verify {disk}/out"
        again = f"mount -o remount,size=50m {disk}; {again};"
        done = self.adapt(disk, checkpoint, images, size="400k", after=again)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert "cannot be written (No space left on device); free space" in errors[0]
        assert "ended 2" in done.stderr
        assert "Traceback" not in done.stderr
        assert "had a prediction" in done.stdout
        assert "the record is as it was written" in done.stdout

    def test_a_disk_that_is_read_only(self, checkpoint, folders, tmp_path):
        images, _ = folders
        write_images(images, 2)
        disk = tmp_path / "disk"
        disk.mkdir()
        done = self.adapt(disk, checkpoint, images, size="1m", before=f"mount -o remount,ro {disk}")
        assert "cannot be written (Read-only file system)" in done.stderr
        assert ("ended 2" in done.stderr, "Traceback" in done.stderr) == (True, False)


class TestState:
    @pytest.fixture
    def output(self, dltta, checkpoint, folders):
        images, output = folders
        write_images(images, 3, size=(20, 24))
        given = ("adapt", "-m", checkpoint, "-i", images, "-o", output, "--method", "tent", "--guard")
        assert dltta(*given)[0] == 0
        return output

    def test_list_and_show(self, dltta, output):
        done, out, _ = dltta("state", "list", output)
        assert done == 0
        head, *rows = [row.split() for row in out.splitlines()]
        assert head == ["version", "size", "made", "by"]
        assert [row[-1] for row in rows] == ["start", "case_0", "case_1", "case_2"]
        assert rows[-1][:2] == ["*", "3"]
        listed = json.loads(dltta("state", "list", output, "--json")[1])
        assert rows[-1][2:4] == [f"{listed[-1]['bytes'] / 1000:.1f}", "kB"]
        assert [entry["version"] for entry in json.loads(dltta("state", "list", output, "--json")[1])] == [0, 1, 2, 3]
        out = dltta("state", "show", output, "--version", "1")[1]
        told = {key.strip(): value for key, value in (line.split("  ", 1) for line in out.splitlines() if "  " in line)}
        assert (told["version"].strip(), told["batches seen"].strip(), told["pairs in memory"].strip()) == ("1",) * 3
        assert re.search(r"^  recipe.method +tent$", out, re.MULTILINE)
        assert re.search(r"^  recipe.guard +yes$", out, re.MULTILINE)
        assert re.search(r"^  window +none$", out, re.MULTILINE)
        assert re.search(r"^  network +[0-9a-f]{12}…$", out, re.MULTILINE)
        assert max(map(len, out.splitlines())) <= 80
        assert re.search(r"^  classes +background, a, b$", out, re.MULTILINE)
        assert re.search(r"^adapted tensors +36, such as conv_0\S+$", out, re.MULTILINE)
        assert json.loads(dltta("state", "show", output, "--json")[1])["version"] == 3

    def test_the_log_as_a_table(self, dltta, output):
        head, *rows = [row.split() for row in dltta("state", "cases", output)[1].splitlines()]
        assert head[:2] == ["case", "decision"]
        assert "expected" not in head  # a named method expects nothing, so the column is left out
        assert [row[0] for row in rows] == ["case_0", "case_1", "case_2"]
        logged = json.loads(dltta("state", "cases", output, "--json")[1])
        assert [row[1] for row in rows] == [line["decision"] for line in logged]
        assert dltta("state", "cases", output, "--review")[:2] == (0, f"{output}: no case to review\n")

    def test_the_table_says_what_to_expect_and_what_to_look_at(self, dltta, tmp_path):
        good = {"case": "a", "prediction": "a.png", "decision": "accepted", "candidate": "batch", "quality": 0.9}
        poor = {**good, "case": "b", "quality": 0.412, "quality_low": 0.2, "quality_high": 0.66, "review": True}
        skipped = {"case": "c", "error": "cannot be read"}
        Journal(tmp_path / "stream.jsonl", tmp_path / "head").append([good, {**poor, "change": 0.25}, skipped])
        out = dltta("state", "cases", tmp_path)[1]
        assert out.splitlines()[0].split() == ["case", "decision", "reason", "given", "expected", "changed", "review"]
        assert [" ".join(row.split()) for row in out.splitlines()[1:]] == [
            "a accepted batch 90",
            "b accepted batch 41 (20–66) 25.0% look at it",
            "c skipped cannot be read",
        ]
        assert [row.split()[0] for row in dltta("state", "cases", tmp_path, "--review")[1].splitlines()[1:]] == ["b"]

    def test_roll_back_and_go_on(self, dltta, output, checkpoint, folders):
        done, out, _ = dltta("state", "rollback", output, "--to", "1")
        assert (done, out) == (0, f"{output}: version 4 is version 1 again\n")
        same = ("-m", checkpoint, "-i", folders[0], "-o", output, "--method", "tent", "--guard")
        assert dltta("adapt", *same, "--resume")[0] == 0
        assert dltta("state", "list", output)[1].splitlines()[-1].split()[-3:] == ["rollback", "to", "1"]

    def test_verify(self, dltta, output):
        assert dltta("state", "verify", output)[:2] == (0, f"{output}: the record is as it was written\n")
        (output / "case_1.png").unlink()
        assert dltta("state", "verify", output)[:2] == (1, f"{output / 'case_1.png'} is missing\n")
        assert json.loads(dltta("state", "verify", output, "--json")[1]) == [f"{output / 'case_1.png'} is missing"]

    @pytest.mark.parametrize(
        "command",
        [
            ("list",),
            ("cases",),
            ("show",),
            ("verify",),
            ("rollback", "--to", "0"),
            ("export", "-m", "MODEL", "-o", "new"),
        ],
        ids=lambda command: command[0],
    )
    def test_a_folder_that_is_no_stream_is_one_line(self, dltta, checkpoint, folders, command):
        name, *options = (str(checkpoint) if part == "MODEL" else part for part in command)
        done, _, err = dltta("state", name, folders[0], *options)
        assert (done, err.count("\n")) == (2, 1)
        assert "is not the output of dltta adapt" in err

    @pytest.mark.parametrize(
        ("command", "words"),
        [
            (("show", "--version", "9"), "there is no version 9; there are 0-3"),
            (("rollback", "--to", "9"), "there is no version 9; there are 0-3"),
        ],
    )
    def test_a_version_that_is_not_there_is_one_line(self, dltta, output, command, words):
        done, _, err = dltta("state", command[0], output, *command[1:])
        assert (done, err.count("\n"), words in err) == (2, 1, True)

    def test_export_into_a_full_folder_is_one_line(self, dltta, output, checkpoint, folders):
        done, _, err = dltta("state", "export", output, "-m", checkpoint, "-o", folders[0])
        assert (done, err.count("\n")) == (2, 1)
        assert "is there already and not empty" in err

    def test_a_list_of_long_and_marked_up_names_fits_80_columns(self, dltta, checkpoint, folders, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        images, output = folders
        write_images(images, 2, size=(20, 24))
        (images / "case_0.png").rename(images / "[red]x[red].png")
        (images / "case_1.png").rename(images / f"{'very_' * 30}long.png")
        assert dltta("adapt", "-m", checkpoint, "-i", images, "-o", output)[0] == 0
        out = dltta("state", "list", output)[1]
        assert max(map(len, out.splitlines())) <= 80
        assert "[red]x[red]" in out
        assert re.search(r"very_(very_)+.*…$", out.rstrip())


class TestHooked:
    """What happens in the middle of a stream: the model's own code does it, when it sees a certain image."""

    HOOKED = """
import signal
from pathlib import Path

from bright import Bright


class Hooked(Bright):
    def forward(self, x):
        found = Path(__file__).with_name(f"when_{int(x.max())}.py")
        if found.exists():
            exec(found.read_text())
        return super().forward(x)


def hooked(): return Hooked(2, 1, True)
"""

    @pytest.fixture
    def hooked(self, code, tmp_path, monkeypatch):
        monkeypatch.syspath_prepend(tmp_path)
        (tmp_path / "hooked.py").write_text(self.HOOKED)
        return f"{tmp_path / 'hooked.py'}:hooked"

    def image(self, folder, brightest):
        values = random(8, 12, seed=brightest) % brightest
        values[0, 0] = brightest
        Pillow.fromarray(values.astype(np.uint8)).save(folder / f"case_{brightest}.png")

    def test_a_watch_predicts_what_arrives_until_a_file_named_stop(self, dltta, hooked, folders, tmp_path):
        """Resumed, the watch ends after its idle time: nothing that was predicted counts as news."""
        images, output = folders
        self.image(images, 201)
        self.image(tmp_path, 202)
        later = tmp_path / "case_202.png"
        (tmp_path / "when_201.py").write_text(
            f"p = Path({str(later)!r})\nif p.exists(): p.rename({str(images)!r} + '/later.png')"
        )
        (tmp_path / "when_202.py").write_text(f"Path({str(images / 'STOP')!r}).touch()")
        given = ("adapt", "-m", hooked, "-i", images, "-o", output, "--watch")
        done, out, err = dltta(*given)
        assert (done, first(out)) == (0, f"{output}: 2 predicted"), err
        before = told(output)
        (images / "STOP").unlink()
        (images / "case_201.png").write_bytes(b"not looked at")
        done, out, _ = dltta(*given, "--idle", "0.1", "--resume")
        assert (done, first(out)) == (0, f"{output}: 0 predicted")
        assert told(output) == before

    def test_ctrl_c_keeps_what_was_predicted(self, dltta, hooked, folders, tmp_path):
        images, output = folders
        for brightest in (201, 202, 203):
            self.image(images, brightest)
        (tmp_path / "when_203.py").write_text("signal.raise_signal(signal.SIGINT)")
        usual = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            done, out, err = dltta("adapt", "-m", hooked, "-i", images, "-o", output)
        finally:
            signal.signal(signal.SIGINT, usual)
        assert (done, out) == (130, "")
        assert err.splitlines()[-1].startswith("interrupted; the same command continues where it stopped, adapt and")
        assert [line["case"] for line in lines(output) if "prediction" in line] == ["case_201", "case_202"]
        (tmp_path / "when_203.py").unlink()
        done, out, _ = dltta("adapt", "-m", hooked, "-i", images, "-o", output, "--resume")
        assert (done, first(out)) == (0, f"{output}: 1 predicted, 2 had a prediction")


def test_what_was_ignored_is_counted_at_the_end_and_in_json(dltta, code, folders):
    images, output = folders
    write_images(images, 1)
    (images / "notes.txt").write_text("x")
    (images / "a.jpg").write_text("x")
    (images / "b.jpg").write_text("x")
    done, out, _ = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output)
    assert (done, out.splitlines()[-1]) == (0, "ignored: 2 .jpg, 1 .txt")
    done, out, _ = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output, "--resume", "--json")
    assert (done, json.loads(out)["ignored"]) == (0, {".jpg": 2, ".txt": 1})


def test_settle_is_for_a_watch(dltta, code, folders):
    images, output = folders
    write_images(images, 1)
    given = ("adapt", "-m", code("grey"), "-i", images, "-o", output, "--settle", "1")
    assert "add --watch" in dltta(*given)[2]
    assert dltta(*given, "--watch", "--idle", "0.1")[0] == 0


def test_an_anonymous_mask_tells_no_description(dltta, code, folders):
    images, output = folders
    images.mkdir(exist_ok=True)
    named = nib.Nifti1Image(np.random.default_rng(0).integers(0, 200, (8, 12, 3)).astype(np.int16), np.eye(4))
    named.header["descrip"] = b"Jane Doe"
    named.header["db_name"] = b"Jane Doe"
    nib.save(named, images / "jane.nii")
    done, _, err = dltta("adapt", "-m", code("grey"), "-i", images, "-o", output, "--anonymize")
    assert done == 0, err
    assert "anonymize takes names" in err
    (mask,) = output.glob("*.nii")
    assert b"Jane" not in mask.read_bytes()
    assert b"Jane" not in (output / "stream.jsonl").read_bytes()


def test_a_bad_file_does_not_end_a_watch(dltta, code, folders):
    images, output = folders
    write_images(images, 2)
    Pillow.new("RGB", (12, 8)).save(images / "case_00.png")  # the model takes one channel
    given = ("adapt", "-m", code("grey"), "-i", images, "-o", output)
    done, out, _ = dltta(*given, "--watch", "--idle", "0.1", "--settle", "0.1")
    assert (done, first(out)) == (1, f"{output}: 2 predicted, 1 skipped")
    assert dltta(*given, "--resume", "--watch", "--idle", "0.1", "--settle", "0.1", "--on-error", "stop")[0] == 2
