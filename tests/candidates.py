"""Predictions by hand, as the guard's signals take them."""

import torch

from dltta.quality.signals import Candidate, ImageSignals, UpdateSignals


def binary(*foreground):
    """Probabilities (1, 2, N) with these of class 1."""
    values = torch.tensor(foreground)
    return torch.stack([1 - values, values])[None]


def says(*marks):
    """A network that gives class 1 at these positions whatever it sees, so that flips change its prediction."""
    return lambda images: binary(*[0.9 if mark else 0.1 for mark in marks]).log().expand(len(images), -1, -1)


def never(images):
    raise AssertionError("a pass that nobody needs")


def candidate(prediction, network=never, images=None):
    """A prediction that is there already; further passes only if a network is given."""
    images = torch.rand(len(prediction), 1, *prediction.shape[2:]) if images is None else images
    return Candidate(network, images, prediction.log())


def image_signals(*means, images=None, source=never, instance=never, unadapted=never):
    """Images whose mean at the only layer is this: OOD score ((mean − 1) / √2)² / 2 by `ONE_LAYER`."""
    count = len(means)
    images = torch.rand(count, 1, 4) if images is None else images
    layers = {"n": (torch.tensor(means, dtype=torch.float32)[:, None], torch.ones(count, 1))}
    return ImageSignals(images, layers, *(Candidate(network, images) for network in (source, instance, unadapted)))


def update_signals(adapted, unadapted=None, source=None, drift=0.0, rate=1e-3):
    """Of predictions that are there already."""
    predictions = [adapted if other is None else other for other in (adapted, unadapted, source)]
    return UpdateSignals(*map(candidate, predictions), drift, rate)
