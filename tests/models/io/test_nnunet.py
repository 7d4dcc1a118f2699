"""nnU-Net's result folders: opened safely, and without adaptation predicted as nnU-Net predicts, voxel for voxel."""

import json
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image as Pillow

pytest.importorskip("nnunetv2", reason="the extra nnunet is not installed")

from commands import typed
from dltta.config import make_adapter
from dltta.data.formats.images import read_channels, read_mask
from dltta.data.sites import open_site
from dltta.errors import DlttaError
from dltta.evaluation.home import of_site
from dltta.models.io.nnunet.images import as_read
from dltta.models.io.opening import open_model
from dltta.predictor import Predictor, load
from dltta.quality.choosing import ChoosingAdapter
from dltta.recipes import paper, recommended
from nnunets import plans, predicted_by_nnunet, write_nnunet

OBLIQUE = np.array([[0.0, -1.3, 0.0, 4], [0.9, 0.0, 0.0, -7], [0.0, 0.0, 1.7, 1], [0, 0, 0, 1]])


def write_volumes(folder, count=2, shape=(11, 13, 9), channels=1, affine=OBLIQUE):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(1)
    for number in range(count):
        for channel in range(channels):
            values = rng.normal(100, 50, size=shape).astype(np.float32)
            values[:2] = 0  # cropped away by nnU-Net where all channels are zero
            nib.save(nib.Nifti1Image(values, affine), folder / f"case{number}_{channel:04d}.nii.gz")
    return folder


def masks(folder, ending=".nii.gz"):
    return {path.name: read_mask(path) for path in sorted(folder.glob(f"*{ending}"))}


def adapt(monkeypatch, capsys, *arguments):
    code, out, err = typed(monkeypatch, capsys, "adapt", *arguments)
    assert code == 0, err
    return out


def same_as_nnunet(monkeypatch, capsys, tmp_path, model, images, folds=(0,), ending=".nii.gz"):
    predicted_by_nnunet(model, images, tmp_path / "theirs", folds)
    capsys.readouterr()
    options = ("--method", "source", "--fold", ",".join(map(str, folds)))
    adapt(monkeypatch, capsys, "-m", model, "-i", images, "-o", tmp_path / "ours", *options)
    theirs, ours = masks(tmp_path / "theirs", ending), masks(tmp_path / "ours", ending)
    assert theirs.keys() == ours.keys()
    assert len(theirs) == 2
    for name, mask in theirs.items():
        assert len(np.unique(mask)) > 1  # something to differ in
        assert np.array_equal(mask, ours[name])


class TestPredictions:
    """Without adaptation."""

    @pytest.mark.parametrize("axes", [2, 3])
    def test_masks_are_nnunets_own(self, tmp_path, monkeypatch, capsys, axes):
        model, images = write_nnunet(tmp_path, axes), write_volumes(tmp_path / "in")
        same_as_nnunet(monkeypatch, capsys, tmp_path, model, images)

    def test_two_folds_predict_together_as_nnunets_do(self, tmp_path, monkeypatch, capsys):
        model = write_nnunet(tmp_path, 2, folds=("0", "1"), mirroring=(0,))
        images = write_volumes(tmp_path / "in", shape=(9, 11, 3))
        same_as_nnunet(monkeypatch, capsys, tmp_path, model, images, (0, 1))

    def test_low_resolution_transposed_and_reoriented_volumes_of_two_channels(self, tmp_path, monkeypatch, capsys):
        planned = plans(3, channels=2, spacing=(2.1, 1.4, 1.6))
        planned |= {"image_reader_writer": "NibabelIOWithReorient"}
        planned |= {"transpose_forward": [2, 0, 1], "transpose_backward": [1, 2, 0]}
        model = write_nnunet(tmp_path, 3, channels=2, planned=planned, mirroring=(0, 2))
        images = write_volumes(tmp_path / "in", channels=2)
        same_as_nnunet(monkeypatch, capsys, tmp_path, model, images)

    def test_2d_images_in_color(self, tmp_path, monkeypatch, capsys):
        planned = plans(2, channels=3) | {"image_reader_writer": "NaturalImage2DIO"}
        model = write_nnunet(tmp_path, 2, channels=3, planned=planned, ending=".png")
        (tmp_path / "in").mkdir()
        for name in "ab":
            values = np.random.default_rng(ord(name)).integers(0, 255, (15, 21, 3), np.uint8)
            Pillow.fromarray(values).save(tmp_path / "in" / f"{name}_0000.png")
        same_as_nnunet(monkeypatch, capsys, tmp_path, model, tmp_path / "in", ending=".png")

    def test_probabilities_are_of_the_mask(self, tmp_path):
        opened = open_model(str(write_nnunet(tmp_path, 3, mirroring=(0,))))
        (file,) = write_volumes(tmp_path / "in", 1).iterdir()
        predictor = Predictor(opened, make_adapter(opened, paper("source")))
        found = predictor.segment("case", load(opened, read_channels([file]), ""))
        assert found.probabilities.shape == (3, 11, 13, 9)
        assert torch.allclose(found.probabilities.sum(0), torch.ones(11, 13, 9), atol=1e-3)
        agreeing = (found.probabilities.argmax(0) == found.labels(opened)).float().mean()
        assert agreeing > 0.999  # resampled logits may tie in probability
        assert (found.labels(opened)[:2] == 0).all()  # cut away: background


