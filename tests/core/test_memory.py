import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

import reference
from dltta import MemoryBank
from dltta.errors import InputError, SettingError, StateError


def bank(**options):
    """Keys are numbers on a line, values say which pair they came from: pair i predicts (i / 10, 1 − i / 10)."""
    return MemoryBank("layer", **{"capacity": 3, "neighbors": 2, **options})


def push(memory, *numbers):
    memory.push(tensor([[float(n)] for n in numbers]), tensor([[n / 10, 1 - n / 10] for n in numbers]))


def test_recall_is_the_mean_prediction_of_the_nearest_by_hand():
    memory = bank()
    push(memory, 0, 1, 5)
    assert memory.recall(tensor([[0.9]])).tolist() == [pytest.approx([0.05, 0.95])]  # of 0 and 1
    assert memory.recall(tensor([[4.0]])).tolist() == [pytest.approx([0.3, 0.7])]  # of 5 and 1
    assert memory.recall(tensor([[0.9], [4.0]])).tolist() == [pytest.approx([0.05, 0.95]), pytest.approx([0.3, 0.7])]


def test_nearest_is_by_distance_not_by_dot_product():
    memory = bank(neighbors=1)
    push(memory, 0, 1, 5)
    assert memory.recall(tensor([[1.1]])).tolist() == [pytest.approx([0.1, 0.9])]


def test_cosine_compares_directions():
    memory = MemoryBank(capacity=2, neighbors=1, distance="cosine")
    memory.push(tensor([[10.0, 0.0], [0.0, 1.0]]), tensor([[1.0, 0.0], [0.0, 1.0]]))
    assert memory.recall(tensor([[1.0, 0.5]])).tolist() == [[1.0, 0.0]]
    nearest_by_l2 = MemoryBank(capacity=2, neighbors=1)
    nearest_by_l2.load_state_dict(memory.state_dict())
    assert nearest_by_l2.recall(tensor([[1.0, 0.5]])).tolist() == [[0.0, 1.0]]


def test_bank_is_ready_when_full_or_with_enough_neighbors():
    full, early = bank(), bank(ready="neighbors")
    for memory in (full, early):
        push(memory, 1, 2)
    assert full.recall(tensor([[1.0]])) is None
    assert early.recall(tensor([[1.0]])).tolist() == [pytest.approx([0.15, 0.85])]
    push(full, 3)
    assert full.recall(tensor([[1.0]])).tolist() == [pytest.approx([0.15, 0.85])]


def test_bank_forgets_the_oldest_key_and_value_together():
    memory = bank(neighbors=1)
    push(memory, 0, 1, 2, 3)  # 0 leaves
    assert len(memory) == 3
    assert memory.recall(tensor([[0.0]])).tolist() == [pytest.approx([0.1, 0.9])]
    push(memory, 8)  # 1 leaves
    assert memory.recall(tensor([[0.0]])).tolist() == [pytest.approx([0.2, 0.8])]


def test_a_batch_larger_than_the_bank_leaves_its_latest_pairs():
    memory = bank(neighbors=1)
    push(memory, 0, 1, 2, 3, 4, 5, 6)
    assert memory.recall(tensor([[0.0]])).tolist() == [pytest.approx([0.4, 0.6])]


def test_storage_is_allocated_once():
    memory = bank()
    push(memory, 0, 1, 2)
    places = [memory._keys.data_ptr(), *(value.data_ptr() for value in memory._values)]
    size = memory.nbytes
    push(memory, 3, 4, 5, 6)
    assert places == [memory._keys.data_ptr(), *(value.data_ptr() for value in memory._values)]
    assert memory.nbytes == size == 3 * (1 + 2) * 4


