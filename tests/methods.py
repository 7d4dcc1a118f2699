"""Methods and rates as somebody outside the package would write them; nothing here is registered anywhere."""

import copy

import torch
from torch.nn import functional as F

from dltta import Signals
from dltta.core.gradients import differentiated, displaced
from dltta.models.normalization import BATCH_STATISTICS, affine_parameters, use_test_statistics
from dltta.models.predictions import entropy


class MeanTeacher:
    """As CoTTA: an averaged teacher predicts, and single weights return to the source at random."""

    def __init__(self, statistics=BATCH_STATISTICS, momentum=0.9, restored=0.2, seed=0):
        self.statistics, self.momentum, self.restored = statistics, momentum, restored
        self.generator = torch.Generator().manual_seed(seed)

    def prepare(self, model):
        use_test_statistics(model, self.statistics)
        self.teacher = copy.deepcopy(model)
        adapted = affine_parameters(model)
        self.source = [parameter.detach().clone() for parameter in adapted]
        return adapted

    def __call__(self, model, x, logits):
        with torch.no_grad():  # the mean over the image and its mirror image
            flipped = self.teacher(x.flip(-1)).softmax(1)
            wanted = (self.teacher(x).softmax(1) + (flipped.flip(-1) if flipped.ndim > 2 else flipped)) / 2
        return -(wanted * logits.log_softmax(1)).sum(1).mean()

    def after_update(self, model):
        for ours, theirs in zip(self.teacher.parameters(), model.parameters(), strict=True):
            ours.mul_(self.momentum).add_(theirs, alpha=1 - self.momentum)
        for parameter, source in zip(affine_parameters(model), self.source, strict=True):
            drawn = torch.rand(parameter.shape, generator=self.generator) < self.restored
            parameter.copy_(torch.where(drawn.to(parameter.device), source.to(parameter), parameter))

    def predict(self, model, x, logits):
        return self.teacher(x)

    def state_dict(self):
        return {"teacher": self.teacher.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.teacher.load_state_dict(state["teacher"])
        self.generator.set_state(state["generator"].cpu())


class Lookahead:
    """The gradient one step ahead, applied here."""

    def __init__(self, statistics=BATCH_STATISTICS):
        self.statistics = statistics

    def prepare(self, model):
        use_test_statistics(model, self.statistics)
        return affine_parameters(model)

    def __call__(self, model, x, logits):
        return entropy(logits).mean()

    def gradient(self, model, x, logits, parameters):
        _, here = differentiated(self(model, x, logits), parameters)
        with displaced(parameters, [-part for part in here]):
            return differentiated(self(model, x, model(x)), parameters)


class Prototypes:
    """As T3A: no loss; classes are the means of the confident logits so far, and the nearest one is predicted."""

    def prepare(self, model):
        self.sums, self.counts = None, None

    def predict(self, model, x, logits):
        if self.sums is None:
            self.sums, self.counts = torch.eye(logits.shape[1]).to(logits), torch.ones(logits.shape[1]).to(logits)
        certain = entropy(logits) < 0.6
        for row, chosen in zip(logits[certain], logits[certain].argmax(1), strict=True):
            self.sums[chosen] += row
            self.counts[chosen] += 1
        return F.normalize(logits) @ F.normalize(self.sums / self.counts[:, None]).T

    def state_dict(self):
        return {"sums": self.sums, "counts": self.counts}

    def load_state_dict(self, state):
        self.sums, self.counts = state["sums"], state["counts"]


class GradientNorm:
    """The longer the gradient, the smaller the step."""

    def __init__(self, alpha=0.1):
        self.alpha = alpha

    def __call__(self, signals):
        squares = sum(part.square().sum().item() for part in signals.gradient.values())
        return self.alpha / (1 + squares**0.5)


class Annotated:
    """Asks for the signals by the type of its argument."""

    def __call__(self, known: Signals):
        return 0.1 * known.loss


class LayerWise:
    """As LAW: every parameter at its own rate, by the length of its gradient."""

    per_parameter = True

    def __call__(self, signals):
        return [0.5 * signals.gradient[name].norm().item() for name in signals.parameters]


class Needy:
    """Cannot be made without arguments."""

    def __init__(self, temperature):
        self.temperature = temperature

    def prepare(self, model):
        return affine_parameters(model)


class NoMethod:
    """Has nothing that a method needs."""


def no_rate():
    """What it gives cannot be called."""
    return 0.1


class Diverging:
    """Its loss grows without bound: finite on the first batch, infinite from the second on."""

    def __init__(self, statistics=BATCH_STATISTICS):
        self.statistics, self.batches = statistics, 0

    def prepare(self, model):
        use_test_statistics(model, self.statistics)
        return affine_parameters(model)

    def __call__(self, model, x, logits):
        return entropy(logits).mean() * (torch.inf if self.batches else 1.0)

    def after_update(self, model):
        self.batches += 1
