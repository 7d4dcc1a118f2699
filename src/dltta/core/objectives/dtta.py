"""3 objectives. An image normalizer that follows the denoised prediction (DTTA, Karani et al., MedIA 2021)."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dltta.errors import InputError, NothingToAdaptError, SettingError
from dltta.models.normalization import NormalizationStatistics, use_test_statistics
from dltta.models.parts.adaptors import insert_in_front
from dltta.models.parts.denoiser import Denoiser, soft_dice
from dltta.models.parts.normalizer import NAME, ImageNormalizer
from dltta.models.predictions import probabilities


class DTTA:
    """Makes the prediction plausible by moving a small network that changes the image; for segmentation.

    The network has an image normalizer in front that was trained with it on the source, and `denoiser` was trained on
    the source's label maps: `dltta train --with dtta`, then `checkpoint.for_method("dtta")` has both. To a network
    without one, `normalizer` is added. Only the normalizer moves. At the
    first step of an image and every `every` steps the denoised prediction becomes the target; the loss is one minus the
    soft Dice with it over all classes. Predicted is with the parameters whose prediction agreed best with its own
    denoised form: of those moments and of the last step.

    The authors' run is `Adapter(model, DTTA(…), Fixed(1e-3), optimizer=torch.optim.Adam, steps=500,
    mode="image-specific")`. Batch normalization keeps the source's statistics, as theirs does, unless `statistics` are
    given.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        normalizer: ImageNormalizer | None = None,
        *,
        every: int = 25,
        statistics: NormalizationStatistics | None = None,
    ) -> None:
        if every < 1:
            raise SettingError(f"every must be at least 1, got {every}")
        if normalizer is not None and normalizer.spatial_dims != denoiser.spatial_dims:
            raise SettingError(
                f"the normalizer is for {normalizer.spatial_dims}-D images, the denoiser for {denoiser.spatial_dims}-D"
            )
        self.normalizer, self.denoiser, self.every, self.statistics = normalizer, denoiser, every, statistics
        self._steps = 0  # taken for the batch at hand
        self._target: Tensor | None = None
        self._batch: Tensor | None = None
        self._best: tuple[float, list[Tensor]] | None = None  # agreement, parameters of the normalizer

    def prepare(self, model: nn.Module, /) -> Sequence[nn.Parameter]:
        if self.normalizer is not None:
            normalizer = copy.deepcopy(self.normalizer).to(next(model.parameters())).requires_grad_(False).eval()
            insert_in_front(model, NAME, normalizer)
        parameters = [part for name, part in model.named_parameters() if name.startswith(f"{NAME}.")]
        if not parameters:
            raise NothingToAdaptError(
                f"DTTA finds no image normalizer in front of {type(model).__name__}; train the model with "
                "`--with dtta` and take model.for_method('dtta')"
            )
        self.denoiser.requires_grad_(False).eval()
        if self.statistics is not None:
            use_test_statistics(model, self.statistics)
        return parameters

    def before_batch(self, model: nn.Module, x: Tensor, /) -> None:
        self._steps, self._target, self._batch, self._best = 0, None, x, None

    def __call__(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        prediction = self._dense(x, logits)
        if self._target is None or self._steps % self.every == 0:
            self._target = self._compare(model, prediction.detach())
        return 1 - soft_dice(prediction, self._target)

    def after_update(self, model: nn.Module, /) -> None:
        self._steps += 1

    def predict(self, model: nn.Module, x: Tensor, logits: Tensor, /) -> Tensor:
        if x is self._batch:
            self._compare(model, self._dense(x, logits))
        if self._best is None:
            return logits
        now = _named(model)
        best = {name: part.to(now[name]) for name, part in zip(now, self._best[1], strict=True)}
        if all(torch.equal(now[name], best[name]) for name in now):
            return logits
        given: Tensor = functional_call(model, best, (x,))
        return given

    def state_dict(self) -> dict[str, Any]:
        agreement, parameters = self._best or (None, [])
        return {"agreement": agreement, "best": [part.clone() for part in parameters]}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self._best = None if state["agreement"] is None else (state["agreement"], list(state["best"]))
        self._steps, self._target = 0, None

    @torch.no_grad()
    def _compare(self, model: nn.Module, prediction: Tensor) -> Tensor:
        """The denoised prediction; the parameters are kept if no other prediction agreed better with its own."""
        denoised: Tensor = self.denoiser.to(prediction)(prediction).softmax(dim=1)
        agreement = soft_dice(prediction, denoised).item()
        if self._best is None or agreement > self._best[0]:
            self._best = agreement, [part.detach().clone() for part in _named(model).values()]
        return denoised

    def _dense(self, x: Tensor, logits: Tensor) -> Tensor:
        """Class probabilities, if they are what the denoiser knows."""
        prediction = probabilities(logits)
        expected = (self.denoiser.classes, self.denoiser.spatial_dims)
        if logits.ndim != x.ndim or (prediction.shape[1], logits.ndim - 2) != expected:
            raise InputError(
                f"the denoiser knows {expected[1]}-D segmentations of {expected[0]} classes, the network gives "
                f"{tuple(logits.shape[1:])} for images {tuple(x.shape[1:])}; DTTA is for segmentation"
            )
        return prediction


def _named(model: nn.Module) -> dict[str, Tensor]:
    """The normalizer's parameters by their name in the network."""
    return {name: part for name, part in model.named_parameters() if name.startswith(f"{NAME}.")}
