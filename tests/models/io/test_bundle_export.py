"""Bundles that we write, loaded and run by MONAI's own tools."""

import json

import monai.bundle
import nibabel as nib
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser, ConfigWorkflow
from monai.data import decollate_batch
from PIL import Image as Pillow

from bundles import config, make_bundle, network
from dltta.core.adapter import Adapter
from dltta.core.rates import Fixed
from dltta.data.formats.images import read_image, read_mask
from dltta.data.preprocessing import Preprocessing
from dltta.errors import SettingError, StateError
from dltta.models.io.bundle import export_bundle
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.io.opening import Window, open_checkpoint, open_model
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.autoencoders import UNET_LEVELS, AutoEncoders
from dltta.objectives import ATTA, Tent
from networks import Segmenter, trained

ARCHITECTURES = [
    Architecture("unet", 2, 1, 3, {"width": 4}),
    Architecture("unet", 3, 2, 3, {"width": 2}),
    Architecture("densenet_small", 2, 3, 3),
    Architecture("densenet121", 2, 1, 3, {"blocks": (1, 2), "growth": 4, "width": 8}),
]
SCALED = Preprocessing("scale", 255.0)


def checkpoint(architecture=ARCHITECTURES[0], preprocessing=SCALED, patch=None):
    task = "segmentation" if architecture.name == "unet" else "classification"
    model = trained(architecture.build(seed=0))
    record = {"fingerprint": {"patch": patch}}
    return Checkpoint(model, architecture, task, ("background", "a", "b"), preprocessing, record)


def written(tmp_path, *args, **kwargs):
    opened = open_checkpoint(checkpoint(*args, **kwargs), "net")
    export_bundle(tmp_path / "bundle", opened)
    return opened, tmp_path / "bundle"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: f"{a.name}-{a.spatial_dims}d")
class TestNetwork:
    def test_monai_builds_and_fills_the_same_network(self, tmp_path, architecture):
        opened, folder = written(tmp_path, architecture)
        parser = ConfigParser()
        parser.read_config(folder / "configs" / "inference.json")
        built = parser.get_parsed_content("network_def")
        built.load_state_dict(torch.load(folder / "models" / "model.pt", weights_only=True))
        x = torch.rand(2, architecture.in_channels, *[32] * architecture.spatial_dims)
        assert torch.equal(built.eval()(x), opened.model(x))

    def test_monais_own_loader_and_checks_accept_it(self, tmp_path, architecture):
        opened, folder = written(tmp_path, architecture)
        loaded = monai.bundle.load("bundle", bundle_dir=tmp_path, workflow_type="inference", device="cpu").eval()
        x = torch.rand(2, architecture.in_channels, *[32] * architecture.spatial_dims)
        assert torch.equal(loaded(x), opened.model(x))
        configs = folder / "configs"
        monai.bundle.verify_net_in_out(
            "network_def", str(configs / "metadata.json"), str(configs / "inference.json"), device="cpu", n=2
        )

    def test_opened_again_it_is_what_it_was(self, tmp_path, architecture):
        opened, folder = written(tmp_path, architecture)
        again = open_model(str(folder))
        for part in ("task", "classes", "spatial_dims", "in_channels", "window", "activation"):
            assert getattr(again, part) == getattr(opened, part)
        x = torch.rand(1, architecture.in_channels, *[32] * architecture.spatial_dims)
        assert torch.equal(again.model(x), opened.model(x))


def flat_image(path, channels, shape=(37, 50)):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3) if channels == 3 else shape, dtype=np.uint8)
    Pillow.fromarray(pixels).save(path)
    return read_image(path)


def volume(path, shape=(18, 35, 21)):
    affine = nib.affines.from_matvec(nib.eulerangles.euler2mat(0.1, 0.2, 0.3) @ np.diag([-1.0, 2.0, 3.0]), [1, 2, 3])
    nib.save(nib.Nifti1Image(np.random.default_rng(0).normal(3, 50, shape).astype(np.float32), affine), path)
    return read_image(path)


