"""3 objectives. Continual test-time adaptation (CoTTA, Wang et al., CVPR 2022)."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.core.augmentation import random_view
from dltta.errors import NothingToAdaptError, SettingError
from dltta.models.normalization import BATCH_STATISTICS, NormalizationStatistics, use_test_statistics
from dltta.models.predictions import as_logits, log_probabilities, most_likely, probabilities

SCALES = {2: (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0), 3: (0.75, 1.0, 1.25)}  # by the number of spatial axes
OF_IMAGES, DENSE = 0.92, 0.69  # confidence of the source: for one prediction per image, and for each position
DIVISOR = 32  # sides of resized images keep what they share with it: networks halve them up to five times


class CoTTA:
    """All weights learn from a running average of the network, which predicts; some return to the source at random.

    The teacher starts as the source model and keeps `momentum` of itself after every update. Its prediction is the
    target. Where the source model is less confident than `confidence`, the target is its mean over other views:

    - one prediction per image: the mean logits of `views` random views (`dltta.core.augmentation`) if the confidence,
      averaged over the batch, is below 0.92; the loss is the cross-entropy to its probabilities
    - dense: position by position, with the mean probabilities of the images resized by each of `scales` and mirrored,
      brought back, where the confidence is not above 0.69; the loss is the cross-entropy to its classes

    Then every single weight returns to the source with probability `restored`. Views and weights are drawn from
    `seed`. The target is also the prediction, made before the update.
    """

    def __init__(
        self,
        *,
        confidence: float | None = None,
        momentum: float = 0.999,
        restored: float = 0.01,
        views: int = 32,
        scales: Sequence[float] | None = None,
        seed: int = 0,
        statistics: NormalizationStatistics = BATCH_STATISTICS,
    ) -> None:
        _require_share(confidence=confidence or 0.0, momentum=momentum, restored=restored)
        if views < 1 or (scales is not None and (not scales or min(scales) <= 0)):
            raise SettingError(f"views must be at least 1 and scales above 0, got {views} and {scales}")
        self.confidence, self.momentum, self.restored = confidence, momentum, restored
        self.views, self.scales, self.statistics = views, None if scales is None else tuple(scales), statistics
        self._generator = torch.Generator().manual_seed(seed)
        self.teacher: nn.Module | None = None
        self.source: nn.Module | None = None
        self._given: tuple[Tensor, Tensor] | None = None  # the images of the latest loss and their target, as logits

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        use_test_statistics(model, self.statistics)
        parameters = list(model.parameters())
        if not parameters:
            raise NothingToAdaptError(f"CoTTA finds nothing to adapt in {type(model).__name__}: it has no parameters")
        self.teacher, self.source = copy.deepcopy(model), copy.deepcopy(model)
        return parameters

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        target = self._target(model, x)
        self._given = x, target
        log_p = log_probabilities(logits)
        if logits.ndim > 2:
            return F.nll_loss(log_p, most_likely(probabilities(target)))
        return -(probabilities(target) * log_p).sum(1).mean()

    def after_update(self, model: nn.Module, /) -> None:
        teacher, source = self._networks()
        for ours, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            ours.lerp_(theirs, 1 - self.momentum)
        for parameter, first in zip(model.parameters(), source.parameters(), strict=True):
            drawn = torch.rand(parameter.shape, generator=self._generator) < self.restored
            parameter.copy_(torch.where(drawn.to(parameter.device), first, parameter))

    def predict(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """The target of these images: the one that was learned from, if they were."""
        given, self._given = self._given, None
        return given[1] if given is not None and given[0] is x else self._target(model, x)

    @torch.no_grad()
    def _target(self, model: nn.Module, x: Tensor) -> Tensor:
        """What the teacher makes of images x, as logits (B, C, *positions)."""
        teacher, source = self._networks()
        for network in (teacher, source):  # they normalize by the statistics of the stream, as the network does
            for ours, theirs in zip(network.buffers(), model.buffers(), strict=True):
                ours.copy_(theirs)
        confidence = probabilities(source(x)).amax(1)  # (B, *positions)
        single: Tensor = teacher(x)
        if single.ndim == 2:
            sure = confidence.mean() >= self._limit(OF_IMAGES)
            return single if sure else self._mean_logits(teacher, x)
        unsure = (confidence <= self._limit(DENSE)).unsqueeze(1)
        if not unsure.any():
            return single
        averaged = as_logits(self._mean_probabilities(teacher, x, single).log(), single.shape[1])
        return torch.where(unsure, averaged, as_logits(log_probabilities(single), single.shape[1]))

    def _mean_logits(self, teacher: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([teacher(random_view(x, self._generator)) for _ in range(self.views)]).mean(0)

    def _mean_probabilities(self, teacher: nn.Module, x: Tensor, single: Tensor) -> Tensor:
        """Over scales and mirror images, on the grid of the plain prediction; never quite zero."""
        scales = SCALES.get(x.ndim - 2, (1.0,)) if self.scales is None else self.scales
        total = torch.zeros_like(probabilities(single))
        for scale in scales:
            view = resized(x, [scaled(side, scale) for side in x.shape[2:]])
            for given in (single if view is x else teacher(view), teacher(view.flip(-1)).flip(-1)):
                total += resized(probabilities(given), single.shape[2:])
        return (total / (2 * len(scales))).clamp_min(torch.finfo(total.dtype).tiny)

    def _limit(self, usual: float) -> float:
        return usual if self.confidence is None else self.confidence

    def _networks(self) -> tuple[nn.Module, nn.Module]:
        if self.teacher is None or self.source is None:
            raise SettingError("CoTTA has no teacher yet; it is made by prepare(model)")
        return self.teacher, self.source

    def state_dict(self) -> dict[str, Any]:
        return {"teacher": self._networks()[0].state_dict(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._networks()[0].load_state_dict(state["teacher"])
        self._generator.set_state(state["generator"].cpu())
        self._given = None


def scaled(side: int, scale: float) -> int:
    """A side so much longer, rounded to what networks that halve it can take if they took it before."""
    shared = math.gcd(side, DIVISOR)
    return max(round(side * scale / shared), 1) * shared


def resized(x: Tensor, size: Sequence[int]) -> Tensor:
    """Images (B, C, *spatial) on a grid of another size."""
    if tuple(x.shape[2:]) == tuple(size):
        return x
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    return F.interpolate(x, size=tuple(size), mode=mode, align_corners=False)


def _require_share(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise SettingError(f"{name} lies between 0 and 1, got {value}")
