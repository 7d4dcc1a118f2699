"""3 objectives. Prediction-time batch normalization (Nado et al. 2020)."""

from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dltta.errors import NothingToAdaptError
from dltta.models.normalization import (
    BATCH_STATISTICS,
    NormalizationStatistics,
    normalization_layers,
    use_test_statistics,
)


@dataclass(frozen=True)
class PTBN:
    """Normalization by the statistics of the test batch instead of the training set's; no gradient.

    `statistics` other than the test batch's are in `dltta.models.statistics`.
    """

    statistics: NormalizationStatistics = BATCH_STATISTICS

    def prepare(self, model: nn.Module, /) -> None:
        tracking = [
            layer
            for _, layer in normalization_layers(model)
            if isinstance(layer, _BatchNorm | _InstanceNorm) and layer.running_mean is not None
        ]
        if not tracking:
            raise NothingToAdaptError(
                f"PTBN changes nothing in {type(model).__name__}: no layer normalizes by statistics of the training "
                "set, as batch normalization does; use Source, or Tent if its normalization layers have scale and shift"
            )
        use_test_statistics(model, self.statistics)
