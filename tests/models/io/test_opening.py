"""Networks from a checkpoint folder and from one's own code."""

import sys
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dltta.data.formats.images import Geometry, Image
from dltta.data.preprocessing import Preprocessing, resize
from dltta.errors import InputError, SettingError, StateError
from dltta.models.calibration import Calibration
from dltta.models.io.checkpoint import Checkpoint, Rotation, save_checkpoint
from dltta.models.io.opening import ModelSource, Window, open_model
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.rotation import RotationHead
from networks import Classifier, Segmenter, trained

CLASSES = ("background", "a", "b")


def flat_image(channels=1, size=(20, 30)):
    array = np.arange(channels * np.prod(size), dtype=np.float32).reshape(channels, *size)
    return Image(array, Geometry("png", size, channels, 255))


def save(folder, size=(32, 48), patch=None):
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    model = trained(architecture.build(seed=3))
    record = {"fingerprint": {"patch": patch}}
    save_checkpoint(
        folder, Checkpoint(model, architecture, "segmentation", CLASSES, Preprocessing("scale", 255.0, size), record)
    )
    return model


class TestCheckpoint:
    def test_network_and_description_come_along(self, tmp_path):
        model = save(tmp_path / "a")
        opened = open_model(str(tmp_path / "a"))
        x = torch.rand(1, 1, 32, 48)
        assert torch.equal(opened.model(x), model(x))
        assert not opened.model.training
        assert (opened.kind, opened.name, opened.task, opened.classes) == ("checkpoint", "a", "segmentation", CLASSES)
        assert (opened.spatial_dims, opened.in_channels, opened.size) == (2, 1, (32, 48))
        assert opened.window is None
        assert opened.checkpoint is not None

    def test_a_sixteen_bit_copy_of_an_eight_bit_image_is_prepared_alike(self, tmp_path):
        save(tmp_path)
        opened = open_model(str(tmp_path))
        array = np.arange(600, dtype=np.float32).reshape(1, 20, 30) % 256
        eight, sixteen = Image(array, Geometry("tiff", (20, 30), 1, 255)), Geometry("tiff", (20, 30), 1, 65535)
        torch.testing.assert_close(opened.prepare(Image(array * 257, sixteen)).image, opened.prepare(eight).image)
        with pytest.raises(InputError, match="values up to 4080 of 65535"):
            opened.prepare(Image(array * 16, sixteen))

    def test_images_are_prepared_as_in_training_and_predictions_brought_back(self, tmp_path):
        save(tmp_path)
        opened = open_model(str(tmp_path))
        image = flat_image()
        prepared = opened.prepare(image)
        assert torch.equal(prepared.image, resize(torch.from_numpy(image.array), (32, 48)) / 255)
        probability = torch.rand(3, 32, 48, generator=torch.Generator().manual_seed(0)).softmax(dim=0)
        restored = prepared.restore(probability)
        assert restored.shape == (3, 20, 30)
        torch.testing.assert_close(restored.sum(dim=0), torch.ones(20, 30))

    def test_a_prediction_of_the_files_size_is_brought_back_bit_for_bit(self, tmp_path):
        save(tmp_path, size=None)
        prepared = open_model(str(tmp_path)).prepare(flat_image())
        probability = torch.rand(3, 20, 30)
        assert torch.equal(prepared.restore(probability), probability)

    def test_its_window_is_the_patch_it_was_trained_on(self, tmp_path):
        save(tmp_path, size=None, patch=[16, 32])
        assert open_model(str(tmp_path)).window == Window((16, 32), 0.25)
        assert open_model(str(tmp_path), patch=(32, 32), overlap=0.5).window == Window((32, 32), 0.5)

    def test_weights_change_the_fingerprint_and_the_place_does_not(self, tmp_path):
        model = save(tmp_path / "a")
        save(tmp_path / "b")
        first, second = (open_model(str(tmp_path / name)).fingerprint for name in "ab")
        assert first == second
        model.final_conv.bias.data[0] += 1e-6
        architecture = Architecture("unet", 2, 1, 3, {"width": 4})
        moved = Checkpoint(model, architecture, "segmentation", CLASSES, Preprocessing("scale", 255.0, (32, 48)))
        save_checkpoint(tmp_path / "b", moved)
        assert open_model(str(tmp_path / "b")).fingerprint != first

    def test_ttt_gets_the_network_that_was_trained_for_it(self, tmp_path):
        plain = save(tmp_path)
        bare = open_model(str(tmp_path))
        with pytest.raises(SettingError, match="no rotation head, which TTT needs; train it with `--with ttt`"):
            bare.for_method("ttt")
        architecture, head = Architecture("unet", 2, 1, 3, {"width": 4}), RotationHead(64, 8)
        joint = replace(
            bare.checkpoint,
            model=trained(architecture.build(), seed=4),
            rotation=Rotation(head, "down_4", ()),
            calibration=Calibration({}, {}, {"images": 5}),
        )
        save_checkpoint(tmp_path, replace(bare.checkpoint, joint=joint))
        opened = open_model(str(tmp_path))
        chosen = opened.for_method("ttt")
        assert opened.fingerprint == chosen.fingerprint != bare.fingerprint
        x = torch.rand(1, 1, 32, 48)
        assert torch.equal(opened.for_method("tent").model(x), plain(x))
        assert torch.equal(chosen.model(x), joint.model(x))
        assert torch.equal(chosen.rotation.head(torch.ones(1, 64, 2, 2)), head(torch.ones(1, 64, 2, 2)))
        assert (opened.calibration, chosen.calibration.predictions) == (None, {"images": 5})
        assert chosen.for_method("ttt") is chosen
        assert (chosen.prepare, chosen.window) == (opened.prepare, opened.window)

    @pytest.mark.parametrize(
        ("image", "words"),
        [(flat_image(3), "images of 1 channels, this one has 3; save it as grey"), (flat_image(1, (4, 4, 4)), "3-D")],
    )
    def test_an_image_that_does_not_fit_is_refused(self, tmp_path, image, words):
        save(tmp_path)
        with pytest.raises(InputError, match=words):
            open_model(str(tmp_path)).prepare(image)

    def test_what_it_knows_itself_cannot_be_said(self, tmp_path):
        save(tmp_path)
        with pytest.raises(SettingError, match="--classes has no meaning"):
            open_model(str(tmp_path), classes=CLASSES)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A folder with somebody's own code, as the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_networks.py").write_text(
        "from networks import Classifier, Segmenter\n"
        "def segmenter(): return Segmenter(classes=3)\n"
        "def volumes(): return Segmenter(axes=3, channels=2, classes=1)\n"
        "def classifier(): return Classifier(channels=3)\n"
        "def with_arguments(channels, *, classes): ...\n"
        "def number(): return 3\n"
        "def halved():\n"
        "    import torch\n"
        "    return torch.nn.Conv2d(1, 2, 2, stride=2)\n"
    )
    yield tmp_path
    sys.modules.pop("my_networks", None)