@pytest.mark.parametrize("reader", ["SimpleITKIO", "NibabelIO", "NibabelIOWithReorient"])
@pytest.mark.parametrize("turned", [False, True])
def test_images_are_as_nnunets_readers_give_them(tmp_path, reader, turned):
    from nnunetv2.imageio.reader_writer_registry import recursive_find_reader_writer_by_name

    affine = OBLIQUE if turned else np.diag([-0.7, 0.9, 1.1, 1])
    image = nib.Nifti1Image(np.random.default_rng(0).integers(0, 900, (4, 5, 6)).astype(np.int16), affine)
    image.header.set_slope_inter(0.25, 3)
    nib.save(image, tmp_path / "a.nii.gz")
    data, properties = recursive_find_reader_writer_by_name(reader)().read_images([str(tmp_path / "a.nii.gz")])
    read = read_channels([tmp_path / "a.nii.gz"])
    ours, spacing, back = as_read(read, reader)
    assert np.array_equal(ours, data)
    assert list(spacing) == list(properties["spacing"])
    assert np.array_equal(back(data), read.array)


class TestAdapting:
    """A step per window, of every fold."""

    def test_mirrored_copies_teach_nothing(self, tmp_path):
        opened = open_model(str(write_nnunet(tmp_path, 2)))
        (file,) = write_volumes(tmp_path / "in", 1, (10, 12, 3), affine=np.eye(4)).iterdir()
        adapter = make_adapter(opened, paper("tent", "fixed"))
        Predictor(opened, adapter).segment("case", load(opened, read_channels([file]), ""))
        # two of ten columns are zero and cut away: 12 rows x 8 columns in windows of 8 x 8, half a window apart: 2 x 1
        assert adapter.batches_seen == 2 * 1 * 3  # in each of three slices

    def test_a_stopped_stream_of_two_folds_goes_on_as_if_it_had_not(self, tmp_path, monkeypatch, capsys):
        model = write_nnunet(tmp_path, 2, folds=("0", "1"), mirroring=(1,))
        images = write_volumes(tmp_path / "in", 3, shape=(9, 11, 3))
        options = ("--method", "tent", "--rate", "dynamic", "--alpha", "0.05", "--pool", "2", "--save-probabilities")
        adapt(monkeypatch, capsys, "-m", model, "-i", images, "-o", tmp_path / "whole", *options)
        last = images / "case2_0000.nii.gz"
        last.rename(tmp_path / "case2_0000.nii.gz")
        adapt(monkeypatch, capsys, "-m", model, "-i", images, "-o", tmp_path / "parts", *options)
        (tmp_path / "case2_0000.nii.gz").rename(last)
        adapt(monkeypatch, capsys, "-m", model, "-i", images, "-o", tmp_path / "parts", "--resume", *options)
        frozen = ("--mode", "frozen", "--save-probabilities")
        adapt(monkeypatch, capsys, "-m", model, "-i", images, "-o", tmp_path / "source", *frozen)
        whole, parts, source = (
            np.asarray(nib.load(tmp_path / part / "case2_probabilities.nii.gz").dataobj)
            for part in ("whole", "parts", "source")
        )
        assert np.array_equal(whole, parts)
        assert not np.allclose(whole, source, atol=1e-3)

    def test_the_guard_predicts_mirrored_copies_with_the_model_it_chose(self, tmp_path):
        opened = open_model(str(write_nnunet(tmp_path, 2)))
        adapter = make_adapter(opened, paper("tent", "fixed").changed(guard=True))
        for parameter in adapter.adapted_parameters().values():
            parameter.data += 1
        step = adapter.step(torch.zeros(1, 1, 8, 8))  # constant: the source model predicts
        x = torch.rand(1, 1, 8, 8)
        assert step.decision.outcome.by_source
        assert torch.allclose(adapter.again(x, step), opened.model(x), atol=1e-5)

    def test_an_exported_folder_is_predicted_by_nnunet_as_by_us(self, tmp_path, monkeypatch, capsys):
        model = write_nnunet(tmp_path / "results", 2, folds=("0", "1"), mirroring=(0,))
        images = write_volumes(tmp_path / "in", shape=(9, 11, 3))
        options = ("--method", "tent", "--rate", "fixed", "--alpha", "0.3")
        adapt(monkeypatch, capsys, "-m", model, "-i", images, "-o", tmp_path / "out", *options)
        new = tmp_path / "new"
        code, out, err = typed(
            monkeypatch, capsys, "state", "export", tmp_path / "out", "-m", model, "-o", new, "-i", images
        )
        assert code == 0, err
        assert "it predicts 0.00% of positions otherwise than the model that adapts, on 2 images" in out
        files = (folder / "fold_1" / "checkpoint_final.pth" for folder in (model, new))
        before, after = (torch.load(file, weights_only=False) for file in files)
        key = "decoder.stages.0.convs.0.norm.weight"
        assert not torch.equal(before["network_weights"][key], after["network_weights"][key])
        assert before["init_args"] == after["init_args"]
        same_as_nnunet(monkeypatch, capsys, tmp_path / "again", new, images, (0, 1))


