"""How the bank keeps and averages what it holds: one allocation, no copies, the same answers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dltta import Adapter, MemoryBank, Proportional
from dltta.errors import InputError, StateError
from dltta.objectives import Tent
from networks import Classifier, Segmenter, stream, trained


def filled(pairs, key, value, seed=0, **options):
    """A full bank and what is in it, as numpy arrays."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(pairs, *shape, generator=generator) for shape in (key, value))
    values = values.softmax(1)
    memory = MemoryBank(**{"capacity": pairs, "neighbors": 3, **options})
    memory.push(keys, values)
    return memory, keys, values


def slow_recall(keys, values, query, neighbors):
    order = np.argsort(((keys.numpy() - query.numpy()) ** 2).reshape(len(keys), -1).sum(1), kind="stable")
    return values.double().numpy()[order[:neighbors]].mean(0)


@pytest.mark.parametrize("value", [(2,), (3, 7), (2, 8, 8), (11, 16, 64), (5, 13, 7), (2, 4, 4, 4)])
@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.parametrize("options", [{}, {"pool": 2}, {"dtype": torch.float16}])
def test_recall_of_any_shape_agrees_with_a_plain_mean(value, batch, options):
    memory, keys, values = filled(12, (3, 4, 4) if "pool" not in options else (3, 2, 2), value, **options)
    queries = torch.randn(batch, *keys.shape[1:], generator=torch.Generator().manual_seed(1))
    recalled = memory.recall(queries)
    assert recalled.shape == (batch, *value)
    assert recalled.dtype == torch.float32
    for answer, query in zip(recalled, queries, strict=True):
        tolerance = 1e-3 if "dtype" in options else 1e-6
        np.testing.assert_allclose(answer.numpy(), slow_recall(keys, values, query, 3), atol=tolerance)


@pytest.mark.parametrize(("options", "kind"), [({}, torch.Tensor), ({"pool": 2}, list)])
def test_predictions_of_one_shape_are_one_tensor_allocated_for_all(options, kind):
    memory = MemoryBank(capacity=50, neighbors=2, **options)
    memory.push(torch.rand(1, 4, 2, 2), torch.rand(1, 3, 6))
    assert isinstance(memory._values, kind)
    assert len(memory.state_dict()["values"]) == len(memory) == 1
    if kind is torch.Tensor:
        assert memory._values.shape == (50, 3, 6)
        assert memory.nbytes == 50 * (16 + 18) * 4


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 7), st.lists(st.integers(1, 17), min_size=1, max_size=8), st.booleans())
def test_batches_of_any_size_leave_the_latest_pairs(capacity, batches, pooled):
    memory = MemoryBank(capacity=capacity, neighbors=1, ready="neighbors", pool=1 if pooled else None)
    sent = 0
    for size in batches:
        numbers = torch.arange(sent, sent + size, dtype=torch.float32)
        memory.push(numbers[:, None], numbers[:, None])
        sent += size
    held = list(range(max(0, sent - capacity), sent))
    assert len(memory) == len(held)
    recalled = memory.recall(torch.arange(sent, dtype=torch.float32)[:, None])
    assert recalled.flatten().tolist() == [max(number, held[0]) for number in range(sent)]
    assert sorted(value.item() for value in memory.state_dict()["values"]) == held


def test_a_push_of_another_shape_is_refused_before_anything_is_written():
    memory = MemoryBank(capacity=2, neighbors=1, ready="neighbors")
    memory.push(torch.ones(1, 4), torch.full((1, 3, 6), 0.5))
    with pytest.raises(InputError, match=r"shape \(3, 1\) .* \(3, 6\)"):
        memory.push(torch.ones(1, 4), torch.zeros(1, 3, 1))
    with pytest.raises(InputError, match="8 elements"):
        memory.push(torch.ones(1, 8), torch.zeros(1, 3, 6))
    assert len(memory) == 1
    assert memory.recall(torch.ones(1, 4)).tolist() == torch.full((1, 3, 6), 0.5).tolist()


def test_a_state_with_several_shapes_needs_a_pooled_bank():
    memory = MemoryBank(capacity=2, neighbors=1, pool=1)
    memory.push(torch.ones(1, 4, 2, 2), torch.zeros(1, 3, 6))
    memory.push(torch.ones(1, 4, 3, 3), torch.zeros(1, 3, 9))
    MemoryBank(capacity=2, neighbors=1, pool=1).load_state_dict(memory.state_dict())
    with pytest.raises(StateError, match="several shapes"):
        MemoryBank(capacity=2, neighbors=1).load_state_dict(memory.state_dict())


@pytest.mark.parametrize("distance", ["l2", "cosine"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_restored_bank_recalls_bit_for_bit(distance, dtype):
    memory, keys, _ = filled(40, (6, 5), (3, 8), distance=distance, dtype=dtype)
    other = MemoryBank(capacity=40, neighbors=3, distance=distance, dtype=dtype)
    other.load_state_dict(memory.state_dict())
    queries = keys[:9] + 0.1
    assert torch.equal(memory.recall(queries), other.recall(queries))
    assert torch.equal(memory.recall(queries[:1]), other.recall(queries[:1]))


def coarse(shape, batches):
    """Images whose samples differ at a large scale, so that a classifier does not answer the same for all."""
    return [images.repeat_interleave(4, 2).repeat_interleave(4, 3) for images in stream(shape, batches)]


@pytest.mark.parametrize(
    ("make", "images"),
    [(lambda: Segmenter(2, classes=5), stream((1, 1, 16, 16), 20)), (Classifier, coarse((8, 1, 3, 3), 20))],
)
def test_a_half_precision_bank_leaves_the_rate_unchanged_to_one_percent(make, images):
    rates = {}
    for dtype in (None, torch.float16):
        bank = MemoryBank(capacity=8, neighbors=4, dtype=dtype, ready="neighbors")
        adapter = Adapter(trained(make()), Tent(), Proportional(1e-2), memory=bank)
        rates[dtype] = [adapter.step(x).rate for x in images]
    assert len(set(rates[None])) > 10  # the rate does follow the images
    assert rates[None] != rates[torch.float16]
    assert rates[torch.float16] == pytest.approx(rates[None], rel=0.01)