def test_pairs_are_copies():
    memory = bank(neighbors=1)
    keys, values = tensor([[1.0]] * 3), tensor([[0.5, 0.5]] * 3)
    memory.push(keys, values)
    keys.zero_()
    values.zero_()
    assert memory.recall(tensor([[1.0]])).tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_halves_the_size_and_answers_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(20, 64, generator=generator), torch.rand(20, 4, 16, generator=generator)
    whole, half = MemoryBank(), MemoryBank(dtype=dtype)
    for memory in (whole, half):
        memory.push(keys, values)
    assert half.nbytes * 2 == whole.nbytes
    assert half.recall(keys[:3]).dtype == torch.float32
    torch.testing.assert_close(half.recall(keys[:3]), whole.recall(keys[:3]), atol=4e-3, rtol=0)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 9), st.sampled_from(["l2", "cosine"]), st.integers(1, 5)
)
def test_recall_agrees_with_the_slow_reference(seed, neighbors, extra, distance, batch):
    generator = torch.Generator().manual_seed(seed)
    capacity = neighbors + extra
    memory = MemoryBank(capacity=capacity, neighbors=neighbors, distance=distance)
    pairs = []
    for _ in range(2 * capacity // batch + 1):
        keys, values = torch.randn(batch, 3, 4, generator=generator), torch.rand(batch, 2, 5, generator=generator)
        memory.push(keys, values)
        pairs += [(k.double().numpy().ravel(), v.numpy()) for k, v in zip(keys, values, strict=True)]
        pairs = pairs[-capacity:]
    query = torch.randn(batch, 3, 4, generator=generator)
    slow = [
        sum(value for _, value in reference.nearest(pairs, q.double().numpy().ravel(), neighbors, distance)) / neighbors
        for q in query
    ]
    np.testing.assert_allclose(memory.recall(query).numpy(), np.stack(slow), atol=1e-6)


def test_another_image_size_is_refused_without_pooling():
    memory = bank()
    memory.push(torch.rand(1, 2, 4, 4), torch.rand(1, 3, 8, 8))
    with pytest.raises(InputError, match=r"features have 72 elements .* 32.*pool="):
        memory.check(torch.rand(1, 2, 6, 6), torch.rand(1, 3, 12, 12))
    with pytest.raises(InputError, match=r"shape \(3, 4, 16\) .* \(3, 8, 8\).*pool="):
        memory.check(torch.rand(1, 2, 4, 4), torch.rand(1, 3, 4, 16))


def test_pooled_keys_let_sizes_mix_and_compare_only_equal_shapes():
    memory = MemoryBank(capacity=4, neighbors=2, pool=2)
    small, large = torch.full((1, 2, 4, 4), 1.0), torch.full((1, 2, 6, 6), 1.0)
    for value in (0.1, 0.3):
        memory.check(small, torch.full((1, 3, 8, 8), value))
        memory.push(small, torch.full((1, 3, 8, 8), value))
    for value in (0.5, 0.7):
        memory.check(large, torch.full((1, 3, 12, 12), value))
        memory.push(large, torch.full((1, 3, 12, 12), value))
    assert memory._keys.shape == (4, 2 * 2 * 2)
    torch.testing.assert_close(memory.recall(small, (3, 8, 8)), torch.full((1, 3, 8, 8), 0.2))
    torch.testing.assert_close(memory.recall(large, (3, 12, 12)), torch.full((1, 3, 12, 12), 0.6))
    assert memory.recall(large, (3, 10, 10)) is None
    memory.push(large, torch.full((1, 3, 12, 12), 0.9))  # takes the place of an 8 × 8 prediction
    assert memory.recall(small, (3, 8, 8)) is None


def test_pooled_key_is_the_mean_over_each_cell():
    memory = MemoryBank(capacity=1, neighbors=1, pool=(1, 2))
    memory.push(torch.arange(8.0).view(1, 1, 2, 4), torch.ones(1, 1))
    assert memory._keys.tolist() == [[(0 + 1 + 4 + 5) / 4, (2 + 3 + 6 + 7) / 4]]
    with pytest.raises(SettingError, match="does not fit features"):
        memory.push(torch.rand(1, 1, 2, 2, 2), torch.ones(1, 1))


def test_a_restored_bank_continues_like_the_original():
    one, other = bank(), bank()
    push(one, 0, 1, 2, 3)
    saved = one.state_dict()
    push(one, 7)
    other.load_state_dict(saved)
    push(other, 7)
    for query in (0.0, 2.5, 9.0):
        assert torch.equal(one.recall(tensor([[query]])), other.recall(tensor([[query]])))


def test_a_state_of_another_capacity_or_layer_is_refused():
    memory = bank()
    push(memory, 0, 1, 2)
    with pytest.raises(StateError, match="capacity 4"):
        bank(capacity=4).load_state_dict({**memory.state_dict(), "pushed": 9})
    with pytest.raises(StateError, match="'layer'.*'other'"):
        MemoryBank("other", capacity=3, neighbors=2).load_state_dict(memory.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"neighbors": 4}, "neighbors must be from 1 to capacity"),
        ({"neighbors": 0}, "neighbors must be from 1 to capacity"),
        ({"distance": "dot"}, "'l2' or 'cosine'"),
        ({"ready": "now"}, "'full' or 'neighbors'"),
        ({"dtype": torch.int8}, "floating-point"),
        ({"positions": "max"}, "'mean' or 'sum'"),
    ],
)
def test_impossible_settings_are_refused(options, words):
    with pytest.raises(SettingError, match=words):
        bank(**options)
