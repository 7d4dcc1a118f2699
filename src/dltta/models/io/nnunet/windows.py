"""2 networks. nnU-Net's sliding window with its Gaussian and its mirroring, around a network that adapts."""

from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dltta.models.io.nnunet.plan import Plan, quiet
from dltta.models.io.opened import Views


@dataclass(frozen=True)
class NNUNetWindow:
    """Windows as `nnUNetPredictor` takes them: volumes (C, *spatial), slice by slice for a 2-D network.

    Every window is a step of the stream; its mirrored copies are predicted as that step predicted and teach nothing.
    The predictor blends in half precision on the CPU, as it does by itself.
    """

    patch: tuple[int, ...]
    mirroring: tuple[int, ...] | None
    tile_step_size: float
    plan: InitVar[Plan]
    model: InitVar[nn.Module]  # where it is, there windows are computed

    def __post_init__(self, plan: Plan, model: nn.Module) -> None:
        object.__setattr__(self, "_plan", plan)
        object.__setattr__(self, "_model", model)

    def whole(self, spatial: tuple[int, ...]) -> bool:
        """Never: mirroring and blending are part of every prediction."""
        return False

    def slide(self, x: Tensor, network: Views) -> Tensor:
        plan: Plan = self._plan  # type: ignore[attr-defined]
        model: nn.Module = self._model  # type: ignore[attr-defined]
        predictor = _predictor(self.tile_step_size, next(model.parameters()).device)
        managers = (plan.plans, plan.configuration)
        with quiet():
            predictor.manual_initialization(
                _Window(network), *managers, None, dict(plan.dataset), plan.trainer, self.mirroring
            )
        logits = [predictor.predict_sliding_window_return_logits(image.cpu()) for image in x]
        return torch.stack([each.clone() for each in logits])


class _Window(nn.Module):
    """What the predictor takes for a network: the first call for a window is a step, the others are mirrored copies."""

    def __init__(self, network: Views) -> None:
        super().__init__()
        self._network, self._begun = network, False

    def begin(self) -> None:
        self._begun = False

    def forward(self, x: Tensor) -> Tensor:
        if self._begun:
            return self._network.again(x).clone()
        self._begun = True
        return self._network(x).clone()  # the predictor adds to it in place


def _predictor(tile_step_size: float, device: torch.device) -> Any:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    class Predictor(nnUNetPredictor):  # type: ignore[misc]  # nnU-Net has no types
        def _internal_maybe_mirror_and_predict(self, x: Tensor) -> Tensor:
            self.network.begin()
            mean: Tensor = super()._internal_maybe_mirror_and_predict(x)
            return mean

    with quiet():
        return Predictor(
            tile_step_size=tile_step_size,
            use_gaussian=True,
            use_mirroring=True,
            perform_everything_on_device=False,  # on a full GPU it would begin again, and windows be learned from twice
            device=device,
            allow_tqdm=False,
        )
