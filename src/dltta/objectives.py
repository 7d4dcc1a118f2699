"""The test-time objectives under their public name: `from dltta.objectives import Tent`."""

from dltta.core.objectives import (
    ATTA,
    EATA,
    NOTE,
    PTBN,
    SAR,
    T3A,
    TTT,
    CoTTA,
    DeYO,
    GraTa,
    InTEnt,
    Objective,
    Preparation,
    RoTTA,
    Source,
    Tent,
)

__all__ = [
    "ATTA",
    "EATA",
    "NOTE",
    "PTBN",
    "SAR",
    "T3A",
    "TTT",
    "CoTTA",
    "DeYO",
    "GraTa",
    "InTEnt",
    "Objective",
    "Preparation",
    "RoTTA",
    "Source",
    "Tent",
]
