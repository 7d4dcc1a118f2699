"""Baselines that see labeled source and unlabeled target images together, before anything is tested."""

from dltta.training.uda.training import UDAMethod, UDATraining

__all__ = ["UDAMethod", "UDATraining"]
