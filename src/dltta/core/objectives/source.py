"""3 objectives. No adaptation: the network exactly as it was trained."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Source:
    """The source network with its stored normalization statistics; the row "W/o adaptation"."""

    def prepare(self, model: nn.Module, /) -> None:
        """Nothing to prepare."""
