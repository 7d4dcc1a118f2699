"""6 update. Which predictions could be given for an image? Each arm normalizes in its own way, or takes a step.

An arm costs one pass, two with its flip; steps along one gradient cost another for the gradient. Mixtures of arms cost
nothing more. Which arms a model runs is its `Plan`, chosen in rehearsal under a limit of passes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dltta.core.objectives.tent import Tent
from dltta.core.passes import run
from dltta.errors import SettingError
from dltta.models.calibration import Calibration, LayerSamples
from dltta.models.fast import speed_up
from dltta.models.normalization import NormalizationStatistics, affine_parameters, use_test_statistics
from dltta.models.predictions import probabilities
from dltta.models.statistics import (
    AvailableStatistics,
    Blended,
    Pooled,
    Running,
    Shrinkage,
    StatefulWrapper,
    stateful_layers,
)
from dltta.quality.steps import Steps

SOURCE, BLENDED, BATCH, SHRINKAGE, RUNNING, POOLED = (
    "source", "blended", "batch", "shrinkage", "running", "pooled",
)  # fmt: skip
TENT = "tent:"
STEP_SIZES = (0.03, 0.1)  # of a step on Tent; `tent:0.03` is an arm. Found on phantoms at simulated sites
MEAN, ENTROPY = (
    "mean",
    "entropy",
)  # mixtures of the arms: evenly, and by entropy as InTEnt does (Dong et al. 2024)
MIXTURES = (MEAN, ENTROPY)
TEMPERATURE = 0.1  # nats of mean entropy: InTEnt's weights are softmax(−H / T)
PER_IMAGE = 0.1  # how far one image moves running statistics; a batch moves them as its images would
EFFORTS = {"default": 5, "low": 2}  # passes that a step may take; signals take about one more


@dataclass(frozen=True)
class Plan:
    """What is computed for every image: the arms, and the axis of the flip that is averaged in (None: no flip)."""

    arms: tuple[str, ...]
    flip: int | None = None  # spatial axis

    @property
    def passes(self) -> int:
        gradient = any(map(is_step, self.arms))  # takes about as long as a pass
        return len(self.arms) * (1 if self.flip is None else 2) + gradient

    @property
    def candidates(self) -> tuple[str, ...]:
        """The arms, then the mixtures of two or more of them."""
        return self.arms + (MIXTURES if len(self.arms) > 1 else ())

    @property
    def full_names(self) -> tuple[str, ...]:
        """The candidates as they are told from those of other plans, such as `mean of source+batch, flip 1`."""
        flip = "" if self.flip is None else f", flip {self.flip}"
        mixed = "+".join(self.arms)
        return tuple(each + flip if each in self.arms else f"{each} of {mixed}{flip}" for each in self.candidates)

    def as_json(self) -> dict[str, Any]:
        return {"arms": list(self.arms), "flip": self.flip}


def is_step(arm: str) -> bool:
    return arm.startswith(TENT)


def possible_arms(model: nn.Module, calibration: Calibration | None) -> tuple[str, ...]:
    """Those that make a difference to this network and for which everything is known.

    Mapping the values of an image to the source's is no candidate, though networks without stored statistics have few:
    simulated sites, whose images show what source images show, flatter it; at synthetic scanners it lost
    (docs/instance-norm.md).
    """
    steps = tuple(f"{TENT}{size}" for size in STEP_SIZES) if affine_parameters(model) else ()
    normalized = any(
        isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None
        for layer in model.modules()
    )
    if not normalized:
        return (SOURCE, *steps)
    shrinkage = (SHRINKAGE,) if calibration is not None and calibration.layers else ()
    return (SOURCE, BATCH, BLENDED, *shrinkage, RUNNING, POOLED, *steps)


def possible_plans(arms: Sequence[str], flip: int | None, passes: int) -> list[Plan]:
    """The source model and batch statistics, alone and with other arms, with and without the flip, as passes allow.

    Both are always there: whichever of them is right at a site, it can be given. Steps are taken at all sizes, and
    without the flip, which would be too many passes.
    """
    plain, steps = [arm for arm in arms if not is_step(arm)], tuple(filter(is_step, arms))
    always, others = tuple(plain[:2]), plain[2:]
    sets = [always + chosen for count in range(len(others) + 1) for chosen in combinations(others, count)]
    plans = [Plan(chosen, each) for each in ((None,) if flip is None else (None, flip)) for chosen in sets]
    plans += [Plan(chosen + steps) for chosen in sets] if steps else []
    return [plan for plan in plans if plan.passes <= passes]


class Arms:
    """The networks of a plan. All share the parameters of one copy of the source model; some have own statistics.

    `calibration` is needed by the shrinkage arm.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        *,
        calibration: Calibration | None = None,
        batch_size: int = 1,
        layout: str = "auto",
    ) -> None:
        with torch.inference_mode(False):
            self.source = copy.deepcopy(model).requires_grad_(False).eval()
            if layout == "auto":
                speed_up(self.source)
            plain = [name for name in names if not is_step(name)]
            made = {name: _statistics(name, calibration, batch_size) for name in plain}
            self.networks = {name: self._network(statistics) for name, statistics in made.items()}
            steps = any(map(is_step, names))
            self.steps = Steps(self._network(None, own=True), Tent(AvailableStatistics())) if steps else None
        self.stateful: dict[str, list[StatefulWrapper]] = {
            name: stateful_layers(network) for name, network in self.networks.items()
        }

    def _network(self, statistics: NormalizationStatistics | None, *, own: bool = False) -> nn.Module:
        if statistics is None and not own:
            return self.source
        network = copy.deepcopy(self.source, {id(parameter): parameter for parameter in self.source.parameters()})
        if statistics is not None:
            use_test_statistics(network, statistics)
        return network

    def all_logits(self, names: Sequence[str], x: Tensor, *, samples: LayerSamples | None = None) -> dict[str, Tensor]:
        """Of several arms for a batch x (B, C, *spatial); the gradient is computed once.

        `samples` collects what the source model's layers get.
        """
        before = None if self.steps is None else self.steps.begin(x)
        start = BATCH if BATCH in self.networks else SOURCE  # the arm that the step begins from
        found = {}
        for name in names:
            watched = samples if name == SOURCE else None
            if name == start and before is not None and watched is None:
                found[name] = before
            else:
                found[name] = self.logits(name, x, samples=watched)
        return found

    def logits(self, name: str, x: Tensor, *, samples: LayerSamples | None = None) -> Tensor:
        """Of one arm; a step goes along the direction of the latest batch of `all_logits`."""
        if self.steps is not None and is_step(name):
            return self.steps.logits(x, float(name.removeprefix(TENT)))
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
        stepping = [] if self.steps is None else [self.steps.network]
        for network in dict.fromkeys([self.source, *self.networks.values(), *stepping]):
            network._apply(fn)


def _own_buffers(layer: nn.Module) -> dict[str, Tensor]:
    """What a layer gathers along a stream."""
    return {
        name: value
        for name, value in layer._buffers.items()
        if value is not None and name.startswith(("test_", "stream_"))
    }


def _statistics(name: str, calibration: Calibration | None, batch_size: int) -> NormalizationStatistics | None:
    if name == SOURCE:
        return None
    if name == SHRINKAGE:
        if calibration is None:
            raise SettingError("shrinkage statistics need a calibrated model; run `dltta calibrate`")
        return Shrinkage(calibration.moments(batch_size))
    made: dict[str, NormalizationStatistics] = {
        BLENDED: Blended(),
        BATCH: AvailableStatistics(),
        RUNNING: Running(1 - (1 - PER_IMAGE) ** batch_size),
        POOLED: Pooled(),
    }
    return made[name]


def mixture_weights(entropies: Tensor, kind: str) -> Tensor:
    """Of arms (…, N) with these mean entropies: equal, or as InTEnt weighs them."""
    return (torch.zeros_like(entropies) if kind == MEAN else -entropies / TEMPERATURE).softmax(-1)
