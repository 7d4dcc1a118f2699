"""How it is measured: rounds in which everything has its turn, medians, peak memory of a process of its own."""

import gc
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import dltta.core.adapter as step
from dltta import Adapter

PARTS = ("forward 1", "recall", "discrepancy", "loss and backward", "update", "forward 2", "push", "rest")


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every run in every round; one more round in front is not counted.

    Every other round goes backwards, so that nobody always comes after the same one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(repeats + 1):
        gc.collect()
        for name in runs if number % 2 else reversed(runs):
            started = time.perf_counter()
            runs[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in seconds.items()}


def ratio(seconds: Mapping[str, list[float]], name: str, to: str) -> float:
    """The median of a run's ratio to another within each round: a machine that drifts slows both down."""
    return median(one / other for one, other in zip(seconds[name], seconds[to], strict=True))


def breakdown(adapter: Adapter, run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Median seconds of the parts of a step, and what is left between them."""
    rounds: dict[str, list[float]] = {part: [] for part in PARTS}
    for number in range(repeats + 1):
        with _stopwatch(adapter) as parts:
            started = time.perf_counter()
            run()
            whole = time.perf_counter() - started
        parts["rest"] = whole - sum(parts.values())
        for part in PARTS:
            if number:
                rounds[part].append(parts.get(part, 0.0))
    return medians(rounds)


@contextmanager
def _stopwatch(adapter: Adapter) -> Iterator[dict[str, float]]:
    """Seconds by part while the context lasts; nothing is nested."""
    parts: dict[str, float] = {}
    passes = iter(("forward 1", "forward 2"))

    def timed(function: Callable[..., Any], part: Callable[[], str]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                name = part()
                parts[name] = parts.get(name, 0.0) + time.perf_counter() - started

        return call

    def probabilities_part() -> str:
        return "push" if "forward 2" in parts else "discrepancy"

    memory, optimizer = adapter.memory, adapter._optimizer
    with (
        patch.object(adapter, "_forward", timed(adapter._forward, lambda: next(passes))),
        patch.object(adapter, "objective", _Timed(adapter.objective, timed)),
        patch.object(torch.autograd, "grad", timed(torch.autograd.grad, lambda: "loss and backward")),
        patch.object(optimizer, "step", timed(optimizer.step, lambda: "update")),
        patch.object(memory, "recall", timed(memory.recall, lambda: "recall")),
        patch.object(memory, "push", timed(memory.push, lambda: "push")),
        patch.object(step, "batch_discrepancy", timed(step.batch_discrepancy, lambda: "discrepancy")),
        patch.object(step, "probabilities", timed(step.probabilities, probabilities_part)),
    ):
        yield parts


class _Timed:
    """An objective whose call is timed."""

    def __init__(self, objective: Any, timed: Callable[..., Any]) -> None:
        self.prepare = objective.prepare
        self._call = timed(objective, lambda: "loss and backward")

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)


class PeakMemory:
    """The largest resident size of this process between two moments, by the kernel's own account (Linux)."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    @staticmethod
    def bytes() -> int:
        return _status("VmHWM")

    @staticmethod
    def now() -> int:
        return _status("VmRSS")


def _status(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}; peak memory is measured on Linux only")
    return 1024 * int(found[1])
