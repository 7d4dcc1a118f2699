"""4 memory. Which keys are nearest? Exactly, at little more than the cost of a matrix product."""

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

Distance = Literal["l2", "cosine"]
BLOCK = 1024  # elements summed by one matrix product, which bounds its rounding error
PIECE = (32, 8192)  # keys and elements that are measured at a time: differences stay in the processor's cache
FEW = 4  # for fewer queries a matrix product saves nothing: reading the keys is what takes time


def nearest(queries: Tensor, keys: Tensor, squares: Tensor, count: int, distance: Distance = "l2") -> Tensor:
    """Rows (B, count) of the keys (K, D) nearest to each query (B, D), in ascending order.

    Of equally near keys the first are taken. `squares` (K,) are the keys' squared lengths. Everything is computed in
    float32 or finer.
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    queries, squares = queries.to(wide), squares.to(wide)
    if distance == "cosine":
        return _smallest(-_products(queries, keys) / _length_products(queries, squares), count)
    if len(queries) < FEW or torch.get_float32_matmul_precision() != "highest":
        return torch.stack([_nearest_to_one(query, keys.split(PIECE[0]), count) for query in queries])
    return _nearest_by_product(queries, keys, squares, count)


def squared_lengths(keys: Tensor) -> Tensor:
    """Of each row, in float32 or finer."""
    return keys.to(torch.promote_types(keys.dtype, torch.float32)).square().sum(dim=1)


def _nearest_by_product(queries: Tensor, keys: Tensor, squares: Tensor, count: int) -> Tensor:
    """By |q − k|² = |q|² − 2 q·k + |k|², which loses digits to cancellation: what it leaves open is measured.

    A sum of n products, in whatever order, is wrong by at most ½ n ε |q| |k|. So a key can be among the nearest only if
    its lower bound is not above the `count`-th smallest upper bound; where just `count` keys are left, they are it.
    """
    estimate = squares - 2 * _products(queries, keys)  # |q|² is the same for all keys
    terms = min(BLOCK, keys.shape[1]) + keys.shape[1] // BLOCK + 64  # 64: the steps around the products, and measuring
    slack = terms * torch.finfo(estimate.dtype).eps * _length_sums(queries, squares).square_()
    limit = _kth_smallest(estimate + slack, count)
    possible = ~(estimate - slack > limit)  # not `<=`: a key whose bounds overflow stays possible
    rows = possible.to(torch.uint8).topk(count, dim=1).indices.sort(dim=1).values
    for sample in (possible.sum(dim=1) > count).nonzero().flatten().tolist():
        left = possible[sample].nonzero().flatten()
        parts = (keys[part] for part in left.split(PIECE[0]))  # never a copy of all of them
        rows[sample] = left[_nearest_to_one(queries[sample], parts, count)]
    return rows


def _nearest_to_one(query: Tensor, parts: Iterable[Tensor], count: int) -> Tensor:
    """Among keys that come in parts, by the sum of squared differences, which loses no digits."""
    return _smallest(torch.cat([_squared_distances(query, keys) for keys in parts])[None], count)[0]


def _squared_distances(query: Tensor, keys: Tensor) -> Tensor:
    total = query.new_zeros(len(keys))
    for q, k in zip(query.split(PIECE[1]), keys.split(PIECE[1], dim=1), strict=True):
        total += (k - q).square_().sum(dim=1)
    return total


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """Dot product of each query and key, (B, K), block by block; in place, so that autocast leaves it alone."""
    products = queries.new_zeros((len(queries), len(keys)))
    for q, k in zip(queries.split(BLOCK, dim=1), keys.split(BLOCK, dim=1), strict=True):
        products.addmm_(q, k.to(q.dtype).T)
    return products


def _smallest(values: Tensor, count: int) -> Tensor:
    """Columns (B, count) of the smallest values (B, K); of equal ones the first."""
    limit = _kth_smallest(values, count)
    columns = torch.arange(values.shape[1], device=values.device)
    order = torch.where(values == limit, columns, torch.where(values < limit, -1, len(columns)))
    return order.topk(count, dim=1, largest=False).indices.sort(dim=1).values


def _kth_smallest(values: Tensor, k: int) -> Tensor:
    return values.topk(k, dim=1, largest=False).values.amax(dim=1, keepdim=True)


def _length_products(queries: Tensor, squares: Tensor) -> Tensor:
    """|q| |k|, (B, K); a length of zero counts as tiny, so that its cosine is zero."""
    tiny = 1e-12
    lengths: Tensor = queries.norm(dim=1).clamp_min(tiny)
    return lengths[:, None] * squares.sqrt().clamp_min(tiny)


def _length_sums(queries: Tensor, squares: Tensor) -> Tensor:
    """|q| + |k|, (B, K)."""
    lengths: Tensor = queries.norm(dim=1)
    return lengths[:, None] + squares.sqrt()
