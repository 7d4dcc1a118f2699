"""Source and target together. CycleGAN: target images are translated to the source's appearance, then segmented.

Zhu et al., "Unpaired Image-to-Image Translation using Cycle-Consistent Adversarial Networks", ICCV 2017. Two generators
translate between the sites, a discriminator at each site learns to tell real images from translated ones, and an image
that is translated to the other site and back must be itself again. Volumes are translated slice by slice.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dltta.errors import SettingError
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.models.nets.discriminators import PatchDiscriminator
from dltta.models.nets.translation import Generator, Translated, as_slices
from dltta.training.examples import Examples
from dltta.training.fit import Batch, Losses, Plan
from dltta.training.uda.domains import Images, Mixed
from dltta.training.uda.training import Parts, UDATraining, frozen, set_rate

if TYPE_CHECKING:
    from monai.transforms import Compose

UNUSED = torch.tensor(0)  # in place of labels, which translation does not need

# For a few dozen images on two cores: narrow networks, small crops, few steps at a larger rate.
PHANTOM: dict[str, Any] = {
    "epochs": 8,
    "learning_rate": 1e-3,
    "width": 16,
    "blocks": 3,
    "discriminator_width": 16,
    "crop": (64, 64),
}


@dataclass(frozen=True)
class CycleGAN:
    """Settings of unpaired translation; the defaults are those of Zhu et al. where nothing else is said."""

    epochs: int = 200  # the rate falls linearly to zero over the second half
    batch_size: int = 1
    learning_rate: float = 2e-4  # Adam (0.5, 0.999)
    cycle: float = 10.0
    identity: float = 5.0  # half of `cycle`
    pool: int = 50  # translated images that the discriminators may be shown again
    width: int = 64
    blocks: int = 9  # theirs from 256 pixels; 6 for smaller images
    discriminator_width: int = 64
    crop: tuple[int, ...] | None = (
        None  # (height, width) of random crops; None: whole slices. Theirs: 256 of 286 pixels
    )
    name: ClassVar[str] = "cyclegan"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "width", "discriminator_width"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} of cyclegan must be at least 1, got {getattr(self, name)}")
        if self.crop is not None and len(self.crop) != 2:
            raise SettingError(f"crop of cyclegan is height and width of a slice, got {self.crop}")

    def train(self, training: UDATraining, /) -> Checkpoint:
        source, seed = training.source(), training.settings.seed
        examples = self._examples(training)
        learner = self.learner(examples, training.device, seed)
        training.learn(learner, examples, Plan(self.name, self.epochs, self.batch_size, self.learning_rate, seed))
        model = Translated(learner.networks.to_source, copy.deepcopy(source.model), learner.center, learner.scale)
        return training.checkpoint(model, self._architecture(source.architecture))

    def learner(self, examples: Mixed, device: torch.device, seed: int) -> "Translation":
        """Generators, discriminators and optimizers, as they are before the first step."""
        center, scale = _intensities(examples)
        images = examples.source[0][0], examples.target[0]
        size = [min(extents) for extents in zip(*(image.shape[1:] for image in images), strict=True)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            networks = Networks(
                to_source=Generator(len(center), width=self.width, blocks=self.blocks),
                to_target=Generator(len(center), width=self.width, blocks=self.blocks),
                at_source=PatchDiscriminator(len(center), size, width=self.discriminator_width),
                at_target=PatchDiscriminator(len(center), size, width=self.discriminator_width),
            )
            networks.apply(_initialize)
        return Translation(self, networks.to(device), center.to(device), scale.to(device))

    def _architecture(self, network: Architecture) -> Architecture:
        described = network.as_json()
        options = {
            "network": {"name": described["name"], "options": described["options"]},
            "generator": {"width": self.width, "blocks": self.blocks},
        }
        return Architecture("translated", network.spatial_dims, network.in_channels, network.classes, options)

    def _examples(self, training: UDATraining) -> Mixed:
        """Every slice of source and target, cropped and mirrored; brightness and noise are what is to be learned."""
        seed = training.settings.seed
        sides = [image for image, _ in training.domains.source.pairs], training.domains.target.images
        source, target = ([part for image in side for part in as_slices(image[None])] for side in sides)
        return Mixed(
            Examples([(part, UNUSED) for part in source], self._augmentation(source), seed=seed),
            Images(target, self._augmentation(target), seed=seed),
            seed=seed,
        )

    def _augmentation(self, slices: Sequence[Tensor]) -> "Compose":
        from monai import transforms as mt  # here: importing any part of MONAI imports all of it

        smallest = [min(extents) for extents in zip(*(part.shape[1:] for part in slices), strict=True)]
        crop = [min(extents) for extents in zip(self.crop or smallest, smallest, strict=True)]
        return mt.Compose([mt.RandSpatialCropd("image", crop, random_size=False), mt.RandFlipd("image", 0.5, 1)])


class Networks(nn.Module):
    """Two generators and two discriminators."""

    def __init__(self, to_source: nn.Module, to_target: nn.Module, at_source: nn.Module, at_target: nn.Module) -> None:
        super().__init__()
        self.to_source, self.to_target, self.at_source, self.at_target = to_source, to_target, at_source, at_target

    @property
    def generators(self) -> tuple[nn.Module, nn.Module]:
        return self.to_source, self.to_target

    @property
    def discriminators(self) -> tuple[nn.Module, nn.Module]:
        return self.at_source, self.at_target


class Pool:
    """Translated images of the past: half of the time one of them is shown and the new one takes its place.

    So the discriminators do not forget what generators did before. The first `capacity` images are shown as they come.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.images: list[Tensor] = []  # (C, H, W) each

    def __call__(self, images: Tensor, random: torch.Generator) -> Tensor:
        return torch.stack([self._one(image, random) for image in images.detach()])

    def _one(self, image: Tensor, random: torch.Generator) -> Tensor:
        if len(self.images) < self.capacity:
            self.images.append(image)
            return image
        if self.capacity == 0 or torch.rand(1, generator=random).item() < 0.5:
            return image
        place = int(torch.randint(self.capacity, (1,), generator=random))
        older, self.images[place] = self.images[place], image
        return older

    def state_dict(self) -> dict[str, Any]:
        return {"images": self.images}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.images = list(state["images"])


