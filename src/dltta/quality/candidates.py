"""6 update. Which predictions could be given for an image? Each arm normalizes in its own way.

An arm costs one pass, two with its flip. Mixtures of arms cost nothing more. Which arms a model runs is its `Plan`,
chosen in rehearsal under a limit of passes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltta.core.passes import run
from dltta.errors import SettingError
from dltta.models.calibration import Calibration, LayerSamples
from dltta.models.fast import speed_up
from dltta.models.normalization import NormalizationStatistics, use_test_statistics
from dltta.models.predictions import probabilities
from dltta.models.quantiles import SourceValues
from dltta.models.statistics import AvailableStatistics, Blended, Running, Shrinkage, StatefulWrapper, stateful_layers

SOURCE, BLENDED, BATCH, SHRINKAGE, RUNNING, MATCHED = (
    "source", "blended", "batch", "shrinkage", "running", "matched",
)  # fmt: skip
MEAN, ENTROPY = (
    "mean",
    "entropy",
)  # mixtures of the arms: evenly, and by entropy as InTEnt does (Dong et al. 2024)
MIXTURES = (MEAN, ENTROPY)
TEMPERATURE = 0.1  # nats of mean entropy: InTEnt's weights are softmax(−H / T)
EFFORTS = {"default": 6, "low": 3}  # passes of the network that a step may cost


@dataclass(frozen=True)
class Plan:
    """What is computed for every image: the arms, and the axis of the flip that is averaged in (None: no flip)."""

    arms: tuple[str, ...]
    flip: int | None = None  # spatial axis

    @property
    def passes(self) -> int:
        return len(self.arms) * (1 if self.flip is None else 2)

    @property
    def candidates(self) -> tuple[str, ...]:
        """The arms, then the mixtures of two or more of them."""
        return self.arms + (MIXTURES if len(self.arms) > 1 else ())

    def as_json(self) -> dict[str, Any]:
        return {"arms": list(self.arms), "flip": self.flip}


def possible_arms(model: nn.Module, calibration: Calibration | None, values: SourceValues | None) -> tuple[str, ...]:
    """Those that make a difference to this network and for which everything is known.

    Matched values are for networks that store no statistics: simulated sites, whose images show what source images
    show, would make them look better than they are.
    """
    normalized = any(
        isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None
        for layer in model.modules()
    )
    if not normalized:
        return (SOURCE, MATCHED) if values is not None else (SOURCE,)
    shrinkage = (SHRINKAGE,) if calibration is not None and calibration.layers else ()
    return (SOURCE, BATCH, BLENDED, *shrinkage, RUNNING)


def possible_plans(arms: Sequence[str], flip: int | None, passes: int) -> list[Plan]:
    """The source model and batch statistics, alone and with other arms, with and without the flip, as passes allow.

    Both are always there: whichever of them is right at a site, it can be given.
    """
    always, others = tuple(arms[:2]), arms[2:]
    sets = [always + chosen for count in range(len(others) + 1) for chosen in combinations(others, count)]
    flips = (None,) if flip is None else (None, flip)
    plans = [Plan(chosen, each) for each in flips for chosen in sets]
    return [plan for plan in plans if plan.passes <= passes]


class Arms:
    """The networks of a plan. All share the parameters of one copy of the source model; some have own statistics.

    `calibration` is needed by the shrinkage arm, `values` by the matched one.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        *,
        calibration: Calibration | None = None,
        values: SourceValues | None = None,
        batch_size: int = 1,
        layout: str = "auto",
    ) -> None:
        self.values = values
        with torch.inference_mode(False):
            self.source = copy.deepcopy(model).requires_grad_(False).eval()
            if layout == "auto":
                speed_up(self.source)
            made = {name: _statistics(name, calibration, batch_size) for name in names}
            self.networks = {name: self._network(statistics) for name, statistics in made.items()}
        self.stateful: dict[str, list[StatefulWrapper]] = {
            name: stateful_layers(network) for name, network in self.networks.items()
        }

    def _network(self, statistics: NormalizationStatistics | None) -> nn.Module:
        if statistics is None:
            return self.source
        network = copy.deepcopy(self.source, {id(parameter): parameter for parameter in self.source.parameters()})
        use_test_statistics(network, statistics)
        return network

    def logits(self, name: str, x: Tensor, *, samples: LayerSamples | None = None) -> Tensor:
        """Of one arm for a batch x (B, C, *spatial); `samples` collects what the source model's layers get."""
        if name == MATCHED and self.values is not None:
            x = torch.stack([self.values.match(image) for image in x])
        network = self.networks[name]
        if samples is None:
            return run(network, x, features=False, learning=False).logits
        with samples.watching(network):
            return run(network, x, features=False, learning=False).logits

    def flipped(self, name: str, x: Tensor, axis: int) -> Tensor:
        """Probabilities (B, C, *positions) of the flipped images, flipped back; leaves no trace in the statistics."""
        latest = [layer.latest for layer in self.stateful[name]]
        prediction = probabilities(self.logits(name, x.flip(2 + axis)))
        for layer, kept in zip(self.stateful[name], latest, strict=True):
            layer.latest = kept
        return prediction.flip(2 + axis) if prediction.ndim > 2 else prediction

    def commit(self) -> None:
        """The statistics of the latest batch become part of the stream's."""
        for layers in self.stateful.values():
            for layer in layers:
                layer.commit()

    def buffered(self) -> list[nn.Module]:
        """The layers whose buffers move along a stream."""
        return [layer for layers in self.stateful.values() for layer in layers]

    def state_dict(self) -> dict[str, Any]:
        return {
            name: [{key: value.clone() for key, value in _own_buffers(layer).items()} for layer in layers]
            for name, layers in self.stateful.items()
            if layers
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, layers in self.stateful.items():
            for layer, saved in zip(layers, state.get(name, []), strict=True):
                for key, value in _own_buffers(layer).items():
                    value.copy_(saved[key])

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Bring the networks to another device or type, as `nn.Module._apply` does."""
        for network in dict.fromkeys([self.source, *self.networks.values()]):
            network._apply(fn)


def _own_buffers(layer: nn.Module) -> dict[str, Tensor]:
    """What a layer gathers along a stream."""
    return {
        name: value
        for name, value in layer._buffers.items()
        if value is not None and name.startswith(("test_", "stream_"))
    }


def _statistics(name: str, calibration: Calibration | None, batch_size: int) -> NormalizationStatistics | None:
    if name in (SOURCE, MATCHED):
        return None
    if name == SHRINKAGE:
        if calibration is None:
            raise SettingError("shrinkage statistics need a calibrated model; run `dltta calibrate`")
        return Shrinkage(calibration.moments(batch_size))
    made: dict[str, NormalizationStatistics] = {
        BLENDED: Blended(), BATCH: AvailableStatistics(), RUNNING: Running(),
    }  # fmt: skip
    return made[name]


def mixture_weights(entropies: Tensor, kind: str) -> Tensor:
    """Of arms (N,) with these mean entropies: equal, or as InTEnt weighs them."""
    return (torch.zeros_like(entropies) if kind == MEAN else -entropies / TEMPERATURE).softmax(0)