CASES = [
    (2, 1, Preprocessing()),
    (2, 1, Preprocessing("scale", 255.0)),
    (2, 3, Preprocessing("zscore")),
    (2, 3, Preprocessing("imagenet", 255.0)),
    (2, 3, Preprocessing("imagenet", 255.0, (16, 80))),  # smaller along one axis, larger along the other
    (2, 1, Preprocessing("zscore", size=(32, 32))),
    (3, 1, Preprocessing("zscore")),
    (3, 1, Preprocessing("scale", 100.0, (16, 16, 16))),
]


@pytest.mark.parametrize(("axes", "channels", "preprocessing"), CASES)
class TestPreprocessing:
    def setup(self, tmp_path, axes, channels, preprocessing):
        file = tmp_path / ("a.png" if axes == 2 else "a.nii.gz")
        image = flat_image(file, channels) if axes == 2 else volume(file)
        architecture = Architecture("unet", axes, channels, 3, {"width": 2})
        opened = open_checkpoint(checkpoint(architecture, preprocessing), "net")
        with torch.no_grad():  # else one class has it all
            logits = opened.model(opened.prepare(image).image[None])
            opened.model.final_conv.bias -= logits.flatten(2).mean(dim=(0, 2))
        export_bundle(tmp_path / "bundle", opened)
        return opened, tmp_path / "bundle", file, image

    def test_monai_computes_our_numbers_from_the_file(self, tmp_path, axes, channels, preprocessing):
        opened, folder, file, image = self.setup(tmp_path, axes, channels, preprocessing)
        parser = ConfigParser()
        parser.read_config(folder / "configs" / "inference.json")
        theirs = parser.get_parsed_content("preprocessing")({"image": str(file)})["image"]
        ours = opened.prepare(image).image
        torch.testing.assert_close(theirs.as_tensor(), ours, atol=1e-6, rtol=1e-6)

    def test_so_do_we_when_it_is_opened_again(self, tmp_path, axes, channels, preprocessing):
        opened, folder, _, image = self.setup(tmp_path, axes, channels, preprocessing)
        again = open_model(str(folder)).prepare(image)
        once = opened.prepare(image)
        torch.testing.assert_close(again.image, once.image, atol=1e-6, rtol=1e-6)
        probability = torch.rand(3, *once.image.shape[1:]).softmax(dim=0)
        assert again.restore(probability).shape == (3, *image.array.shape[1:])
        if preprocessing.size is None:
            assert torch.equal(again.restore(probability), probability)

    def test_a_run_by_monai_leaves_the_prediction_on_the_files_grid(self, tmp_path, axes, channels, preprocessing):
        """As the evaluator of MONAI does it: data set, loader, inferer, postprocessing and saving."""
        opened, folder, file, image = self.setup(tmp_path, axes, channels, preprocessing)
        data = tmp_path / "data"
        data.mkdir()
        file.rename(data / file.name)
        parser = ConfigParser()
        parser.read_config(folder / "configs" / "inference.json")
        parser["bundle_root"], parser["dataset_dir"], parser["device"] = str(folder), str(data), "cpu"
        net = monai.bundle.load("bundle", bundle_dir=tmp_path, workflow_type="inference", device="cpu").eval()
        (batch,) = list(parser.get_parsed_content("dataloader"))
        with torch.no_grad():
            batch["pred"] = parser.get_parsed_content("inferer")(batch["image"], net)
        (result,) = [parser.get_parsed_content("postprocessing")(each) for each in decollate_batch(batch)]
        theirs = result["pred"].as_tensor()[0].long()
        prepared = opened.prepare(image)
        with torch.no_grad():
            probability = opened.model(prepared.image[None])[0].softmax(dim=0)
        ours = prepared.restore(probability).argmax(dim=0)
        assert theirs.shape == ours.shape
        assert len(ours.unique()) > 1
        assert (theirs == ours).float().mean() > 0.999  # rounding
        (saved,) = (path for path in (folder / "eval").rglob("*") if path.is_file())
        assert np.array_equal(read_mask(saved), theirs)
        assert axes == 2 or np.allclose(nib.load(saved).affine, image.geometry.affine)


