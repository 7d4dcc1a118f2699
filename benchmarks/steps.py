"""What is timed on a workload: a plain forward pass, every method with fixed and dynamic rate, the released order."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.methods import Method, Optimizer
from dltta.models.fast import speed_up
from dltta.models.features import forward_with_features
from dltta.models.predictions import probabilities
from dltta.models.quantiles import SourceValues
from dltta.objectives import PTBN, Tent
from dltta.quality.candidates import EFFORTS, possible_arms, possible_plans
from dltta.quality.choosing import ChoosingAdapter, Policy, Rehearsed, Yardstick
from dltta.quality.estimate import QualityModel, design
from dltta.quality.measures import SIGNALS, Usual
from dltta.training.calibration import calibrate
from released import ReleasedSequence
from workloads import Workload

PLAIN, PLAIN_FAST = "plain forward", "plain forward, channels-last"
TENT_DYNAMIC = "Tent, dynamic"
METHODS = ("Tent", "TTT", "ATTA")
RECOMMENDED = {"default": "Recommended", "low": "Recommended, low effort"}


@dataclass(frozen=True)
class Row:
    """One thing that is timed; `batch` images are given to it."""

    name: str
    run: Callable[[], object]
    batch: int
    adapter: Adapter | None = None


Make = Callable[[Workload], Row]


def rows(workload: Workload) -> dict[str, Make]:
    """How to make every row of a workload's table, in order."""
    makers: dict[str, Make] = {
        PLAIN: lambda w: _plain(w, PLAIN),
        PLAIN_FAST: lambda w: _plain(w, PLAIN_FAST, fast=True),
        "PTBN": lambda w: _adapted(w, "PTBN", "none"),
    }
    for method in METHODS:
        for rate in ("fixed", "dynamic"):
            makers[f"{method}, {rate}"] = lambda w, method=method, rate=rate: _adapted(w, method, rate)
    if workload.ttt_batch is not None:
        makers[f"plain forward, batch {workload.ttt_batch}"] = lambda w: _plain(
            w, f"plain forward, batch {w.ttt_batch}", batch=w.ttt_batch
        )
    makers["Tent, dynamic, as released"] = _released
    return makers


def newer_rows(workload: Workload) -> dict[str, Make]:
    """Plain forward passes and a step of the recommended recipe and of every method that the paper does not compare."""
    makers: dict[str, Make] = {
        PLAIN: lambda w: _plain(w, PLAIN),
        PLAIN_FAST: lambda w: _plain(w, PLAIN_FAST, fast=True),
    }
    for effort in RECOMMENDED:
        makers[RECOMMENDED[effort]] = lambda w, effort=effort: _recommended(w, effort)
    dense = workload.architecture.name == "unet"
    for method in Method:
        if not method.facts.of_paper and ("segmentation" if dense else "classification") in method.facts.tasks:
            makers[_newer_name(method)] = lambda w, method=method: _newer(w, method)
    return makers


def _newer_name(method: Method) -> str:
    """What is timed: methods that learn from a memory now and then are timed with and for an update of each batch."""
    often = {"note": ", update with every batch", "rotta": ", update with every batch", "dtta": ", one step of 500"}
    return f"{method.facts.title}{often.get(method, '')}"


def _newer(workload: Workload, method: Method) -> Row:
    model, x, facts = workload.model(), workload.images(), method.facts
    task = "segmentation" if workload.architecture.name == "unet" else "classification"
    objective = workload.newer(method, model)
    adapter = Adapter(
        model,
        objective,
        *([Fixed(facts.step(task).alpha)] if facts.loss else []),
        optimizer=torch.optim.Adam if facts.step(task).optimizer == Optimizer.ADAM else torch.optim.SGD,
        predict=str(facts.predict),
        mode=str(facts.mode),
    )
    return Row(_newer_name(method), lambda: adapter.step(x), len(x), adapter)


