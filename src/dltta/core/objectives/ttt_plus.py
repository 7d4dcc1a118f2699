"""3 objectives. Test-time training with contrast and feature alignment (TTT++, Liu et al., NeurIPS 2021)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dltta.core.augmentation import contrast_view
from dltta.errors import SettingError, StateError
from dltta.models.encoder import encode
from dltta.models.normalization import BATCH_STATISTICS, NormalizationStatistics, use_test_statistics
from dltta.models.parts.contrast import FeatureMoments, ProjectionHead, contrast_loss, pooled
from dltta.models.predictions import each_prediction

QUEUE = 1536  # rows, the authors' for CIFAR-10


class TTTPlus:
    """The encoder keeps telling images apart, and its features keep the mean and covariance that the source's have.

    `head` was trained with the network on the source (`dltta train --with ttt++`) on the features of `layer`; `shared`
    names the parameters in front of it, which move. `features` and `projections` are the moments of source features
    and of their projections, aligned with these `weights`; the latest `queue` rows join the batch's once there are as
    many, without a gradient.

    Ours: one step per batch of a stream; the authors go up to 500 times over the whole test set and choose rate and end
    by its labels. In dense predictions the positions of the feature map are the rows of its moments. A single image has
    no other to be told from, so that only the alignment moves.
    """

    def __init__(
        self,
        head: ProjectionHead,
        layer: str,
        shared: Sequence[str],
        features: FeatureMoments,
        projections: FeatureMoments,
        *,
        weights: tuple[float, float] = (0.05, 0.2),
        queue: int = QUEUE,
        seed: int = 0,
        statistics: NormalizationStatistics = BATCH_STATISTICS,
    ) -> None:
        if queue < 1 or min(weights) < 0:
            raise SettingError(f"queue is at least 1 and weights at least 0, got {queue} and {tuple(weights)}")
        self.head, self.layer, self.shared = head, layer, tuple(shared)
        self.features, self.projections = features, projections
        self.weights, self.queue, self.seed, self.statistics = tuple(weights), queue, seed, statistics
        self._queues: list[Tensor | None] = [None, None]  # of features and of projections
        self._batches = 0
        self._latest: list[Tensor] = []  # what joins them after the update; not part of the state

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        named = dict(model.named_parameters())
        unknown = [name for name in self.shared if name not in named]
        if unknown:
            raise StateError(
                f"the projection head belongs to another network: {unknown[0]!r} is not a parameter of this one"
            )
        use_test_statistics(model, self.statistics)
        self.head.requires_grad_(False).eval()
        return [named[name] for name in self.shared]

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        self.head.to(x.device)
        maps = encode(model, self.layer, x)
        rows = each_prediction(maps) if logits.ndim > 2 else pooled(maps)
        projected = self.head(pooled(maps))
        self._latest = [rows.detach(), projected.detach()]
        loss = self._aligned(0, rows, self.features) + self._aligned(1, projected, self.projections)
        return loss if len(x) == 1 else loss + self._contrast(model, x)

    def _contrast(self, model: nn.Module, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self._batches)
        one, other = (self.head(pooled(encode(model, self.layer, contrast_view(x, generator)))) for _ in range(2))
        return contrast_loss(one, other)

    def _aligned(self, which: int, rows: Tensor, moments: FeatureMoments) -> Tensor:
        earlier = self._queues[which]
        if earlier is not None and len(earlier) == self.queue:
            rows = torch.cat([rows, earlier.to(rows)])
        return self.weights[which] * moments.distance(rows.float())

    def after_update(self, model: nn.Module, /) -> None:
        for which, rows in enumerate(self._latest):
            earlier = self._queues[which]
            joined = rows if earlier is None else torch.cat([earlier.to(rows), rows])
            self._queues[which] = joined[-self.queue :].clone()
        self._latest = []
        self._batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"features": self._queues[0], "projections": self._queues[1], "batches": self._batches}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._queues = [state["features"], state["projections"]]
        self._batches, self._latest = state["batches"], []
