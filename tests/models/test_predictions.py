import math

import numpy as np
import pytest
import torch
from torch import tensor

from dltta.models.predictions import (
    all_finite,
    as_logits,
    each_prediction,
    entropy,
    greatest_entropy,
    log_probabilities,
    most_likely,
    probabilities,
)


def test_two_logits_by_hand():
    logits = tensor([[0.0, math.log(3)]])
    assert probabilities(logits).tolist() == [pytest.approx([0.25, 0.75])]
    assert entropy(logits).tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3)])


def test_one_channel_is_a_sigmoid_of_background_and_foreground():
    logits = tensor([[[math.log(3), 0.0]]])  # (1, 1, 2 positions)
    assert probabilities(logits)[0].T.tolist() == [pytest.approx([0.25, 0.75]), pytest.approx([0.5, 0.5])]
    assert entropy(logits)[0].tolist() == pytest.approx([0.25 * math.log(4) + 0.75 * math.log(4 / 3), math.log(2)])


def test_the_most_likely_class_is_the_first_of_the_highest():
    scores = np.random.default_rng(0).integers(0, 3, (2, 4, 5, 6)).astype(np.float32)  # many are equal
    expected = np.array(
        [[[image[:, i, j].tolist().index(max(image[:, i, j])) for j in range(6)] for i in range(5)] for image in scores]
    )
    for layout in (torch.contiguous_format, torch.channels_last):
        given = torch.from_numpy(scores).contiguous(memory_format=layout)
        assert most_likely(given).tolist() == expected.tolist()
        assert most_likely(given[1], dim=0).tolist() == expected[1].tolist()


def test_saturated_logits_have_zero_entropy_and_a_finite_gradient():
    logits = tensor([[500.0, -500.0]], requires_grad=True)
    entropy(logits).sum().backward()
    assert entropy(logits).item() == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_narrow_types_are_widened_and_wide_ones_kept(dtype, expected):
    logits = torch.zeros(1, 2, dtype=dtype)
    assert probabilities(logits).dtype == expected
    assert entropy(logits).dtype == expected


def slow_entropy(logits):
    """Step by step, so that autograd finds the derivative by itself."""
    if logits.shape[1] == 1:
        p = torch.cat([1 - logits.sigmoid(), logits.sigmoid()], dim=1)
    else:
        p = logits.exp() / logits.exp().sum(dim=1, keepdim=True)
    return -(p * p.log()).sum(dim=1)


@pytest.mark.parametrize("shape", [(4, 3), (2, 1, 5), (1, 11, 6, 7), (2, 2, 3, 4, 5)])
def test_entropy_and_its_gradient_agree_with_the_slow_way(shape):
    logits = (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    weights = torch.randn(slow_entropy(logits).shape, dtype=torch.float64)
    torch.testing.assert_close(entropy(logits), slow_entropy(logits))
    [expected] = torch.autograd.grad((weights * slow_entropy(logits)).sum(), logits)
    [gradient] = torch.autograd.grad((weights * entropy(logits)).sum(), logits)
    torch.testing.assert_close(gradient, expected)
    assert torch.autograd.gradcheck(entropy, logits)
    assert torch.autograd.gradgradcheck(entropy, logits)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 77, 1000])
def test_one_value_that_is_not_finite_is_seen(value, dtype, place):
    tensor = torch.randn(7, 11, 13).to(dtype)
    assert all_finite(tensor)
    assert all_finite(tensor[:0])
    tensor.view(-1)[place] = value
    assert not all_finite(tensor)
    assert not all_finite(tensor.transpose(0, 2))


@pytest.mark.parametrize("channels", [1, 3])
def test_logarithms_of_probabilities_and_the_way_back(channels):
    logits = torch.randn(2, channels, 4, generator=torch.Generator().manual_seed(0))
    log_p = log_probabilities(logits)
    torch.testing.assert_close(log_p.exp(), probabilities(logits))
    torch.testing.assert_close(probabilities(as_logits(log_p, channels)), probabilities(logits))
    assert as_logits(log_p, channels).shape == logits.shape
    far = log_probabilities(torch.full((1, channels), -300.0) * torch.arange(1, channels + 1))
    assert far.isfinite().all()


def test_the_greatest_entropy_is_that_of_equal_probabilities():
    for channels in (1, 2, 5):
        logits = torch.zeros(1, channels)
        assert greatest_entropy(logits) == pytest.approx(entropy(logits).item(), abs=1e-6)


def test_each_prediction_is_a_row_in_the_order_of_its_entropy():
    logits = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    rows = each_prediction(logits)
    assert rows.shape == (40, 3)
    assert torch.equal(rows[1 * 20 + 2 * 5 + 3], logits[1, :, 2, 3])
    torch.testing.assert_close(entropy(rows), entropy(logits).flatten())
    assert torch.equal(each_prediction(logits[:, :, 0, 0]), logits[:, :, 0, 0])
