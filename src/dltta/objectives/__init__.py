"""3 objectives. What does the network minimize at test time? One method per file."""

from dltta.objectives.atta import ATTA
from dltta.objectives.objective import Objective, Preparation
from dltta.objectives.ptbn import PTBN
from dltta.objectives.source import Source
from dltta.objectives.tent import Tent
from dltta.objectives.ttt import TTT

__all__ = ["ATTA", "PTBN", "TTT", "Objective", "Preparation", "Source", "Tent"]
