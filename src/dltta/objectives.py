"""The test-time objectives under their public name: `from dltta.objectives import Tent`."""

from dltta.core.objectives import ATTA, EATA, PTBN, SAR, TTT, CoTTA, DeYO, Objective, Preparation, Source, Tent

__all__ = ["ATTA", "EATA", "PTBN", "SAR", "TTT", "CoTTA", "DeYO", "Objective", "Preparation", "Source", "Tent"]
