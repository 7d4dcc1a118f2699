"""3 objectives. A low-frequency prompt for every image, statistics as the loss (VPTTA, Chen et al., CVPR 2024)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from dltta.errors import InputError, NothingToAdaptError, SettingError
from dltta.models.normalization import BatchNormWrapper, stores_statistics, wrap_batch_norms
from dltta.models.parts.adaptors import insert_in_front
from dltta.models.parts.prompt import FrequencyPrompt

NAME = "frequency_prompt"  # of the prompt in the network


class VPTTA:
    """Brings the statistics in every layer near the source's by factors on the image's lowest frequencies.

    The network is frozen; what moves is a prompt in front of it. For each image it starts from the prompts of the
    `neighbors` most similar of the last `capacity` images (cosine of the low-frequency amplitudes, softmax at
    `temperature`), from ones until there are so many. Batch normalization warms up: the image's share of the
    statistics is 1 / (√i / `warmup` + 1) at the i-th image, the rest is the source's.

    The authors' step is `Adapter(model, VPTTA(), Fixed(0.05), optimizer=partial(torch.optim.Adam, betas=(0.9, 0.99)))`
    for fundus images, rate 0.01 for polyps; predicted after it. `fraction` of each side is prompted, at most `largest`
    frequencies per axis. Images of a batch share one prompt and their statistics; volumes and classification are ours.
    `channels` and `spatial_dims` of the images are those of the network's first convolution unless given.
    """

    def __init__(
        self,
        *,
        fraction: float = 0.01,
        capacity: int = 40,
        neighbors: int = 16,
        temperature: float = 0.2,
        warmup: float = 5.0,
        largest: int = 16,
        channels: int | None = None,
        spatial_dims: int | None = None,
    ) -> None:
        if not 0 < fraction <= 1 or largest < 1:
            raise SettingError(f"fraction lies above 0 and up to 1, largest from 1, got {fraction} and {largest}")
        if not 1 <= neighbors <= capacity:
            raise SettingError(f"neighbors lies between 1 and capacity, got {neighbors} of {capacity}")
        if not (temperature > 0 and warmup > 0):
            raise SettingError(f"temperature and warmup must be positive, got {temperature} and {warmup}")
        self.fraction, self.largest = fraction, largest
        self.capacity, self.neighbors, self.temperature = capacity, neighbors, temperature
        self.channels, self.spatial_dims = channels, spatial_dims
        self._progress = _Progress(warmup)
        self.keys: list[Tensor] = []  # low-frequency amplitudes, flat
        self.prompts: list[Tensor] = []
        self._key: Tensor | None = None  # of the batch at hand
        self._stored = False  # whether its prompt is the last one of the memory

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        if not stores_statistics(model):
            raise NothingToAdaptError(
                f"VPTTA finds no statistics of the source in {type(model).__name__}: no layer stores them as batch "
                "normalization does; use Tent if its normalization layers have scale and shift"
            )
        dims, channels = self._image_form(model)
        wrap_batch_norms(model, self._wrapped)
        prompt = FrequencyPrompt(dims, channels, fraction=self.fraction, largest=self.largest)
        insert_in_front(model, NAME, prompt.to(next(model.parameters())))
        return [prompt.factors]

    def before_batch(self, model: nn.Module, x: Tensor, /) -> None:
        """Count the images and start from similar ones."""
        prompt = _prompt(model)
        self._progress.images += len(x)
        self._key, self._stored = prompt.amplitude(x).mean(dim=0).flatten(), False
        start = self.start(self._key)
        prompt.factors.copy_(torch.ones_like(prompt.factors) if start is None else start)

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        found = [layer.take() for layer in model.modules() if isinstance(layer, _WarmUp)]
        distances = [distance for distance in found if distance is not None]
        if not distances:
            raise InputError("every layer gets a single value per channel, which has no statistics; use larger images")
        return torch.stack(distances).mean()

    def after_update(self, model: nn.Module, /) -> None:
        """Remember the prompt; one for each batch, however many steps it takes."""
        for layer in model.modules():
            if isinstance(layer, _WarmUp):
                layer.take()  # of the passes that a rate made: their graphs end here
        if self._key is None:
            return
        if self._stored:
            self.keys.pop()
            self.prompts.pop()
        self.keys.append(self._key.detach().clone())
        self.prompts.append(_prompt(model).factors.detach().clone())
        self._stored = True
        del self.keys[: -self.capacity], self.prompts[: -self.capacity]

    def start(self, key: Tensor) -> Tensor | None:
        """The prompt to begin with; None while too few images of this size are known."""
        known = [number for number, other in enumerate(self.keys) if other.shape == key.shape]
        if len(known) < self.neighbors:
            return None
        keys = torch.stack([self.keys[number] for number in known]).to(key)
        nearest = torch.cosine_similarity(keys, key[None], dim=1).topk(self.neighbors)
        weights = (nearest.values / self.temperature).softmax(dim=0)
        prompts = torch.stack([self.prompts[known[number]] for number in nearest.indices.tolist()]).to(key)
        mixed: Tensor = torch.tensordot(weights, prompts, dims=1)
        return mixed

    def state_dict(self) -> dict[str, Any]:
        return {"images": self._progress.images, "keys": list(self.keys), "prompts": list(self.prompts)}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._progress.images = state["images"]
        self.keys, self.prompts = list(state["keys"]), list(state["prompts"])
        self._key, self._stored = None, False

    def _wrapped(self, layer: _BatchNorm, name: str) -> nn.Module:
        return layer if layer.running_mean is None else _WarmUp(layer, name, self._progress)

    def _image_form(self, model: nn.Module) -> tuple[int, int]:
        """Spatial axes and channels of the images."""
        if self.channels is not None and self.spatial_dims is not None:
            return self.spatial_dims, self.channels
        first = next((layer for layer in model.modules() if isinstance(layer, _ConvNd)), None)
        if first is None:
            raise SettingError(
                f"{type(model).__name__} has no convolution that tells what its images are like; give channels and "
                "spatial_dims to VPTTA"
            )
        return self.spatial_dims or len(first.kernel_size), self.channels or first.in_channels


@dataclass
class _Progress:
    """How many images were seen; one object for all layers."""

    warmup: float
    images: int = 0

    @property
    def share(self) -> float:
        """Of the latest image's own statistics: 0.83 at the first, 0.5 at the 25th with `warmup` 5."""
        return 1 / (math.sqrt(max(self.images, 1)) / self.warmup + 1)


