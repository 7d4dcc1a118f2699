"""What a network's logits say: probabilities and their entropy.

Logits are (B, C, *positions): C ≥ 2 channels are classes of a softmax, one channel is a binary sigmoid. Everything is
computed in float32 or finer, whatever the network's own precision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def probabilities(logits: Tensor) -> Tensor:
    """Class probabilities (B, C, *positions) that sum to one; a sigmoid channel becomes (background, foreground)."""
    logits = _at_least_float32(logits)
    if logits.shape[1] == 1:
        return torch.sigmoid(torch.cat([-logits, logits], dim=1))
    return logits.softmax(dim=1)


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of each sample at each position, (B, *positions)."""
    logits = _at_least_float32(logits)
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)  # sigmoid(z) = softmax(0, z)
    log_probability = F.log_softmax(logits, dim=1)
    return -(log_probability.exp() * log_probability).sum(dim=1)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
