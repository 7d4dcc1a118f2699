"""3 objectives. Test-time template adjuster (T3A, Iwasawa and Matsuo, NeurIPS 2021)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from dltta.errors import NothingToAdaptError, SettingError
from dltta.models.features import find_layer
from dltta.models.predictions import each_prediction, entropy, most_likely, probabilities

PIXELS = 256  # of each image, in dense predictions


class T3A:
    """The last layer gives way to class prototypes: the mean direction of the confident features seen so far.

    Supports begin as the rows of the last layer's weight, each labeled by the class that the layer sees in it. Every
    feature joins with the network's own label and entropy; each class keeps the `supports` of lowest entropy (None:
    all), the rest is gone for good. A class's logit is the feature times the normalized sum of its normalized supports.
    No gradient; stored statistics.

    Ours: in dense predictions features are those of positions, of which `pixels` drawn at random from each image join;
    a sigmoid channel has a second prototype, which begins as the opposite of the first, and is their difference.
    `layer` names the last layer, linear or a convolution of size 1; None takes the last one in the network's order.
    """

    def __init__(
        self, *, supports: int | None = 100, pixels: int = PIXELS, layer: str | None = None, seed: int = 0
    ) -> None:
        if (supports is not None and supports < 1) or pixels < 1:
            raise SettingError(f"supports and pixels must be at least 1, got {supports} and {pixels}")
        self.supports, self.pixels, self.layer, self.seed = supports, pixels, layer, seed
        self._seen: dict[str, Tensor] = {}  # what the last layer took and gave in the latest pass

    def prepare(self, model: nn.Module, /) -> None:
        name = self.layer or _last_layer(model)
        head = find_layer(model, name)
        if not _is_last(head) or not isinstance(head, _ConvNd | nn.Linear):
            raise SettingError(f"T3A replaces a linear layer or a convolution of size 1, {name!r} is neither")
        self._name = name
        self._watch(head)
        weight, bias = head.weight.detach().flatten(1), head.bias  # (C, D)
        if len(weight) == 1:
            weight = torch.cat([-weight, weight])
        logits = F.linear(weight, head.weight.detach().flatten(1), None if bias is None else bias.detach())
        self._features = weight.clone()  # (N, D)
        self._labels = most_likely(probabilities(logits))  # (N,)
        self._entropies = entropy(logits)  # (N,)
        self._classes = len(weight)
        self._images = 0

    def _watch(self, head: nn.Module) -> None:
        seen = self._seen

        def record(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen["taken"], seen["given"] = inputs[0].detach(), output.detach()

        head.register_forward_hook(record)

    def predict(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        features = self._taken(model, x, logits)  # (B, D, *positions)
        self._join(features, logits)
        prototypes = self.prototypes().to(features)  # (C, D)
        if logits.shape[1] == 1:
            prototypes = prototypes[1:] - prototypes[:1]
        return torch.einsum("bd...,cd->bc...", features, prototypes)

    def _taken(self, model: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
        """What the last layer took in the pass that gave these logits."""
        if not self._seen or self._seen["given"].shape != logits.shape:
            model(x)
        taken, given = self._seen["taken"], self._seen["given"]
        self._seen.clear()
        if not torch.equal(given.to(logits), logits):
            raise SettingError(
                f"T3A needs the layer that gives the logits, and {self._name!r} does not; name it with layer=…"
            )
        return taken.float()

    def _join(self, features: Tensor, logits: Tensor) -> None:
        """Some features become supports; of each class the most certain stay, in the order in which they came."""
        chosen = self._chosen(features)
        new = each_prediction(features)[chosen]
        predicted, uncertain = each_prediction(probabilities(logits))[chosen], entropy(logits).flatten()[chosen]
        device = features.device
        self._features = torch.cat([self._features.to(device), new])
        self._labels = torch.cat([self._labels.to(device), most_likely(predicted)])
        self._entropies = torch.cat([self._entropies.to(device), uncertain])
        self._images += len(features)
        if self.supports is None:
            return
        order = self._entropies.argsort(stable=True)
        kept = torch.cat([order[self._labels[order] == c][: self.supports] for c in range(self._classes)])
        kept = kept.sort().values
        self._features, self._labels, self._entropies = self._features[kept], self._labels[kept], self._entropies[kept]

    def _chosen(self, features: Tensor) -> Tensor:
        """Rows of `each_prediction`: all images, or so many positions of each."""
        positions = features.shape[2:].numel()
        if positions <= self.pixels:
            return torch.arange(len(features) * positions, device=features.device)
        rows = []
        for number in range(len(features)):
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * (self._images + number))
            drawn = torch.randperm(positions, generator=generator)[: self.pixels].sort().values
            rows.append(drawn + number * positions)
        return torch.cat(rows).to(features.device)

    def prototypes(self) -> Tensor:
        """The direction of each class, (C, D); zero for a class without supports."""
        labels = F.one_hot(self._labels, self._classes).to(self._features)  # (N, C)
        return F.normalize(labels.T @ F.normalize(self._features, dim=1), dim=1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "features": self._features,
            "labels": self._labels,
            "entropies": self._entropies,
            "images": self._images,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._features, self._labels = state["features"], state["labels"]
        self._entropies, self._images = state["entropies"], state["images"]


def _is_last(layer: nn.Module) -> bool:
    if isinstance(layer, _ConvNd):
        return not layer.transposed and layer.groups == 1 and set(layer.kernel_size) == {1} == set(layer.stride)
    return isinstance(layer, nn.Linear)


def _last_layer(model: nn.Module) -> str:
    names: list[str] = [name for name, layer in model.named_modules() if name and _is_last(layer)]
    if not names:
        raise NothingToAdaptError(
            f"T3A replaces the last linear layer or convolution of size 1, and {type(model).__name__} has none"
        )
    return names[-1]
