"""3 objectives. Mixtures of source and test statistics, weighted by entropy (InTEnt, Dong et al., CVPR-W 2024)."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltta.errors import InputError, NothingToAdaptError, SettingError
from dltta.models.features import forward_pass
from dltta.models.normalization import BatchNormWrapper, stores_statistics, wrap_batch_norms
from dltta.models.predictions import most_likely, probabilities


@dataclass(frozen=True)
class InTEnt:
    """The mean of the predictions under mixtures of source and test statistics; the certain ones weigh more. No loss.

    `shares` of the test statistics (mean and variance, all layers alike) are tried. Each prediction has a score: minus
    its entropy, balanced over the classes that it predicts. Scores are brought to 0…1 over the shares; their softmax
    at `temperature` are the weights, which differ at most e : 1 at temperature 1. Nothing is carried along.

    Shares, temperature and the balanced score are the released code's. It is for one 2-D image with a foreground; for
    more classes, for volumes and for classification we take the mean entropy of each predicted class, then the mean of
    these. Images of a batch share their statistics and have weights of their own.
    """

    shares: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise SettingError(f"shares of the test statistics lie between 0 and 1, got {self.shares}")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise SettingError(f"temperature must be a positive number, got {self.temperature!r}")

    def prepare(self, model: nn.Module, /) -> None:
        if not stores_statistics(model):
            raise NothingToAdaptError(
                f"InTEnt finds no statistics to mix in {type(model).__name__}: no layer normalizes by those of the "
                "training set, as batch normalization does; use Source, or Tent if its normalization is affine"
            )
        wrap_batch_norms(model, lambda layer, name: layer if layer.running_mean is None else _Mixed(layer, name))

    def predict(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """One pass for the test statistics, one for each share but 0, whose logits are given."""
        layers = [layer for layer in model.modules() if isinstance(layer, _Mixed)]
        try:
            _record(model, x, layers)
            predictions = [self._prediction(model, x, logits, layers, share) for share in self.shares]
        finally:
            for layer in layers:
                layer.forget()
        scores = torch.stack([-balanced_entropy(p) for p in predictions])  # (J, B)
        weights = mixture_weights(scores, self.temperature)
        shape = (-1, *[1] * (logits.ndim - 1))
        mixed = sum(
            (w.view(shape) * p for w, p in zip(weights, predictions, strict=True)), torch.zeros_like(predictions[0])
        )
        return as_logits(mixed, logits)

    def _prediction(self, model: nn.Module, x: Tensor, logits: Tensor, layers: "list[_Mixed]", share: float) -> Tensor:
        """Class probabilities (B, C, *positions) under a mixture."""
        if share == 0:  # the network's own pass is the source's
            return probabilities(logits)
        for layer in layers:
            layer.share = share
        return probabilities(forward_pass(model, x).logits)


def balanced_entropy(probability: Tensor) -> Tensor:
    """Mean entropy of each predicted class, then the mean over these classes, (B,); 0 certain, 1 knows nothing.

    In units of log C, which are bits for two classes. A probability of 0.5 of two is foreground.
    """
    classes = probability.shape[1]
    h = (-torch.special.xlogy(probability, probability).sum(dim=1) / math.log(classes)).reshape(
        len(probability), -1
    )  # (B, P)
    label = (probability[:, 1] >= 0.5).long() if classes == 2 else most_likely(probability)
    label = label.reshape(len(h), -1)
    total, present = h.new_zeros(len(h)), h.new_zeros(len(h))
    for number in range(classes):
        chosen = (label == number).to(h)
        count = chosen.sum(dim=1)
        total += (h * chosen).sum(dim=1) / count.clamp_min(1)
        present += count > 0
    balanced: Tensor = total / present
    return balanced


def mixture_weights(scores: Tensor, temperature: float) -> Tensor:
    """Weights (J, B) that sum to one over the J candidates, the higher the score; equal scores weigh the same."""
    low, high = scores.amin(dim=0), scores.amax(dim=0)
    spread = torch.where(high > low, high - low, torch.ones_like(high))
    return ((scores - low) / spread / temperature).softmax(dim=0)


def as_logits(probability: Tensor, like: Tensor) -> Tensor:
    """Logits in the form of `like` whose probabilities these are; one channel for two classes if it has one."""
    logs = probability.clamp_min(torch.finfo(probability.dtype).tiny).log()
    return (logs if like.shape[1] > 1 else logs[:, 1:] - logs[:, :1]).to(like.dtype)


def _record(model: nn.Module, x: Tensor, layers: "list[_Mixed]") -> None:
    """One pass under the test statistics, which the layers keep."""
    for layer in layers:
        layer.recording = True
    forward_pass(model, x)
    for layer in layers:
        layer.recording = False


class _Mixed(BatchNormWrapper):
    """Normalizes by source statistics and `share` of those recorded; while recording, by those of the batch.

    As in a training pass of torch: the batch is normalized by its variance, the unbiased estimate is what is kept.
    """

    def __init__(self, layer: _BatchNorm, name: str) -> None:
        super().__init__(layer, name)
        self.forget()

    def forget(self) -> None:
        self.share, self.recording = 0.0, False
        self.test: tuple[Tensor, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = self.stored()
        if self.recording:
            if input.numel() == input.shape[1]:
                raise InputError(
                    f"layer {self._name!r} gets a single value per channel (one image, one position), which has no "
                    "statistics of its own; use a larger batch or larger images"
                )
            unbiased, test_mean = torch.var_mean(input.to(mean.dtype), [0, *range(2, input.ndim)])
            self.test = test_mean, unbiased
            count = input.numel() / input.shape[1]
            return self.normalized(input, test_mean, unbiased * ((count - 1) / count))
        if self.test is not None:
            mean = torch.lerp(mean, self.test[0], self.share)
            variance = torch.lerp(variance, self.test[1], self.share)
        return self.normalized(input, mean, variance)
