import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

import reference
from dltta import symmetric_kl
from dltta.core.discrepancy import batch_discrepancy


def test_symmetric_kl_of_two_coins_by_hand():
    # p = (1/2, 1/2), q = (1/4, 3/4): KL(p‖q) = ½ ln 2 + ½ ln ⅔, KL(q‖p) = ¼ ln ½ + ¾ ln 3/2; half their sum = ⅛ ln 3
    value = symmetric_kl(tensor([[0.5, 0.5]]), tensor([[0.25, 0.75]]))
    assert value.tolist() == pytest.approx([math.log(3) / 8], abs=1e-7)


def test_positions_are_averaged_and_classes_summed():
    prediction = tensor([[[0.5, 0.25], [0.5, 0.75]]])  # (1 sample, 2 classes, 2 positions)
    other = tensor([[[0.25, 0.25], [0.75, 0.75]]])  # the second position agrees
    assert symmetric_kl(prediction, other).tolist() == pytest.approx([math.log(3) / 16], abs=1e-7)


def test_positions_may_be_summed():
    prediction = tensor([[[0.5, 0.25], [0.5, 0.75]], [[0.5, 0.5], [0.5, 0.5]]])
    other = tensor([[[0.25, 0.25], [0.75, 0.75]], [[0.25, 0.25], [0.75, 0.75]]])  # one of two differs, both differ
    by_hand = [math.log(3) / 8, math.log(3) / 4]
    assert symmetric_kl(prediction, other, positions="sum").tolist() == pytest.approx(by_hand, abs=1e-7)
    assert batch_discrepancy(prediction, other, positions="sum") == pytest.approx(math.log(3) * 3 / 16, abs=1e-7)


def test_discrepancy_does_not_grow_with_the_image():
    prediction, other = tensor([[[0.5], [0.5]]]), tensor([[[0.25], [0.75]]])
    wide = symmetric_kl(prediction.repeat(1, 1, 50), other.repeat(1, 1, 50))
    assert wide.tolist() == pytest.approx(symmetric_kl(prediction, other).tolist(), rel=1e-6)


def test_batch_discrepancy_is_the_mean_of_the_samples_by_hand():
    prediction = tensor([[0.5, 0.5], [0.5, 0.5]])
    other = tensor([[0.25, 0.75], [0.5, 0.5]])
    assert batch_discrepancy(prediction, other) == pytest.approx(math.log(3) / 16, abs=1e-7)


def test_certain_and_opposite_predictions_stay_finite():
    value = symmetric_kl(tensor([[1.0, 0.0]]), tensor([[0.0, 1.0]]))
    assert value.item() == pytest.approx(-math.log(torch.finfo(torch.float32).tiny), rel=1e-5)
    assert symmetric_kl(tensor([[1.0, 0.0]]), tensor([[1.0, 0.0]])).item() == 0


@given(st.lists(st.floats(-8, 8), min_size=6, max_size=6))
def test_agrees_with_the_slow_reference_and_is_symmetric(values):
    p, q = tensor(values).double().view(2, 3).softmax(1)
    slow = 0.5 * (reference.kl(p.tolist(), q.tolist()) + reference.kl(q.tolist(), p.tolist()))
    assert symmetric_kl(p[None], q[None]).item() == pytest.approx(slow, abs=1e-9)
    assert symmetric_kl(p[None], q[None]).item() == symmetric_kl(q[None], p[None]).item()


@pytest.mark.parametrize("shape", [(1, 2), (200, 2), (3, 5, 7), (1, 11, 40, 300), (2, 3, 300, 200), (1, 2, 40, 40, 40)])
def test_cutting_into_pieces_changes_nothing(shape):
    p, q = (torch.randn(shape).mul(4).softmax(1) for _ in range(2))
    slow = 0.5 * ((p.double() - q.double()) * (p.double().log() - q.double().log())).sum(1)
    torch.testing.assert_close(symmetric_kl(p, q).double(), slow.reshape(len(p), -1).mean(1), rtol=1e-6, atol=1e-7)


def test_discrepancy_can_be_differentiated():
    logits = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    other = torch.randn(2, 3, 4, dtype=torch.float64).softmax(1)
    assert torch.autograd.gradcheck(lambda z: symmetric_kl(z.softmax(1), other), logits)
