"""4 discrepancy. How far is the prediction for this image from those for images like it?"""

from typing import Literal

import torch
from torch import Tensor

Positions = Literal["mean", "sum"]

SMALLEST = torch.finfo(torch.float32).tiny
PIECE = 1 << 16  # elements


def symmetric_kl(prediction: Tensor, reference: Tensor, *, positions: Positions = "mean") -> Tensor:
    """Half the sum of the two Kullback-Leibler divergences, one value per sample — Eq. (4).

    Both are probabilities (B, C, *positions): summed over the classes, averaged over the positions, so that the value
    does not grow with the size of the image. The paper writes one sum and does not say over what; `positions="sum"`
    takes it over classes and positions. ½ (KL(p‖q) + KL(q‖p)) is evaluated as ½ Σ (p − q)(log p − log q).
    A probability that underflowed to zero counts as the smallest normal float32: the divergence stays finite.
    """
    p, q = prediction.flatten(1), reference.flatten(1)
    total = p.new_zeros(len(p))
    for part, other in zip(_pieces(p), _pieces(q), strict=True):
        total = total + _log(part).sub_(_log(other)).mul_(part - other).sum(dim=1)
    return 0.5 * total / (prediction.shape[2:].numel() if positions == "mean" else 1)


def batch_discrepancy(prediction: Tensor, reference: Tensor, *, positions: Positions = "mean") -> float:
    """The mean of the samples' discrepancies — Eq. (5)."""
    return symmetric_kl(prediction, reference, positions=positions).mean().item()


def _pieces(rows: Tensor) -> tuple[Tensor, ...]:
    """Cut along the second axis, so that what is computed from a piece stays in the processor's cache."""
    pieces: tuple[Tensor, ...] = rows.split(max(1, PIECE // len(rows)), dim=1)
    return pieces


def _log(probability: Tensor) -> Tensor:
    return probability.clamp_min(SMALLEST).log_()
