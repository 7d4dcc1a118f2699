"""Small networks that the tests adapt."""

import torch
from torch import nn


def norm(kind, channels, axes):
    batch = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[axes]
    instance = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[axes]
    return {
        "batch": lambda: batch(channels),
        "instance": lambda: instance(channels, affine=True),
        "group": lambda: nn.GroupNorm(2, channels),
    }[kind]()


class Segmenter(nn.Module):
    """Encoder with one pooling, decoder, head; 2-D or 3-D."""

    def __init__(self, axes=2, channels=1, classes=3, kind="batch"):
        super().__init__()
        conv = {2: nn.Conv2d, 3: nn.Conv3d}[axes]
        pool = {2: nn.AvgPool2d, 3: nn.AvgPool3d}[axes]
        self.encoder = nn.Sequential(conv(channels, 4, 3, padding=1), norm(kind, 4, axes), nn.Tanh(), pool(2))
        self.bottleneck = nn.Sequential(conv(4, 6, 3, padding=1), norm(kind, 6, axes), nn.Tanh())
        self.up = nn.Upsample(scale_factor=2)
        self.head = conv(6, classes, 1)

    def forward(self, x):
        return self.head(self.up(self.bottleneck(self.encoder(x))))


class Classifier(nn.Module):
    def __init__(self, channels=1, classes=3, kind="batch"):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), norm(kind, 4, 2), nn.Tanh(), nn.MaxPool2d(2))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.dropout(self.encoder(x).mean(dim=(2, 3))))


def trained(model, seed=0):
    """A network whose parameters and stored statistics are not the initial ones, so that mistakes show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
        for name, buffer in model.named_buffers():
            if "running_mean" in name:
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
            if "running_var" in name:
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model.eval()


def decisive(model, x):
    """The network with predictions of images x, normalized by themselves, that differ in class and in certainty."""
    axes = [0, *range(2, x.ndim)]
    with torch.no_grad():
        model.head.weight *= 40 if isinstance(model.head, nn.Linear) else 6
        for layer in model.modules():
            layer.train(isinstance(layer, nn.modules.batchnorm._BatchNorm))
        stored = {name: value.clone() for name, value in model.state_dict().items()}
        logits = model(x)
        model.load_state_dict(stored)
        model.head.bias -= logits.mean(axes[: logits.ndim - 1])
    return model.eval()


def stream(shape, batches, seed=1, last=None):
    """Batches that drift in brightness and contrast; the last may be smaller."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [shape[0]] * (batches - 1) + [last or shape[0]]
    return [
        torch.randn((size, *shape[1:]), generator=generator) * (1 + 0.3 * index) + 0.2 * index
        for index, size in enumerate(sizes)
    ]