def test_bench_inspect_and_card_take_it(tmp_path, monkeypatch, capsys):
    model = write_nnunet(tmp_path, 2, folds=("0", "1"), mirroring=(0,))
    site = tmp_path / "site"
    images = write_volumes(site / "imagesTr", shape=(9, 11, 3))
    (site / "labelsTr").mkdir()
    for file in images.iterdir():
        label = (read_mask_of(file) > 100).astype(np.uint8)
        nib.save(nib.Nifti1Image(label, OBLIQUE), site / "labelsTr" / file.name.replace("_0000", ""))
    described = {"channel_names": {"0": "MR"}, "labels": {"background": 0, "cord": 1, "grey": 2}}
    (site / "dataset.json").write_text(json.dumps(described | {"file_ending": ".nii.gz"}))
    options = ("--methods", "source,tent", "--rates", "fixed:0.1", "-o", tmp_path / "bench")
    code, _, err = typed(monkeypatch, capsys, "bench", "--model", model, "--target", site, *options)
    assert code == 0, err
    found = json.loads((tmp_path / "bench" / "results.json").read_text())
    dice = {row["method"]: row["mean"] for row in found["summary"] if row["metric"] == "dice"}
    adapt(monkeypatch, capsys, "-m", model, "-i", images, "-o", tmp_path / "out", "--method", "source")
    by_hand = []
    for name, mask in masks(tmp_path / "out").items():
        label = read_mask(site / "labelsTr" / name)
        by_hand.append(2 * ((mask == 1) & (label == 1)).sum() / ((mask == 1).sum() + (label == 1).sum()))
    cord = {row["method"]: row["mean"] for row in found["summary"] if row["metric"] == "dice_cord"}
    assert (cord or dice)["source"] == pytest.approx(np.mean(by_hand), abs=1e-6)
    (tent,) = (stream for stream in found["streams"] if stream["method"] == "tent")
    assert all(case["rate"] == pytest.approx(0.1) and case["loss"] > 0 for case in tent["cases"])
    code, out, _ = typed(monkeypatch, capsys, "inspect", model, "--json")
    assert json.loads(out)["kind"] == "nnunet"
    assert json.loads(out)["methods"]["tent"]["works"]
    code, out, _ = typed(monkeypatch, capsys, "model", "card", model)
    assert "- **Data set**: Dataset001_phantom" in out
    assert "- **Folds**: 0, 1" in out


