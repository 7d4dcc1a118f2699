import json

import pytest
import torch

from dltta.data.preprocessing import Preprocessing
from dltta.errors import StateError
from dltta.models.io.checkpoint import Checkpoint, Reconstructions, Rotation, load_checkpoint, save_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.autoencoders import UNET_LEVELS, AutoEncoders
from dltta.models.parts.rotation import RotationHead


def checkpoint():
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    return Checkpoint(
        model=architecture.build(seed=3),
        architecture=architecture,
        task="segmentation",
        classes=("background", "a", "b"),
        preprocessing=Preprocessing("scale", 255.0, (32, 32)),
        record={"epoch": 3},
        rotation=Rotation(RotationHead(64, 8), "down_4", ("conv_0.conv_0.conv.weight",)),
        reconstructions=Reconstructions(AutoEncoders({"image": (1, 32, 32)}, width=8), UNET_LEVELS, (4, 8, 16)),
    )


def test_everything_comes_back(tmp_path):
    saved = checkpoint()
    save_checkpoint(tmp_path / "model", saved)
    loaded = load_checkpoint(tmp_path / "model")
    for part in ("architecture", "task", "classes", "preprocessing", "record"):
        assert getattr(loaded, part) == getattr(saved, part)
    pairs = [
        (saved.model, loaded.model),
        (saved.rotation.head, loaded.rotation.head),
        (saved.reconstructions.autoencoders, loaded.reconstructions.autoencoders),
    ]
    for before, after in pairs:
        assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())
    assert (loaded.rotation.layer, loaded.rotation.shared) == (saved.rotation.layer, saved.rotation.shared)
    assert (loaded.reconstructions.levels, loaded.reconstructions.channels) == (UNET_LEVELS, (4, 8, 16))
    assert not loaded.model.training


def test_files_are_weights_and_json_only(tmp_path):
    save_checkpoint(tmp_path, checkpoint())
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"model.json", "model.safetensors", "ttt.safetensors", "atta.safetensors"}


def damage_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\0" * 40)


def damage_json(folder):
    (folder / "model.json").write_text("{")


def remove_part(folder):
    (folder / "ttt.safetensors").unlink()


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
        (remove_part, r"ttt\.safetensors is missing"),
        (other_format, "has not the format 1"),
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
