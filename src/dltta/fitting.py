"""6 update. Does a case fit into memory: whole, in windows, or not at all?

What a step needs is counted once, on two small crops, and grows with the positions of its input. The same limit always
gives the same windows, so a stream that is continued with the limit it was begun with continues bit for bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from dltta.core.adapter import Adapter
from dltta.data.formats.format import Geometry
from dltta.errors import DlttaError, InputError, SettingError
from dltta.machine import SHARE, available_memory, show_bytes, total_memory
from dltta.models.footprint import peak_bytes
from dltta.models.io.opened import OpenedModel, Window

SURELY = 1 << 16  # bytes per position that no network needs: an image that fits by this measure is not estimated
MARGIN = 1.25  # what the allocator and layers need beyond the tensors that are counted
SMALLEST = {2: 128, 3: 32}  # sides of the smallest windows that are chosen
CANDIDATES = 6  # predictions that a guard compares
FLOAT, LABEL = 4, 8  # bytes
READING = 16  # bytes per value: as stored, as doubles, as floats


def default_limit(device: torch.device) -> int:
    """Half of this machine's memory, or of the GPU's; the same whatever else runs. Unlimited where nobody knows."""
    if device.type == "cuda":
        return int(SHARE * torch.cuda.get_device_properties(device).total_memory)
    total = total_memory()
    return 1 << 62 if total is None else int(SHARE * total)


@dataclass(frozen=True)
class Cost:
    """Bytes of one step on an input of n positions: `fixed + per_position × n`."""

    fixed: float
    per_position: float

    def at(self, positions: int) -> float:
        return MARGIN * (self.fixed + self.per_position * positions)


@dataclass(frozen=True)
class Extent:
    """How large a case is: the positions of one input of the network, of all of them together, and of its file."""

    input: tuple[int, ...]  # spatial
    inputs: int  # one, or one per slice
    file: int
    channels: int

    @property
    def positions(self) -> int:
        return math.prod(self.input)


class Fitting:
    """Chooses windows for cases that are too large to go through a network whole. `make` gives another adapter."""

    def __init__(
        self,
        opened: OpenedModel,
        make: Callable[[], Adapter],
        limit: int,
        available: Callable[[], int | None] = available_memory,
    ) -> None:
        self.opened, self.limit = opened, limit
        self._make, self._available = make, available

    def window(self, extent: Extent) -> Window | None:
        """The model's own window, or a smaller one; raises `InputError` if the case does not fit even so."""
        own = _own(self.opened)
        size = extent.input if own is None else own.size(extent.input)
        held = self._held(extent)
        if held + SURELY * math.prod(size) <= self.limit and self._now(held + SURELY * math.prod(size)):
            return own
        if self.cost is None or held + self.cost.at(math.prod(size)) <= self.limit:
            self._require_now(extent.input, held + (0 if self.cost is None else self.cost.at(math.prod(size))))
            return own
        if own is not None:
            need = held + self.cost.at(math.prod(size))
            raise InputError(f"{self._needs(extent, need)} in windows of {_size(size)}; give a smaller --patch")
        held += FLOAT * (len(self.opened.classes) + 1) * extent.positions  # what the windows are blended in
        side, axes = 1 << max(extent.input).bit_length(), len(extent.input)
        smallest = SMALLEST.get(axes, 128)
        while side > smallest and held + self.cost.at(side**axes) > self.limit:
            side //= 2
        need = held + self.cost.at(side**axes)
        if need > self.limit:
            raise InputError(f"{self._needs(extent, need)} even in windows; allow more, or cut it into tiles")
        self._require_now(extent.input, need)
        return Window(tuple(min(side, length) for length in extent.input))

    def require(self, extent: Extent) -> None:
        """Raise `InputError` for images to classify, which cannot be cut, if they do not fit together."""
        held = self._held(extent)
        if held + SURELY * extent.positions * extent.inputs <= self.limit or self.cost is None:
            return
        need = held + self.cost.at(extent.positions * extent.inputs)
        if need > self.limit:
            fewer = "a smaller --batch-size" if extent.inputs > 1 else "--resize, or a smaller image"
            raise InputError(f"{self._needs(extent, need)}; allow more, or give {fewer}")
        self._require_now(extent.input, need)

    def require_readable(self, geometry: Geometry) -> None:
        """Raise `InputError` for a file that does not even fit into memory as an array."""
        need = READING * geometry.channels * math.prod(geometry.shape)
        if need > self.limit:
            raise InputError(f"{_size(geometry.shape)} {self._more(need)} to be read; allow more, or cut it into tiles")
        self._require_now(geometry.shape, need)

    @cached_property
    def cost(self) -> Cost | None:
        """None for a network that does not take other sizes than its own."""
        axes = self.opened.spatial_dims
        small, large = {3: ((32, 32, 32), (64, 32, 32))}.get(axes, ((64,) * axes, (128,) * axes))
        device = next(self.opened.model.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            try:
                few, many = (self._counted(shape) for shape in (small, large))
            except DlttaError:
                return None
        slope = (many - few) / (math.prod(large) - math.prod(small))
        return Cost(max(few - slope * math.prod(small), 0.0), slope)

    def _counted(self, spatial: tuple[int, ...]) -> float:
        """Bytes of a step in which the guard lets everything happen, and of the memory bank."""
        adapter = self._make()
        x = torch.rand((1, self.opened.in_channels, *spatial), generator=torch.Generator().manual_seed(0))
        Adapter.step(adapter, x)  # fills what is made once
        plain = peak_bytes(lambda: Adapter.step(adapter, x))
        compared = CANDIDATES * FLOAT * len(self.opened.classes) * math.prod(spatial)
        bank = 0 if adapter.memory is None else adapter.memory.nbytes
        return max(plain + compared, peak_bytes(lambda: adapter.step(x))) + bank

    def _held(self, extent: Extent) -> float:
        """Bytes of a case beside its step: the image as read and as prepared, the next one, and the prediction."""
        inputs = extent.positions * extent.inputs
        images = FLOAT * extent.channels * (3 * extent.file + 2 * inputs)
        if self.opened.task == "classification":
            return images
        classes = len(self.opened.classes)
        return images + FLOAT * classes * (2 * inputs + 2 * extent.file) + 2 * LABEL * extent.file

    def _now(self, need: float) -> bool:
        available = self._available()
        return available is None or need <= available

    def _require_now(self, spatial: tuple[int, ...], need: float) -> None:
        """Whatever is allowed, there must be as much at this moment."""
        if not self._now(need):
            free = show_bytes(self._available() or 0)
            raise InputError(
                f"{_size(spatial)} needs about {show_bytes(need)}, and {free} are free at the moment; end other "
                "programs, or begin a stream with a smaller --max-memory"
            )

    def _needs(self, extent: Extent, need: float) -> str:
        many = f"{extent.inputs} images of " if self.opened.task == "classification" and extent.inputs > 1 else ""
        return f"{many}{_size(extent.input)} {self._more(need)}"

    def _more(self, need: float) -> str:
        return f"needs about {show_bytes(need)}, more than the {show_bytes(self.limit)} of --max-memory,"


def _own(opened: OpenedModel) -> Window | None:
    if not isinstance(opened.window, Window | None):
        raise SettingError(f"{opened.name} has windows of its own kind, which cannot be made smaller")
    return opened.window


def _size(spatial: tuple[int, ...]) -> str:
    return " x ".join(map(str, spatial))