class Translation(Parts):
    """The learner: one step of the generators, then one of the discriminators, on images from -1 to 1."""

    def __init__(self, settings: CycleGAN, networks: Networks, center: Tensor, scale: Tensor) -> None:
        self.settings, self.networks = settings, networks
        self.center, self.scale = center, scale  # (C,)
        self.generating = _adam(networks.generators, settings.learning_rate)
        self.judging = _adam(networks.discriminators, settings.learning_rate)
        self.pools = {"source": Pool(settings.pool), "target": Pool(settings.pool)}  # of images translated to it
        super().__init__(networks=networks, generating=self.generating, judging=self.judging, **self.pools)

    def step(self, batch: Batch, generator: torch.Generator, progress: float, /) -> Losses:
        center, scale = self.center.view(-1, 1, 1), self.scale.view(-1, 1, 1)
        source, target = ((images - center) / scale for images in (batch[0], batch[2]))
        for optimizer in (self.generating, self.judging):
            set_rate(optimizer, self.settings.learning_rate * min(1.0, 2 * (1 - progress)))
        losses, as_source, as_target = self._translate(source, target)
        shown = self.pools["source"](as_source, generator), self.pools["target"](as_target, generator)
        return {**losses, "discriminator": self._judge((source, target), shown)}

    def _translate(self, source: Tensor, target: Tensor) -> tuple[Losses, Tensor, Tensor]:
        """Learn to fool the discriminators, to find the way back and to leave images of the other side unchanged."""
        to_source, to_target = self.networks.generators
        weights = self.settings
        with frozen(*self.networks.discriminators):
            as_source, as_target = to_source(target), to_target(source)
            losses = {
                "adversarial": real_loss(self.networks.at_source(as_source))
                + real_loss(self.networks.at_target(as_target)),
                "cycle": distance(to_target(as_source), target) + distance(to_source(as_target), source),
                "identity": distance(to_source(source), source) + distance(to_target(target), target),
            }
            self.generating.zero_grad(set_to_none=True)
            total = losses["adversarial"] + weights.cycle * losses["cycle"] + weights.identity * losses["identity"]
            total.backward()
        self.generating.step()
        return {name: loss.item() for name, loss in losses.items()}, as_source.detach(), as_target.detach()

    def _judge(self, real: tuple[Tensor, Tensor], translated: tuple[Tensor, Tensor]) -> float:
        """Learn to tell real images from translated ones, at both sites; the mean loss."""
        losses = [
            discriminator_loss(judge(ours), judge(theirs))
            for judge, ours, theirs in zip(self.networks.discriminators, real, translated, strict=True)
        ]
        self.judging.zero_grad(set_to_none=True)
        total = torch.stack(losses)
        total.sum().backward()
        self.judging.step()
        return total.mean().item()


def real_loss(scores: Tensor) -> Tensor:
    """Squared distance from 1, which a discriminator gives to real images."""
    return (scores - 1).square().mean()


def discriminator_loss(real: Tensor, translated: Tensor) -> Tensor:
    """Real images should get 1, translated ones 0 (least squares)."""
    return 0.5 * (real_loss(real) + translated.square().mean())


def distance(one: Tensor, other: Tensor) -> Tensor:
    """Mean absolute difference."""
    return (one - other).abs().mean()


def _adam(modules: Sequence[nn.Module], rate: float) -> torch.optim.Adam:
    return torch.optim.Adam([p for module in modules for p in module.parameters()], lr=rate, betas=(0.5, 0.999))


def _initialize(module: nn.Module) -> None:
    """Normal weights of sd 0.02, as theirs."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _intensities(examples: Mixed) -> tuple[Tensor, Tensor]:
    """Middle and half width of the range of every channel over the images of both sites."""
    images = [*(image for image, _ in examples.source.pairs), *examples.target.images]
    low = torch.stack([image.flatten(1).amin(1) for image in images]).amin(0)
    high = torch.stack([image.flatten(1).amax(1) for image in images]).amax(0)
    return (low + high) / 2, ((high - low) / 2).clamp_min(1e-8)
