import json
import shutil

import pytest
import torch

from dltta.data.preprocessing import Preprocessing
from dltta.errors import SettingError, StateError
from dltta.models.io.checkpoint import Checkpoint, Reconstructions, Rotation, load_checkpoint, save_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.autoencoders import UNET_LEVELS, AutoEncoders
from dltta.models.parts.rotation import RotationHead


def network(seed, **parts):
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    return Checkpoint(
        model=architecture.build(seed=seed),
        architecture=architecture,
        task="segmentation",
        classes=("background", "a", "b"),
        preprocessing=Preprocessing("scale", 255.0, (32, 32)),
        record={"epoch": seed},
        **parts,
    )


def checkpoint():
    """A source model with auto-encoders, and a network with a rotation head for TTT."""
    return network(
        3,
        reconstructions=Reconstructions(AutoEncoders({"image": (1, 32, 32)}, width=8), UNET_LEVELS, (4, 8, 16)),
        joint=network(4, rotation=Rotation(RotationHead(64, 8), "down_4", ("conv_0.conv_0.conv.weight",))),
    )


def test_everything_comes_back(tmp_path):
    saved = checkpoint()
    save_checkpoint(tmp_path / "model", saved)
    loaded = load_checkpoint(tmp_path / "model")
    for part in ("architecture", "task", "classes", "preprocessing", "record"):
        assert getattr(loaded, part) == getattr(saved, part)
        assert getattr(loaded.joint, part) == getattr(saved.joint, part)
    assert len(saved.modules()) == 4
    for before, after in zip(saved.modules(), loaded.modules(), strict=True):
        assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())
    one, other = saved.joint.rotation, loaded.joint.rotation
    assert (one.layer, one.shared) == (other.layer, other.shared)
    assert (loaded.reconstructions.levels, loaded.reconstructions.channels) == (UNET_LEVELS, (4, 8, 16))
    assert not loaded.model.training
    assert not loaded.joint.model.training


@pytest.mark.parametrize("method", ["source", "ptbn", "tent", "atta", "udas", "package.module:Own"])
def test_every_method_but_ttt_starts_from_the_source_model(method):
    saved = checkpoint()
    assert saved.for_method(method) is saved


def test_ttt_starts_from_the_network_that_was_trained_jointly_with_rotation():
    saved = checkpoint()
    assert saved.for_method("ttt") is saved.joint
    assert saved.joint.for_method("ttt") is saved.joint
    with pytest.raises(SettingError, match="no rotation head, which TTT needs; train it with `--with ttt`"):
        network(3).for_method("ttt")


def test_files_are_weights_and_json_only(tmp_path):
    save_checkpoint(tmp_path, checkpoint())
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    joint = {"ttt/model.json", "ttt/model.safetensors", "ttt/rotation.safetensors"}
    assert names == {"model.json", "model.safetensors", "atta.safetensors"} | joint


def damage_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\0" * 40)


def damage_json(folder):
    (folder / "model.json").write_text("{")


def remove_part(folder):
    (folder / "atta.safetensors").unlink()


def remove_joint(folder):
    shutil.rmtree(folder / "ttt")


def exchange_joint(folder):
    save_checkpoint(folder / "ttt", network(5))


def damage_head(folder):
    (folder / "ttt" / "rotation.safetensors").write_bytes(b"\0" * 40)


def first_format(folder):
    """As written before there were two networks in a folder."""
    description = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**description, "format": 1}))


def other_format(folder):
    description = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps({**description, "format": 99}))


def missing_key(folder):
    description = json.loads((folder / "model.json").read_text())
    del description["classes"]
    (folder / "model.json").write_text(json.dumps(description))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_weights, "not the file that model.json was written with"),
        (damage_json, "is not JSON"),
        (remove_part, r"atta\.safetensors is missing"),
        (remove_joint, r"ttt/model\.json is missing; copy the whole model folder"),
        (exchange_joint, r"ttt/model\.json is not the file that model\.json was written with"),
        (damage_head, r"ttt/rotation\.safetensors is not the file that model\.json was written with"),
        (first_format, "has not the format 2 that this version reads; train it again"),
        (other_format, "has not the format 2"),
        (missing_key, "malformed: 'classes'"),
    ],
)
def test_damage_is_one_clear_error(tmp_path, damage, words):
    save_checkpoint(tmp_path, checkpoint())
    damage(tmp_path)
    with pytest.raises(StateError, match=words):
        load_checkpoint(tmp_path)


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(StateError, match=r"is not a model: it has no model\.json"):
        load_checkpoint(tmp_path)
