"""2 networks. What does an image look like, apart from what it shows? Style transfer (Gatys et al. 2016).

A perceptual network gives features of an image at several depths. How their channels occur together, whatever the
place, is the image's style; where they occur is its content.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn

from dltta.data.preprocessing import IMAGENET_MEAN, IMAGENET_SD
from dltta.errors import InputError, SettingError
from dltta.models.encoder import encode_levels
from dltta.models.nets.translation import as_slices, from_slices

Features = Mapping[str, Tensor]  # layer: (B, C, *positions)
SMALLEST = 1e-6  # mean activation that is told from none


@dataclass(frozen=True)
class PerceptualLayers:
    """The layers whose statistics are the style, and the one whose features are the content."""

    style: tuple[str, ...]
    content: str

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.style, self.content)))


VGG_LAYERS = PerceptualLayers(("1", "6", "11", "20", "29"), "22")  # conv1_1, 2_1, 3_1, 4_1, 5_1 and 4_2, rectified
UNET_LAYERS = PerceptualLayers(("conv_0", "down_1", "down_2", "down_3", "down_4"), "down_3")
DENSENET_LAYERS = PerceptualLayers(
    ("features.relu0", *(f"features.denseblock{number}" for number in (1, 2, 3, 4))), "features.denseblock3"
)
ENCODER_LAYERS = {"unet": UNET_LAYERS, "densenet121": DENSENET_LAYERS, "densenet_small": DENSENET_LAYERS}


Extract = Callable[[Tensor], Features]  # images (B, C, *spatial) as the task network takes them to features


def through_encoder(network: nn.Module, layers: PerceptualLayers) -> Extract:
    """Features of a task network, 2-D or 3-D, which must be in evaluation mode."""
    return lambda x: encode_levels(network, layers.all, x)


def through_vgg(network: nn.Module, layers: PerceptualLayers, low: float, high: float) -> Extract:
    """Features of VGG-19, of images with one or three channels; volumes go slice by slice.

    Intensities from `low` to `high` are shown to it as black to white.
    """

    def extract(x: Tensor) -> Features:
        if x.shape[1] not in (1, 3):
            raise InputError(f"VGG-19 takes images of 1 or 3 channels, these have {x.shape[1]}; leave out its file")
        shown = ((as_slices(x) - low) / (high - low)).expand(-1, 3, -1, -1)
        mean, sd = (x.new_tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_SD))
        features = encode_levels(network, layers.all, (shown - mean) / sd)
        return {layer: from_slices(found, x.shape) for layer, found in features.items()}

    return extract


@dataclass(frozen=True)
class Perception:
    """Features at several depths, each divided by its mean activation, so that no layer outweighs the others.

    Gatys et al. scale the filters of their network likewise; we scale whole layers, as measured on our images.
    """

    extract: Extract
    layers: PerceptualLayers
    activations: Mapping[str, float]

    @classmethod
    @torch.no_grad()
    def measured(cls, extract: Extract, layers: PerceptualLayers, images: Iterable[Tensor]) -> "Perception":
        """With the mean activations on these images (C, *spatial), which are taken one by one."""
        means = [[float(found.abs().mean()) for found in extract(image[None]).values()] for image in images]
        activations = [max(fmean(each), SMALLEST) for each in zip(*means, strict=True)]
        return cls(extract, layers, dict(zip(layers.all, activations, strict=True)))

    def __call__(self, x: Tensor) -> Features:
        return {layer: found / self.activations[layer] for layer, found in self.extract(x).items()}


def gram(features: Tensor) -> Tensor:
    """How channels occur together: features (B, C, *positions) to (B, C, C), mean over the positions."""
    flat = features.flatten(2)
    return flat @ flat.transpose(1, 2) / flat.shape[2]


@dataclass(frozen=True)
class Style:
    """The look of an image, or of many: Gram matrices (C, C) by layer, and the range of its intensities."""

    grams: Mapping[str, Tensor]
    low: float
    high: float

    @classmethod
    def mean(cls, styles: Iterable["Style"]) -> "Style":
        """The look that images have in common; styles are taken one by one."""
        total, count = None, 0
        for style in styles:
            total, count = style if total is None else total._plus(style), count + 1
        if total is None:
            raise InputError("there is no image whose style could be measured")
        return cls({layer: gram / count for layer, gram in total.grams.items()}, total.low, total.high)

    def _plus(self, other: "Style") -> "Style":
        grams = {layer: gram + other.grams[layer] for layer, gram in self.grams.items()}
        return Style(grams, min(self.low, other.low), max(self.high, other.high))


@torch.no_grad()
def style_of(perception: Perception, image: Tensor) -> Style:
    """The style of one image (C, *spatial)."""
    features = perception(image[None])
    grams = {layer: gram(features[layer])[0] for layer in perception.layers.style}
    return Style(grams, float(image.min()), float(image.max()))


def style_loss(features: Features, style: Style) -> Tensor:
    """Gatys et al., Eq. 4 and 5: for each layer the squared difference of the Gram matrices, over 4 C²; their mean."""
    losses = [
        (gram(features[layer]) - wanted).square().sum() / (4 * len(wanted) ** 2)
        for layer, wanted in style.grams.items()
    ]
    return torch.stack(losses).mean()


def content_loss(features: Tensor, wanted: Tensor) -> Tensor:
    """Gatys et al., Eq. 1: half the squared difference, summed over channels and positions."""
    return (features - wanted).square().sum() / 2


@dataclass(frozen=True)
class Restyling:
    """How an image is given another style: its intensities are optimized, beginning with its own."""

    content_weight: float = 1.0
    style_weight: float = 1e3  # over content_weight: 1e3 or 1e4 in the paper
    iterations: int = 100
    optimizer: Literal["lbfgs", "adam"] = "lbfgs"  # the paper's
    rate: float = 0.02  # Adam's, as a share of the image's range

    def __post_init__(self) -> None:
        if self.optimizer not in ("lbfgs", "adam"):
            raise SettingError(f"optimizer must be 'lbfgs' or 'adam', got {self.optimizer!r}")
        if self.iterations < 1:
            raise SettingError(f"iterations must be at least 1, got {self.iterations}")
        if self.content_weight < 0 or self.style_weight <= 0 or self.rate <= 0:
            raise SettingError("style_weight and rate must be positive, content_weight not negative")

    def __call__(self, perception: Perception, image: Tensor, style: Style) -> Tensor:
        """The image (C, *spatial) in that style; intensities stay in the range of image and style.

        Works wherever it is called, also where gradients are switched off; gives no gradient to the network.
        """
        low, high = min(style.low, float(image.min())), max(style.high, float(image.max()))
        with torch.inference_mode(False), torch.enable_grad():
            image = image.detach().clone()
            content = perception(image[None])[perception.layers.content].detach()
            restyled = image.clone().requires_grad_()

            def loss() -> Tensor:
                features = perception(restyled[None])
                kept = content_loss(features[perception.layers.content], content)
                return self.content_weight * kept + self.style_weight * style_loss(features, style)

            self._minimize(loss, restyled, high - low)
        return restyled.detach().clamp(low, high)

    def _minimize(self, loss: Callable[[], Tensor], image: Tensor, span: float) -> None:
        def closure() -> Tensor:
            value = loss()
            (image.grad,) = torch.autograd.grad(value, [image])  # of the image only, not of the network
            return value

        if self.optimizer == "lbfgs":
            torch.optim.LBFGS([image], max_iter=self.iterations, line_search_fn="strong_wolfe").step(closure)
            return
        adam = torch.optim.Adam([image], lr=self.rate * span)
        for _ in range(self.iterations):
            adam.step(closure)


class Restyled(nn.Module):
    """A network that first gives every image the style of the images that it was trained on.

    What it knows of those images are their mean Gram matrices and their range. An image costs an optimization, about
    `iterations` passes forward and back through the perceptual network, before the network's pass.
    """

    def __init__(
        self,
        network: nn.Module,
        vgg: nn.Module | None,
        restyling: Restyling,
        layers: PerceptualLayers,
        channels: Sequence[int],
    ) -> None:
        super().__init__()
        self.network, self.vgg, self.restyling, self.layers, self.channels = network, vgg, restyling, layers, channels
        for number, count in enumerate(channels):
            self.register_buffer(f"gram_{number}", torch.zeros(count, count))
        self.register_buffer("range", torch.tensor([0.0, 1.0]))  # of intensities in that style
        self.register_buffer("activations", torch.ones(len(layers.all)))

    def keep(self, style: Style, activations: Mapping[str, float]) -> None:
        """From now on every image is given this style, seen with these mean activations."""
        for number, layer in enumerate(self.layers.style):
            self.get_buffer(f"gram_{number}").copy_(style.grams[layer])
        self.get_buffer("range").copy_(torch.tensor([style.low, style.high]))
        self.get_buffer("activations").copy_(torch.tensor([activations[layer] for layer in self.layers.all]))

    @property
    def style(self) -> Style:
        grams = {layer: self.get_buffer(f"gram_{number}") for number, layer in enumerate(self.layers.style)}
        low, high = self.get_buffer("range").tolist()
        return Style(grams, low, high)

    @property
    def perception(self) -> Perception:
        activations = dict(zip(self.layers.all, self.get_buffer("activations").tolist(), strict=True))
        if self.vgg is None:
            return Perception(through_encoder(self.network, self.layers), self.layers, activations)
        low, high = self.get_buffer("range").tolist()
        return Perception(through_vgg(self.vgg, self.layers, low, high), self.layers, activations)

    def restyle(self, x: Tensor) -> Tensor:
        """The images (B, C, *spatial) as the network gets to see them."""
        perception, style = self.perception, self.style
        return torch.stack([self.restyling(perception, image, style) for image in x])

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(self.restyle(x))
        return logits
