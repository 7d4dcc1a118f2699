"""3 objectives. Entropy minimization (Tent, Wang et al., ICLR 2021)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dltta.errors import NothingToAdaptError
from dltta.models.normalization import BATCH_STATISTICS, NormalizationStatistics, affine_parameters, use_test_statistics
from dltta.models.predictions import entropy


@dataclass(frozen=True)
class Tent:
    """Makes predictions confident by moving scale and shift of the normalization layers; test-batch statistics.

    Works with batch, instance, group, layer and RMS normalization that is affine. Tent's authors predict from the pass
    before the update: `Adapter(…, predict="before")`; the DLTTA paper, and our default, from the pass after it.
    `statistics` other than the test batch's are in `dltta.models.statistics`.
    """

    statistics: NormalizationStatistics = BATCH_STATISTICS

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        parameters = affine_parameters(model)
        if not parameters:
            raise NothingToAdaptError(
                f"Tent finds nothing to adapt in {type(model).__name__}: it has no normalization layer with scale and "
                "shift; build it with affine normalization (MONAI: norm=('instance', {'affine': True}) or norm='batch')"
            )
        use_test_statistics(model, self.statistics)
        return parameters

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        return entropy(logits).mean()
