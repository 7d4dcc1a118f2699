"""2 networks. Which way up is this image? The auxiliary task of test-time training (Sun et al. 2020)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.models.encoder import encode

TURNS = (0, 1, 2, 3)  # quarter turns


class RotationHead(nn.Module):
    """Global average pooling and a small perceptron: features (B, C, *positions) to the logits of four rotations."""

    def __init__(self, channels: int, hidden: int = 64) -> None:
        super().__init__()
        self.channels, self.hidden = channels, hidden
        self.layers = nn.Sequential(nn.Linear(channels, hidden), nn.ReLU(), nn.Linear(hidden, len(TURNS)))

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.layers(features.flatten(2).mean(dim=2))
        return logits


def rotate(x: Tensor, turns: int) -> Tensor:
    """Images (B, C, H, W) or volumes (B, C, H, W, D) by quarter turns in the plane of the first two spatial axes.

    For volumes in the usual left-posterior-superior or right-anterior-superior order that is the axial plane.
    """
    return torch.rot90(x, turns, dims=(2, 3))


def rotation_logits(model: nn.Module, head: nn.Module, layer: str, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (N, 4) and turns (N,) for the images x (B, …) each turned as said; images of one shape go together.

    A quarter turn of an image that is not square has another shape, so it cannot share a batch with the upright ones.
    """
    logits, turned = [], []
    square = x.shape[2] == x.shape[3]
    for group in [TURNS] if square else [(0, 2), (1, 3)]:
        chosen = [index for index, turn in enumerate(turns.tolist()) if turn in group]
        if chosen:
            batch = torch.cat([rotate(x[i : i + 1], int(turns[i])) for i in chosen])
            logits.append(head(encode(model, layer, batch)))
            turned.append(turns[chosen])
    return torch.cat(logits), torch.cat(turned)


def rotation_loss(model: nn.Module, head: nn.Module, layer: str, x: Tensor, turns: Tensor) -> Tensor:
    """Cross-entropy of the predicted rotation, mean over the batch."""
    logits, turned = rotation_logits(model, head, layer, x, turns)
    return F.cross_entropy(logits.float(), turned.to(logits.device))
