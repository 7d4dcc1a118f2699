import math

import pytest
import torch

from dltta.training.task import TaskLoss


def test_dice_is_that_of_the_whole_batch():
    """Two images of two positions: one labeled and certain, one without a label and certain of that."""
    logits = torch.tensor([[[0.0, 40.0], [40.0, 0.0]], [[40.0, math.log(3.0)], [0.0, 0.0]]])[..., None]  # (2, 2, 2, 1)
    labels = torch.tensor([[1, 0], [0, 0]])[..., None]
    probability = 0.25  # of the class at the last position, wrongly
    wanted = 1 - 2 * 1 / (1 + probability + 1)  # overlap 1; sums 1.25 and 1
    both, plain = TaskLoss("ce+dice")(logits, labels), TaskLoss("ce")(logits, labels)
    assert (both - plain).item() == pytest.approx(wanted, abs=1e-4)
    assert plain.item() == pytest.approx(-math.log(0.75) / 4, abs=1e-6)
