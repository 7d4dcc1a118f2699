"""2 networks. How many bytes do tensors hold at once while something runs?

Counted where torch makes tensors, so that the result does not depend on the allocator or on what ran before.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# These lay their input and output out anew where torch cannot see it (oneDNN, im2col).
REARRANGING = ("convolution", "convolution_backward")
BLOCK = 16  # channels


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that tensors made during this work hold at once."""
    counter = _Counter()
    with counter:
        work()
    return counter.peak


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.held = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            self._know(tensor, ours=False)
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._know(tensor, ours=True)
        hidden = 0
        if func._schema.name.removeprefix("aten::") in REARRANGING:
            hidden = sum(map(_rearranged, (*given, *made)))
        self.peak = max(self.peak, self.held + hidden)
        return result

    def _know(self, tensor: Tensor, *, ours: bool) -> None:
        """Count the memory of a tensor until it is freed, once for all views of it."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes() if ours else 0
        if key in self._known:
            return

        def forget(_: object) -> None:
            self.held -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, forget)
        self.held += size


def _rearranged(tensor: Tensor) -> int:
    """Bytes of a copy whose channels are filled up to whole blocks, as oneDNN has them."""
    if tensor.device.type != "cpu" or tensor.ndim < 3 or tensor.shape[1] == 0:
        return 0
    return tensor.nbytes // tensor.shape[1] * BLOCK * math.ceil(tensor.shape[1] / BLOCK)
