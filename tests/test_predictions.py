import math

import pytest
import torch
from torch import tensor

from dltta.predictions import entropy, probabilities


def test_two_logits_by_hand():
    logits = tensor([[0.0, math.log(3)]])
    assert probabilities(logits).tolist() == [pytest.approx([0.25, 0.75])]
    assert entropy(logits).tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3)])


def test_one_channel_is_a_sigmoid_of_background_and_foreground():
    logits = tensor([[[math.log(3), 0.0]]])  # (1, 1, 2 positions)
    assert probabilities(logits)[0].T.tolist() == [pytest.approx([0.25, 0.75]), pytest.approx([0.5, 0.5])]
    assert entropy(logits)[0].tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3), math.log(2)])


def test_saturated_logits_have_zero_entropy_and_a_finite_gradient():
    logits = tensor([[500.0, -500.0]], requires_grad=True)
    entropy(logits).sum().backward()
    assert entropy(logits).item() == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "answer"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_narrow_types_are_widened_and_wide_ones_kept(dtype, answer):
    logits = torch.zeros(1, 2, dtype=dtype)
    assert probabilities(logits).dtype == answer
    assert entropy(logits).dtype == answer
