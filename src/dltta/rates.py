"""5 rate. How large should the update for this image be?

A learning rate is anything that can be called with the discrepancy of the current batch, or None while the memory is
not ready, and answers a finite number ≥ 0. A rate with `needs_memory = True` is refused by an adapter without memory.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dltta.errors import SettingError


class LearningRate(Protocol):
    """`(discrepancy or None) -> learning rate`."""

    def __call__(self, discrepancy: float | None, /) -> float: ...


@dataclass(frozen=True)
class Fixed:
    """The same rate for every image: the baseline."""

    rate: float
    needs_memory: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _require_rate("rate", self.rate)

    def __call__(self, discrepancy: float | None, /) -> float:
        return self.rate


@dataclass(frozen=True)
class Proportional:
    """η = α · L_DIV — Eq. (6); `initial` while the memory is not ready, α itself unless given."""

    alpha: float
    initial: float | None = None
    needs_memory: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _require_rate("alpha", self.alpha)
        _require_rate("initial", self.alpha if self.initial is None else self.initial)

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
        _require_rate("alpha", self.alpha)
        _require_rate("initial", self.alpha if self.initial is None else self.initial)

    def __call__(self, discrepancy: float | None, /) -> float:
        if discrepancy is None:
            return self.alpha if self.initial is None else self.initial
        exponent = 2 * discrepancy
        return self.alpha * math.exp(exponent) if exponent < 700 else math.inf  # the adapter refuses an infinite rate


def _require_rate(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise SettingError(f"{name} must be a finite number ≥ 0, got {value!r}; the paper uses 1e-3 and 3e-4")
