"""For comparison: the order of operations of the authors' released programs, written anew from a description of it.

The release carries no licence; nothing of it is copied. What it does in one dynamic step, as far as time and memory go:
features and prediction for the memory come from two passes through the un-adapted network, which record a graph that
nobody uses; the memory is a Python dictionary of numpy arrays; then come the pass with the loss, the backward pass over
the adapted parameters, and a last pass that records a graph again. Four forward passes where two would do.
"""

import copy

import numpy as np
import torch
from torch import Tensor, nn

from dltta.core.objectives.objective import Objective


class ReleasedSequence:
    """A dynamic step as released; `objective` is ours, so that only the order of operations differs."""

    def __init__(
        self, model: nn.Module, objective: Objective, layer: str, *, alpha: float, capacity: int, neighbors: int
    ) -> None:
        self.source = copy.deepcopy(model).eval()
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self.objective = copy.deepcopy(objective)
        self.adapted = list(self.objective.prepare(self.model))
        for parameter in self.adapted:
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.SGD(self.adapted, lr=alpha)
        self.layer, self.alpha, self.capacity, self.neighbors = layer, alpha, capacity, neighbors
        self.memory: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.pushed = 0

    def fill(self, features: Tensor, probabilities: Tensor) -> None:
        """Push noisy copies of a batch until the memory is full."""
        while len(self.memory) < self.capacity:
            self._push(features.numpy() * (1 + 0.01 * self.pushed), probabilities.numpy())

    def step(self, x: Tensor) -> Tensor:
        features = self._features(x).detach().numpy()
        prediction = self.source(x).softmax(1).detach().numpy()
        rate = self.alpha * self._discrepancy(features, prediction)
        loss = self.objective(self.model, x, self.model(x))
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        logits = self.model(x)  # with a graph
        self._push(features, prediction)
        return logits

    def _features(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        handle = self.source.get_submodule(self.layer).register_forward_hook(lambda m, i, output: seen.append(output))
        self.source(x)
        handle.remove()
        return seen[0]

    def _discrepancy(self, features: np.ndarray, prediction: np.ndarray) -> float:
        keys = np.stack([key for key, _ in self.memory.values()])
        values = [value for _, value in self.memory.values()]
        total = 0.0
        for query, p in zip(features.reshape(len(features), -1), prediction, strict=True):
            similar = keys @ query / (np.linalg.norm(keys, axis=1) * np.linalg.norm(query))
            q = np.mean([values[i] for i in np.argsort(-similar)[: self.neighbors]], axis=0)
            total += float((p * np.log(p / q) + q * np.log(q / p)).sum(0).mean() / 2)
        return total / len(features)

    def _push(self, features: np.ndarray, prediction: np.ndarray) -> None:
        for key, value in zip(features.reshape(len(features), -1), prediction, strict=True):
            self.memory[self.pushed % self.capacity] = (key.copy(), value.copy())
            self.pushed += 1
