"""Algorithm 1 written a second time, slowly, from the paper: loops over samples, positions, classes and pairs.

Shares no code with the package. Numbers are float64 numpy except the network and its gradient, which are torch's.
"""

import copy
import math

import numpy as np
import torch
from torch import nn


def softmax(row):
    exponentials = [math.exp(value - max(row)) for value in row]
    return [value / sum(exponentials) for value in exponentials]


def predicted(logits):
    """(B, C, *positions) logits -> list over samples of (positions, classes) probabilities."""
    answer = []
    for sample in logits.detach().double().numpy():
        columns = sample.reshape(sample.shape[0], -1).T
        if sample.shape[0] == 1:
            answer.append(np.array([softmax([0.0, column[0]]) for column in columns]))
        else:
            answer.append(np.array([softmax(list(column)) for column in columns]))
    return answer


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def discrepancy(prediction, reference):
    """Eq. (4) of one sample, mean over positions."""
    values = [0.5 * (kl(r, v) + kl(v, r)) for v, r in zip(prediction, reference, strict=True)]
    return sum(values) / len(values)


def nearest(memory, query, neighbors, distance):
    def far(pair):
        key = pair[0]
        if distance == "cosine":
            return 1 - float(np.dot(key, query) / (np.linalg.norm(key) * np.linalg.norm(query)))
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(key, query, strict=True)))

    return sorted(memory, key=far)[:neighbors]


class Reference:
    """A stream adapted with Tent and plain gradient descent."""

    def __init__(self, model, layer, rate, *, capacity, neighbors, distance="l2", ready="full", steps=1):
        self.model = copy.deepcopy(model).eval()
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean = module.running_var = None  # torch then normalizes by the batch
        self.layer, self.rate, self.steps = layer, rate, steps
        self.capacity, self.neighbors, self.distance = capacity, neighbors, distance
        self.needed = capacity if ready == "full" else neighbors
        self.memory = []

    def parameters(self):
        kinds = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.modules.instancenorm._InstanceNorm)
        for module in self.model.modules():
            if isinstance(module, kinds) and module.weight is not None:
                yield module.weight
                yield module.bias

    def forward(self, x):
        caught = []
        handle = self.model.get_submodule(self.layer).register_forward_hook(lambda *call: caught.append(call[2]))
        logits = self.model(x)
        handle.remove()
        features = [sample.detach().double().numpy().ravel() for sample in caught[-1]]
        return logits, features, predicted(logits)

    def step(self, x):
        records = []
        for _ in range(self.steps):
            logits, features, predictions = self.forward(x)
            value = None
            if len(self.memory) >= self.needed:
                total = 0.0
                for query, prediction in zip(features, predictions, strict=True):
                    pairs = nearest(self.memory, query, self.neighbors, self.distance)
                    mean = sum(pair[1] for pair in pairs) / self.neighbors  # Eq. (3)
                    total += discrepancy(prediction, mean)
                value = total / len(x)  # Eq. (5)
            rate = self.rate(value)
            loss = self.entropy(logits)
            self.model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in self.parameters():
                    if parameter.grad is not None:
                        parameter -= rate * parameter.grad  # Eq. (2)
            records.append((loss.item(), value, rate))
        logits, features, predictions = self.forward(x)
        for pair in zip(features, predictions, strict=True):
            self.memory.append(pair)
            if len(self.memory) > self.capacity:
                self.memory.pop(0)
        return logits.detach(), records

    @staticmethod
    def entropy(logits):
        p = torch.softmax(logits, 1) if logits.shape[1] > 1 else torch.cat([1 - logits.sigmoid(), logits.sigmoid()], 1)
        return -(p * p.log()).sum(1).mean()
