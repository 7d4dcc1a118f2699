"""The test-time objectives under their public name: `from dltta.objectives import Tent`."""

from dltta.core.objectives import ATTA, NOTE, PTBN, T3A, TTT, Objective, Preparation, RoTTA, Source, Tent

__all__ = ["ATTA", "NOTE", "PTBN", "T3A", "TTT", "Objective", "Preparation", "RoTTA", "Source", "Tent"]
