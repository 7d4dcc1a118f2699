"""What is measured: the paper's networks on its image sizes, and a larger color image.

Weights are untrained: time does not depend on them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dltta.methods import Method
from dltta.models.encoder import encode, shared_parameters
from dltta.models.io.factories import arguments, import_object
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.autoencoders import DENSENET_LEVELS, UNET_LEVELS, AutoEncoders, LevelOutputs
from dltta.models.parts.contrast import FeatureMoments, ProjectionHead
from dltta.models.parts.denoiser import Denoiser
from dltta.models.parts.normalizer import ImageNormalizer
from dltta.models.parts.rotation import RotationHead
from dltta.objectives import ATTA, TTT

LEARNING: dict[str, dict[str, object]] = {  # so that these learn from every batch, also without trained weights
    "note": {"capacity": 8, "every": 1},
    "rotta": {"capacity": 8, "every": 1},
    "eata": {"margin": 2.0, "redundancy": 2.0},
    "sar": {"margin": 2.0},
    "deyo": {"certain": 2.0, "threshold": -1.0},
}


@dataclass(frozen=True)
class Workload:
    """A network, the shape of a batch and the memory that the paper uses for that task."""

    name: str
    title: str
    architecture: Architecture
    shape: tuple[int, ...]  # (B, C, *spatial)
    repeats: int
    capacity: int = 20  # these four: the paper's in segmentation
    neighbors: int = 8
    alpha: float = 1e-3
    layer: str = "down_4"
    ttt_batch: int | None = None  # smaller batch for TTT, whose four rotations would not fit in memory

    @property
    def levels(self):
        return UNET_LEVELS if self.architecture.name == "unet" else DENSENET_LEVELS

    def model(self) -> nn.Module:
        return self.architecture.build(seed=0).eval()

    def images(self, batch: int | None = None) -> Tensor:
        shape = (batch or self.shape[0], *self.shape[1:])
        return torch.rand(shape, generator=torch.Generator().manual_seed(1))

    def ttt(self, model: nn.Module) -> TTT:
        sample = self.images(2)
        with torch.no_grad():
            channels = encode(model, self.layer, sample).shape[1]
        torch.manual_seed(0)
        return TTT(RotationHead(channels), self.layer, tuple(shared_parameters(model, self.layer, sample)))

    def atta(self, model: nn.Module) -> ATTA:
        """As `dltta train --with atta` builds it, with the published width."""
        probe = self.architecture.build(seed=0).requires_grad_(False).eval()
        channels: list[int] = []
        for layer in self.levels.adapted:
            probe.get_submodule(layer).register_forward_hook(lambda m, i, output: channels.append(output.shape[1]))
        watch = LevelOutputs(self.levels)
        watch.attach(probe)
        probe(self.images(1))
        shapes = {name: tuple(seen.shape[1:]) for name, seen in watch.take().items()}
        torch.manual_seed(0)
        return ATTA(AutoEncoders(shapes), self.levels, channels)

    def newer(self, method: Method, model: nn.Module) -> object:
        """The method as its authors set it, with untrained parts, but so that it learns from every batch."""
        made = import_object(method.facts.path)
        if method == Method.TTT_PLUS:
            return self._contrast(model, made)
        if method == Method.DTTA:
            dims, channels = self.architecture.spatial_dims, self.architecture.in_channels
            return made(Denoiser(dims, self.architecture.classes), ImageNormalizer(dims, channels))
        often = LEARNING.get(method, {})
        about = {"channels": self.architecture.in_channels, "spatial_dims": self.architecture.spatial_dims}
        return made(**often, **{key: value for key, value in about.items() if key in arguments(made)})

    def _contrast(self, model: nn.Module, made: Callable[..., object]) -> object:
        sample = self.images(2)
        with torch.no_grad():
            channels = encode(model, self.layer, sample).shape[1]
        torch.manual_seed(0)
        moments = [FeatureMoments(torch.zeros(size), torch.eye(size), 1.0, 1.0) for size in (channels, 128)]
        return made(ProjectionHead(channels), self.layer, shared_parameters(model, self.layer, sample), *moments)

    def small(self) -> "Workload":
        """The same kinds of layers on an image that takes milliseconds."""
        spatial = tuple(min(size, 64 if len(self.shape) == 4 else 32) for size in self.shape[2:])
        batch = min(self.shape[0], 8)
        return replace(
            self,
            shape=(batch, self.shape[1], *spatial),
            capacity=min(self.capacity, 4 * batch + 16),
            repeats=3,
            ttt_batch=None if self.ttt_batch is None else 4,
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "oct",
            "OCT, U-Net, 1 × 1 × 128 × 1024, 9 classes",
            Architecture("unet", 2, 1, 9),
            (1, 1, 128, 1024),
            repeats=15,
        ),
        Workload(
            "histology",
            "Histology, DenseNet-121, 200 × 3 × 96 × 96, 2 classes",
            Architecture("densenet121", 2, 3, 2),
            (200, 3, 96, 96),
            repeats=3,
            capacity=800,
            neighbors=12,
            alpha=3e-4,
            layer="features",
            ttt_batch=50,
        ),
        Workload(
            "prostate",
            "Prostate, 3-D U-Net, 1 × 1 × 80 × 80 × 80, 2 classes",
            Architecture("unet", 3, 1, 2),
            (1, 1, 80, 80, 80),
            repeats=9,
        ),
        Workload(
            "color",
            "Color image, U-Net, 1 × 3 × 512 × 512, 3 classes",
            Architecture("unet", 2, 3, 3),
            (1, 3, 512, 512),
            repeats=15,
        ),
    )
}
