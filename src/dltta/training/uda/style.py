"""Source and target together. UDA-ST: source images are given the look of target images, then trained on.

Gatys et al., "Image Style Transfer Using Convolutional Neural Networks", CVPR 2016, as the OCT literature uses it. The
other direction needs no training: the source model gives every image the look of the source.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dltta.data.case import Cases
from dltta.data.preprocessing import Preprocessing
from dltta.errors import SettingError
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.models.nets.style import (
    ENCODER_LAYERS,
    VGG_LAYERS,
    Perception,
    PerceptualLayers,
    Restyled,
    Restyling,
    Style,
    style_loss,
    style_of,
    through_encoder,
    through_vgg,
)
from dltta.models.nets.vgg import load_vgg19
from dltta.training.examples import gather
from dltta.training.fit import Batch, Losses, Plan
from dltta.training.uda.training import UDATraining

WEIGHTS = {"vgg19": 1e4, "encoder": 1e6}  # of style over content
PHANTOM: dict[str, Any] = {"iterations": 15, "start": "source", "epochs": 8}  # a minute for 40 images on two cores
ROUNDS = 10  # parts in which images are restyled; after each the training can be resumed


@dataclass(frozen=True)
class StyleTransfer:
    """Settings of style transfer. The perceptual network is VGG-19 if a file is given, else the source's encoder.

    `style_weight` None is the paper's 1e4 for VGG-19. For the encoder it is 1e6: there, and not at 1e4, restyled images
    come as near to a target image's style as two source images are to each other, which needs no label to be seen.
    """

    direction: Literal["to-target", "to-source"] = "to-target"
    vgg: str | None = None  # file with the state dict of torchvision's vgg19
    content_weight: float = 1.0
    style_weight: float | None = None
    iterations: int = 100  # ours; where the paper stops it does not say
    optimizer: Literal["lbfgs", "adam"] = "lbfgs"  # the paper's
    start: Literal["new", "source"] = "new"  # the network that is trained on restyled images
    epochs: int | None = None  # of that training; None: as many as for the source model
    name: ClassVar[str] = "uda-st"

    def __post_init__(self) -> None:
        if self.direction not in ("to-target", "to-source"):
            raise SettingError(f"direction of uda-st must be 'to-target' or 'to-source', got {self.direction!r}")
        if self.start not in ("new", "source"):
            raise SettingError(f"start of uda-st must be 'new' or 'source', got {self.start!r}")
        if self.vgg is not None and not Path(self.vgg).is_file():
            raise SettingError(f"vgg of uda-st: no file {self.vgg}; give the state dict of torchvision's vgg19")
        _ = self.restyling  # which checks the rest

    @property
    def restyling(self) -> Restyling:
        usual = WEIGHTS["encoder" if self.vgg is None else "vgg19"]
        weight = usual if self.style_weight is None else self.style_weight
        return Restyling(self.content_weight, weight, self.iterations, self.optimizer)

    def train(self, training: UDATraining, /) -> Checkpoint:
        by = "the source model's encoder" if self.vgg is None else f"VGG-19 from {Path(self.vgg).name}"
        vgg = None if self.vgg is None else load_vgg19(Path(self.vgg)).to(training.device).requires_grad_(False)
        source = training.source()
        network = copy.deepcopy(source.model).to(training.device).eval().requires_grad_(False)
        images = [image for image, _ in training.domains.source.pairs]
        perception = perceive(network, vgg, self.layers(source.architecture), images, training.device)
        if self.direction == "to-source":
            style = Style.mean(style_of(perception, image.to(training.device)) for image in images)
            model = Restyled(network, vgg, self.restyling, perception.layers, [len(g) for g in style.grams.values()])
            model.keep(style, perception.activations)
            return training.checkpoint(model, self._architecture(source.architecture, model), perception=by)
        trained = self._train_on(training, self._restyle(training, perception), source.model)
        return training.checkpoint(trained.model, perception=by, history=trained.record["history"])

    def layers(self, architecture: Architecture) -> PerceptualLayers:
        """The layers of the perceptual network that are used."""
        if self.vgg is not None:
            return VGG_LAYERS
        if (layers := ENCODER_LAYERS.get(architecture.name)) is None:
            raise SettingError(
                f"style transfer does not know the encoder of {architecture.name!r}; "
                "give the state dict of torchvision's vgg19"
            )
        return layers

    def _restyle(self, training: UDATraining, perception: Perception) -> Cases:
        """Every source case, each in the style of a target image; the labels stay."""
        cases, seed = gather(training.sites), training.settings.seed
        images = [training.preprocessing.image(case.image, case.limit) for case in cases]
        targets = training.domains.target.images
        learner = Restyler(self.restyling, perception, images, targets, couples(len(images), len(targets), seed))
        rounds = min(ROUNDS, len(images))
        training.learn(learner, Rounds(len(images), rounds), Plan("style", rounds, 1, 1.0, seed))
        changed = [
            replace(case, image=learner.restyled[number], label=training.preprocessing.label(case.label))
            for number, case in enumerate(cases)
            if case.label is not None  # reading the domains has refused others
        ]
        return Cases(tuple(changed), "+".join(site.site for site in training.sites), training.task, training.classes)

    def _train_on(self, training: UDATraining, restyled: Cases, source: nn.Module) -> Checkpoint:
        """A source training on restyled images, which are preprocessed already."""
        settings = replace(training.settings, epochs=self.epochs or training.settings.epochs)
        inner = replace(training, preprocessing=Preprocessing(), settings=settings)
        return inner.train_source([restyled], "restyled", source if self.start == "source" else None)

    def _architecture(self, network: Architecture, model: Restyled) -> Architecture:
        described = network.as_json()
        options = {
            "network": {"name": described["name"], "options": described["options"]},
            "vgg": self.vgg is not None,
            "restyling": asdict(self.restyling),
            "channels": model.channels,
        }
        return Architecture("restyled", network.spatial_dims, network.in_channels, network.classes, options)


def perceive(
    network: nn.Module,
    vgg: nn.Module | None,
    layers: PerceptualLayers,
    images: Sequence[Tensor],
    device: torch.device,
) -> Perception:
    """VGG-19 if there is one, else the network's encoder; activations as measured on these images."""
    shown = (image.to(device) for image in images)
    if vgg is None:
        return Perception.measured(through_encoder(network, layers), layers, shown)
    low, high = min(float(image.min()) for image in images), max(float(image.max()) for image in images)
    return Perception.measured(through_vgg(vgg, layers, low, high), layers, shown)


