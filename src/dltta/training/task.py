"""Source side. The supervised loss L_m of Eq. (1) and how good a network is on labeled images."""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.data.case import Task
from dltta.metrics import dice_per_class, mean_defined
from dltta.models.predictions import most_likely
from dltta.training.examples import Pair


class TaskLoss(nn.Module):
    """Cross-entropy, mean over the batch and its positions; "ce+dice" adds soft Dice over the foreground classes.

    Dice is that of the whole batch, as nnU-Net has it in 2-D: a slice without a class says nothing of its overlap.
    """

    def __init__(self, kind: Literal["ce", "ce+dice"]) -> None:
        super().__init__()
        from monai.losses import DiceLoss  # here: importing any part of MONAI imports all of it

        overlap = DiceLoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
        self.dice = overlap if kind == "ce+dice" else None

    def forward(self, logits: Tensor, label: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, label)
        return loss if self.dice is None else loss + self.dice(logits, label[:, None])


@torch.no_grad()
def validation_score(
    model: nn.Module, pairs: Sequence[Pair], task: Task, classes: int, patch: Sequence[int] | None = None
) -> float:
    """Mean foreground Dice over the images, or accuracy, by the network in evaluation mode; both from 0 to 1."""
    from monai.inferers import sliding_window_inference

    model.eval()
    device = next(model.parameters()).device
    scores = []
    for image, label in pairs:
        x = image[None].to(device)
        if patch is None:
            prediction = most_likely(model(x)[0], dim=0).cpu()
        else:
            whole = sliding_window_inference(x, patch, 1, model, overlap=0.25)[0]
            prediction = most_likely(whole, dim=0).cpu()
        if task == "classification":
            scores.append(float(prediction == label))
        else:
            scores.append(mean_defined(dice_per_class(prediction, label, classes)))
    return mean_defined(scores)
