"""Source and target together. UDAS: segmentations of the target are made to look like those of the source.

Tsai et al., "Learning to Adapt Structured Output Space for Semantic Segmentation", CVPR 2018. A discriminator learns to
tell the softmax outputs of the two sites apart; the segmentation network learns the task on the source and, on the
target, to be taken for the source. Multi-level: the same once more for an auxiliary output from a decoder level.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.errors import SettingError
from dltta.models.features import find_layer
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.nets.discriminators import OutputDiscriminator
from dltta.training.fit import Batch, Losses, Plan
from dltta.training.settings import LEARNING_RATES
from dltta.training.task import TaskLoss
from dltta.training.uda.domains import Images
from dltta.training.uda.training import Parts, UDATraining, frozen, set_rate

# For a few dozen images on two cores. In so few steps the discriminator learns nothing at its usual rate: its loss
# stays at log 2, and the network has nothing to follow.
PHANTOM: dict[str, Any] = {"epochs": 8, "discriminator_rate": 1e-3, "width": 16}


@dataclass(frozen=True)
class UDAS:
    """Settings of output-space adaptation; the defaults are those of Tsai et al. where nothing else is said.

    They begin with ImageNet weights and SGD 2.5e-4; here the source model is the beginning and Adam at the rate of
    source training continues it, because that is how these networks are trained.
    """

    epochs: int = 50  # ours: half as many as source training; theirs are 150,000 steps
    learning_rate: float | None = None  # None: that of source training
    discriminator_rate: float = 1e-4  # Adam (0.9, 0.99)
    power: float = 0.9  # of the polynomial decay of both rates
    levels: Literal["single", "multi"] = "multi"
    layer: str = "upcat_2"  # ours: the decoder level at half resolution gives the auxiliary output
    adversarial: float = 1e-3
    auxiliary_adversarial: float = 2e-4
    auxiliary_task: float = 0.1
    width: int = 64  # of the discriminators' first layer
    name: ClassVar[str] = "udas"

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise SettingError(f"epochs of udas must be at least 1, got {self.epochs}")
        if self.levels not in ("single", "multi"):
            raise SettingError(f"levels of udas must be 'single' or 'multi', got {self.levels!r}")

    def train(self, training: UDATraining, /) -> Checkpoint:
        if training.task != "segmentation":
            raise SettingError("udas aligns segmentations, but the task is classification; use uda-swav")
        network = copy.deepcopy(training.source().model).to(training.device)
        learner = self.learner(training, network)
        settings = training.settings
        plan = Plan(self.name, self.epochs, settings.batch_size, learner.rate, settings.seed, settings.workers)
        training.learn(learner, training.domains.mixed, plan, score=lambda: training.score(network))
        collect_statistics(network, training.domains.target, settings.batch_size, training.device)
        return training.checkpoint(network)

    def learner(self, training: UDATraining, network: nn.Module) -> "OutputAlignment":
        """Network, discriminators and optimizers, as they are before the first step."""
        pair, target = training.domains.source[0][0], training.domains.target[0]
        size = [min(extents) for extents in zip(pair.shape[1:], target.shape[1:], strict=True)]
        dims, classes = training.spatial_dims, len(training.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.settings.seed)
            outputs = Outputs(network, self.layer if self.levels == "multi" else None, classes, pair[None])
            judges = nn.ModuleList(OutputDiscriminator(dims, classes, size, width=self.width) for _ in outputs.levels)
        rate = self.learning_rate or training.settings.learning_rate or LEARNING_RATES[training.task]
        loss = TaskLoss(training.settings.loss)
        return OutputAlignment(self, rate, loss, outputs.to(training.device), judges.to(training.device))


class Outputs(nn.Module):
    """A network's logits and, from one of its layers through a 1 × 1 convolution, auxiliary logits of the same size.

    The auxiliary head is for training only; a checkpoint of the network has neither it nor the hook.
    """

    def __init__(self, network: nn.Module, layer: str | None, classes: int, sample: Tensor) -> None:
        super().__init__()
        self.network = network
        self.levels = ("main",) if layer is None else ("main", "auxiliary")
        self._seen: list[Tensor] = []  # what the layer gave last
        if layer is not None:
            find_layer(network, layer).register_forward_hook(self._see)
            self.head = self._new_head(classes, sample.to(next(network.parameters()).device))

    def forward(self, images: Tensor) -> list[Tensor]:
        logits: Tensor = self.network(images)
        if len(self.levels) == 1:
            return [logits]
        mode = {2: "bilinear", 3: "trilinear"}[logits.ndim - 2]
        return [logits, F.interpolate(self.head(self._seen.pop()), size=logits.shape[2:], mode=mode)]

    def _see(self, _module: nn.Module, _inputs: Any, output: Tensor) -> None:
        self._seen[:] = [output]

    @torch.no_grad()
    def _new_head(self, classes: int, sample: Tensor) -> nn.Module:
        self.network.eval()(sample)
        features = self._seen.pop()
        return {4: nn.Conv2d, 5: nn.Conv3d}[features.ndim](features.shape[1], classes, 1)


class OutputAlignment(Parts):
    """The learner: one step of the segmentation network, then one of the discriminators."""

    def __init__(
        self, settings: UDAS, rate: float, loss: TaskLoss, outputs: Outputs, discriminators: nn.ModuleList
    ) -> None:
        self.settings, self.rate, self.loss = settings, rate, loss
        self.outputs, self.discriminators = outputs, discriminators
        self.optimizer = torch.optim.Adam(outputs.parameters(), lr=rate)
        self.judging = torch.optim.Adam(discriminators.parameters(), lr=settings.discriminator_rate, betas=(0.9, 0.99))
        super().__init__(outputs=outputs, discriminators=discriminators, optimizer=self.optimizer, judging=self.judging)

    def step(self, batch: Batch, generator: torch.Generator, progress: float, /) -> Losses:
        source, label, target = batch
        decay = (1 - progress) ** self.settings.power
        set_rate(self.optimizer, self.rate * decay)
        set_rate(self.judging, self.settings.discriminator_rate * decay)
        losses, of_source, of_target = self._segment(source, label, target)
        return {**losses, "discriminator": self._judge(of_source, of_target)}

    def _segment(self, source: Tensor, label: Tensor, target: Tensor) -> tuple[Losses, list[Tensor], list[Tensor]]:
        """Learn the task on the source and to be taken for it on the target; the probabilities of both, per level."""
        of_source, of_target = self.outputs(source), [logits.softmax(1) for logits in self.outputs(target)]
        with frozen(self.discriminators):
            task = [self.loss(logits, label) for logits in of_source]
            fooling = [
                adversarial_loss(judge(prediction))
                for judge, prediction in zip(self.discriminators, of_target, strict=True)
            ]
            self.optimizer.zero_grad(set_to_none=True)
            (self._weighted(task, self._task_weights) + self._weighted(fooling, self._adversarial_weights)).backward()
        self.optimizer.step()
        losses = {"task": task[0].item(), "adversarial": fooling[0].item()}
        return losses, [logits.softmax(1).detach() for logits in of_source], [p.detach() for p in of_target]

    def _judge(self, source: Sequence[Tensor], target: Sequence[Tensor]) -> float:
        """Learn to tell the predictions of the two sites apart; the loss, mean over levels."""
        losses = [
            discriminator_loss(judge(of_source), judge(of_target))
            for judge, of_source, of_target in zip(self.discriminators, source, target, strict=True)
        ]
        self.judging.zero_grad(set_to_none=True)
        total = torch.stack(losses)
        total.sum().backward()
        self.judging.step()
        return total.mean().item()

    @property
    def _task_weights(self) -> tuple[float, float]:
        return 1.0, self.settings.auxiliary_task

    @property
    def _adversarial_weights(self) -> tuple[float, float]:
        return self.settings.adversarial, self.settings.auxiliary_adversarial

    @staticmethod
    def _weighted(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return torch.stack([weight * loss for weight, loss in zip(weights, losses, strict=False)]).sum()


def discriminator_loss(source: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits that should be positive for source outputs and negative for target outputs."""
    return 0.5 * (_taken_for(source, 1.0) + _taken_for(target, 0.0))


def adversarial_loss(target: Tensor) -> Tensor:
    """Cross-entropy of logits of target outputs that should be taken for source outputs."""
    return _taken_for(target, 1.0)


def _taken_for(logits: Tensor, site: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, site))


@torch.no_grad()
def collect_statistics(network: nn.Module, images: Images, batch_size: int, device: torch.device) -> None:
    """Stored statistics of batch normalization from these images, as the network met them in training.

    In training each site's batches are normalized by that site's statistics and the stored ones are a mixture of both;
    at test only the target comes.
    """
    layers = [module for module in network.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    kept = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
    images.epoch = 0
    network.train()
    for batch in torch.arange(len(images)).split(batch_size):
        network(torch.stack([images[index] for index in batch.tolist()]).to(device))
    network.eval()
    for layer, momentum in zip(layers, kept, strict=True):
        layer.momentum = momentum