def read_mask_of(file):
    return np.asarray(nib.load(file).dataobj)


class TestCalibrating:
    """Rehearsal with nnU-Net's own preprocessing, all folds together."""

    def site(self, folder, count=3, shape=(14, 16, 12)):
        """Labeled volumes in which a label can be told by its value."""
        rng = np.random.default_rng(0)
        for part in ("imagesTr", "labelsTr"):
            (folder / part).mkdir(parents=True)
        for number in range(count):
            label = np.zeros(shape, np.uint8)
            row, column = rng.integers(3, 6, 2)
            label[row : row + 6, column : column + 7, 2:10] = 1
            label[row + 2 : row + 4, column + 2 : column + 5, 4:8] = 2
            values = (10 + 100.0 * label).astype(np.float32)
            values[:2] = 0  # cropped away
            nib.save(nib.Nifti1Image(values, OBLIQUE), folder / "imagesTr" / f"case{number}_0000.nii.gz")
            nib.save(nib.Nifti1Image(label, OBLIQUE), folder / "labelsTr" / f"case{number}.nii.gz")
        described = {"channel_names": {"0": "MR"}, "labels": {"background": 0, "cord": 1, "grey": 2}}
        (folder / "dataset.json").write_text(json.dumps(described | {"file_ending": ".nii.gz"}))
        return folder

    @pytest.mark.parametrize(("axes", "reader"), [(2, "SimpleITKIO"), (3, "NibabelIOWithReorient")])
    def test_labels_are_where_the_image_shows_them(self, tmp_path, axes, reader):
        planned = plans(axes, spacing=[1.2, 1.1, 1.0][:axes])
        planned |= {"image_reader_writer": reader, "transpose_forward": [1, 0, 2], "transpose_backward": [1, 0, 2]}
        opened = open_model(str(write_nnunet(tmp_path, axes, planned=planned)))
        home = of_site(opened, open_site(self.site(tmp_path / "site")))
        assert home.sliced == (axes == 2)
        assert all(image.shape == (1, *label.shape) == (1, *[8] * axes) for image, label in home.pairs)
        means = [
            torch.cat([image[0][label == value] for image, label in home.pairs]).mean().item() for value in range(3)
        ]
        assert means[0] < means[1] < means[2]
        middle = (means[0] + means[1]) / 2
        alike = torch.cat([((image[0] > middle) == (label > 0)).flatten() for image, label in home.pairs])
        assert alike.float().mean() > 0.97

    @pytest.mark.long
    @pytest.mark.usefixtures("short_rehearsal")
    def test_folds_rehearse_together_and_predict_as_they_rehearsed(self, tmp_path, monkeypatch, capsys):
        model = write_nnunet(tmp_path, 3, folds=("0", "1"), mirroring=(0,))
        site = self.site(tmp_path / "site")

        def dltta(*arguments):
            return typed(monkeypatch, capsys, *arguments)

        code, out, err = dltta("calibrate", "-m", model, "-i", site, "-o", tmp_path / "known")
        assert code == 0, err
        assert "batches of 1: source" in out
        kept = json.loads((tmp_path / "known" / "rehearsal.json").read_text())
        assert kept["batch_sizes"]["1"]["default"]["plan"]["flip"] is None  # nnU-Net mirrors
        known = ("--calibration", tmp_path / "known")
        adapt(monkeypatch, capsys, "-m", model, "-i", site / "imagesTr", "-o", tmp_path / "out", *known)
        entries = map(json.loads, (tmp_path / "out" / "stream.jsonl").read_text().splitlines())
        entries = [entry for entry in entries if "case" in entry]
        assert len(entries) == 3
        assert all(0 <= entry["quality_low"] <= entry["quality"] <= entry["quality_high"] <= 1 for entry in entries)
        together = make_adapter(open_model(str(model), calibration=tmp_path / "known"), recommended())
        assert isinstance(together, ChoosingAdapter)  # of both folds: what is expected is of their prediction
        x = torch.rand(1, 1, 8, 8, 8)
        folds = [make_adapter(open_model(str(model), fold=fold), paper("source")) for fold in ("0", "1")]
        assert torch.allclose(together._arms.logits("source", x), sum(f.predict(x) for f in folds) / 2, atol=1e-5)
        code, _, err = dltta(
            "adapt", "-m", model, "--fold", "0", "-i", site / "imagesTr", "-o", tmp_path / "one", *known
        )
        assert (code, "belongs to another network" in err) == (2, True)
        code, out, _ = dltta("inspect", model, *known, "--json")
        assert not any("rehearsal" in part for part in json.loads(out)["missing"])