class TestFactory:
    def test_a_function_and_a_state_dict_are_enough(self, package):
        source = trained(Segmenter(classes=3))
        torch.save(source.state_dict(), package / "w.pt")
        opened = open_model("my_networks:segmenter", weights=package / "w.pt")
        x = torch.rand(1, 1, 16, 16)
        assert torch.equal(opened.model(x), source(x))
        assert (opened.task, opened.spatial_dims, opened.in_channels) == ("segmentation", 2, 1)
        assert opened.classes == ("background", "class_1", "class_2")
        assert (opened.kind, opened.name, opened.activation) == ("factory", "segmenter", "softmax")

    def test_a_file_of_ones_own(self, package):
        opened = open_model(f"{package / 'my_networks.py'}:classifier", classes=("a", "b", "c"), untrained=True)
        assert (opened.task, opened.in_channels, opened.classes) == ("classification", 3, ("a", "b", "c"))
        probability = torch.rand(3)
        assert torch.equal(opened.prepare(flat_image(3)).restore(probability), probability)

    def test_a_single_channel_is_a_sigmoid_of_two_classes(self, package):
        opened = open_model(
            "my_networks:volumes",
            preprocessing=Preprocessing("zscore", size=(8, 8, 8)),
            patch=(4, 4, 4),
            untrained=True,
        )
        assert (opened.activation, opened.spatial_dims, opened.in_channels) == ("sigmoid", 3, 2)
        assert opened.classes == ("background", "class_1")
        assert opened.window == Window((4, 4, 4))
        prepared = opened.prepare(flat_image(2, (6, 6, 6)))
        assert prepared.image.shape == (2, 8, 8, 8)
        with pytest.raises(InputError, match="got 1 channels; apply"):
            prepared.restore(torch.rand(1, 8, 8, 8))

    def test_the_prediction_is_the_likeliest_class_or_what_passes_the_threshold(self, package):
        probability = torch.tensor([[0.7, 0.4], [0.3, 0.6]])
        single = open_model("my_networks:volumes", untrained=True)
        assert single.labels(probability).tolist() == [0, 1]
        assert replace(single, threshold=0.3).labels(probability).tolist() == [1, 1]
        several = open_model("my_networks:segmenter", untrained=True)
        assert several.labels(torch.tensor([[0.5, 0.2], [0.3, 0.3], [0.2, 0.5]])).tolist() == [0, 2]

    def test_random_weights_predict_only_when_they_are_meant(self, package):
        words = "without weights would predict with random ones; add --weights FILE, or --untrained"
        with pytest.raises(SettingError, match=words):
            open_model("my_networks:segmenter")
        assert open_model("my_networks:segmenter", untrained=True).task == "segmentation"
        assert ModelSource("my_networks:segmenter").open(predicting=False).task == "segmentation"

    @pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"state_dict": s}, lambda s: {"epoch": 3, "model": s}])
    @pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
    def test_state_dicts_as_trainers_leave_them(self, package, wrap, prefix):
        source = trained(Segmenter(classes=3))
        saved = {prefix + name: tensor for name, tensor in source.state_dict().items()}
        torch.save(wrap(saved), package / "w.pth")
        opened = open_model("my_networks:segmenter", weights=package / "w.pth")
        assert all(torch.equal(v, opened.model.state_dict()[k]) for k, v in source.state_dict().items())

    def test_safetensors(self, package):
        source = trained(Segmenter(classes=3))
        save_file(source.state_dict(), package / "w.safetensors")
        opened = open_model("my_networks:segmenter", weights=package / "w.safetensors")
        assert torch.equal(opened.model.head.weight, source.head.weight)

    @pytest.mark.parametrize(
        ("spec", "options", "words"),
        [
            ("nowhere:f", {}, "no module 'nowhere'"),
            ("my_networks:segmentor", {}, "no function or class 'segmentor'; there are .*segmenter"),
            ("nothing.py:f", {}, "no file nothing.py"),
            ("my_networks:with_arguments", {}, "needs the arguments channels, classes"),
            ("my_networks:number", {}, "returns a int"),
            ("my_networks:halved", {}, "gives 2x64x64 for an image of 128x128"),
            ("my_networks:segmenter", {"classes": ("a", "b")}, "gives 3 channels, that is 3 classes, but 2 are named"),
            ("my_networks:segmenter", {"task": "classification"}, "gives a segmentation"),
            ("my_networks:segmenter", {"task": "regression"}, "task must be"),
            ("my_networks:segmenter", {"size": (5, 5), "channels": 7}, "cannot be tried out .*; say what it takes"),
            ("my_networks:segmenter", {"patch": (8, 8, 8)}, "cannot be tried out"),
            ("my_networks:segmenter", {"overlap": 0.5}, "takes whole images"),
            ("nothing", {}, "is not a model"),
            ("my_networks.py", {}, "no network; name the code that builds it"),
        ],
    )
    def test_mistakes_are_one_line(self, package, spec, options, words):
        with pytest.raises(SettingError, match=words) as caught:
            open_model(spec, **options)
        assert "\n" not in str(caught.value)


