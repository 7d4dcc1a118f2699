"""Source side. Trains the network that will be adapted, and what TTT and ATTA need beside it."""

from dltta.training.settings import TrainingSettings
from dltta.training.source import SourceTraining

__all__ = ["SourceTraining", "TrainingSettings"]
