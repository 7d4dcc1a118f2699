"""3 objectives. Auto-encoder based test-time adaptation (ATTA, He et al., Medical Image Analysis 2021)."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from dltta.errors import SettingError
from dltta.models.normalization import BATCH_STATISTICS, NormalizationStatistics, use_test_statistics
from dltta.models.parts.adaptors import FeatureAdaptor, InputAdaptor, insert_feature_adaptor, insert_input_adaptor
from dltta.models.parts.autoencoders import AutoEncoders, LevelOutputs, Levels


class ATTA:
    """Makes image, features and prediction reconstruct well by auto-encoders that know the source.

    The network is frozen; what moves are adaptors put into it, which start as the identity: one in front of the network
    and one behind each of `levels.adapted`, of that many `channels`. `weights` scales the reconstruction error of each
    auto-encoder (1 unless given), `orthogonality` the penalty that keeps the feature adaptors near rotations.
    Auto-encoders come from the source (`dltta train --with atta`).
    """

    def __init__(
        self,
        autoencoders: AutoEncoders,
        levels: Levels,
        channels: Sequence[int],
        *,
        weights: Mapping[str, float] | None = None,
        orthogonality: float = 1.0,
        statistics: NormalizationStatistics = BATCH_STATISTICS,
    ) -> None:
        unknown = set(weights or {}) - set(autoencoders.shapes)
        if unknown:
            raise SettingError(f"no auto-encoder {sorted(unknown)[0]!r}; there are {', '.join(autoencoders.shapes)}")
        self.autoencoders = autoencoders
        self.levels = levels
        self.channels = tuple(channels)
        self.weights = dict(weights or {})
        self.orthogonality = orthogonality
        self.statistics = statistics
        self._watch = LevelOutputs(levels)
        self._adaptors: list[FeatureAdaptor] = []

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        self.levels.check(model)
        self.autoencoders.requires_grad_(False).eval()
        use_test_statistics(model, self.statistics)
        channels, *spatial = self.autoencoders.shapes["image"]
        like = next(model.parameters())
        front = InputAdaptor(len(spatial), channels).to(like)
        insert_input_adaptor(model, front)
        self._adaptors = [FeatureAdaptor(len(spatial), number).to(like) for number in self.channels]
        for layer, adaptor in zip(self.levels.adapted, self._adaptors, strict=True):
            insert_feature_adaptor(model, layer, adaptor)
        self._watch.attach(model)  # after the adaptors: it sees what they give
        return [*front.parameters(), *(p for adaptor in self._adaptors for p in adaptor.parameters())]

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        errors = self.autoencoders.to(x).errors(self._watch.take())
        reconstruction = sum((self.weights.get(name, 1.0) * error for name, error in errors.items()), x.new_zeros(()))
        penalty = sum((adaptor.orthogonality() for adaptor in self._adaptors), x.new_zeros(()))
        return reconstruction + self.orthogonality * penalty
