"""Source and target together. UDA-SwAV: a classifier that first learns, without labels, what images of both sites show.

Caron et al., "Unsupervised Learning of Visual Features by Contrasting Cluster Assignments", NeurIPS 2020; on Camelyon17
Sagawa et al. 2022. Two views of an image should belong to the same cluster: each predicts the cluster of the other.
Then the same network is trained on labeled source images as usual.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.errors import DataError, SettingError
from dltta.models.io.checkpoint import Checkpoint
from dltta.training.fit import Batch, Losses, Plan
from dltta.training.uda.crops import Crops, views
from dltta.training.uda.lars import LARS
from dltta.training.uda.training import Parts, UDATraining, set_rate

CODED = 2  # views that the others predict: the large ones
SMALLEST_VIEW = 32  # pixels; a DenseNet halves them five times

# For a few hundred small images on two cores. A network that begins with random weights sees little in common in two
# views: the scores of large views correlate by 0.05, those of large and small ones by less. Where that is below
# epsilon / temperature, all predictions become uniform; so epsilon is small here, colors change less, and there are no
# small views. Chosen by the loss, without labels.
PHANTOM: dict[str, Any] = {
    "epochs": 16,
    "batch_size": 32,
    "optimizer": "sgd",
    "learning_rate": 0.05,
    "epsilon": 0.003,
    "hidden": 128,
    "large_scale": (0.5, 1.0),
    "small_views": 0,
    "jitter": 0.7,
}


@dataclass(frozen=True)
class SwAV:
    """Settings of pre-training; the defaults are those of Sagawa et al. for Camelyon17 where nothing else is said.

    They show six views of the full size and use no queue, since their batches are large. Caron et al. show two large
    views and six of 96 / 224 their size from 0.05 to 0.14 of the area; for batches of 256 their queue holds 3840 images
    and is used from the 15th epoch.
    """

    epochs: int = 400
    batch_size: int = 672
    learning_rate: float | None = None  # None: 4.8 · batch_size / 4096, which is for LARS
    last_rate: float = 1e-3  # as a share of the first, at the end of a cosine
    optimizer: Literal["lars", "sgd"] = "lars"
    momentum: float = 0.9
    weight_decay: float = 1e-6
    prototypes: int = 20
    features: int = 128
    hidden: int = 2048  # of the projection head; Caron et al. for ResNet-50
    temperature: float = 0.1
    epsilon: float = 0.03  # Caron et al.: 0.05
    sinkhorn: int = 3  # iterations
    frozen_epochs: int = 1  # in which prototypes do not move
    large_scale: tuple[float, float] = (0.14, 1.0)
    small_views: int = 4
    small_size: float = 1.0  # as a share of the image's
    small_scale: tuple[float, float] = (0.14, 1.0)
    jitter: float = 1.0  # how strongly colors change, 1 as in Caron et al.
    queue: int = 0
    queue_epoch: int = 15
    name: ClassVar[str] = "uda-swav"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "prototypes", "features", "hidden", "sinkhorn"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} of uda-swav must be at least 1, got {getattr(self, name)}")
        for name in ("temperature", "epsilon", "small_size"):
            if getattr(self, name) <= 0:
                raise SettingError(f"{name} of uda-swav must be positive, got {getattr(self, name)}")
        for name in ("large_scale", "small_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise SettingError(f"{name} of uda-swav must rise within 0 and 1, got {low} and {high}")
        if self.optimizer not in ("lars", "sgd"):
            raise SettingError(f"optimizer of uda-swav must be 'lars' or 'sgd', got {self.optimizer!r}")

    @property
    def first_rate(self) -> float:
        return 4.8 * self.batch_size / 4096 if self.learning_rate is None else self.learning_rate

    def train(self, training: UDATraining, /) -> Checkpoint:
        if training.task != "classification" or training.spatial_dims != 2:
            raise SettingError(
                f"uda-swav is for classification of 2-D images, not for {training.task} in {training.spatial_dims}-D"
            )
        network, seed = training.network(), training.settings.seed
        source = [image for image, _ in training.domains.source.pairs]
        images = WholeBatches([*source, *training.domains.target.images], self.batch_size, seed)
        smallest = min(side for kind in self.kinds(images[0].shape[1:]) for side in kind.size)
        if smallest < SMALLEST_VIEW:
            raise SettingError(
                f"a view of uda-swav would have {smallest} pixels on a side, less than {SMALLEST_VIEW}; "
                "choose a larger small_size or give --size"
            )
        learner = self.learner(network, images, training.device, seed)
        training.learn(learner, images, Plan("swav", self.epochs, self.batch_size, self.first_rate, seed))
        trained = training.train_source(training.sites, "supervised", network)
        return training.checkpoint(trained.model, history=trained.record["history"])

    def learner(self, network: nn.Module, images: "WholeBatches", device: torch.device, seed: int) -> "Pretraining":
        """Projection head, prototypes and optimizer around the network's trunk, as they are before the first step."""
        with torch.no_grad():
            width = trunk(network).eval()(images[0][None].to(device)).shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            clusters = Clusters(trunk(network), width, self.hidden, self.features, self.prototypes)
        return Pretraining(self, clusters.to(device))

    def kinds(self, size: Sequence[int]) -> list[Crops]:
        """The large views of images of this size, which come first, and the small ones."""
        height, width = size
        small = round(self.small_size * height), round(self.small_size * width)
        large = Crops(CODED, (height, width), self.large_scale, self.jitter)
        return [large, Crops(self.small_views, small, self.small_scale, self.jitter)][: 2 if self.small_views else 1]


