"""Independent references in plain loops: the networks of `networks.py` written out, and what predictions say."""

import math

import torch
import torch.nn.functional as F

NORMS = ("encoder.1.weight", "encoder.1.bias", "bottleneck.1.weight", "bottleneck.1.bias")


def weights_of(model):
    """Parameters by name, in double precision."""
    return {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}


def normalized(x, weight, bias, kind, eps=1e-5):
    """By the statistics of the batch, of each image, or of each half of the channels of each image."""
    out = torch.empty_like(x)
    channels = range(x.shape[1])
    if kind == "batch":
        groups = [(slice(None), slice(c, c + 1)) for c in channels]
    elif kind == "instance":
        groups = [(slice(b, b + 1), slice(c, c + 1)) for b in range(len(x)) for c in channels]
    else:
        half = x.shape[1] // 2
        groups = [(slice(b, b + 1), slice(k * half, (k + 1) * half)) for b in range(len(x)) for k in range(2)]
    for images, part in groups:
        values = x[images, part]
        mean = values.sum() / values.numel()
        variance = ((values - mean) ** 2).sum() / values.numel()
        out[images, part] = (values - mean) / (variance + eps) ** 0.5
    shape = (1, -1, *[1] * (x.ndim - 2))
    return out * weight.view(shape) + bias.view(shape)


def segmenter(weights, x, kind="batch"):
    """`networks.Segmenter`, 2-D or 3-D."""
    volume = x.ndim == 5
    conv, pool = (F.conv3d, F.avg_pool3d) if volume else (F.conv2d, F.avg_pool2d)
    x = conv(x, weights["encoder.0.weight"], weights["encoder.0.bias"], padding=1)
    x = pool(torch.tanh(normalized(x, weights["encoder.1.weight"], weights["encoder.1.bias"], kind)), 2)
    x = conv(x, weights["bottleneck.0.weight"], weights["bottleneck.0.bias"], padding=1)
    x = torch.tanh(normalized(x, weights["bottleneck.1.weight"], weights["bottleneck.1.bias"], kind))
    for axis in range(2, x.ndim):
        x = x.repeat_interleave(2, dim=axis)
    return conv(x, weights["head.weight"], weights["head.bias"])


def classifier(weights, x, kind="batch"):
    """`networks.Classifier`."""
    x = F.conv2d(x, weights["encoder.0.weight"], weights["encoder.0.bias"], padding=1)
    x = F.max_pool2d(torch.tanh(normalized(x, weights["encoder.1.weight"], weights["encoder.1.bias"], kind)), 2)
    return x.mean((2, 3)) @ weights["head.weight"].T + weights["head.bias"]


def rows(logits):
    """One list of logits for every sample and position, in the order of (B, *positions)."""
    return list(logits.movedim(1, -1).reshape(-1, logits.shape[1]))


def shares(row):
    """Probabilities of one row of logits; one logit is a sigmoid."""
    if len(row) == 1:
        row = torch.cat([torch.zeros_like(row), row])
    powers = torch.exp(row - row.max().detach())
    return powers / powers.sum()


def uncertainty(row):
    """Entropy in nats of one row of logits."""
    p = shares(row)
    return -sum(value * torch.log(value) for value in p)


def limit(factor, row):
    return factor * math.log(max(2, len(row)))
