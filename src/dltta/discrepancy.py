"""4 discrepancy. How far is the prediction for this image from those for images like it?"""

import torch
from torch import Tensor


def symmetric_kl(prediction: Tensor, reference: Tensor) -> Tensor:
    """Half the sum of the two Kullback-Leibler divergences, one value per sample — Eq. (4).

    Both are probabilities (B, C, *positions): summed over the classes, averaged over the positions, so that the value
    does not grow with the size of the image. ½ (KL(p‖q) + KL(q‖p)) is evaluated as ½ Σ (p − q)(log p − log q).
    A probability that underflowed to zero counts as the smallest normal float32: the divergence stays finite.
    """
    smallest = torch.finfo(torch.float32).tiny
    p, q = prediction.clamp_min(smallest), reference.clamp_min(smallest)
    divergence = 0.5 * ((p - q) * (p.log() - q.log())).sum(dim=1)  # (B, *positions)
    return divergence.flatten(1).mean(dim=1) if divergence.ndim > 1 else divergence


def batch_discrepancy(prediction: Tensor, reference: Tensor) -> float:
    """The mean of the samples' discrepancies — Eq. (5)."""
    return symmetric_kl(prediction, reference).mean().item()
