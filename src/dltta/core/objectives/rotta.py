"""3 objectives. Robust test-time adaptation in dynamic scenarios (RoTTA, Yuan et al., CVPR 2023)."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltta.core.augmentation import random_view
from dltta.errors import NothingToAdaptError, SettingError
from dltta.models.normalization import BatchNormWrapper, use_test_statistics
from dltta.models.predictions import entropy, greatest_entropy, log_probabilities, most_likely, probabilities

OF_IMAGES, OF_DENSE = 64, 16  # the authors' capacity; ours for images of which each has many predictions


@dataclass(frozen=True)
class Remembered:
    """An image of the memory; `age` counts the images that came after it."""

    image: Tensor  # (C, *spatial)
    label: int
    uncertainty: float  # entropy / ln C
    age: int = 0

    def score(self, capacity: int) -> float:
        """Old and uncertain images go first."""
        return 1 / (1 + math.exp(-self.age / capacity)) + self.uncertainty


class TimelyMemory:
    """Images in one list per predicted class, balanced; of the full ones the oldest and least certain gives way.

    A newcomer to a class that has its share (`capacity` / `classes`) competes with the worst of that class, one to a
    full memory with the worst of the largest classes: it comes in only if that one's score is above its own.
    """

    def __init__(self, capacity: int, classes: int) -> None:
        self.capacity, self.classes = capacity, classes
        self.entries: list[Remembered] = []

    def add(self, image: Tensor, label: int, uncertainty: float) -> None:
        new = Remembered(image, label, uncertainty)
        if self._room(new):
            self.entries.append(new)
        self.entries = [replace(entry, age=entry.age + 1) for entry in self.entries]

    def _room(self, new: Remembered) -> bool:
        """Whether there is a place for it; made by dropping another if need be."""
        counts = {entry.label: 0 for entry in self.entries}
        for entry in self.entries:
            counts[entry.label] += 1
        if counts.get(new.label, 0) >= self.capacity / self.classes:
            rivals = {new.label}
        elif len(self.entries) < self.capacity:
            return True
        else:
            rivals = {label for label, count in counts.items() if count == max(counts.values())}
        candidates = [i for i, entry in enumerate(self.entries) if entry.label in rivals]
        worst = max(candidates, key=lambda i: self.entries[i].score(self.capacity))
        if self.entries[worst].score(self.capacity) <= new.score(self.capacity):
            return False
        del self.entries[worst]
        return True


class RoTTA:
    """A student learns, on a balanced memory of timely images, to predict what its slow teacher does; this predicts.

    Batch normalization uses statistics that follow the memory slowly, `momentum` of each batch. Every `every` images
    the student (scale and shift of batch normalization) takes a step on strong views of the memory towards the
    teacher's predictions, old images counting less; the teacher follows by `follow`. Predictions are the teacher's,
    from before the update. Capacity and `every` are the authors' 64 unless given.

    Ours: a step of a batch is one update at most. Dense predictions: all images in one list, uncertainty the mean over
    positions, capacity 16; and strong views (`dltta.core.augmentation`) leave everything in its place there.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        every: int | None = None,
        follow: float = 0.001,
        momentum: float = 0.05,
        seed: int = 0,
    ) -> None:
        for name, value in (("capacity", capacity), ("every", every)):
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, got {value}")
        if not (0 < follow <= 1 and 0 < momentum <= 1):
            raise SettingError(f"follow and momentum lie above 0 and up to 1, got {follow} and {momentum}")
        self.capacity, self.every, self.follow, self.momentum, self.seed = capacity, every, follow, momentum, seed
        self.memory: TimelyMemory | None = None  # made when the number of classes is known
        self._arrived, self._updates = 0, 0
        self._latest: Tensor | None = None  # these are of the latest batch, not part of the state
        self._answer: Tensor | None = None
        self._due = False

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        stored = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
        if not any(layer.weight is not None for layer in stored):
            raise NothingToAdaptError(
                f"RoTTA finds nothing to adapt in {type(model).__name__}: it moves scale, shift and stored statistics "
                "of batch normalization; use Tent with other normalization layers"
            )
        use_test_statistics(model, _Robust(self.momentum))
        self._student = robust_layers(model)
        self.teacher = copy.deepcopy(model)
        return _affine(self._student)

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """On the memory, when an update is due; else without a graph: no update."""
        if x is not self._latest:
            with torch.no_grad():
                answer = self.teacher(x)
            self._due = self._collect(x, answer)
            self._latest, self._answer = x, answer
        return self._loss(model) if self._due else logits.new_zeros(())

    def _collect(self, x: Tensor, logits: Tensor) -> bool:
        """The images join the memory; whether an update is due."""
        dense = logits.ndim > 2
        capacity = self.capacity or (OF_DENSE if dense else OF_IMAGES)
        if self.memory is None:
            self.memory = TimelyMemory(capacity, 1 if dense else max(2, logits.shape[1]))
        uncertain = entropy(logits).flatten(1).mean(1) if dense else entropy(logits)
        labels = [0] * len(x) if dense else most_likely(probabilities(logits)).tolist()
        for image, label, h in zip(x, labels, uncertain.tolist(), strict=True):
            self.memory.add(image.detach().clone(), label, h / greatest_entropy(logits))
        before, self._arrived = self._arrived, self._arrived + len(x)
        every = self.every or capacity
        return self._arrived // every > before // every

    def _loss(self, model: nn.Module) -> Tensor:
        """Mean over the memory of weight · cross-entropy between the teacher's and the student's prediction."""
        memory = self.memory or TimelyMemory(1, 1)
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self._updates)
        total = next(self.teacher.parameters()).new_zeros(())
        with _following([*self._student, *robust_layers(self.teacher)]):
            for entries in _alike(memory.entries):
                images = torch.stack([entry.image for entry in entries]).to(total.device)
                with torch.no_grad():
                    wanted = probabilities(self.teacher(images))
                views = random_view(images, generator, in_place=wanted.ndim > 2)
                errors = -(wanted * log_probabilities(model(views))).sum(1)  # (B, *positions)
                errors = errors.flatten(1).mean(1) if errors.ndim > 1 else errors
                ages = errors.new_tensor([entry.age / memory.capacity for entry in entries])
                total = total + (timeliness(ages) * errors).sum()
        return total / len(memory.entries)

    def after_update(self, model: nn.Module, /) -> None:
        for ours, theirs in zip(_affine(robust_layers(self.teacher)), _affine(self._student), strict=True):
            ours.lerp_(theirs, self.follow)
        for layer in (*self._student, *robust_layers(self.teacher)):
            layer.commit()
        self._updates += 1

    def predict(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        if x is self._latest and self._answer is not None:
            return self._answer.contiguous()
        predicted: Tensor = self.teacher(x)
        return predicted.contiguous()

    def state_dict(self) -> dict[str, Any]:
        teacher = robust_layers(self.teacher)
        return {
            "teacher": [parameter.detach() for parameter in _affine(teacher)],
            "statistics": [part for layer in (*self._student, *teacher) for part in layer.moments()],
            "capacity": None if self.memory is None else [self.memory.capacity, self.memory.classes],
            "entries": [] if self.memory is None else [vars(entry) for entry in self.memory.entries],
            "arrived": self._arrived,
            "updates": self._updates,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        teacher = robust_layers(self.teacher)
        held = [part for layer in (*self._student, *teacher) for part in layer.moments()]
        with torch.no_grad():
            for ours, saved in zip([*_affine(teacher), *held], [*state["teacher"], *state["statistics"]], strict=True):
                ours.copy_(saved)
        self.memory = None if state["capacity"] is None else TimelyMemory(*state["capacity"])
        if self.memory is not None:
            self.memory.entries = [Remembered(**entry) for entry in state["entries"]]
        self._arrived, self._updates = state["arrived"], state["updates"]
        self._latest, self._answer, self._due = None, None, False


def timeliness(ages: Tensor) -> Tensor:
    """e^(−a) / (1 + e^(−a)) of ages a in units of the memory's capacity."""
    return (-ages).sigmoid()


@dataclass(frozen=True)
class _Robust:
    momentum: float

    def wrap(self, layer: _BatchNorm, name: str) -> nn.Module:
        return RobustBatchNorm(layer, name, self.momentum)


class RobustBatchNorm(BatchNormWrapper):
    """Batch normalization by statistics that begin as the source's and follow the batches learned from slowly.

    While `following`, each batch moves them by `momentum` and is normalized by the result, through which gradients
    flow; `commit` keeps it: of several batches, such as images of several sizes, the mean over their images.
    """

    robust_mean: Tensor
    robust_variance: Tensor

    def __init__(self, layer: _BatchNorm, name: str, momentum: float) -> None:
        super().__init__(layer, name)
        mean, variance = self.stored()
        self._buffers = dict(self._buffers)  # a copy: the stored statistics of the source model stay
        self.register_buffer("robust_mean", mean.clone(), persistent=False)  # the objective keeps them
        self.register_buffer("robust_variance", variance.clone(), persistent=False)
        self.weight_of_batch = momentum
        self.following = False
        self.moved: list[tuple[int, Tensor]] = []  # for each batch followed: images; mean and variance, (2, C)

    def forward(self, input: Tensor) -> Tensor:
        if not self.following:
            return self.normalized(input, self.robust_mean, self.robust_variance)
        variance, mean = torch.var_mean(input, [0, *range(2, input.ndim)], correction=0)
        mean = self.robust_mean.lerp(mean, self.weight_of_batch)
        variance = self.robust_variance.lerp(variance, self.weight_of_batch)
        self.moved.append((len(input), torch.stack([mean, variance]).detach()))
        shape = (1, -1, *(1,) * (input.ndim - 2))
        normalized = (input - mean.view(shape)) * (variance.view(shape) + self.eps).rsqrt()
        return normalized if self.weight is None else normalized * self.weight.view(shape) + self.bias.view(shape)

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.robust_mean, self.robust_variance

    def commit(self) -> None:
        """Keep what the batches that were followed have moved."""
        if self.moved:
            images = sum(count for count, _ in self.moved)
            mean, variance = torch.stack([count / images * both for count, both in self.moved]).sum(0)
            self.robust_mean.copy_(mean)
            self.robust_variance.copy_(variance)
        self.moved = []


def robust_layers(model: nn.Module) -> list[RobustBatchNorm]:
    return [layer for layer in model.modules() if isinstance(layer, RobustBatchNorm)]


@contextmanager
def _following(layers: Sequence[RobustBatchNorm]) -> Iterator[None]:
    """While the context lasts, robust statistics follow what passes through their layers."""
    for layer in layers:
        layer.following, layer.moved = True, []
    try:
        yield
    finally:
        for layer in layers:
            layer.following = False


def _affine(layers: Sequence[RobustBatchNorm]) -> list[nn.Parameter]:
    found = (parameter for layer in layers for parameter in (layer.weight, layer.bias))
    return list(dict.fromkeys(parameter for parameter in found if isinstance(parameter, nn.Parameter)))


def _alike(entries: Sequence[Remembered]) -> list[list[Remembered]]:
    """Images of one size together."""
    groups: dict[torch.Size, list[Remembered]] = {}
    for entry in entries:
        groups.setdefault(entry.image.shape, []).append(entry)
    return list(groups.values())
