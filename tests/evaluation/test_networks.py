"""Which method starts from which network: what `dltta inspect` says, and what stands below a table."""

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from small_results import one_target, results, stream

from dltta.data.preprocessing import Preprocessing
from dltta.evaluation.outputs import training_curves
from dltta.evaluation.overview import overview
from dltta.evaluation.tables import by_target
from dltta.models.encoder import shared_parameters
from dltta.models.io.checkpoint import Checkpoint, Rotation
from dltta.models.io.opening import open_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.rotation import RotationHead


@pytest.fixture(scope="module")
def checkpoint():
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    model = architecture.build(seed=4).eval()
    shared = tuple(shared_parameters(model, "down_4", torch.rand(1, 1, 32, 32)))
    joint = Checkpoint(
        model,
        architecture,
        "segmentation",
        ("background", "a", "b"),
        Preprocessing(size=(32, 32)),
        {"losses": ["task", "rotation"]},
        rotation=Rotation(RotationHead(64, 8), "down_4", shared),
    )
    source = architecture.build(seed=3).eval()
    return replace(joint, model=source, record={"losses": ["task"]}, rotation=None, joint=joint)


def shown(seen):
    console = Console(width=120, file=io.StringIO())
    console.print(seen.tables())
    return console.file.getvalue()


def test_inspect_tells_which_method_starts_from_which_network(checkpoint):
    seen = overview(open_checkpoint(checkpoint, "net"))
    methods = seen.as_json()["methods"]
    losses = {name: method["losses"] for name, method in methods.items()}
    assert losses.pop("ttt") == ("task", "rotation")
    assert [losses.pop(name) for name in ("atta", "dtta", "ttt++")] == [None] * 3
    assert set(losses.values()) == {("task",)}
    assert methods["ttt"]["works"]
    text = " ".join(shown(seen).split())
    assert "source, ptbn, tent, t3a" in text
    assert "start from the network trained with the task loss alone" in text
    assert "ttt starts from the network trained with the task and rotation losses" in text


def test_a_network_of_unknown_training_is_not_spoken_of(checkpoint):
    seen = overview(open_checkpoint(replace(checkpoint, record={}, joint=None), "net"))
    assert "default feature layer" in shown(seen)
    assert "trained with" not in shown(seen)


def test_tables_say_how_source_and_the_network_of_ttt_were_trained():
    known = {"trained_with": {"source": ["task"], "ttt": ["task", "rotation"]}}
    source = "Source: trained with the task loss alone."
    joint = "TTT starts from another network, trained with the task and rotation losses."
    without = by_target(replace(one_target(), config=known))
    assert source in without.notes
    assert joint not in without.notes
    shown = results(*one_target().streams, stream("ttt", "fixed", [0.6] * 8))
    assert {source, joint} <= set(by_target(replace(shown, config=known)).notes)
    assert source not in by_target(shown).notes


def test_the_report_draws_the_rotation_loss_of_the_network_of_ttt_and_the_rest_of_the_source_model(checkpoint):
    history = [
        {"stage": "task", "task": 0.5, "score": 0.8},
        {"stage": "ttt", "task": 0.6, "rotation": 1.3, "score": 0.7},
        {"stage": "atta", "validation": 0.2},
    ]
    assert training_curves(replace(checkpoint, record={"history": history, "metric": "dice"})) == {
        "task loss": [0.5], "validation dice": [0.8], "rotation loss": [1.3], "reconstruction error": [0.2]
    }  # fmt: skip