class Exploit:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class TestRefused:
    """One line, exit code 2, nothing run."""

    def test_a_pickle_that_runs_code(self, tmp_path, monkeypatch, capsys):
        model = write_nnunet(tmp_path, 2)
        file, evidence = model / "fold_0" / "checkpoint_final.pth", tmp_path / "it ran"
        torch.save({**torch.load(file, weights_only=False), "logging": Exploit(evidence)}, file)
        code, _, err = typed(monkeypatch, capsys, "inspect", model)
        assert code == 2
        assert "which would run code when loaded" in " ".join(err.split())
        assert not evidence.exists()

    @pytest.mark.parametrize("kept", [0, 40, 5000])
    def test_a_checkpoint_that_was_cut_off(self, tmp_path, kept):
        model = write_nnunet(tmp_path, 2)
        file = model / "fold_0" / "checkpoint_final.pth"
        file.write_bytes(file.read_bytes()[:kept])
        with pytest.raises(DlttaError, match=r"checkpoint_final\.pth is damaged"):
            open_model(str(model))

    def test_plans_that_name_a_program(self, tmp_path):
        planned = plans(2)
        model = write_nnunet(tmp_path, 2, planned=planned)
        planned["configurations"]["2d"]["architecture"]["network_class_name"] = "subprocess.run"
        (model / "plans.json").write_text(json.dumps(planned))
        with pytest.raises(DlttaError, match=r"names 'subprocess\.run', which is no layer or network"):
            open_model(str(model))

    def test_the_second_stage_of_a_cascade(self, tmp_path):
        model = write_nnunet(tmp_path, 3, planned=plans(3, previous_stage="3d_lowres"))
        with pytest.raises(DlttaError, match="second stage of a cascade, which needs the masks of 3d_lowres"):
            open_model(str(model))

    def test_regions(self, tmp_path):
        model = write_nnunet(tmp_path, 2)
        dataset = json.loads((model / "dataset.json").read_text())
        dataset |= {"labels": {"background": 0, "whole": [1, 2], "core": 2}, "regions_class_order": [1, 2]}
        (model / "dataset.json").write_text(json.dumps(dataset))
        with pytest.raises(DlttaError, match="trained on regions, classes that overlap"):
            open_model(str(model))

    @pytest.mark.parametrize(
        ("place", "fold", "words"),
        [
            ("", "3", "--fold 3 names fold '3', which is not there; .* has 0, 1"),
            ("", "0,0", "names one fold twice"),
            ("fold_1", None, "is one fold; give the folder above it, with --fold 1"),
            ("..", None, "holds nnU-Net's nnUNetTrainer__nnUNetPlans__2d; give one of these folders"),
        ],
    )
    def test_folds_and_folders_that_are_not_there(self, tmp_path, place, fold, words):
        model = write_nnunet(tmp_path / "Dataset001", 2, folds=("0", "1"))
        with pytest.raises(DlttaError, match=words):
            open_model(str(model / place), fold=fold)

    def test_options_that_its_plans_decide(self, tmp_path):
        with pytest.raises(DlttaError, match="which its plans describe, for which --patch has no meaning"):
            open_model(str(write_nnunet(tmp_path, 2)), patch=(8, 8))

    def test_a_trainer_that_is_not_installed(self, tmp_path):
        model = write_nnunet(tmp_path, 2)
        file = model / "fold_0" / "checkpoint_final.pth"
        torch.save({**torch.load(file, weights_only=False), "trainer_name": "nnUNetTrainerOfOurs"}, file)
        with pytest.raises(DlttaError, match="the trainer nnUNetTrainerOfOurs cannot be imported"):
            open_model(str(model))

    def test_images_of_other_channels(self, tmp_path):
        opened = open_model(str(write_nnunet(tmp_path, 2)))
        files = sorted(write_volumes(tmp_path / "in", 1, channels=2).iterdir())
        with pytest.raises(DlttaError, match="takes images of 1 channels, this one has 2"):
            load(opened, read_channels(files), "")