def damaged(path):
    path.write_bytes(b"\0" * 100)


def other_network(path):
    torch.save(Classifier().state_dict(), path)


def code(path):
    torch.save({"model": Segmenter()}, path)


def numbers(path):
    torch.save({"a": 1}, path)


def script(path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (damaged, "is damaged or"),
        (other_network, "does not fit the network: .* missing, .* foreign"),
        (code, "holds more than tensors, which would run code"),
        (numbers, "holds no state dict"),
        (script, "TorchScript"),
        (lambda path: None, "cannot be read: No such file"),
    ],
)
def test_weights_that_cannot_be_used_are_one_line(package, write, words):
    write(package / "w.pt")
    with pytest.raises(StateError, match=words) as caught:
        open_model("my_networks:segmenter", weights=package / "w.pt")
    assert "\n" not in str(caught.value)


def test_the_lines_of_the_documentation_run(tmp_path, monkeypatch):
    lines = (Path(__file__).parents[3] / "docs" / "models.md").read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "networks.py").write_text(
        "from networks import Segmenter\ndef build(): return Segmenter(axes=3)\n"
    )
    torch.save(trained(Segmenter(axes=3)).state_dict(), tmp_path / "best.pt")
    values = np.random.default_rng(0).normal(size=(12, 10, 8)).astype(np.float32)
    nib.save(nib.Nifti1Image(values, np.eye(4)), tmp_path / "case.nii.gz")
    names = {}
    exec(lines, names)
    assert names["label"].shape == (12, 10, 8)
    assert set(names["label"].unique().tolist()) <= {0, 1, 2}
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        del sys.modules[name]