def _recommended(workload: Workload, effort: str) -> Row:
    """The plan of most passes that rehearsal may choose, with all signals; what is expected changes no time."""
    model, x = workload.model(), workload.images()
    images = list(workload.images(2))
    calibration, values = calibrate(model, images), SourceValues.of(images)
    with torch.no_grad():
        predictions = list(probabilities(model(torch.stack(images))))
    arms = possible_arms(model, calibration)
    plan = max(possible_plans(arms, 0, EFFORTS[effort]), key=lambda each: each.passes)
    count = len(SIGNALS)
    weights = np.zeros(design(np.zeros((1, len(plan.candidates), count))).shape[-1])
    quality = QualityModel(np.zeros(count), np.ones(count), np.full(count, -9.0), np.full(count, 9.0), weights, 1.0)
    rehearsed = Rehearsed(plan, Policy(plan.arms[0]), quality, radius=0.1, review_below=0.5)
    adapter = ChoosingAdapter(
        model, rehearsed, Yardstick(Usual.of(predictions), values, calibration), batch_size=len(x)
    )
    return Row(RECOMMENDED[effort], lambda: adapter.step(x), len(x), adapter)


def baseline(workload: Workload, name: str) -> str:
    """The plain forward pass that a row is compared with."""
    smaller = name.startswith("TTT") and workload.ttt_batch is not None
    return f"plain forward, batch {workload.ttt_batch}" if smaller else PLAIN


def _plain(workload: Workload, name: str, *, fast: bool = False, batch: int | None = None) -> Row:
    model, x = workload.model(), workload.images(batch)
    if fast:
        speed_up(model)

    def run() -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(x)
            return logits

    return Row(name, run, len(x))


def _adapted(workload: Workload, method: str, rate: str) -> Row:
    x = workload.images(workload.ttt_batch if method == "TTT" else None)
    adapter = make_adapter(workload, method, rate)
    name = method if rate == "none" else f"{method}, {rate}"
    return Row(name, lambda: adapter.step(x), len(x), adapter)


def make_adapter(workload: Workload, method: str, rate: str, **options: object) -> Adapter:
    """An adapter whose memory, if it has one, is full."""
    model = workload.model()
    if rate == "none":
        return Adapter(model, PTBN(), **options)
    objective = {"Tent": lambda: Tent(), "TTT": lambda: workload.ttt(model), "ATTA": lambda: workload.atta(model)}[
        method
    ]()
    if rate == "fixed":
        return Adapter(model, objective, Fixed(workload.alpha), **options)
    adapter = Adapter(model, objective, Proportional(workload.alpha), memory=empty_bank(workload), **options)
    fill(adapter, workload, model)
    return adapter


def empty_bank(workload: Workload, dtype: torch.dtype | None = None) -> MemoryBank:
    return MemoryBank(workload.layer, capacity=workload.capacity, neighbors=workload.neighbors, dtype=dtype)


def fill(adapter: Adapter, workload: Workload, model: nn.Module) -> None:
    """As if `capacity` images had gone by: copies of one prediction with some noise, each different."""
    bank = adapter.memory
    assert bank is not None
    features, prediction = seen_once(workload, model)
    noise = torch.Generator().manual_seed(2)
    while len(bank) < bank.capacity:
        moved = features + 0.1 * features.std() * torch.randn(features.shape, generator=noise)
        bank.push(moved, prediction)


def seen_once(workload: Workload, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Features and probabilities of at most ten images."""
    with torch.no_grad():
        seen = forward_with_features(model, workload.layer, workload.images(min(10, workload.shape[0])))
    assert seen.features is not None
    return seen.features, probabilities(seen.logits)


def _released(workload: Workload) -> Row:
    model, x = workload.model(), workload.images()
    sequence = ReleasedSequence(
        model, Tent(), workload.layer, alpha=workload.alpha, capacity=workload.capacity, neighbors=workload.neighbors
    )
    sequence.fill(*seen_once(workload, copy.deepcopy(model)))
    return Row("Tent, dynamic, as released", lambda: sequence.step(x), len(x))