class WholeBatches:
    """Images of all sites, as many as fill whole batches; which are left out changes from epoch to epoch."""

    def __init__(self, images: Sequence[Tensor], batch_size: int, seed: int) -> None:
        for image in images:
            if image.shape != images[0].shape:
                raise DataError(
                    f"images are {tuple(images[0].shape[1:])} and {tuple(image.shape[1:])}; "
                    "give --size so that source and target have one size"
                )
        self.images, self.seed = images, seed
        self.count = max(len(images) - len(images) % batch_size, min(len(images), batch_size))
        self.epoch = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._order = np.random.default_rng([self.seed, 7, epoch]).permutation(len(self.images))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self.images[int(self._order[index])]


def trunk(network: nn.Module) -> nn.Sequential:
    """A DenseNet without its last layer, of the same modules: images to pooled features (B, D)."""
    features, head = getattr(network, "features", None), getattr(network, "class_layers", None)
    if not isinstance(features, nn.Module) or not isinstance(head, nn.Sequential):
        raise SettingError(
            f"uda-swav takes a DenseNet, not a {type(network).__name__}; choose densenet121 or densenet_small"
        )
    return nn.Sequential(features, *list(head)[:-1])


class Clusters(nn.Module):
    """Trunk, projection head and prototypes: images to features on the unit sphere, and their scores by prototype."""

    def __init__(self, trunk: nn.Module, width: int, hidden: int, features: int, prototypes: int) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Sequential(
            nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, features)
        )
        self.prototypes = nn.Linear(features, prototypes, bias=False)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = F.normalize(self.head(self.trunk(images)), dim=1)
        return features, self.prototypes(features)

    @torch.no_grad()
    def normalize_prototypes(self) -> None:
        self.prototypes.weight.copy_(F.normalize(self.prototypes.weight, dim=1))


