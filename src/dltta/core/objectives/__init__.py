"""3 objectives. What does the network minimize at test time? One method per file."""

from dltta.core.objectives.atta import ATTA
from dltta.core.objectives.dtta import DTTA
from dltta.core.objectives.grata import GraTa
from dltta.core.objectives.intent import InTEnt
from dltta.core.objectives.objective import Objective, Preparation
from dltta.core.objectives.ptbn import PTBN
from dltta.core.objectives.source import Source
from dltta.core.objectives.tent import Tent
from dltta.core.objectives.ttt import TTT
from dltta.core.objectives.vptta import VPTTA

__all__ = ["ATTA", "DTTA", "PTBN", "TTT", "VPTTA", "GraTa", "InTEnt", "Objective", "Preparation", "Source", "Tent"]
