"""4 memory. What was predicted before for images like this one?"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dltta.core.discrepancy import Positions
from dltta.core.neighbors import Distance as Distance
from dltta.core.neighbors import nearest, squared_lengths
from dltta.errors import InputError, SettingError, StateError

Ready = Literal["full", "neighbors"]


class MemoryBank:
    """The latest `capacity` pairs of features (keys) and predicted probabilities (values); the oldest leave first.

    `layer` names the layer whose output is the key; None lets the adapter find one. A pair is one image, so a batch of
    200 adds 200 pairs. The paper: capacity 20 and 8 neighbors in segmentation, 800 (4 batches of 200) and 12 in
    classification; L2 distance; recall begins when the bank is full.

    `ready="neighbors"` begins as soon as there are `neighbors` pairs. `dtype` keeps keys and values in a narrower
    type. `pool` averages feature maps to a fixed number of positions per axis before they become keys: then images of
    different size can share a bank, and a prediction is compared only with predictions of its own shape. Without
    `pool` a second size is an error. `positions` says how the discrepancy with what is recalled treats positions
    (`symmetric_kl`). One bank belongs to one adapter.

    Its size in bytes is capacity × (key elements + value elements) × bytes per element (`nbytes`), allocated once; four
    bytes per pair for the length of its key come on top.
    """

    def __init__(
        self,
        layer: str | None = None,
        *,
        capacity: int = 20,
        neighbors: int = 8,
        distance: Distance = "l2",
        ready: Ready = "full",
        dtype: torch.dtype | None = None,
        pool: int | Sequence[int] | None = None,
        positions: Positions = "mean",
    ) -> None:
        if not 1 <= neighbors <= capacity:
            raise SettingError(f"neighbors must be from 1 to capacity, got {neighbors} of {capacity}")
        if distance not in ("l2", "cosine"):
            raise SettingError(f"distance must be 'l2' or 'cosine', got {distance!r}")
        if ready not in ("full", "neighbors"):
            raise SettingError(f"ready must be 'full' or 'neighbors', got {ready!r}")
        if positions not in ("mean", "sum"):
            raise SettingError(f"positions must be 'mean' or 'sum', got {positions!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise SettingError(f"dtype must be a floating-point type, got {dtype}")
        self.layer = layer
        self.capacity = capacity
        self.neighbors = neighbors
        self.distance: Distance = distance
        self.ready: Ready = ready
        self.dtype = dtype
        self.pool = pool
        self.positions: Positions = positions
        self.clear()

    def clear(self) -> None:
        """Forget every pair; the storage is allocated anew by the next push."""
        self._keys: Tensor | None = None  # (capacity, key elements): slot i holds key i
        self._squares: Tensor | None = None  # (capacity,): the keys' squared lengths
        self._values: Tensor | list[Tensor] = []  # slot i holds value i, (C, *positions); a list once shapes may differ
        self._pushed = 0  # pairs ever pushed; the next goes to slot _pushed mod capacity

    def __len__(self) -> int:
        return min(self._pushed, self.capacity)

    @property
    def needed(self) -> int:
        """How many pairs recall waits for."""
        return self.capacity if self.ready == "full" else self.neighbors

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        values = [self._values] if isinstance(self._values, Tensor) else self._values
        return sum(value.nbytes for value in values) + (0 if self._keys is None else self._keys.nbytes)

    def recall(self, features: Tensor, shape: Sequence[int] | None = None) -> Tensor | None:
        """The mean prediction of the nearest neighbors of each sample, (B, C, *positions) — Eq. (3).

        `shape` (C, *positions) is that of the prediction to compare with; the newest one's unless given. None is
        given while the bank is not ready: too few pairs altogether, or too few of this shape.
        """
        if self._keys is None or self._squares is None:
            return None
        if len(self) < self.needed:
            return None
        slots = self._slots_of(self._newest_shape() if shape is None else torch.Size(shape))
        if len(slots) < self.neighbors:
            return None
        everything = len(slots) == len(self)
        keys = self._keys[: len(self)] if everything else self._keys[slots]
        squares = self._squares[: len(self)] if everything else self._squares[slots]
        rows = nearest(self._flatten(features), keys, squares, self.neighbors, self.distance)
        return self._mean(rows if everything else torch.tensor(slots, device=rows.device)[rows])

    def push(self, features: Tensor, predictions: Tensor) -> None:
        """Add one pair per sample; when the bank is full each takes the place of the oldest."""
        self.check(features, predictions)
        keys, values = self._flatten(features), predictions.detach()
        if self._keys is None or self._squares is None:
            self._keys, self._squares, self._values = self._storage(keys, values)
        for samples, slots in _runs(len(keys), self._pushed, self.capacity):
            self._keys[slots] = keys[samples]
            self._squares[slots] = squared_lengths(self._keys[slots])
            if isinstance(self._values, Tensor):
                self._values[slots] = values[samples]
        if isinstance(self._values, list):
            for number, value in enumerate(values, start=self._pushed):
                slot = number % self.capacity
                self._values[slot : slot + 1] = [value.to(self.dtype or value.dtype, copy=True)]
        self._pushed += len(keys)

    def check(self, features: Tensor, prediction: Tensor) -> None:
        """Raise `InputError` unless this batch's features and prediction can be compared with what is held."""
        elements = self._flatten(features[:0]).shape[1] if self.pool is not None else features[0].numel()
        if self._keys is not None and elements != self._keys.shape[1]:
            raise InputError(
                f"the features have {elements} elements but those in memory have {self._keys.shape[1]}; "
                "images of different size need MemoryBank(pool=8), on the command line --pool 8, or one common size"
            )
        if self.pool is None and len(self) and self._newest_shape() != prediction.shape[1:]:
            raise InputError(
                f"the prediction has shape {tuple(prediction.shape[1:])} but those in memory "
                f"{tuple(self._newest_shape())}; "
                "images of different size need MemoryBank(pool=8), on the command line --pool 8, or one common size"
            )

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of the pairs: later pushes do not change it."""
        return {
            "layer": self.layer,
            "pushed": self._pushed,
            "keys": None if self._keys is None else self._keys[: len(self)].clone(),
            "values": [value.clone() for value in self._values[: len(self)]],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Counterpart of `state_dict`: every pair returns to the slot it had."""
        if self.layer is not None and state["layer"] not in (None, self.layer):
            raise StateError(
                f"the saved memory holds features of {state['layer']!r}, this bank those of {self.layer!r}"
            )
        pairs = len(state["values"])
        if pairs != min(state["pushed"], self.capacity):
            raise StateError(f"the saved memory of {pairs} pairs does not fit a bank of capacity {self.capacity}")
        if self.pool is None and len({value.shape for value in state["values"]}) > 1:
            raise StateError("the saved memory holds predictions of several shapes, which needs MemoryBank(pool=…)")
        self.clear()
        self.layer = state["layer"] or self.layer
        self._pushed = state["pushed"]
        if state["keys"] is None:
            return
        self._keys, self._squares, self._values = self._storage(state["keys"], state["values"][0][None])
        self._keys[:pairs] = state["keys"]
        self._squares[:pairs] = squared_lengths(state["keys"])
        if isinstance(self._values, Tensor):
            self._values[:pairs] = torch.stack(state["values"])
        else:
            self._values = [value.clone() for value in state["values"]]

    def to(self, device: torch.device) -> "MemoryBank":
        """Move what is held to a device."""
        if self._keys is not None and self._squares is not None:
            self._keys, self._squares = self._keys.to(device), self._squares.to(device)
        values = self._values
        self._values = values.to(device) if isinstance(values, Tensor) else [value.to(device) for value in values]
        return self

    def _storage(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor | list[Tensor]]:
        """Room for `capacity` pairs like these; values that may differ in shape are kept one by one."""
        room = keys.new_empty((self.capacity, keys.shape[1]), dtype=self.dtype or keys.dtype)
        squares = squared_lengths(keys[:0]).new_empty(self.capacity)
        if self.pool is not None:
            return room, squares, []
        return room, squares, values.new_empty((self.capacity, *values.shape[1:]), dtype=self.dtype or values.dtype)

    def _newest_shape(self) -> torch.Size:
        return self._values[(self._pushed - 1) % self.capacity].shape

    def _slots_of(self, shape: torch.Size) -> Sequence[int]:
        """The slots whose value has this shape."""
        if isinstance(self._values, Tensor):
            return range(len(self)) if self._values.shape[1:] == shape else []
        return [slot for slot, value in enumerate(self._values) if value.shape == shape]

    def _flatten(self, features: Tensor) -> Tensor:
        features = features.detach()
        if self.pool is not None and features.ndim > 2:
            features = average_pool(features, self.pool)
        return features.flatten(1)

    def _mean(self, slots: Tensor) -> Tensor:
        """Over the slots (B, D) of each sample, in float32 or finer: (B, C, *positions)."""
        values = self._values
        if isinstance(values, Tensor) and values.dtype in (torch.float32, torch.float64):
            return _mean_rows(values, slots)
        return torch.stack([_mean([values[slot] for slot in row]) for row in slots.tolist()])