def test_all_folds_are_used_unless_one_is_named(tmp_path):
    model = write_nnunet(tmp_path, 2, folds=("1", "0", "10", "all"))
    assert open_model(str(model)).nnunet.folds == ("0", "1", "10")
    assert open_model(str(model), fold="all").nnunet.folds == ("all",)
    assert open_model(str(model), fold="10").nnunet.folds == ("10",)


class TestTrainers:
    """Found although some of nnU-Net's modules need packages that are not installed."""

    @pytest.fixture(autouse=True)
    def without_timm(self, monkeypatch):
        loaded = ("timm", "nnunetv2.training.nnUNetTrainer.primus")
        for name in [name for name in sys.modules if name.startswith(loaded)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "timm", None)

    def trained_by(self, folder, name):
        model = write_nnunet(folder, 2)
        file = model / "fold_0" / "checkpoint_final.pth"
        torch.save({**torch.load(file, weights_only=False), "trainer_name": name}, file)
        return model

    @pytest.mark.parametrize("name", ["nnUNetTrainer_5epochs", "nnUNetTrainerNoMirroring"])
    def test_one_of_nnunets_own(self, tmp_path, name):
        opened = open_model(str(self.trained_by(tmp_path, name)))
        plain = open_model(str(write_nnunet(tmp_path / "plain", 2)))
        x = torch.rand(1, 1, 8, 8)
        assert torch.equal(opened.model(x), plain.model(x))

    def test_one_of_ones_own(self, tmp_path, monkeypatch):
        (tmp_path / "trainers").mkdir()
        (tmp_path / "trainers" / "ours.py").write_text(
            "from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer\n"
            "class nnUNetTrainerOfOurs(nnUNetTrainer):\n    pass\n"
        )
        model = self.trained_by(tmp_path, "nnUNetTrainerOfOurs")
        with pytest.raises(DlttaError, match="the trainer nnUNetTrainerOfOurs cannot be imported"):
            open_model(str(model))
        monkeypatch.setenv("nnUNet_extTrainer", str(tmp_path / "trainers"))
        assert open_model(str(model)).classes == ("background", "cord", "grey")


def test_without_nnunet_one_line_says_what_to_install(tmp_path, monkeypatch, capsys):
    model = write_nnunet(tmp_path, 2)
    for name in [name for name in sys.modules if name.split(".")[0] == "nnunetv2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nnunetv2", None)
    code, _, err = typed(monkeypatch, capsys, "inspect", model)
    assert code == 2
    assert "pip install 'dltta[nnunet]'" in err
