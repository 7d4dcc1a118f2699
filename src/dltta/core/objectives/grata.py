"""3 objectives. A step on a consistency loss one entropy step ahead (GraTa, Chen et al., AAAI 2025)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dltta.core.gradients import Gradient, differentiated, displaced
from dltta.errors import NothingToAdaptError
from dltta.models.features import forward_pass
from dltta.models.normalization import BATCH_STATISTICS, NormalizationStatistics, affine_parameters, use_test_statistics
from dltta.models.predictions import entropy
from dltta.models.views import cross_entropy, flips_and_turns, mean_prediction, strong_view


class GraTa:
    """Makes the prediction of a strongly changed image agree with that of flips and turns, where entropy leads.

    Moves scale and shift of the normalization layers. The gradient of the entropy is followed for a whole step of size
    `lookahead`; there the gradient of the consistency loss is taken, and it is this one that is applied at the present
    parameters. The cosine between both sets the learning rate: `Aligned` (`dltta.core.aligned`). The authors' step is
    `Adapter(model, GraTa(), Aligned(1e-4), optimizer=torch.optim.Adam)`, predicted after it.

    One sigmoid channel as by the authors, who count the foreground's part of the entropy only; softmax for exclusive
    classes, volumes (flips and turns in the plane of the first two axes) and classification are ours. Quarter turns
    where the plane is square.
    """

    def __init__(
        self, *, lookahead: float = 1.0, seed: int = 0, statistics: NormalizationStatistics = BATCH_STATISTICS
    ) -> None:
        self.lookahead, self.statistics = lookahead, statistics
        self.auxiliary_gradient: Gradient | None = None  # of the entropy, for the rate
        self._generator = torch.Generator().manual_seed(seed)

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        parameters = affine_parameters(model)
        if not parameters:
            raise NothingToAdaptError(
                f"GraTa finds nothing to adapt in {type(model).__name__}: it has no normalization layer with scale and "
                "shift; build it with affine normalization (MONAI: norm=('instance', {'affine': True}) or norm='batch')"
            )
        use_test_statistics(model, self.statistics)
        return parameters

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """The entropy, whose gradient leads."""
        if logits.shape[1] > 1:
            return entropy(logits).mean()
        p = torch.sigmoid(logits.float())
        return -(p * (p + 1e-6).log()).mean()

    def gradient(
        self, model: nn.Module, x: Tensor, logits: Tensor, parameters: Sequence[nn.Parameter], /
    ) -> tuple[Tensor, Gradient]:
        """The consistency loss and its gradient, both one entropy step ahead."""
        _, leading = differentiated(self(model, x, logits), parameters)
        self.auxiliary_gradient = leading
        ahead: Gradient = [None if part is None else -self.lookahead * part for part in leading]

        def network(images: Tensor) -> Tensor:
            return forward_pass(model, images).logits

        with displaced(parameters, ahead):
            target = mean_prediction(network, x, flips_and_turns(x))
            changed = strong_view(x, self._generator)
            return differentiated(cross_entropy(network(changed), target), parameters)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._generator.set_state(state["generator"].cpu())
