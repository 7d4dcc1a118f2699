"""3 objectives. Robust continual adaptation against temporal correlation (NOTE, Gong et al., NeurIPS 2022)."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltta.errors import NothingToAdaptError, SettingError
from dltta.models.normalization import BatchNormWrapper, use_test_statistics
from dltta.models.predictions import entropy, most_likely, probabilities

OF_IMAGES, OF_DENSE = 64, 16  # the authors' capacity; ours for images of which each has many predictions


class Reservoir:
    """Prediction-balanced reservoir sampling: so many images, as balanced over predicted classes as they came.

    Until it is full every image joins. Then one of a class that is not among the largest takes the place of a random
    image of one of those; another one takes the place of one of its own class with probability m/n: of the n that came,
    m are held.
    """

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity, self.seed = capacity, seed
        self.entries: list[tuple[Tensor, int]] = []  # image (C, *spatial), predicted class
        self.came: dict[int, int] = {}  # by class

    def add(self, image: Tensor, label: int) -> None:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * sum(self.came.values()))
        self.came[label] = self.came.get(label, 0) + 1
        if len(self.entries) < self.capacity:
            self.entries.append((image, label))
            return
        held = {other: [i for i, (_, of) in enumerate(self.entries) if of == other] for _, other in self.entries}
        largest = [other for other, where in held.items() if len(where) == max(map(len, held.values()))]
        if label not in largest:
            where = held[largest[_below(len(largest), generator)]]
        elif torch.rand((), generator=generator).item() < len(held[label]) / self.came[label]:
            where = held[label]
        else:
            return
        self.entries[where[_below(len(where), generator)]] = (image, label)


class NOTE:
    """Entropy on a balanced memory; batch normalization corrects the stored statistics only where an image stands out.

    Each image is predicted alone and before any update: by instance-aware batch normalization (IABN), which moves from
    the stored mean and variance towards the image's own by what exceeds `k` standard errors. Every `every` images scale
    and shift take a step on the entropy of the memory's predictions, and the stored statistics follow the memory by
    `momentum`. Capacity and `every` are the authors' 64 unless given.

    Ours: the source need not have been trained with IABN, as the authors' was. A step of a batch is one update at most.
    Dense predictions: all images in one class, capacity 16; with many positions the standard errors vanish, so IABN is
    close to instance normalization there. The loss is the mean entropy; the released program divides it by C too.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        every: int | None = None,
        k: float = 4.0,
        momentum: float = 0.01,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        for name, value in (("capacity", capacity), ("every", every)):
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, got {value}")
        if k < 0 or temperature <= 0 or not 0 < momentum <= 1:
            raise SettingError(
                "k is at least 0, temperature positive, momentum above 0 and up to 1, "
                f"got {k}, {temperature} and {momentum}"
            )
        self.capacity, self.every, self.k, self.momentum = capacity, every, k, momentum
        self.temperature, self.seed = temperature, seed
        self.memory: Reservoir | None = None
        self._arrived = 0
        self._latest: Tensor | None = None  # these are of the latest batch, not part of the state
        self._due = False

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        stored = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        if not any(layer.weight is not None for layer in stored):
            raise NothingToAdaptError(
                f"NOTE finds nothing to adapt in {type(model).__name__}: it moves scale, shift and stored statistics "
                "of batch normalization; use Tent with other normalization layers"
            )
        use_test_statistics(model, _Aware(self.k, self.momentum))
        self._layers = [layer for layer in model.modules() if isinstance(layer, InstanceAwareBatchNorm)]
        found = (parameter for layer in self._layers for parameter in (layer.weight, layer.bias))
        return list(dict.fromkeys(parameter for parameter in found if isinstance(parameter, nn.Parameter)))

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """On the memory, when an update is due; else without a graph: no update."""
        if x is not self._latest:
            self._due = self._collect(x, logits.detach())
            self._latest = x
        return self._loss(model) if self._due else logits.new_zeros(())

    def _collect(self, x: Tensor, logits: Tensor) -> bool:
        """The images join the memory; whether an update is due."""
        dense = logits.ndim > 2
        capacity = self.capacity or (OF_DENSE if dense else OF_IMAGES)
        if self.memory is None:
            self.memory = Reservoir(capacity, self.seed)
        labels = [0] * len(x) if dense else most_likely(probabilities(logits)).tolist()
        for image, label in zip(x, labels, strict=True):
            self.memory.add(image.detach().clone(), label)
        before, self._arrived = self._arrived, self._arrived + len(x)
        every = self.every or capacity
        return self._arrived // every > before // every

    def _loss(self, model: nn.Module) -> Tensor:
        """Mean entropy of the memory's predictions, normalized together; images of one size at a time."""
        entries = [] if self.memory is None else self.memory.entries
        sizes: dict[torch.Size, list[Tensor]] = {}
        for image, _ in entries:
            sizes.setdefault(image.shape, []).append(image)
        like = next(model.parameters())
        total = like.new_zeros(())
        with _learning(self._layers):
            for images in sizes.values():
                logits = model(torch.stack(images).to(like.device))
                total = total + entropy(logits / self.temperature).mean() * len(images)
        return total / len(entries)

    def after_update(self, model: nn.Module, /) -> None:
        for layer in self._layers:
            layer.commit()

    def state_dict(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "statistics": [part for layer in self._layers for part in layer.moments()],
            "capacity": None if memory is None else memory.capacity,
            "images": [] if memory is None else [image for image, _ in memory.entries],
            "labels": [] if memory is None else [label for _, label in memory.entries],
            "came": [] if memory is None else [[label, count] for label, count in memory.came.items()],
            "arrived": self._arrived,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        held = [part for layer in self._layers for part in layer.moments()]
        with torch.no_grad():
            for ours, saved in zip(held, state["statistics"], strict=True):
                ours.copy_(saved)
        self.memory = None
        if state["capacity"] is not None:
            self.memory = Reservoir(state["capacity"], self.seed)
            self.memory.entries = list(zip(state["images"], state["labels"], strict=True))
            self.memory.came = dict(state["came"])
        self._arrived = state["arrived"]
        self._latest, self._due = None, False


@dataclass(frozen=True)
class _Aware:
    k: float
    momentum: float

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        return InstanceAwareBatchNorm(layer, name, self.k, self.momentum)


class InstanceAwareBatchNorm(BatchNormWrapper):
    """By stored statistics, or those of the batch that is learned from, corrected where an image clearly deviates.

    μ = μ_b + S(μ_i − μ_b; k √(σ_b² / n)), σ² = max(0, σ_b² + S(σ_i² − σ_b²; k σ_b² √(2 / (n − 1)))) and n positions,
    S the soft shrinkage; a layer with a single position has no statistics of an image and keeps μ_b and σ_b².
    """

    test_mean: Tensor
    test_variance: Tensor

    def __init__(self, layer: _BatchNorm, name: str, k: float, momentum: float) -> None:
        super().__init__(layer, name)
        mean, variance = self.stored()
        self._buffers = dict(self._buffers)  # a copy: the stored statistics of the source model stay
        self.register_buffer("test_mean", mean.clone(), persistent=False)  # the objective keeps them
        self.register_buffer("test_variance", variance.clone(), persistent=False)
        self.k, self.weight_of_batch = k, momentum
        self.following = False
        self.batches: list[tuple[int, Tensor]] = []  # of each learned from: images; mean and variance, (2, C)

    def forward(self, input: Tensor) -> Tensor:
        shape = (1, -1, *(1,) * (input.ndim - 2))
        mean, variance = (part.view(shape) for part in self._reference(input))
        positions = input.shape[2:].numel()
        if positions > 1:
            own_variance, own_mean = torch.var_mean(input, list(range(2, input.ndim)), correction=1, keepdim=True)
            mean_error = self.k * (variance / positions).sqrt()
            variance_error = self.k * variance * math.sqrt(2 / (positions - 1))
            mean = mean + soft_shrink(own_mean - mean, mean_error)
            variance = (variance + soft_shrink(own_variance - variance, variance_error)).clamp_min(0)
        normalized = (input - mean) * (variance + self.eps).rsqrt()
        return normalized if self.weight is None else normalized * self.weight.view(shape) + self.bias.view(shape)

    def _reference(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """μ_b and σ_b², (C,) each: of the batch while following it, unbiased, unless it has a single value."""
        if not self.following or input.numel() == input.shape[1]:
            return self.test_mean, self.test_variance
        variance, mean = torch.var_mean(input, [0, *range(2, input.ndim)], correction=1)
        self.batches.append((len(input), torch.stack([mean, variance]).detach()))
        return mean, variance

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.test_mean, self.test_variance

    def commit(self) -> None:
        """The stored statistics follow what was learned from: of images of several sizes the mean over the images."""
        if self.batches:
            images = sum(count for count, _ in self.batches)
            mean, variance = torch.stack([count / images * both for count, both in self.batches]).sum(0)
            self.test_mean.lerp_(mean, self.weight_of_batch)
            self.test_variance.lerp_(variance, self.weight_of_batch)
        self.batches = []


def soft_shrink(values: Tensor, threshold: Tensor) -> Tensor:
    """Towards zero by the threshold, to zero within it."""
    return values.sign() * F.relu(values.abs() - threshold)


@contextmanager
def _learning(layers: Sequence[InstanceAwareBatchNorm]) -> Iterator[None]:
    for layer in layers:
        layer.following, layer.batches = True, []
    try:
        yield
    finally:
        for layer in layers:
            layer.following = False


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator).item())