def test_the_workflow_has_all_that_monai_requires(tmp_path):
    _, folder = written(tmp_path)
    configs = folder / "configs"
    workflow = ConfigWorkflow(
        str(configs / "inference.json"), str(configs / "metadata.json"), logging_file=False, workflow_type="inference"
    )
    workflow.parser.parse(True)
    required = [name for name, entry in workflow.properties.items() if entry["required"]]
    assert all(workflow.properties[name]["id"] in workflow.parser for name in required)


def test_windows_go_along(tmp_path):
    opened, folder = written(tmp_path, patch=[16, 32])
    assert opened.window == open_model(str(folder)).window == Window((16, 32))


class TestAdapted:
    def test_the_weights_are_those_that_are_given(self, tmp_path):
        opened = open_checkpoint(checkpoint(), "net")
        adapter = Adapter(opened.model, Tent(), Fixed(0.1))
        adapter.step(torch.rand(1, 1, 32, 32))
        export_bundle(tmp_path / "bundle", opened, adapter.model)
        again = open_model(str(tmp_path / "bundle")).model.state_dict()
        moved = {name for name, tensor in opened.model.state_dict().items() if not torch.equal(tensor, again[name])}
        assert moved == set(adapter.adapted_parameters())
        assert all(torch.equal(tensor, again[name]) for name, tensor in adapter.model.state_dict().items())

    def test_a_network_with_parts_put_into_it_is_refused(self, tmp_path):
        opened = open_checkpoint(checkpoint(), "net")
        parts = AutoEncoders({"image": (1, 32, 32)}, width=8)
        adapter = Adapter(opened.model, ATTA(parts, UNET_LEVELS, (4, 8, 16)), Fixed(0.1))
        with pytest.raises(StateError, match=r"does not fit the network: 0 tensors missing, \d+ foreign"):
            export_bundle(tmp_path / "bundle", opened, adapter.model)
        assert not list(tmp_path.iterdir())

    def test_a_bundle_goes_as_itself_with_other_weights(self, tmp_path):
        make_bundle(tmp_path / "a", config())
        (tmp_path / "a" / "eval").mkdir()
        (tmp_path / "a" / "eval" / "patient.nii.gz").write_text("a prediction")
        (tmp_path / "a" / "models" / "model.ts").write_text("other weights")
        (tmp_path / "a" / "docs" / "link").symlink_to("/etc/hostname")
        other = network(seed=5)
        export_bundle(tmp_path / "b", open_model(str(tmp_path / "a")), other)
        for name in ("configs/inference.json", "configs/metadata.json", "docs/README.md", "LICENSE"):
            assert (tmp_path / "b" / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
        files = {str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*") if path.is_file()}
        assert "models/model.pt" in files
        assert not files & {"eval/patient.nii.gz", "models/model.ts", "docs/link"}
        x = torch.rand(1, 1, 16, 16, 16)
        assert torch.equal(open_model(str(tmp_path / "b")).model(x), other(x))

    def test_code_has_no_bundle(self, tmp_path):
        (tmp_path / "own.py").write_text("from networks import Segmenter\ndef net(): return Segmenter()\n")
        opened = open_model(f"{tmp_path / 'own.py'}:net", untrained=True)
        assert isinstance(opened.model, Segmenter)
        with pytest.raises(SettingError, match="was built by code"):
            export_bundle(tmp_path / "bundle", opened)
        assert {path.name for path in tmp_path.iterdir()} <= {"own.py", "__pycache__"}

    def test_what_is_there_is_not_overwritten(self, tmp_path):
        _, folder = written(tmp_path)
        before = (folder / "models" / "model.pt").read_bytes()
        with pytest.raises(SettingError, match="is there already"):
            export_bundle(folder, open_checkpoint(checkpoint(), "net"))
        assert (folder / "models" / "model.pt").read_bytes() == before
        (tmp_path / "empty").mkdir()
        export_bundle(tmp_path / "empty", open_checkpoint(checkpoint(), "net"))
        assert json.loads((tmp_path / "empty" / "configs" / "metadata.json").read_text())["version"] == "1.0.0"
