"""The version, alone in its file so that building the package imports nothing else."""

__version__ = "0.2.0"
