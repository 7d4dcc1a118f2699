"""3 objectives. Efficient anti-forgetting test-time adaptation (EATA, Niu et al., ICML 2022)."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from dltta.errors import SettingError, StateError
from dltta.models.normalization import (
    BATCH_STATISTICS,
    NormalizationStatistics,
    require_affine_parameters,
    use_test_statistics,
)
from dltta.models.predictions import each_prediction, entropy, greatest_entropy, probabilities

OF_IMAGES, OFF = 0.4, 2.0  # redundancy: for one prediction per image, and what no cosine exceeds


class EATA:
    """Entropy of the predictions that are certain and unlike the earlier ones, held near the source where it matters.

    A prediction counts if its entropy H is below E0 = `margin` · ln C and the cosine between its probabilities and
    their running mean over what counted before (`momentum` of the old) is below `redundancy`; with the weight
    exp(E0 − H). In dense predictions each position decides for itself. `redundancy` is 0.4 for one prediction per image
    and off for dense ones, where background resembles background; any number above 1 is off.

    `fisher` says how much each scale and shift matters to the source (`dltta.models.fisher`, measured in calibration);
    `anti_forgetting` times Σ F (θ − θ_source)² is added. Without it nothing holds the network near the source, which
    its authors call ETA; `notice` says so.
    """

    def __init__(
        self,
        *,
        fisher: Mapping[str, Tensor] | None = None,
        margin: float = 0.4,
        redundancy: float | None = None,
        anti_forgetting: float = 1.0,
        momentum: float = 0.9,
        statistics: NormalizationStatistics = BATCH_STATISTICS,
    ) -> None:
        if margin <= 0 or anti_forgetting < 0 or (redundancy is not None and redundancy <= 0):
            raise SettingError(
                "margin and redundancy must be above 0 and anti_forgetting at least 0, "
                f"got {margin}, {redundancy} and {anti_forgetting}"
            )
        if not 0 <= momentum < 1:
            raise SettingError(f"momentum lies from 0 to below 1, got {momentum}")
        self.fisher = dict(fisher or {})
        self.margin, self.redundancy, self.anti_forgetting = margin, redundancy, anti_forgetting
        self.momentum, self.statistics = momentum, statistics
        self._mean: Tensor | None = None  # (C,) running mean of the probabilities that counted
        self._source: dict[str, Tensor] = {}  # scales and shifts that `fisher` weighs

    @property
    def notice(self) -> str | None:
        """What a user must know before the first image."""
        if self.fisher or self.anti_forgetting == 0:
            return None
        return (
            "EATA runs without its anti-forgetting term: the model has no Fisher information of source images, "
            "which calibration measures"
        )

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        parameters = require_affine_parameters("EATA", model)
        use_test_statistics(model, self.statistics)
        adapted = {id(parameter) for parameter in parameters}
        named = {name: each for name, each in model.named_parameters() if id(each) in adapted}
        for name, importance in self.fisher.items():
            if name not in named or named[name].shape != importance.shape:
                raise StateError(
                    f"the Fisher information belongs to another network: {name!r} of shape {tuple(importance.shape)} "
                    "is no scale or shift of this one; calibrate it again"
                )
        self._source = {name: named[name].detach().clone() for name in self.fisher}
        return parameters

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        """Without a graph if no prediction counts: then nothing is learned from the batch."""
        entropies = entropy(logits).flatten()
        limit = self.margin * greatest_entropy(logits)
        counts = self._counting(entropies.detach() < limit, logits.detach())
        if not counts.any():
            return entropies.new_zeros(())
        kept = entropies[counts]
        return ((limit - kept.detach()).exp() * kept).mean() + self._forgetting(model)

    def _counting(self, certain: Tensor, logits: Tensor) -> Tensor:
        """Which predictions (N,) count; they move the running mean."""
        p = each_prediction(probabilities(logits))  # (N, C)
        usual = OF_IMAGES if logits.ndim == 2 else OFF
        limit = usual if self.redundancy is None else self.redundancy
        if self._mean is not None and limit <= 1:
            certain = certain & (F.cosine_similarity(self._mean.to(p)[None], p, dim=1).abs() < limit)
        if certain.any():
            mean = p[certain].mean(0)
            self._mean = mean if self._mean is None else self._mean.to(p).lerp(mean, 1 - self.momentum)
        return certain

    def _forgetting(self, model: nn.Module) -> Tensor | float:
        """The anti-forgetting term, weighed by the Fisher information."""
        moved = ((model.get_parameter(name), name) for name in self.fisher)
        terms = [(self.fisher[name].to(now) * (now - self._source[name].to(now)).square()).sum() for now, name in moved]
        return self.anti_forgetting * sum(terms)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._mean = state["mean"]
