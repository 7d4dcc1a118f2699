"""Source pairs: the memory that is ready at the first image."""

import numpy as np
import pytest
import torch

from dltta.config import make_adapter
from dltta.data.preprocessing import Preprocessing
from dltta.errors import SettingError
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.recipes import Recipe
from dltta.training.pairs import source_pairs
from networks import stream

IMAGES = [x[0] for x in stream((1, 1, 32, 32), 24)]


@pytest.fixture(scope="module")
def checkpoint():
    architecture = Architecture("unet", 2, 1, 2, {"width": 2})
    model = architecture.build(seed=0).eval()
    return Checkpoint(
        model, architecture, "segmentation", ("a", "b"), Preprocessing(), pairs=source_pairs(model, IMAGES)
    )


def test_twenty_images_give_twenty_pairs_of_what_the_network_says(checkpoint):
    pairs = checkpoint.pairs
    assert len(pairs.features) == len(pairs.predictions) == 20
    with torch.no_grad():
        for i in (0, 19):
            expected = checkpoint.model(IMAGES[i][None]).softmax(1)[0]
            np.testing.assert_allclose(pairs.predictions[i].float(), expected, atol=1e-3)


def test_pairs_survive_the_disk(checkpoint, tmp_path):
    save_checkpoint(tmp_path / "m", checkpoint)
    found = load_checkpoint(tmp_path / "m").pairs
    assert found.layer == checkpoint.pairs.layer
    assert torch.equal(found.features, checkpoint.pairs.features)
    assert torch.equal(found.predictions, checkpoint.pairs.predictions)


@pytest.mark.parametrize("pool", [None, 2])
def test_the_first_image_has_a_discrepancy(checkpoint, pool):
    first = make_adapter(checkpoint, Recipe(prefill=True, pool=pool)).step(IMAGES[20][None])
    assert first.discrepancy is not None
    assert first.rate == pytest.approx(1e-3 * first.discrepancy)
    empty = make_adapter(checkpoint, Recipe(pool=pool)).step(IMAGES[20][None])
    assert empty.discrepancy is None


def test_a_model_without_pairs_says_how_to_get_them(checkpoint):
    bare = Checkpoint(
        checkpoint.model, checkpoint.architecture, checkpoint.task, checkpoint.classes, checkpoint.preprocessing
    )
    with pytest.raises(SettingError, match="--with memory"):
        make_adapter(bare, Recipe(prefill=True))
