"""Contract checks for objectives, learning rates and image formats written outside this package.

An objective may have more than `prepare` and a loss: see `dltta.core.objectives.objective`. What it has is checked too.

Run them in your own test suite: each raises `AssertionError` with what the class does and what the contract asks.

    from dltta.testing import check_objective, check_rate

    def test_my_objective_keeps_the_contract():
        check_objective(MyObjective(), model, x)
"""

import copy
import io
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dltta.core.adapter import Adapter
from dltta.core.objectives.objective import ComputesGradient, Objective, Preparation
from dltta.core.rates import AnyRate, Fixed, Signals, takes_signals
from dltta.core.snapshot import load_state, state_of
from dltta.data.formats.format import MALFORMED, START, Completeness, Format, ending_among
from dltta.errors import DataError, DlttaError

DISCREPANCIES = (0.0, 1e-9, 1e-3, 0.5, 1.0, 10.0)


def check_objective(objective: Objective | Preparation, model: nn.Module, x: Tensor) -> None:
    """Check an objective on a network and a batch x (B, C, *spatial) that the network takes."""
    name = type(objective).__name__
    assert isinstance(objective, Objective | Preparation), f"{name} must have prepare(model)"
    before = _tensors(model)
    images = x.clone()
    try:
        adapter = Adapter(model, objective, Fixed(1e-3) if isinstance(objective, Objective) else None)
    except DlttaError as error:
        raise AssertionError(f"{name} cannot be prepared: {error}") from error
    if isinstance(objective, Objective):
        _check_loss(name, adapter, x)
    if isinstance(objective, ComputesGradient):
        _check_gradient(name, adapter, x)
    _check_step(name, adapter, x)
    _check_reset(name, adapter, x)
    _check_resume(name, adapter, x)
    _check_predict(name, adapter, x)
    assert torch.equal(x, images), f"{name} must not write into the images"
    assert _same(_tensors(model), before), f"{name} must not change the caller's network"


def check_rate(rate: AnyRate) -> None:
    """Check a learning rate: finite and ≥ 0 for every discrepancy and for None, and repeatable from a saved state.

    A rate that takes `signals` is asked with a small gradient besides.
    """
    name = type(rate).__name__
    stream = [None, *DISCREPANCIES, *reversed(DISCREPANCIES)]
    given = [_ask(copy.deepcopy(rate), discrepancy) for discrepancy in stream]
    for discrepancy, rates in zip(stream, given, strict=True):
        for each in rates:
            assert isinstance(each, float), f"{name}({discrepancy}) must be a float, is {type(each).__name__}"
            assert math.isfinite(each), f"{name}({discrepancy}) must be finite, is {each}"
            assert each >= 0, f"{name}({discrepancy}) must not be negative, is {each}"
    again = [_ask(copy.deepcopy(rate), discrepancy) for discrepancy in stream]
    assert given == again, f"{name} must give the same from the same state"
    _check_rate_resumes(name, rate, stream)


