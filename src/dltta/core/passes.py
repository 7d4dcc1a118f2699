"""6 update. One pass through the network, with every way in which it can fail said in one sentence."""

from itertools import chain

import torch
from torch import Tensor, nn

from dltta.errors import DlttaError, InputError, NonFiniteError
from dltta.models.features import Seen, forward_pass, forward_with_features
from dltta.models.predictions import all_finite


def accept(model: nn.Module, x: Tensor) -> Tensor:
    """The batch on the network's device and in its type, or an `InputError` that says what is wrong."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        found = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"images must be a floating-point tensor, got {found}; scale them as in training")
    if x.ndim < 2 or x.numel() == 0:
        raise InputError(f"images must be a non-empty batch (B, C, *spatial), got shape {tuple(x.shape)}")
    if not all_finite(x):
        raise InputError(f"{(~x.isfinite()).sum().item()} of {x.numel()} input values are NaN or infinite")
    device, dtype = placement(model)
    x = x.detach().to(device, dtype)
    return x.clone() if x.is_inference() else x


def run(model: nn.Module, x: Tensor, *, features: bool, layer: str | None = None, learning: bool) -> Seen:
    """One pass; with the features of a layer (None finds one) if asked, with a graph only if an update follows."""
    try:
        with torch.set_grad_enabled(learning):
            seen = forward_with_features(model, layer, x) if features else forward_pass(model, x)
    except (DlttaError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, IndexError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"the network cannot take images of shape {tuple(x.shape[1:])}: {reason}") from error
    require_finite(seen.logits)
    if len(seen.logits) != len(x):
        raise InputError(f"the network gives {len(seen.logits)} predictions for a batch of {len(x)}")
    return seen


def require_finite(logits: Tensor) -> None:
    if not all_finite(logits):
        raise NonFiniteError("the prediction has NaN or infinite values")


def placement(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and floating-point type of the network."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.is_floating_point():
            return tensor.device, tensor.dtype
    return torch.device("cpu"), torch.float32
