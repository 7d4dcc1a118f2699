"""What a stream of TTT leaves is taken out with the network that it adapted."""

from dataclasses import replace

import pytest
import torch

from dltta.data.preprocessing import Preprocessing
from dltta.errors import StateError
from dltta.models.encoder import shared_parameters
from dltta.models.io.checkpoint import Checkpoint, Rotation, load_checkpoint, save_checkpoint
from dltta.models.io.opening import open_model
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.rotation import RotationHead
from dltta.serving.maintenance import difference, export, live_adapter
from networks import trained
from streams import SEGMENTS, run, write_images

pytestmark = pytest.mark.usefixtures("no_power_cut")
PLAIN = {"alpha": 0.05, "guard": False, "optimizer": "sgd"}


@pytest.fixture
def model(tmp_path):
    """A folder with a source model and a network for TTT."""
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    networks = [trained(architecture.build(), seed) for seed in (3, 4)]
    source = Checkpoint(networks[0], architecture, "segmentation", SEGMENTS, Preprocessing("scale", 255.0, (32, 32)))
    shared = tuple(shared_parameters(networks[1], "down_4", torch.rand(1, 1, 32, 32)))
    joint = replace(source, model=networks[1], rotation=Rotation(RotationHead(64, 8), "down_4", shared))
    save_checkpoint(tmp_path / "model", replace(source, joint=joint))
    return tmp_path / "model"


@pytest.mark.parametrize("bundle", [False, True])
def test_the_exported_network_is_that_of_ttt_with_what_moved(tmp_path, model, bundle):
    opened, out = open_model(str(model)), tmp_path / "out"
    run(
        opened,
        write_images(tmp_path / "in", 3),
        out,
        method="ttt",
        rate="fixed",
        alpha=0.01,
        guard=False,
        optimizer="sgd",
    )
    export(out, opened, tmp_path / "new", bundle=bundle)
    found = open_model(str(tmp_path / "new")).model.state_dict()
    before = load_checkpoint(model).joint
    moved = {name for name, tensor in before.model.state_dict().items() if not torch.equal(tensor, found[name])}
    assert len(moved) > 0
    assert moved <= set(before.rotation.shared)


def test_the_exported_network_of_rotta_is_the_teacher_with_the_statistics_of_the_stream(tmp_path, model):
    opened, out = open_model(str(model)), tmp_path / "out"
    settings = {"every": 1, "momentum": 0.5, "follow": 0.5}
    run(opened, write_images(tmp_path / "in", 3), out, method="rotta", rate="fixed", settings=settings, **PLAIN)
    adapted = export(out, opened, tmp_path / "new").opened
    live, found = live_adapter(out, opened), open_model(str(tmp_path / "new")).model
    x = torch.rand(1, 1, 32, 32)
    assert torch.allclose(live.predict(x), found(x), atol=1e-5)
    assert not torch.allclose(opened.model(x), found(x), atol=1e-2)
    assert difference(live, adapted) == 0


def test_the_exported_network_of_cotta_is_its_teacher(tmp_path, model):
    opened, out = open_model(str(model)), tmp_path / "out"
    settings = {"momentum": 0.9, "scales": [1.0]}
    run(opened, write_images(tmp_path / "in", 3), out, method="cotta", rate="fixed", settings=settings, **PLAIN)
    export(out, opened, tmp_path / "new")
    live, found = live_adapter(out, opened), open_model(str(tmp_path / "new")).model.state_dict()
    teacher, student = (dict(network.named_parameters()) for network in (live.objective.teacher, live.model))
    assert all(torch.equal(found[name], parameter) for name, parameter in teacher.items())
    assert any(not torch.equal(found[name], parameter) for name, parameter in student.items())


def test_settings_without_a_method_are_said_to_be_altered(tmp_path, model):
    opened, out = open_model(str(model)), tmp_path / "out"
    run(opened, write_images(tmp_path / "in", 1), out)
    settings = out / "state" / "stream.json"
    settings.write_text(settings.read_text().replace('"recipe"', '"receipt"'))
    with pytest.raises(StateError, match="was altered: it names no method"):
        export(out, opened, tmp_path / "new")
