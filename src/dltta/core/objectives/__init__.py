"""3 objectives. What does the network minimize at test time? One method per file."""

from dltta.core.objectives.atta import ATTA
from dltta.core.objectives.cotta import CoTTA
from dltta.core.objectives.deyo import DeYO
from dltta.core.objectives.dtta import DTTA
from dltta.core.objectives.eata import EATA
from dltta.core.objectives.grata import GraTa
from dltta.core.objectives.intent import InTEnt
from dltta.core.objectives.note import NOTE
from dltta.core.objectives.objective import Objective, Preparation
from dltta.core.objectives.ptbn import PTBN
from dltta.core.objectives.rotta import RoTTA
from dltta.core.objectives.sar import SAR
from dltta.core.objectives.source import Source
from dltta.core.objectives.t3a import T3A
from dltta.core.objectives.tent import Tent
from dltta.core.objectives.ttt import TTT
from dltta.core.objectives.ttt_plus import TTTPlus
from dltta.core.objectives.vptta import VPTTA

__all__ = [
    "ATTA",
    "DTTA",
    "EATA",
    "NOTE",
    "PTBN",
    "SAR",
    "T3A",
    "TTT",
    "VPTTA",
    "CoTTA",
    "DeYO",
    "GraTa",
    "InTEnt",
    "Objective",
    "Preparation",
    "RoTTA",
    "Source",
    "TTTPlus",
    "Tent",
]
