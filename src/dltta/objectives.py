"""The test-time objectives under their public name: `from dltta.objectives import Tent`."""

from dltta.core.objectives import ATTA, DTTA, PTBN, TTT, VPTTA, GraTa, InTEnt, Objective, Preparation, Source, Tent

__all__ = ["ATTA", "DTTA", "PTBN", "TTT", "VPTTA", "GraTa", "InTEnt", "Objective", "Preparation", "Source", "Tent"]
