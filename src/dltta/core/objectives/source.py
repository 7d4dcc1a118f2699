"""3 objectives. No adaptation: the source model exactly."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Source:
    """The source model with its stored normalization statistics; the row "W/o adaptation"."""

    def prepare(self, model: nn.Module, /) -> None:
        """Nothing to prepare."""
