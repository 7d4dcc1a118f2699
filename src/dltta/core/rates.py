"""5 rate. How large should the update for this image be?

A learning rate is anything that can be called and gives a finite number ≥ 0. It is asked once per update, when the
gradient is known; not for a batch that the objective learns nothing from, whose rate is 0. One whose argument is called
`signals`, or annotated `Signals`, gets all that is known about the update; any other gets the discrepancy of the
current batch alone, None while the memory is not ready. A rate with `needs_memory = True` is refused by an adapter
without memory; one with `per_parameter = True` gives a number for each adapted parameter. A rate that remembers
something has `state_dict()` and `load_state_dict(state)`.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from dltta.errors import NonFiniteError, SettingError


@dataclass(frozen=True)
class Signals:
    """What is known about an update before it is made. Tensors are the adapter's own: look, do not change."""

    discrepancy: float | None  # None while the memory is not ready, or without one
    loss: float
    gradient: Mapping[str, Tensor]  # of the loss, by the parameter's name; parameters that it does not reach are absent
    parameters: Mapping[str, Tensor]  # all that may move, by name
    model: nn.Module  # the adapted network, before the update
    images: Tensor  # (B, C, *spatial)
    logits: Tensor  # (B, C, *positions), of the pass before the update; detached
    auxiliary: Mapping[str, Tensor] | None = None  # a second gradient, if the objective computes one on its way


class LearningRate(Protocol):
    """`(discrepancy or None) -> learning rate`."""

    def __call__(self, discrepancy: float | None, /) -> float: ...


class SignalRate(Protocol):
    """`(signals) -> learning rate`, or one for each of `signals.parameters` with `per_parameter = True`."""

    def __call__(self, signals: Signals) -> float | Sequence[float]: ...


AnyRate = LearningRate | SignalRate


def takes_signals(rate: AnyRate) -> bool:
    """Whether a rate asks for all signals, by the name or the type of its argument."""
    try:
        arguments = list(inspect.signature(rate).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    if not arguments:
        return False
    name, kind = arguments[0].name, arguments[0].annotation
    return name == "signals" or kind is Signals or (isinstance(kind, str) and kind.rpartition(".")[2] == "Signals")


def ask(rate: AnyRate | None, signals: Signals) -> list[float]:
    """The rate of every adapted parameter; all alike unless the rate gives each its own, 0 if none has a gradient."""
    if not signals.gradient:
        return [0.0] * len(signals.parameters)
    if rate is None:
        raise SettingError("a step needs a learning rate; pass Fixed(1e-3), for example")
    question: Callable[[Any], Any] = rate
    given = question(signals if takes_signals(rate) else signals.discrepancy)
    if getattr(rate, "per_parameter", False):
        rates = [float(each) for each in given]
        if len(rates) != len(signals.parameters):
            raise SettingError(
                f"{type(rate).__name__} gives {len(rates)} rates for {len(signals.parameters)} adapted parameters"
            )
    else:
        rates = [float(given)] * len(signals.parameters)
    for each in rates:
        if not (math.isfinite(each) and each >= 0):
            raise NonFiniteError(f"the learning rate is {each} at discrepancy {signals.discrepancy}")
    return rates


def mean_rate(rates: Sequence[float]) -> float:
    """One number for the log; exact where all are alike."""
    return rates[0] if min(rates) == max(rates) else fmean(rates)


@dataclass(frozen=True)
class Fixed:
    """The same rate for every image: the baseline."""

    rate: float
    needs_memory: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_rate("rate", self.rate)

    def __call__(self, discrepancy: float | None, /) -> float:
        return self.rate


@dataclass(frozen=True)
class Proportional:
    """η = α · L_DIV — Eq. (6); `initial` while the memory is not ready, α itself unless given."""

    alpha: float
    initial: float | None = None
    needs_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_rate("alpha", self.alpha)
        require_rate("initial", self.alpha if self.initial is None else self.initial)

    def __call__(self, discrepancy: float | None, /) -> float:
        if discrepancy is None:
            return self.alpha if self.initial is None else self.initial
        return self.alpha * discrepancy


@dataclass(frozen=True)
class Exponential:
    """η = α · exp(KL(p̂‖v) + KL(v‖p̂)) = α · exp(2 · L_DIV), the form of the authors' released OCT program.

    Differs from Eq. (6): the rate never falls below α, which is how the paper's example rates (1.2e-3 and 4.5e-3 at
    α = 1e-3) can arise. The release also rescales logits and neighbors; that is not part of the rate and not done here.
    """

    alpha: float
    initial: float | None = None
    needs_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_rate("alpha", self.alpha)
        require_rate("initial", self.alpha if self.initial is None else self.initial)

    def __call__(self, discrepancy: float | None, /) -> float:
        if discrepancy is None:
            return self.alpha if self.initial is None else self.initial
        exponent = 2 * discrepancy
        return self.alpha * math.exp(exponent) if exponent < 700 else math.inf  # the adapter refuses an infinite rate


class Relative:
    """η = α · (L_DIV / level), at most `bound` times above or below α: surprise measured against what is usual.

    Eq. (6) multiplies with the discrepancy itself, which is 0.05 in one task and 0.5 in another, so α means something
    else in each. Here the usual image gets α wherever it comes from. The level is the mean discrepancy of the latest
    images (exponential, over about `window` of them), from `level` onwards if the source's is known; each image is
    compared with those before it. α until there is a discrepancy.
    """

    needs_memory: ClassVar[bool] = True

    def __init__(self, alpha: float, *, level: float | None = None, window: int = 20, bound: float = 4.0) -> None:
        require_rate("alpha", alpha)
        if level is not None and not (math.isfinite(level) and level > 0):
            raise SettingError(f"level must be a positive number, got {level!r}")
        if window < 1 or bound < 1:
            raise SettingError(f"window and bound must be at least 1, got {window} and {bound}")
        self.alpha, self.level, self.window, self.bound = alpha, level, window, bound

    def __call__(self, discrepancy: float | None, /) -> float:
        if discrepancy is None:
            return self.alpha
        usual = discrepancy if self.level is None else self.level
        self.level = usual + (discrepancy - usual) / self.window
        surprise = discrepancy / usual if usual > 0 else 1.0
        return self.alpha * min(max(surprise, 1 / self.bound), self.bound)

    def state_dict(self) -> dict[str, float | None]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        self.level = state["level"]


def require_rate(name: str, value: float) -> None:
    """Raise `SettingError` unless a learning rate can be this number."""
    if not (math.isfinite(value) and value >= 0):
        raise SettingError(f"{name} must be a finite number ≥ 0, got {value!r}; the paper uses 1e-3 and 3e-4")
