"""What a network's logits say: probabilities and their entropy.

Logits are (B, C, *positions): C ≥ 2 channels are classes of a softmax, one channel is a binary sigmoid. Everything is
computed in float32 or finer, whatever the network's own precision.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def probabilities(logits: Tensor) -> Tensor:
    """Class probabilities (B, C, *positions) that sum to one; a sigmoid channel becomes (background, foreground)."""
    logits = _at_least_float32(logits)
    if logits.shape[1] == 1:
        return torch.sigmoid(torch.cat([-logits, logits], dim=1))
    return logits.softmax(dim=1)


def log_probabilities(logits: Tensor) -> Tensor:
    """Logarithms of `probabilities`, finite also where these round to zero."""
    logits = _at_least_float32(logits)
    if logits.shape[1] == 1:
        return F.logsigmoid(torch.cat([-logits, logits], dim=1))
    return logits.log_softmax(dim=1)


def as_logits(log_p: Tensor, channels: int) -> Tensor:
    """Logits of so many channels that say these log-probabilities (B, classes, *positions): one is a sigmoid."""
    return log_p[:, 1:] - log_p[:, :1] if channels == 1 else log_p


def greatest_entropy(logits: Tensor) -> float:
    """Of any prediction with so many classes: ln C in nats."""
    return math.log(max(2, logits.shape[1]))


def each_prediction(values: Tensor) -> Tensor:
    """One row for every sample at every position: (B, C, *positions) becomes (B · positions, C)."""
    return values.movedim(1, -1).flatten(0, -2)


def most_likely(scores: Tensor, dim: int = 1) -> Tensor:
    """The class of the highest score at each position, the first of several that are equal."""
    return scores.max(dim).indices  # argmax of an axis that is not the last one takes 25 times as long on a CPU


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of each sample at each position, (B, *positions)."""
    logits = _at_least_float32(logits)
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)  # sigmoid(z) = softmax(0, z)
    entropies: Tensor = _Entropy.apply(logits)  # type: ignore[no-untyped-call]  # torch does not type `apply`
    return entropies


class _Entropy(torch.autograd.Function):
    """H = − Σ p log p of the softmax p of z, with ∂H/∂z = − p (log p + H): fewer passes than step by step."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        log_p, p, h = _entropy_terms(logits)
        ctx.save_for_backward(logits, log_p, p, h)
        return h

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        logits, log_p, p, h = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            log_p, p, h = _entropy_terms(logits)
        slope: Tensor = (log_p + h.unsqueeze(1)).mul_(p)
        return slope.mul_(gradient.neg().unsqueeze(1))


def _entropy_terms(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log p and p, (B, C, *positions); H, (B, *positions)."""
    log_p = F.log_softmax(logits, dim=1)
    p = log_p.exp()
    return log_p, p, (p * log_p).sum(dim=1).neg_()


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite; in one pass, since NaN is passed on by minimum and maximum."""
    return tensor.numel() == 0 or all(math.isfinite(bound) for bound in torch.aminmax(tensor.detach()))


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
