"""4 memory. What was predicted before for images like this one?"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dltta.errors import InputError, SettingError, StateError

Distance = Literal["l2", "cosine"]
Ready = Literal["full", "neighbors"]


class MemoryBank:
    """The latest `capacity` pairs of features (keys) and predicted probabilities (values); the oldest leave first.

    `layer` names the layer whose output is the key; None lets the adapter find one. A pair is one image, so a batch of
    200 adds 200 pairs. The paper: capacity 20 and 8 neighbors in segmentation, 800 (4 batches of 200) and 12 in
    classification; L2 distance; recall begins when the bank is full.

    `ready="neighbors"` begins as soon as there are `neighbors` pairs. `dtype` keeps keys and values in a narrower
    type. `pool` averages feature maps to a fixed number of positions per axis before they become keys: then images of
    different size can share a bank, and a prediction is compared only with predictions of its own shape. Without
    `pool` a second size is an error. One bank belongs to one adapter.

    Its size in bytes is capacity × (key elements + value elements) × bytes per element (`nbytes`).
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
    ) -> None:
        if not 1 <= neighbors <= capacity:
            raise SettingError(f"neighbors must be from 1 to capacity, got {neighbors} of {capacity}")
        if distance not in ("l2", "cosine"):
            raise SettingError(f"distance must be 'l2' or 'cosine', got {distance!r}")
        if ready not in ("full", "neighbors"):
            raise SettingError(f"ready must be 'full' or 'neighbors', got {ready!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise SettingError(f"dtype must be a floating-point type, got {dtype}")
        self.layer = layer
        self.capacity = capacity
        self.neighbors = neighbors
        self.distance: Distance = distance
        self.ready: Ready = ready
        self.dtype = dtype
        self.pool = pool
        self.clear()

    def clear(self) -> None:
        """Forget every pair; the storage is allocated anew by the next push."""
        self._keys: Tensor | None = None  # (capacity, key elements): slot i holds key i
        self._values: list[Tensor] = []  # slot i holds value i, (C, *positions)
        self._pushed = 0  # pairs ever pushed; the next goes to slot _pushed mod capacity

    def __len__(self) -> int:
        return min(self._pushed, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes held by keys and values."""
        return sum(value.nbytes for value in self._values) + (0 if self._keys is None else self._keys.nbytes)

    def recall(self, features: Tensor, shape: Sequence[int] | None = None) -> Tensor | None:
        """The mean prediction of the nearest neighbors of each sample, (B, C, *positions) — Eq. (3).

        `shape` (C, *positions) is that of the prediction to compare with; the newest one's unless given. None is
        answered while the bank is not ready: too few pairs altogether, or too few of this shape.
        """
        if self._keys is None or len(self) < (self.capacity if self.ready == "full" else self.neighbors):
            return None
        wanted = self._newest().shape if shape is None else torch.Size(shape)
        slots = [slot for slot, value in enumerate(self._values) if value.shape == wanted]
        if len(slots) < self.neighbors:
            return None
        held = self._keys[: len(self)] if len(slots) == len(self) else self._keys[slots]
        nearest = self._distances(self._flatten(features), held).topk(self.neighbors, largest=False).indices
        return torch.stack([self._mean_value([slots[i] for i in row]) for row in nearest.tolist()])

    def push(self, features: Tensor, predictions: Tensor) -> None:
        """Add one pair per sample; when the bank is full each takes the place of the oldest."""
        keys = self._flatten(features)
        if self._keys is None:
            self._keys = keys.new_zeros((self.capacity, keys.shape[1]), dtype=self.dtype or keys.dtype)
        for key, value in zip(keys, predictions.detach(), strict=True):
            slot = self._pushed % self.capacity
            self._keys[slot] = key
            if slot == len(self._values):
                self._values.append(value.to(self.dtype or value.dtype, copy=True))
            elif self._values[slot].shape == value.shape:
                self._values[slot].copy_(value)
            else:
                self._values[slot] = value.to(self.dtype or value.dtype, copy=True)
            self._pushed += 1

    def check(self, features: Tensor, prediction: Tensor) -> None:
        """Raise `InputError` unless this batch's features and prediction can be compared with what is held."""
        elements = self._flatten(features).shape[1]
        if self._keys is not None and elements != self._keys.shape[1]:
            raise InputError(
                f"the features have {elements} elements but those in memory have {self._keys.shape[1]}; "
                "images of different size need MemoryBank(pool=…) or one common size"
            )
        if self.pool is None and self._values and self._newest().shape != prediction.shape[1:]:
            raise InputError(
                f"the prediction has shape {tuple(prediction.shape[1:])} but those in memory "
                f"{tuple(self._newest().shape)}; "
                "images of different size need MemoryBank(pool=…) or one common size"
            )

    def state_dict(self) -> dict[str, Any]:
        """A snapshot of the pairs: later pushes do not change it."""
        return {
            "layer": self.layer,
            "pushed": self._pushed,
            "keys": None if self._keys is None else self._keys[: len(self)].clone(),
            "values": [value.clone() for value in self._values],
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
        self.clear()
        self.layer = state["layer"] or self.layer
        self._pushed = state["pushed"]
        if state["keys"] is not None:
            self._keys = state["keys"].new_zeros((self.capacity, state["keys"].shape[1]))
            self._keys[:pairs] = state["keys"]
        self._values = [value.clone() for value in state["values"]]

    def to(self, device: torch.device) -> "MemoryBank":
        """Move what is held to a device."""
        self._keys = None if self._keys is None else self._keys.to(device)
        self._values = [value.to(device) for value in self._values]
        return self

    def _newest(self) -> Tensor:
        return self._values[(self._pushed - 1) % self.capacity]

    def _flatten(self, features: Tensor) -> Tensor:
        features = features.detach()
        if self.pool is not None and features.ndim > 2:
            features = _average_pool(features, self.pool)
        return features.flatten(1)

    def _distances(self, keys: Tensor, held: Tensor) -> Tensor:
        """From each sample (B, D) to each held key (K, D), in float32 or finer: (B, K)."""
        wide = torch.promote_types(keys.dtype, torch.float32)
        keys, held = keys.to(wide), held.to(wide)
        if self.distance == "cosine":
            return 1 - F.normalize(keys, dim=1) @ F.normalize(held, dim=1).T
        # The matrix-product form of the distance loses digits to cancellation; this one does not.
        return torch.cdist(keys, held, compute_mode="donot_use_mm_for_euclid_dist")

    def _mean_value(self, slots: list[int]) -> Tensor:
        values = torch.stack([self._values[slot] for slot in slots])
        return values.to(torch.promote_types(values.dtype, torch.float32)).mean(dim=0)


def _average_pool(features: Tensor, positions: int | Sequence[int]) -> Tensor:
    """Channels-first maps (B, C, *positions) averaged to a fixed number of positions per axis."""
    axes = features.ndim - 2
    pools: dict[int, Any] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
    sizes = (positions,) * axes if isinstance(positions, int) else tuple(positions)
    if axes not in pools or len(sizes) != axes:
        raise SettingError(f"pool={positions!r} does not fit features of shape {tuple(features.shape)}")
    pooled: Tensor = pools[axes](features, sizes)
    return pooled
