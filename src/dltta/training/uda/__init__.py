"""Baselines that see labeled source and unlabeled target images together, before anything is tested."""

from dltta.training.uda.training import Method, UDATraining

__all__ = ["Method", "UDATraining"]