def _runs(count: int, pushed: int, capacity: int) -> Iterator[tuple[slice, slice]]:
    """Which of `count` samples go to which slots, one after the other, after so many were pushed."""
    sample = 0
    while sample < count:
        slot = (pushed + sample) % capacity
        length = min(count - sample, capacity - slot)
        yield slice(sample, sample + length), slice(slot, slot + length)
        sample += length


def _mean_rows(values: Tensor, rows: Tensor) -> Tensor:
    """Mean of the rows (B, D) of values (K, …), without copying them out first.

    Long rows are cut into parts, each a row of its own, which share the processor's cores.
    """
    parts = math.gcd(values[0].numel(), 64)
    table = values.view(len(values) * parts, -1)
    bags = rows[:, None, :] * parts + torch.arange(parts, device=rows.device)[:, None]  # (B, parts, D)
    return F.embedding_bag(bags.flatten(0, 1), table, mode="mean").view(len(rows), *values.shape[1:])


def _mean(values: Sequence[Tensor]) -> Tensor:
    """Mean of tensors of one shape, in float32 or finer; added up one by one."""
    total = values[0].to(torch.promote_types(values[0].dtype, torch.float32), copy=True)
    for value in values[1:]:
        total += value
    return total.div_(len(values))


def average_pool(features: Tensor, positions: int | Sequence[int]) -> Tensor:
    """Channels-first maps (B, C, *positions) averaged to a fixed number of positions per axis."""
    axes = features.ndim - 2
    pools: dict[int, Any] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
    sizes = (positions,) * axes if isinstance(positions, int) else tuple(positions)
    if axes not in pools or len(sizes) != axes:
        raise SettingError(f"pool={positions!r} does not fit features of shape {tuple(features.shape)}")
    pooled: Tensor = pools[axes](features, sizes)
    return pooled
