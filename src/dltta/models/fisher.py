"""2 networks. Which scales and shifts matter to the source? The diagonal of the Fisher information, without labels."""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.models.normalization import BATCH_STATISTICS, NormalizationStatistics, affine_parameters, use_test_statistics
from dltta.models.predictions import all_finite, log_probabilities, most_likely


def fisher(
    model: nn.Module,
    images: Sequence[Tensor],
    *,
    batch_size: int = 64,
    statistics: NormalizationStatistics = BATCH_STATISTICS,
) -> dict[str, Tensor]:
    """The importance of every scale and shift of the normalization layers, by parameter name.

    From source images (C, *spatial) of one size, in batches as EATA's authors take them: the square of the batch's
    gradient of the cross-entropy to its own most likely classes, averaged over the batches. Dense predictions are
    labeled position by position. Empty where there is nothing to measure: no such parameter, or none that the
    predictions depend on in a finite way. The network itself is not changed.
    """
    measured = copy.deepcopy(model).requires_grad_(False).eval()
    parameters = affine_parameters(measured)
    if not parameters or len(images) == 0:
        return {}
    use_test_statistics(measured, statistics)
    for parameter in parameters:
        parameter.requires_grad_(True)
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    batches = [torch.stack(list(images[i : i + batch_size])) for i in range(0, len(images), batch_size)]
    for batch in batches:
        for total, part in zip(sums, _gradient(measured, batch.to(parameters[0].device), parameters), strict=True):
            if part is not None:
                total += part.square()
    names = {id(parameter): name for name, parameter in measured.named_parameters()}
    found = {names[id(p)]: (total / len(batches)).cpu() for p, total in zip(parameters, sums, strict=True)}
    return found if all(map(all_finite, found.values())) and any(part.any() for part in found.values()) else {}


def _gradient(model: nn.Module, x: Tensor, parameters: Sequence[nn.Parameter]) -> Sequence[Tensor | None]:
    with torch.inference_mode(False), torch.enable_grad():
        log_p = log_probabilities(model(x))
        loss = F.nll_loss(log_p, most_likely(log_p.detach()))
        if not loss.requires_grad:  # the network detaches its predictions
            return [None] * len(parameters)
        return torch.autograd.grad(loss, parameters, allow_unused=True)