def _prompt(model: nn.Module) -> FrequencyPrompt:
    prompt = model.get_submodule(NAME)
    if not isinstance(prompt, FrequencyPrompt):
        raise SettingError("this network was not prepared by VPTTA")
    return prompt


class _WarmUp(BatchNormWrapper):
    """Normalizes by a mixture of source and image statistics; remembers how far the image's are from the mixture.

    The mixture is a constant to the gradient. A single value per channel has no statistics: the source's are taken.
    """

    def __init__(self, layer: _BatchNorm, name: str, progress: _Progress) -> None:
        super().__init__(layer, name)
        self.progress = progress
        self._distance: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        mean, variance = self.stored()
        if input.numel() == input.shape[1]:
            return self.normalized(input, mean, variance)
        spread, center = torch.std_mean(input.to(mean.dtype), [0, *range(2, input.ndim)])
        mean = torch.lerp(mean, center.detach(), self.progress.share)
        variance = torch.lerp(variance, spread.detach().square(), self.progress.share)
        if torch.is_grad_enabled():
            self._distance = (mean - center).abs().mean() + (variance.sqrt() - spread).abs().mean()
        return self.normalized(input, mean, variance)

    def take(self) -> Tensor | None:
        """The distance in the last pass, once: no graph outlives its use."""
        distance, self._distance = self._distance, None
        return distance
