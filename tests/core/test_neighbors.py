"""The fast search finds what measuring every distance finds, whatever the rounding of the matrix product."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from dltta.core import neighbors
from dltta.core.neighbors import FEW, nearest, squared_lengths


def slow(queries, keys, count):
    """Every distance in float64, a stable sort: of equally near keys the first."""
    keys = keys.double().numpy()
    rows = []
    for query in queries.double().numpy():
        distances = [sum((key - query) ** 2) if len(key) < 50 else np.sum((key - query) ** 2) for key in keys]
        rows.append(sorted(sorted(range(len(keys)), key=lambda row: (distances[row], row))[:count]))
    return rows


def fast(queries, keys, count, distance="l2"):
    return nearest(queries, keys, squared_lengths(keys), count, distance).tolist()


def test_nearest_by_hand_the_first_of_equally_near_ones():
    keys = tensor([[5.0], [1.0], [3.0], [3.0], [-1.0]])
    queries = tensor([[2.0], [4.9], [-9.0], [3.0]])
    assert fast(queries, keys, 2) == [[1, 2], [0, 2], [1, 4], [2, 3]]
    assert fast(queries[:1], keys, 2) == [[1, 2]]  # the way of few queries


shapes = st.tuples(st.integers(FEW, 7), st.integers(3, 40), st.sampled_from([1, 3, 40, 1023, 1024, 1025, 2500]))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), shapes, st.sampled_from([0.0, 1.0, 100.0]), st.sampled_from([1e-3, 1.0, 1e3]))
def test_random_keys_near_and_far_from_the_origin(seed, shape, offset, scale):
    batch, held, size = shape
    generator = torch.Generator().manual_seed(seed)
    keys, queries = (torch.randn(n, size, generator=generator) * scale + offset for n in (held, batch))
    count = 1 + seed % held
    assert fast(queries, keys, count) == slow(queries, keys, count)
    assert fast(queries[:1], keys, count) == slow(queries[:1], keys, count)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), shapes)
def test_ties_go_to_the_first(seed, shape):
    batch, held, size = shape
    generator = torch.Generator().manual_seed(seed)
    keys, queries = (torch.randint(0, 2, (n, size), generator=generator).float() for n in (held, batch))
    keys[held // 2 :] = keys[: held - held // 2].clone()  # every key twice; distances are exact
    count = 1 + seed % held
    assert fast(queries, keys, count) == slow(queries, keys, count)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([2, 64, 1500]))
def test_near_ties_that_a_matrix_product_cannot_see(seed, size):
    """Keys differ from the query by parts in 10⁶ of a large common vector: |q|² − 2 q·k + |k|² keeps none of that."""
    generator = torch.Generator().manual_seed(seed)
    common = 1000 * torch.randn(size, generator=generator)
    steps = torch.randperm(30, generator=generator)[:, None] + 1
    keys = common + steps / 256 * torch.ones(size)
    queries = common.expand(FEW, size).clone()
    assert fast(queries, keys, 7) == slow(queries, keys, 7)
    products = squared_lengths(keys) - 2 * queries @ keys.T
    wrong = [sorted(row) for row in products.topk(7, largest=False).indices.tolist()]
    assert size == 2 or wrong != slow(queries, keys, 7)  # the product alone would have been wrong


def test_only_what_the_product_leaves_open_is_measured(monkeypatch):
    measured = []

    def spy(query, parts, count):
        parts = list(parts)
        measured.append([len(keys) for keys in parts])
        return original(query, parts, count)

    original = neighbors._nearest_to_one
    monkeypatch.setattr(neighbors, "_nearest_to_one", spy)
    keys = torch.arange(50.0)[:, None] * torch.ones(300)
    queries = tensor([[3.2], [8.9], [7.5], [40.0]]) * torch.ones(300)
    assert fast(queries[[0, 1, 2, 0]], keys, 2) == [[3, 4], [8, 9], [7, 8], [3, 4]]
    assert measured == []
    assert fast(queries, keys, 2) == [[3, 4], [8, 9], [7, 8], [39, 40]]
    assert measured == [[3]]  # 39, 40 and 41 for the last query
    measured.clear()
    assert fast(queries[:1], keys, 2) == [[3, 4]]
    assert measured == [[32, 18]]  # few queries
    measured.clear()
    same = torch.ones(FEW, 300)
    assert fast(same, torch.ones(40, 300), 2) == [[0, 1]] * FEW
    assert measured == [[32, 8]] * FEW  # all are left, and never copied at once


def test_coarse_matrix_products_are_not_used(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    monkeypatch.setattr(neighbors, "_products", lambda queries, keys: pytest.fail("multiplied"))
    generator = torch.Generator().manual_seed(0)
    keys, queries = torch.randn(20, 5, generator=generator), torch.randn(9, 5, generator=generator)
    assert fast(queries, keys, 4) == slow(queries, keys, 4)


def test_autocast_does_not_reach_the_search():
    generator = torch.Generator().manual_seed(0)
    keys, queries = (torch.randn(n, 40, generator=generator) + 30 for n in (60, FEW))
    directions = torch.nn.functional.normalize(queries), torch.nn.functional.normalize(keys)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(queries, keys, 5) == slow(queries, keys, 5)
        assert fast(queries, keys, 5, "cosine") == slow(*directions, 5)  # unit vectors: nearest is most similar


def test_keys_whose_squares_overflow_are_measured():
    keys = tensor([[9e19], [1.5e20], [1e20], [1.01e20], [8e19], [1.02e20]])
    assert fast(tensor([[1e20]] * FEW), keys, 3) == [[2, 3, 5]] * FEW


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_narrow_and_wide_keys_are_compared_as_they_are(dtype):
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(30, 200, generator=generator).to(dtype)
    queries = torch.randn(6, 200, generator=generator)
    assert fast(queries, keys, 5) == slow(queries, keys, 5)
