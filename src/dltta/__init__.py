"""Test-time adaptation for medical images that chooses how much to adapt to each image (DLTTA, IEEE TMI 2022).

Names are imported when they are first asked for: `dltta --help` needs neither torch nor MONAI.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dltta.version import __version__

if TYPE_CHECKING:
    from dltta.core.adapter import Adapter
    from dltta.core.aligned import Aligned
    from dltta.core.discrepancy import symmetric_kl
    from dltta.core.layer_rates import LAW, PALM
    from dltta.core.memory import MemoryBank
    from dltta.core.rates import Exponential, Fixed, LearningRate, Proportional, Relative, Signals
    from dltta.core.step import Step, Update
    from dltta.errors import DlttaError
    from dltta.quality.decision import Decision, Outcome, Reason
    from dltta.quality.guard import Limits, SourceGuard
    from dltta.quality.guarded import GuardedAdapter
    from dltta.recipes import Recipe

__all__ = [
    "LAW",
    "PALM",
    "Adapter",
    "Aligned",
    "Decision",
    "DlttaError",
    "Exponential",
    "Fixed",
    "GuardedAdapter",
    "LearningRate",
    "Limits",
    "MemoryBank",
    "Outcome",
    "Proportional",
    "Reason",
    "Recipe",
    "Relative",
    "Signals",
    "SourceGuard",
    "Step",
    "Update",
    "__version__",
    "symmetric_kl",
]

_HOMES = {
    "dltta.core.adapter": ("Adapter",),
    "dltta.core.aligned": ("Aligned",),
    "dltta.core.layer_rates": ("LAW", "PALM"),
    "dltta.core.step": ("Step", "Update"),
    "dltta.core.discrepancy": ("symmetric_kl",),
    "dltta.core.memory": ("MemoryBank",),
    "dltta.core.rates": ("Exponential", "Fixed", "LearningRate", "Proportional", "Relative", "Signals"),
    "dltta.errors": ("DlttaError",),
    "dltta.quality.decision": ("Decision", "Outcome", "Reason"),
    "dltta.quality.guard": ("Limits", "SourceGuard"),
    "dltta.quality.guarded": ("GuardedAdapter",),
    "dltta.recipes": ("Recipe",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dltta' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
