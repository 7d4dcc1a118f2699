"""Test-time adaptation for medical images that chooses how much to adapt to each image (DLTTA, IEEE TMI 2022)."""

from dltta.adapter import Adapter, Step, Update
from dltta.discrepancy import symmetric_kl
from dltta.errors import DlttaError
from dltta.guard import Limits, Ruling, SourceGuard
from dltta.memory import MemoryBank
from dltta.rates import Exponential, Fixed, LearningRate, Proportional, Relative
from dltta.version import __version__

__all__ = [
    "Adapter",
    "DlttaError",
    "Exponential",
    "Fixed",
    "LearningRate",
    "Limits",
    "MemoryBank",
    "Proportional",
    "Relative",
    "Ruling",
    "SourceGuard",
    "Step",
    "Update",
    "__version__",
    "symmetric_kl",
]
