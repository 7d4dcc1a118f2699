"""3 objectives. Test-time training by rotation prediction (TTT, Sun et al., ICML 2020)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dltta.errors import StateError
from dltta.models.normalization import BATCH_STATISTICS, NormalizationStatistics, use_test_statistics
from dltta.models.parts.rotation import TURNS, RotationHead, rotation_loss


@dataclass(frozen=True)
class TTT:
    """Makes the shared encoder tell the four rotations of the test image apart.

    `head` was trained with the network on the source (`dltta train --with ttt`) on the features of `layer`; `shared`
    names the parameters in front of that layer, which are the ones that move. The head stays as trained. Every step
    uses all four rotations, so nothing is random.
    """

    head: RotationHead
    layer: str
    shared: tuple[str, ...]
    statistics: NormalizationStatistics = BATCH_STATISTICS

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        named = dict(model.named_parameters())
        unknown = [name for name in self.shared if name not in named]
        if unknown:
            raise StateError(
                f"the rotation head belongs to another network: {unknown[0]!r} is not a parameter of this one"
            )
        use_test_statistics(model, self.statistics)
        self.head.requires_grad_(False).eval()
        return [named[name] for name in self.shared]

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        self.head.to(x.device)
        copies = x.repeat_interleave(len(TURNS), dim=0)
        turns = torch.tensor(TURNS, device=x.device).repeat(len(x))
        return rotation_loss(model, self.head, self.layer, copies, turns)
