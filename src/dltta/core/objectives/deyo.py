"""3 objectives. Entropy and whether the object's shape matters (DeYO, Lee et al., ICLR 2024)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.core.objectives.sar import LAST_STAGE
from dltta.errors import InputError, SettingError
from dltta.models.normalization import (
    BATCH_STATISTICS,
    NormalizationStatistics,
    require_affine_parameters,
    use_test_statistics,
)
from dltta.models.predictions import entropy, greatest_entropy, most_likely, probabilities

MODES = {1: "linear", 2: "bilinear", 3: "trilinear"}  # of interpolation, by the number of spatial axes


class DeYO:
    """Entropy of the predictions that are certain and that change when the image is cut up and put together wrongly.

    A prediction counts if its entropy H is below `certain` · ln C and if its class loses more than `threshold` of its
    probability (PLPD) once the blocks of the image, `blocks` along each axis, are in random order; its weight is
    exp(`margin` · ln C − H) + exp(PLPD). In dense predictions each position of a class other than 0, the background,
    decides for itself, and the blocks of the second prediction are put back before they are compared. Normalization
    layers whose names fit `excluded` do not move. The order of the blocks comes from `seed`.
    """

    def __init__(
        self,
        *,
        certain: float = 0.5,
        margin: float = 0.4,
        threshold: float = 0.3,
        blocks: int = 4,
        excluded: Sequence[str] = LAST_STAGE,
        seed: int = 0,
        statistics: NormalizationStatistics = BATCH_STATISTICS,
    ) -> None:
        if certain <= 0 or margin <= 0 or not -1 <= threshold < 1:
            raise SettingError(
                "certain and margin must be above 0 and threshold from -1 to below 1, "
                f"got {certain}, {margin} and {threshold}"
            )
        if blocks < 2:
            raise SettingError(f"blocks must be at least 2, got {blocks}")
        self.certain, self.margin, self.threshold, self.blocks = certain, margin, threshold, blocks
        self.excluded, self.statistics = tuple(excluded), statistics
        self._generator = torch.Generator().manual_seed(seed)

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        parameters = require_affine_parameters("DeYO", model, without=self.excluded)
        use_test_statistics(model, self.statistics)
        return parameters

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """Without a graph if no prediction counts: then nothing is learned from the batch."""
        entropies = entropy(logits)  # (B, *positions)
        known = entropies.detach()
        greatest = greatest_entropy(logits)
        counts = known < self.certain * greatest
        if logits.ndim > 2:
            counts &= most_likely(probabilities(logits.detach())) > 0
        images = counts.flatten(1).any(1) if counts.ndim > 1 else counts  # (B,)
        if not images.any():
            return entropies.new_zeros(())
        drop = torch.zeros_like(known)
        drop[images] = self._drop(model, x[images], logits.detach()[images])
        counts &= drop > self.threshold
        if not counts.any():
            return entropies.new_zeros(())
        weights = (self.margin * greatest - known[counts]).exp() + drop[counts].exp()
        return (weights * entropies[counts]).mean()

    @torch.no_grad()
    def _drop(self, model: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
        """How much probability the predicted class loses in each prediction (B, *positions): PLPD."""
        if x.ndim not in (3, 4, 5):
            raise InputError(f"DeYO cuts images into blocks, which needs 1 to 3 spatial axes, got {tuple(x.shape)}")
        cuts = [min(self.blocks, side) for side in x.shape[2:]]
        order = torch.rand(len(x), math.prod(cuts), generator=self._generator).argsort(1).to(x.device)
        destroyed = model(rearranged(x, cuts, order))
        if logits.ndim > 2:
            destroyed = rearranged(destroyed, cuts, order.argsort(1))
        p = probabilities(logits)
        chosen = most_likely(p).unsqueeze(1)
        return (p.gather(1, chosen) - probabilities(destroyed).gather(1, chosen)).squeeze(1)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._generator.set_state(state["generator"].cpu())


def rearranged(x: Tensor, cuts: Sequence[int], order: Tensor) -> Tensor:
    """The blocks of x (B, C, *spatial), `cuts` along each axis, in another order: place i gets block order[:, i].

    Sides that cannot be cut evenly are resized for it and back.
    """
    even = [max(side // cut, 1) * cut for side, cut in zip(x.shape[2:], cuts, strict=True)]
    blocks = _taken_apart(_resized(x, even), cuts)  # (B, N, C, *sides of a block)
    blocks = blocks[torch.arange(len(x), device=x.device)[:, None], order]
    return _resized(_put_together(blocks, cuts), x.shape[2:])


def _taken_apart(x: Tensor, cuts: Sequence[int]) -> Tensor:
    axes = len(cuts)
    split = [part for side, cut in zip(x.shape[2:], cuts, strict=True) for part in (cut, side // cut)]
    places, sides = range(2, 2 + 2 * axes, 2), range(3, 2 + 2 * axes, 2)
    return x.reshape(*x.shape[:2], *split).permute(0, *places, 1, *sides).flatten(1, axes)


def _put_together(blocks: Tensor, cuts: Sequence[int]) -> Tensor:
    axes = len(cuts)
    apart: Tensor = blocks.unflatten(1, tuple(cuts))  # (B, *cuts, C, *sides of a block)
    pairs = [axis for k in range(axes) for axis in (1 + k, 2 + axes + k)]
    whole = [cut * side for cut, side in zip(cuts, blocks.shape[3:], strict=True)]
    return apart.permute(0, 1 + axes, *pairs).reshape(len(blocks), blocks.shape[2], *whole)


def _resized(x: Tensor, size: Sequence[int]) -> Tensor:
    if tuple(x.shape[2:]) == tuple(size):
        return x
    return F.interpolate(x, size=tuple(size), mode=MODES[len(size)], align_corners=False)