def check_format(format: Format, example: Path | str) -> None:
    """Check an image format on one of its files: header, pixels, a mask written and read back, damaged files."""
    example = Path(example)
    assert isinstance(format, Format), f"{type(format).__name__} must have all that Format names"
    name, ending = format.name, ending_among(example, format.endings)
    assert ending is not None, f"{name}.endings must hold the example's, in lower case with its dot: {example.name}"
    content = example.read_bytes()
    assert format.begins(content[:START]), f"{name}.begins must know its own file"
    for other in (b"", bytes(START), b"text " * 20):
        assert not format.begins(other), f"{name}.begins must not take {other[:9]!r}... for its own"
    geometry, pixels = format.read_geometry(example), format.read_pixels(example)
    assert geometry.kind == name.lower(), f"{name} must call its geometries {name.lower()!r}, not {geometry.kind!r}"
    wanted = (geometry.channels, *geometry.shape)
    assert pixels.shape == wanted, f"{name}.read_pixels must give {wanted} as its geometry, gives {pixels.shape}"
    assert np.array_equal(pixels, format.read_pixels(example)), f"{name}.read_pixels must give the same values again"
    with tempfile.TemporaryDirectory() as folder:
        for highest in (1, 255, 65535):
            labels = np.arange(math.prod(geometry.shape)).reshape(geometry.shape) % (highest + 1)
            stored = labels.astype(np.uint8 if highest < 256 else np.uint16)
            format.write_classes(written := io.BytesIO(), stored, geometry, ending)
            path = Path(folder, f"mask{ending}")
            path.write_bytes(written.getvalue())
            found = format.read_classes(path)
            assert np.array_equal(found, labels), f"{name} must read the class values 0..{highest} that it wrote"
            assert format.read_geometry(path).shape == geometry.shape, f"{name} must write masks of the image's size"
        for length in (0, 1, len(content) // 2):
            path = Path(folder, f"cut{ending}")
            path.write_bytes(content[:length])
            try:
                format.read_geometry(path)
                same = np.array_equal(format.read_pixels(path), pixels)
            except (DataError, *MALFORMED):
                same = True
            assert same, f"{name} must refuse a file that is cut after {length} of {len(content)} bytes"
        if isinstance(format, Completeness):
            assert format.complete(example) is not False, f"{name}.complete must know a whole file"
            assert format.complete(path) is not True, f"{name}.complete must not take half a file for a whole one"


def _ask(rate: AnyRate, discrepancy: float | None) -> list[Any]:
    """As an adapter asks, without its own checks."""
    model = nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.constant_(model.bias, 0.25)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradient = {name: 0.1 * parameter for name, parameter in parameters.items()}
    x = torch.tensor([[1.0, -2.0]])
    signals = Signals(discrepancy, 0.7, gradient, parameters, model, x, model(x).detach())
    question: Any = rate
    found = question(signals if takes_signals(rate) else discrepancy)
    return list(found) if getattr(rate, "per_parameter", False) else [found]


def _check_rate_resumes(name: str, rate: AnyRate, stream: list[float | None]) -> None:
    used = copy.deepcopy(rate)
    fresh = copy.deepcopy(rate)
    for discrepancy in stream:
        _ask(used, discrepancy)
    if hasattr(used, "state_dict") and hasattr(fresh, "load_state_dict"):
        fresh.load_state_dict(copy.deepcopy(used.state_dict()))
    continued = [_ask(used, discrepancy) for discrepancy in stream]
    resumed = [_ask(fresh, discrepancy) for discrepancy in stream]
    assert continued == resumed, f"{name} remembers earlier images: it needs state_dict() and load_state_dict(state)"


def _check_resume(name: str, adapter: Adapter, x: Tensor) -> None:
    """Two steps, saved and loaded in between, are two steps: whatever it remembers is in `state_dict`."""
    adapter.reset()
    adapter.step(x)
    saved = adapter.state_dict()
    continued = adapter.step(x).logits
    for _ in range(2):
        adapter.step(x.flip(-1))
    adapter.load_state_dict(saved)
    again = adapter.step(x).logits
    assert torch.equal(continued, again), f"{name} remembers something: it needs state_dict() and load_state_dict()"


def _check_predict(name: str, adapter: Adapter, x: Tensor) -> None:
    adapter.reset()
    adapter.step(x)
    first, second = adapter.predict(x), adapter.predict(x)
    assert first.shape == adapter.model(x).shape, f"{name}.predict must give logits of the network's shape"
    assert torch.equal(first, second), f"{name}.predict must give the same for the same images and state"
    assert not first.requires_grad, f"{name}.predict must not carry a graph"


def _check_loss(name: str, adapter: Adapter, x: Tensor) -> None:
    objective = adapter.objective
    assert isinstance(objective, Objective)
    state = state_of(objective)
    for batch in (x, x[:1]):
        with torch.enable_grad():
            again = objective(adapter.model, batch, adapter.model(batch))
            load_state(objective, state)
            loss = objective(adapter.model, batch, adapter.model(batch))
            load_state(objective, state)
        assert loss.ndim == 0, f"{name} must give one number per batch, gives shape {tuple(loss.shape)}"
        assert bool(loss.isfinite()), f"{name} must be finite on finite images, is {loss.item()}"
        assert torch.equal(loss, again), f"{name} must give the same loss for the same images and state"
        assert loss.requires_grad, f"{name} finds nothing to learn in these images; check it with others"
        gradients = torch.autograd.grad(loss, adapter._adapted, allow_unused=True)
        assert any(g is not None and bool(g.any()) for g in gradients), (
            f"{name} must depend on at least one parameter that it names"
        )


def _check_gradient(name: str, adapter: Adapter, x: Tensor) -> None:
    """One of its own: the same from the same state, of the right shapes, and nothing has moved when it is done."""
    objective, parameters = adapter.objective, adapter._adapted
    assert isinstance(objective, ComputesGradient)
    before, state = _tensors(adapter.model), state_of(objective)
    found = []
    for _ in range(2):
        load_state(objective, state)
        with torch.enable_grad():
            found.append(objective.gradient(adapter.model, x, adapter.model(x), parameters))
        assert _same(_tensors(adapter.model), before), f"{name}.gradient must leave the network as it was"
    load_state(objective, state)
    (loss, gradient), (again, repeated) = found
    assert loss.ndim == 0, f"{name}.gradient must give one loss per batch, gives shape {tuple(loss.shape)}"
    assert len(gradient) == len(parameters), f"{name}.gradient must give one for each of {len(parameters)} parameters"
    for part, same, parameter in zip(gradient, repeated, parameters, strict=True):
        assert part is None or part.shape == parameter.shape, f"{name}.gradient must have the shapes of the parameters"
        assert (part is None) == (same is None), f"{name}.gradient must give the same for the same images and state"
        assert part is None or same is None or torch.equal(part, same), (
            f"{name}.gradient must give the same for the same images and state"
        )
    assert torch.equal(loss, again), f"{name}.gradient must give the same loss for the same images and state"


def _check_step(name: str, adapter: Adapter, x: Tensor) -> None:
    adapted = set(adapter.adapted_parameters())
    before = _tensors(adapter.model)
    step = adapter.step(x)
    after = _tensors(adapter.model)
    changed = {tensor for tensor in after if not torch.equal(before[tensor], after[tensor])}
    assert changed <= adapted, f"{name} must move only the parameters it names, moved {sorted(changed - adapted)}"
    assert adapter.steps == 0 or changed, f"{name} must move something in a step at rate 1e-3"
    assert len(step.logits) == len(x), f"{name} must predict every image of the batch"


def _check_reset(name: str, adapter: Adapter, x: Tensor) -> None:
    adapter.reset()
    first = [adapter.step(x).logits for _ in range(2)]
    adapter.reset()
    second = [adapter.step(x).logits for _ in range(2)]
    assert all(map(torch.equal, first, second)), f"{name} must give the same predictions again after reset()"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