@torch.no_grad()
def sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Codes (B, K) from scores (B, K): images belong to prototypes that are like them, and all are used alike.

    Sinkhorn-Knopp on exp(scores / epsilon), in logarithms and double precision: shares of a prototype are brought to
    one sum, then those of an image to 1, over and over.
    """
    logarithm = scores.double() / epsilon
    for _ in range(iterations):
        logarithm = logarithm - logarithm.logsumexp(dim=0, keepdim=True)
        logarithm = logarithm - logarithm.logsumexp(dim=1, keepdim=True)
    return logarithm.exp().to(scores.dtype)


def swapped_loss(scores: Sequence[Tensor], codes: Sequence[Tensor], temperature: float) -> Tensor:
    """Cross-entropy of the code of each coded view in what every *other* view predicts; the mean of all couples."""
    losses = [
        -(code * F.log_softmax(predicted / temperature, dim=1)).sum(dim=1).mean()
        for coded, code in enumerate(codes)
        for view, predicted in enumerate(scores)
        if view != coded
    ]
    return torch.stack(losses).mean()


def cosine(progress: float, first: float, last: float) -> float:
    """From `first` at 0 to `last` at 1."""
    return last + 0.5 * (first - last) * (1 + math.cos(math.pi * progress))


class Queue:
    """Features of the images before, the newest first, for each coded view; none until it is full."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.features: Tensor | None = None  # (CODED, up to length, D)

    @property
    def full(self) -> bool:
        return self.features is not None and 0 < self.length == self.features.shape[1]

    def push(self, features: Tensor) -> None:
        """Put features (CODED, B, D) in front; the oldest leave."""
        before = features[:, :0] if self.features is None else self.features.to(features)
        self.features = torch.cat([features, before], dim=1)[:, : self.length]

    def state_dict(self) -> dict[str, Any]:
        return {"features": self.features}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.features = state["features"]


class Pretraining(Parts):
    """The learner: one step of swapped prediction on a batch of images."""

    def __init__(self, settings: SwAV, clusters: Clusters) -> None:
        self.settings, self.clusters, self.queue = settings, clusters, Queue(settings.queue)
        kind = LARS if settings.optimizer == "lars" else torch.optim.SGD
        self.optimizer = kind(
            clusters.parameters(),
            lr=settings.first_rate,
            momentum=settings.momentum,
            weight_decay=settings.weight_decay,
        )
        super().__init__(clusters=clusters, optimizer=self.optimizer, queue=self.queue)

    def step(self, batch: Batch, generator: torch.Generator, progress: float, /) -> Losses:
        settings, epoch = self.settings, progress * self.settings.epochs + 1e-6  # whole epochs that are done, and more
        set_rate(self.optimizer, cosine(progress, settings.first_rate, settings.last_rate * settings.first_rate))
        self.clusters.normalize_prototypes()
        features, scores = self._scores(torch.stack(tuple(batch)), generator)
        codes = self.codes(scores[:CODED], past=epoch >= settings.queue_epoch)
        loss = swapped_loss(scores, codes, settings.temperature)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if epoch < settings.frozen_epochs:
            self.clusters.prototypes.weight.grad = None
        self.optimizer.step()
        self.queue.push(torch.stack(features[:CODED]).detach())
        return {"swav": loss.item()}

    def codes(self, scores: Sequence[Tensor], *, past: bool) -> list[Tensor]:
        """Of each coded view; `past` images in the queue help to balance the prototypes, once there are enough."""
        if not past or self.queue.features is None or not self.queue.full:
            return [sinkhorn(own, self.settings.epsilon, self.settings.sinkhorn) for own in scores]
        with torch.no_grad():
            before = self.clusters.prototypes(self.queue.features)  # (CODED, length, K)
        together = [torch.cat(pair) for pair in zip(scores, before, strict=True)]
        return [
            sinkhorn(both, self.settings.epsilon, self.settings.sinkhorn)[: len(own)]
            for both, own in zip(together, scores, strict=True)
        ]

    def _scores(self, images: Tensor, generator: torch.Generator) -> tuple[list[Tensor], list[Tensor]]:
        """Features and scores of every view, the coded ones first; views of one size pass the network together."""
        features: list[Tensor] = []
        scores: list[Tensor] = []
        for kind in self.settings.kinds(images.shape[2:]):
            seen, likeness = self.clusters(views(images, kind, generator))
            features += seen.chunk(kind.count)
            scores += likeness.chunk(kind.count)
        return features, scores
