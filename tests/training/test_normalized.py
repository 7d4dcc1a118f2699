"""What DTTA needs from source training: a network behind an image normalizer, and a denoiser of label maps."""

import copy
import shutil
from dataclasses import replace

import pytest
import torch

from dltta import Adapter, Fixed, GuardedAdapter, SourceGuard
from dltta.core.objectives.dtta import DTTA
from dltta.data.preprocessing import Preprocessing
from dltta.errors import SettingError, StateError
from dltta.models.io.checkpoint import load_checkpoint
from dltta.models.io.fingerprint import fingerprint
from dltta.models.io.opening import open_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.denoiser import Denoiser
from dltta.models.parts.normalizer import ImageNormalizer
from dltta.objectives import Source
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.source import DenoiserTraining
from sites import Blobs


def training(folder, site=None, **settings):
    site = site or Blobs()
    name, options = ("unet", {"width": 4}) if site.task == "segmentation" else ("densenet_small", {"width": 8})
    defaults = {"epochs": 2, "batch_size": 2, "validation": 0.25, "with_": ("dtta",), "denoiser_epochs": 3}
    chosen = TrainingSettings(**{**defaults, "denoiser_widths": (4, 8), **settings})
    architecture = Architecture(name, site.axes, 1, 2, options)
    return SourceTraining([site], architecture, Preprocessing(), chosen, folder, torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dtta")
    training(folder, learning_rate=1e-2).run()
    return folder


def test_the_network_of_dtta_is_a_second_one_with_a_normalizer_in_front(folder):
    checkpoint = load_checkpoint(folder)
    network = checkpoint.for_method("dtta")
    assert checkpoint.for_method("tent") is checkpoint
    assert isinstance(network.model.image_normalizer, ImageNormalizer)
    assert isinstance(network.denoiser, Denoiser)
    assert not hasattr(checkpoint.model, "image_normalizer")
    assert fingerprint(network.model.conv_0) != fingerprint(checkpoint.model.conv_0)
    assert (network.record["losses"], network.record["finished"]) == (["task"], True)
    assert network.calibration is not None


def test_it_can_be_added_to_a_finished_training(tmp_path):
    training(tmp_path, with_=(), epochs=1).run()
    added = replace(training(tmp_path, epochs=1, denoiser_epochs=1), resume=True)
    assert added.found() is None
    assert added.run().normalized is not None
    assert replace(training(tmp_path, with_=(), epochs=1), resume=True).found() is not None
    with pytest.raises(StateError, match="trained with other settings"):
        replace(training(tmp_path, epochs=1, denoiser_epochs=2), resume=True).found()


def test_the_normalizer_was_trained_jointly_and_takes_part(folder):
    model = load_checkpoint(folder).for_method("dtta").model
    torch.manual_seed(0)
    fresh = ImageNormalizer(2, 1)
    assert not torch.equal(model.image_normalizer.layers[0].weight, fresh.layers[0].weight)
    x = torch.rand(1, 1, 16, 16)
    with torch.no_grad():
        plain = copy.deepcopy(model)
        plain._forward_pre_hooks.clear()
        torch.testing.assert_close(model(x), plain(model.image_normalizer(x)))
        assert not torch.allclose(model(x), plain(x))


def test_loaded_again_it_is_the_same_and_so_is_its_fingerprint(folder, tmp_path):
    one, other = load_checkpoint(folder), load_checkpoint(folder)
    assert open_checkpoint(one, "a").fingerprint == open_checkpoint(other, "a").fingerprint
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    (copied / "dtta" / "denoiser.safetensors").write_bytes(b"other")
    with pytest.raises(StateError, match="denoiser.safetensors is not the file"):
        load_checkpoint(copied)


@pytest.mark.long
def test_the_denoiser_learns_to_mend_held_out_label_maps(tmp_path):
    site = Blobs(count=24, size=24)
    checkpoint = training(tmp_path, site, epochs=1, batch_size=9, denoiser_epochs=12, denoiser_rate=1e-2).run()
    rows = [row for row in checkpoint.record["history"] if row["stage"] == "denoiser"]
    assert len(rows) == 12
    assert rows[-1]["validation"] < 0.5 * rows[-1]["initial"]


def test_the_denoisers_loss_by_hand():
    class Echo(torch.nn.Module):
        classes = 2

        def forward(self, probability):
            return (probability * 1000).detach()

    labels = torch.zeros(1, 4, 4, dtype=torch.long)  # all alike: corruption changes nothing
    loss = DenoiserTraining(Echo())(torch.zeros(1, 1, 4, 4), labels, torch.Generator())["denoiser"]
    assert loss.item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("guarded", [False, True])
def test_an_opened_model_is_adapted_and_starts_as_its_own_network(folder, guarded):
    opened = open_checkpoint(load_checkpoint(folder), "a").for_method("dtta")
    x = torch.rand(1, 1, 16, 16)
    objective = DTTA(opened.denoiser)
    settings = {"optimizer": torch.optim.Adam, "steps": 3, "mode": "image-specific"}
    if guarded:
        adapter = GuardedAdapter(
            opened.model, objective, Fixed(1e-3), guard=SourceGuard(calibration=opened.calibration), **settings
        )
    else:
        adapter = Adapter(opened.model, objective, Fixed(1e-3), **settings)
    source = Adapter(opened.model, Source())(x)
    torch.testing.assert_close(adapter.predict(x), source)
    assert adapter.step(x).logits.isfinite().all()
    assert set(adapter.adapted_parameters()) == {
        name for name, _ in opened.model.named_parameters() if name.startswith("image_normalizer.")
    }


def test_a_model_without_says_how_to_get_one(tmp_path):
    checkpoint = training(tmp_path, with_=(), epochs=1).run()
    with pytest.raises(SettingError, match="train it with `--with dtta`"):
        checkpoint.for_method("dtta")
    with pytest.raises(SettingError, match="train it with `--with dtta`"):
        open_checkpoint(checkpoint, "a").for_method("dtta")
    assert not any(key.startswith("denoiser_") for key in checkpoint.record["fingerprint"])


def test_a_classification_has_nothing_to_denoise(tmp_path):
    with pytest.raises(SettingError, match="dtta denoises segmentations"):
        training(tmp_path, site=Blobs("classification", count=8)).run()


@pytest.mark.long
def test_volumes(tmp_path):
    checkpoint = training(
        tmp_path, site=Blobs(axes=3, count=4, size=16), epochs=1, validation=0.5, denoiser_epochs=1
    ).run()
    network = checkpoint.for_method("dtta")
    assert network.denoiser.spatial_dims == 3
    x = torch.rand(1, 1, 16, 16, 16)
    assert Adapter(network.model, DTTA(network.denoiser), Fixed(1e-3))(x).shape == (1, 2, 16, 16, 16)
