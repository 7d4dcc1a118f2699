"""3 objectives. What does the network minimize at test time? One method per file."""

from dltta.core.objectives.atta import ATTA
from dltta.core.objectives.cotta import CoTTA
from dltta.core.objectives.deyo import DeYO
from dltta.core.objectives.eata import EATA
from dltta.core.objectives.objective import Objective, Preparation
from dltta.core.objectives.ptbn import PTBN
from dltta.core.objectives.sar import SAR
from dltta.core.objectives.source import Source
from dltta.core.objectives.tent import Tent
from dltta.core.objectives.ttt import TTT

__all__ = ["ATTA", "EATA", "PTBN", "SAR", "TTT", "CoTTA", "DeYO", "Objective", "Preparation", "Source", "Tent"]
