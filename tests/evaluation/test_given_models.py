"""Networks that somebody has: adapted, stopped and resumed, and compared on by `dltta bench --model`."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from bundles import make_bundle, network
from commands import typed
from dltta.data.preprocessing import Preprocessing
from dltta.evaluation.source_models import open_given
from dltta.models.io.checkpoint import Checkpoint, save_checkpoint
from dltta.models.nets.architecture import Architecture
from networks import trained
from streams import save_model

CODE = """
import torch
from torch import nn


def seeded(build):
    def made():
        torch.manual_seed(0)
        return build()
    return made


@seeded
def swin_unetr():  # layer normalization in the transformer, instance normalization around it
    from monai.networks.nets import SwinUNETR
    return SwinUNETR(1, 2, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), feature_size=12, spatial_dims=2)


@seeded
def segresnet():  # group normalization
    from monai.networks.nets import SegResNet
    return SegResNet(2, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,))


@seeded
def resenc():  # instance normalization
    from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet
    return ResidualEncoderUNet(
        1, 2, (4, 8), nn.Conv2d, 3, (1, 2), (1, 1), 2, (1,), norm_op=nn.InstanceNorm2d,
        norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU,
    )


class Logits(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x)[0]


@seeded
def vit():  # layer normalization
    from monai.networks.nets import ViT
    return Logits(ViT(1, (32, 32), (16, 16), hidden_size=24, mlp_dim=24, num_layers=1, num_heads=2,
                      classification=True, num_classes=2, spatial_dims=2, post_activation=None))