def couples(sources: int, targets: int, seed: int) -> list[int]:
    """Which target image lends its style to each source image; all lend it equally often, give or take one."""
    random = np.random.default_rng([seed, 6])
    order = [random.permutation(targets) for _ in range(-(-sources // targets))]
    return [int(index) for index in np.concatenate(order)[:sources]]


class Rounds:
    """Positions of images; an epoch sees a part of them, all epochs together every one once."""

    def __init__(self, count: int, rounds: int) -> None:
        self.count, self.rounds, self.epoch = count, rounds, 1

    def __len__(self) -> int:
        return len(range(self.epoch - 1, self.count, self.rounds))

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.epoch - 1 + index * self.rounds])


class Restyler:
    """The learner that gives source images the style of target images; what it learns are the images."""

    def __init__(
        self,
        restyling: Restyling,
        perception: Perception,
        images: Sequence[Tensor],
        targets: Sequence[Tensor],
        couples: Sequence[int],
    ) -> None:
        self.restyling, self.perception = restyling, perception
        self.images, self.targets, self.couples = images, targets, couples
        self.restyled: dict[int, Tensor] = {}

    def train(self) -> None:
        """The perceptual network is never trained."""

    def step(self, batch: Batch, generator: torch.Generator, progress: float, /) -> Losses:
        """Restyle one image; how far it was from the style that was wanted, and how far it is."""
        (number,) = batch[0].flatten().tolist()
        device = batch[0].device
        image = self.images[number].to(device)
        style = style_of(self.perception, self.targets[self.couples[number]].to(device))
        restyled = self.restyling(self.perception, image, style)
        self.restyled[number] = restyled.cpu()
        with torch.no_grad():
            before, after = (style_loss(self.perception(x[None]), style).item() for x in (image, restyled))
        return {"before": before, "style": after}

    def state_dict(self) -> dict[str, Any]:
        return {"restyled": self.restyled}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.restyled = dict(state["restyled"])