def create_model(name="tiny", pretrained=False, num_classes=2, in_chans=1):  # batch normalization, as timm builds them
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(in_chans, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Conv2d(6, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )
"""
NETWORKS = ["swin_unetr", "segresnet", "resenc", "vit", "create_model"]
CLASSIFIERS = ("vit", "create_model")


def write_site(folder, task="segmentation", count=3, size=32):
    """A labeled site of 2-D images."""
    rng = np.random.default_rng(0)
    dense = task == "segmentation"
    images, labels = folder / ("imagesTr" if dense else "images"), folder / "labelsTr"
    images.mkdir(parents=True)
    rows = []
    for number in range(count):
        label = np.zeros((size, size), np.uint8)
        if dense or number % 2:
            label[4 : 12 + number, 6:20] = 1
        noisy = np.clip(90 * label + rng.normal(60, 20, label.shape), 0, 255).astype(np.uint8)
        name = f"case{number}"
        Pillow.fromarray(noisy).save(images / (f"{name}_0000.png" if dense else f"{name}.png"))
        if dense:
            labels.mkdir(exist_ok=True)
            Pillow.fromarray(label).save(labels / f"{name}.png")
        rows.append(f"{name}.png,{'blob' if label.any() else 'background'}")
    if not dense:
        (folder / "labels.csv").write_text("\n".join(["image,label", *rows]) + "\n")
    description = {"channel_names": {"0": "grey"}, "labels": {"background": 0, "blob": 1}, "file_ending": ".png"}
    (folder / "dataset.json").write_text(json.dumps(description | {"task": task}))
    return images


@pytest.fixture
def dltta(monkeypatch, capsys):
    def run(*arguments):
        code, out, err = typed(monkeypatch, capsys, *arguments)
        assert code == 0, err
        return out

    return run


def summary(folder):
    found = json.loads((folder / "results.json").read_text())["summary"]
    return {(row["method"], row["rate"]): row["mean"] for row in found if row["metric"] in ("dice", "accuracy")}


def lines(output):
    """What the log says of each case, without timings and chains."""
    entries = map(json.loads, (output / "stream.jsonl").read_text().splitlines())
    keys = ("case", "loss", "rate", "sha256", "probabilities")
    return [{key: entry.get(key) for key in keys} for entry in entries if "case" in entry]


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_of_ones_own_code_is_adapted_resumed_and_compared_on(tmp_path, dltta, name):
    if name == "resenc":
        pytest.importorskip("dynamic_network_architectures", reason="comes with the extra nnunet")
    (tmp_path / "nets.py").write_text(CODE)
    task = "classification" if name in CLASSIFIERS else "segmentation"
    images = write_site(tmp_path / "site", task)
    size = "64x64" if name == "swin_unetr" else "32x32"  # halved five times, to more than one position
    model = ("-m", f"{tmp_path / 'nets.py'}:{name}", "--untrained", "--intensity", "zscore", "--resize", size)
    method = ("--method", "tent", "--rate", "fixed", "--alpha", "0.01", "--batch-size", "1")
    dltta("adapt", *model, *method, "-i", images, "-o", tmp_path / "whole")
    some = tmp_path / "some"
    shutil.copytree(images, some)
    last = sorted(some.iterdir())[-1]
    last.rename(tmp_path / last.name)
    dltta("adapt", *model, *method, "-i", some, "-o", tmp_path / "parts")
    (tmp_path / last.name).rename(last)
    dltta("adapt", *model, *method, "-i", some, "-o", tmp_path / "parts", "--resume")
    whole = lines(tmp_path / "whole")
    assert len(whole) == 3
    assert all(line["rate"] == 0.01 and line["loss"] > 0 for line in whole)
    assert lines(tmp_path / "parts") == whole
    rates = ("--rates", "fixed:0.01")
    dltta("bench", *model, "--target", tmp_path / "site", *rates, "--methods", "source,tent", "-o", tmp_path / "bench")
    assert set(summary(tmp_path / "bench")) == {("source", "none"), ("tent", "fixed:0.01")}


class TestBench:
    """`dltta bench --model`."""

    def own_folder(self, path):
        architecture = Architecture("unet", 2, 1, 2, {"width": 4})
        model = Checkpoint(
            trained(architecture.build(), 3), architecture, "segmentation", ("background", "blob"),
            Preprocessing("scale", 255.0, (32, 32)), record={"sites": ["a"], "losses": ["task"]},
        )  # fmt: skip
        save_checkpoint(path, model)
        return path

    def test_scores_are_those_of_what_adapt_writes(self, tmp_path, dltta):
        images = write_site(tmp_path / "site", size=40)  # resized for the network, scored on the file's grid
        model = self.own_folder(tmp_path / "model")
        dltta("bench", "--model", model, "--target", tmp_path / "site", "--methods", "source", "-o", tmp_path / "bench")
        dltta("adapt", "-m", model, "-i", images, "-o", tmp_path / "out", "--method", "source")
        dice = []
        for number in range(3):
            mask = np.asarray(Pillow.open(tmp_path / "out" / f"case{number}.png"))
            label = np.asarray(Pillow.open(tmp_path / "site" / "labelsTr" / f"case{number}.png"))
            dice.append(2 * ((mask == 1) & (label == 1)).sum() / ((mask == 1).sum() + (label == 1).sum()))
        assert summary(tmp_path / "bench")["source", "none"] == pytest.approx(np.mean(dice), abs=1e-6)

    def test_by_default_the_methods_that_the_model_has_parts_for(self, tmp_path, dltta):
        write_site(tmp_path / "site")
        model = self.own_folder(tmp_path / "model")
        arguments = ("bench", "-m", model, "--target", tmp_path / "site", "--rates", "fixed", "-o", tmp_path / "bench")
        dltta(*arguments)
        found = {method for method, _ in summary(tmp_path / "bench")}
        assert {"source", "ptbn", "tent"} <= found
        assert not {"ttt", "atta"} & found
        assert not (tmp_path / "bench" / "models").exists()  # nothing was trained
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "bench" / "streams").iterdir()}
        dltta(*arguments)
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "bench" / "streams").iterdir()} == before

    def test_a_bundle_on_volumes(self, tmp_path, dltta):
        nib = pytest.importorskip("nibabel")
        bundle, site = tmp_path / "bundle", tmp_path / "site"
        make_bundle(bundle, model=network())
        for part in ("imagesTr", "labelsTr"):
            (site / part).mkdir(parents=True)
        label = np.zeros((16, 16, 16), np.uint8)
        label[4:9, 4:9, 4:9] = 1
        affine = np.diag([1.5, 1.5, 2.0, 1.0])
        nib.save(nib.Nifti1Image((50.0 * label).astype(np.float32), affine), site / "imagesTr" / "a_0000.nii.gz")
        nib.save(nib.Nifti1Image(label, affine), site / "labelsTr" / "a.nii.gz")
        described = {"channel_names": {"0": "CT"}, "labels": {"background": 0, "left": 1, "right": 2}}
        (site / "dataset.json").write_text(json.dumps(described | {"file_ending": ".nii.gz"}))
        dltta("bench", "-m", bundle, "--target", site, "--methods", "source,tent", "--rates", "fixed", "-o",
              tmp_path / "bench")  # fmt: skip
        assert set(summary(tmp_path / "bench")) == {("source", "none"), ("tent", "fixed")}

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (("--source", "a"), "has source sites to train on or a model, not both"),
            (("--seeds", "2"), "a given model is one network, got 2 seeds"),
            (("--first-seed", "1"), "a given model has no seeds; leave the first seed out"),
            (("--methods", "ttt"), "rotation head"),
            (("--methods", "cyclegan"), "cyclegan learns with source images; give --source, not a model"),
        ],
    )
    def test_what_a_given_model_cannot_do_is_one_line(self, tmp_path, monkeypatch, capsys, options, words):
        write_site(tmp_path / "site")
        model = self.own_folder(tmp_path / "model")
        given = ("-m", model, "--target", tmp_path / "site", "-o", tmp_path / "bench", "--rates", "fixed")
        code, _, err = typed(monkeypatch, capsys, "bench", *given, *options)
        assert (code, err.count("\n")) == (2, 1)
        assert words in err
        assert not (tmp_path / "bench").exists()

    def test_without_a_target_one_line_says_which_option(self, tmp_path, monkeypatch, capsys):
        model = self.own_folder(tmp_path / "model")
        code, _, err = typed(monkeypatch, capsys, "bench", "-m", model, "-o", tmp_path / "bench")
        assert (code, err) == (2, "error: there is no target to compare on; give --target SITE\n")

    def test_a_site_of_other_classes_is_refused_before_the_first_stream(self, tmp_path, monkeypatch, capsys):
        write_site(tmp_path / "site", "classification")
        model = self.own_folder(tmp_path / "model")
        given = ("-m", model, "--target", tmp_path / "site", "-o", tmp_path / "bench", "--methods", "source")
        code, _, err = typed(monkeypatch, capsys, "bench", *given)
        assert code == 2
        assert "gives a segmentation of background, blob, site has a classification" in err


def test_the_card_says_what_the_model_says_and_what_it_lacks(tmp_path, dltta):
    model = TestBench().own_folder(tmp_path / "model")
    text = dltta("model", "card", model)
    assert text.startswith('---\nlibrary_name: "dltta"\npipeline_tag: "image-segmentation"\n')
    assert "- **Sites**: a" in text
    assert "- **Score**: not recorded in the model" in text
    assert "- without auto-encoders: atta" in text
    found = json.loads(dltta("inspect", model, "--json"))["missing"]
    assert [part.partition(":")[0] for part in found] == [
        "calibration", "rehearsal", "rotation head", "projection head", "image normalizer and denoiser",
        "auto-encoders", "source pairs",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.usefixtures("short_rehearsal", "no_power_cut")
def test_what_a_model_rehearsed_is_used_in_a_comparison_and_said_by_its_card(tmp_path, dltta):
    write_site(tmp_path / "site")
    (tmp_path / "nets.py").write_text(CODE)
    spec = f"{tmp_path / 'nets.py'}:segresnet"
    model = ("--untrained", "--intensity", "zscore", "--resize", "32x32")
    assert "batches of 1: source" in dltta(
        "calibrate", "-m", spec, *model, "-i", tmp_path / "site", "-o", tmp_path / "known"
    )
    known = (*model, "--calibration", tmp_path / "known")
    bench = ("bench", "-m", spec, "--target", tmp_path / "site", "--methods", "source,recommended")

    def compared(options):  # in one folder: another calibration is another stream
        open_given.cache_clear()  # as a new process begins
        dltta(*bench, *options, "-o", tmp_path / "bench")
        streams = json.loads((tmp_path / "bench" / "results.json").read_text())["streams"]
        (found,) = (stream["cases"] for stream in streams if stream["method"] == "recommended")
        return found

    assert all(case.get("quality") is None for case in compared(model))
    assert all(case["quality_high"] > 0 for case in compared(known))
    learned = tmp_path / "known" / "rehearsal.json"
    edited = json.loads(learned.read_text())
    edited["batch_sizes"]["1"]["default"]["radius"] = 2.0
    learned.write_text(json.dumps(edited))
    assert all(case["quality_high"] - case["quality_low"] == 1 for case in compared(known))
    card = dltta("model", "card", spec, *known)
    assert "- rehearsed with 4 source cases at 2 simulated sites and in 7 further streams" in card
    arms = ", ".join(edited["batch_sizes"]["1"]["default"]["plan"]["arms"])
    assert f"- batches of 1: {arms}; at simulated sites" in card
    assert "parts that only dltta train adds: ttt, atta, dtta, ttt++, --prefill" in card


class TestPrograms:
    """Networks without layers."""

    def test_what_compilers_make_of_a_network_is_refused(self):
        from dltta import Adapter
        from dltta.errors import SettingError
        from dltta.objectives import PTBN

        network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2)).eval()
        image = torch.rand(1, 1, 4, 4)
        exported = torch.export.export(network, (image,))
        for program, words in (
            (torch.compile(network), r"compiled by torch\.compile .* give the network .*: model\._orig_mod"),
            (torch.jit.trace(network, image), "TorchScript, whose layers cannot be exchanged"),
            (exported, r"exported by torch\.export, which leaves no layers"),
            (exported.module(), r"exported by torch\.export, which leaves no layers"),
        ):
            with pytest.raises(SettingError, match=words):
                Adapter(program, PTBN())
        Adapter(torch.fx.symbolic_trace(network), PTBN()).step(image)  # has its layers still

    def test_their_files_are_no_models(self, tmp_path, monkeypatch, capsys):
        network = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2)).eval()
        image = torch.rand(1, 1, 4, 4)
        for name in ("model.ts", "model.pt"):
            torch.jit.trace(network, image).save(tmp_path / name)
        torch.export.save(torch.export.export(network, (image,)), tmp_path / "model.pt2")
        programs = {
            "model.ts": "is a TorchScript archive, which",
            "model.pt": "is TorchScript, which",
            "model.pt2": "is a program of torch.export, which",
        }
        for name, words in programs.items():
            code, _, err = typed(monkeypatch, capsys, "inspect", tmp_path / name)
            assert (code, err.count("\n")) == (2, 1)
            assert f"{words} has no layers to adapt" in err
        (tmp_path / "nets.py").write_text(CODE)
        for name, words in (("model.pt", "is TorchScript"), ("model.pt2", "is a program of torch.export")):
            given = (f"{tmp_path / 'nets.py'}:create_model", "--weights", tmp_path / name)
            code, _, err = typed(monkeypatch, capsys, "inspect", *given)
            assert (code, err.count("\n")) == (2, 1)
            assert f"{words}; give the state dict of the network that it was made from" in err


def test_slices_of_a_given_model_are_scored_as_the_volumes_that_they_make_up(tmp_path, dltta):
    import nibabel as nib

    site = tmp_path / "site"
    rng = np.random.default_rng(0)
    for number in range(2):
        label = np.zeros((32, 32, 3), np.uint8)
        label[4:12, 6:20, 1:] = 1  # the first slice is empty
        image = np.clip(90 * label + rng.normal(60, 20, label.shape), 0, 255).astype(np.float32)
        for folder, name, values in (("imagesTr", f"v{number}_0000", image), ("labelsTr", f"v{number}", label)):
            (site / folder).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(values, np.diag([1.0, 1.0, 4.0, 1.0])), site / folder / f"{name}.nii.gz")
    description = {"channel_names": {"0": "grey"}, "labels": {"background": 0, "blob": 1, "c": 2}}
    (site / "dataset.json").write_text(json.dumps(description | {"file_ending": ".nii.gz"}))
    model = save_model(tmp_path / "model")
    dltta("bench", "--model", model, "--target", f"slices:{site}", "--methods", "source", "-o", tmp_path / "bench")
    (stream,) = json.loads((tmp_path / "bench" / "results.json").read_text())["streams"]
    assert [row["case"] for row in stream["volumes"]] == ["v0", "v1"]
    assert len(stream["cases"]) == 6
    assert ("source", "none") in summary(tmp_path / "bench")
