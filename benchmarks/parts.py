"""The parts of the speed benchmark; each runs in a process of its own and gives back what JSON can hold."""

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from dltta import Adapter, MemoryBank, Proportional
from dltta.evaluation.provenance import Provenance
from dltta.models.nets.architecture import Architecture
from dltta.objectives import Tent
from dltta.training.augmentation import Augmentation
from dltta.training.examples import Examples
from dltta.training.fit import Plan, Ranks, TrainingState, learn, supervised
from dltta.training.source import TaskTraining
from dltta.training.task import TaskLoss
from dltta.version import __version__
from measuring import PeakMemory, breakdown, interleaved, medians, ratio
from steps import (
    METHODS,
    PLAIN,
    PLAIN_FAST,
    TENT_DYNAMIC,
    baseline,
    empty_bank,
    fill,
    make_adapter,
    newer_rows,
    rows,
    seen_once,
)
from workloads import Workload

STREAM = 20_000
CAPACITIES = (800, 2_000, 5_000, 10_000)


def timing(workload: Workload, settings: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every row and their ratio to the plain forward pass; the parts of a dynamic Tent step; the bank."""
    repeats, surroundings = settings.repeats or workload.repeats, measured_in()
    made = {name: make(workload) for name, make in rows(workload).items()}
    rounds = interleaved({name: row.run for name, row in made.items()}, repeats)
    seconds = medians(rounds)
    dynamic = made[TENT_DYNAMIC]
    assert dynamic.adapter is not None
    return {
        "title": workload.title,
        "shape": workload.shape,
        "repeats": repeats,
        **surroundings,
        "rows": [
            {
                "name": name,
                "batch": row.batch,
                "seconds": seconds[name],
                "ratio": ratio(rounds, name, baseline(workload, name)),
            }
            for name, row in made.items()
        ],
        "dynamic_to_fixed": {name: ratio(rounds, f"{name}, dynamic", f"{name}, fixed") for name in METHODS},
        "breakdown": breakdown(dynamic.adapter, dynamic.run, repeats),
        "bank": bank(workload),
    }


def methods(workload: Workload, settings: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of the recommended recipe and of every method that the paper does not compare.

    `ratio` is to the plain forward pass, `fastest` to that of the fastest layout.
    """
    repeats, surroundings = settings.repeats or max(2, workload.repeats // 3), measured_in()
    made = {name: make(workload) for name, make in newer_rows(workload).items()}
    rounds = interleaved({name: row.run for name, row in made.items()}, repeats)
    seconds = medians(rounds)
    fastest = min((PLAIN, PLAIN_FAST), key=lambda name: seconds[name])
    rows = [
        {
            "name": name,
            "seconds": seconds[name],
            "ratio": ratio(rounds, name, PLAIN),
            "fastest": ratio(rounds, name, fastest),
        }
        for name in made
    ]
    return {"title": workload.title, "repeats": repeats, **surroundings, "rows": rows}


def measured_in() -> dict[str, Any]:
    """On which processor, with which code and threads, and how busy the machine was before this program added to it."""
    cpu, load = Provenance.collect(seeds=(), data={}).machine["cpu"], round(os.getloadavg()[0], 1)
    return {"cpu": cpu, "version": __version__, "threads": torch.get_num_threads(), "load": load}


def bank(workload: Workload) -> dict[str, Any]:
    """Its size by arithmetic and as held, in full and half precision, and what half precision does to the rate."""
    model = workload.model()
    features, prediction = seen_once(workload, model)
    elements = features[0].numel(), prediction[0].numel()
    held, rates = {}, {}
    x = workload.images(min(10, workload.shape[0]))
    for dtype in (torch.float32, torch.float16):
        adapter = Adapter(model, Tent(), Proportional(workload.alpha), memory=empty_bank(workload, dtype))
        fill(adapter, workload, model)
        assert adapter.memory is not None
        name = str(dtype).removeprefix("torch.")
        held[name] = adapter.memory.nbytes
        rates[name] = [adapter.step(x).rate for _ in range(3)]
    return {"pairs": workload.capacity, "key": elements[0], "value": elements[1], "bytes": held, "rates": rates}


def options(workload: Workload, settings: argparse.Namespace) -> dict[str, float]:
    """Seconds of a plain forward pass and of dynamic Tent, with and without what makes networks faster."""
    repeats = settings.repeats or max(2, workload.repeats // 2)
    x = workload.images()
    runs: dict[str, Callable[[], object]] = {PLAIN: rows(workload)[PLAIN](workload).run}
    for layout in ("given", "auto"):
        adapter = make_adapter(workload, "Tent", "dynamic", layout=layout)
        runs[layout] = lambda adapter=adapter: adapter.step(x)
    if has_bf16():
        narrow = make_adapter(workload, "Tent", "dynamic")

        def autocast() -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                narrow.step(x)

        runs["bf16"] = autocast
    return medians(interleaved(runs, repeats))


def compiled(workload: Workload, settings: argparse.Namespace) -> dict[str, Any]:
    """Seconds of dynamic Tent on a network under torch.compile, and of compiling it; or why it cannot be."""
    repeats = settings.repeats or max(2, workload.repeats // 2)
    x, plain, adapter = (
        workload.images(),
        make_adapter(workload, "Tent", "dynamic"),
        make_adapter(workload, "Tent", "dynamic"),
    )
    adapter.model.compile()
    started = time.perf_counter()
    try:
        adapter.step(x)
    except (RuntimeError, AssertionError) as error:
        return {"error": str(error).strip().splitlines()[0]}
    spent = time.perf_counter() - started
    seconds = medians(interleaved({"eager": lambda: plain.step(x), "compiled": lambda: adapter.step(x)}, repeats))
    return {"compiling": spent, **seconds}


def memory(workload: Workload, settings: argparse.Namespace) -> int:
    """Peak bytes of one row beyond what the process had before anything was made."""
    before = PeakMemory.now()
    row = {**newer_rows(workload), **rows(workload)}[settings.row](workload)
    peak = PeakMemory()
    row.run()
    return peak.bytes() - before


def recall(workload: Workload, settings: argparse.Namespace) -> list[dict[str, float]]:
    """Seconds of one recall for a batch against the number of pairs held; only the search and the mean."""
    features, prediction = seen_once(workload, workload.model())
    generator = torch.Generator().manual_seed(3)
    spread = features.std()

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        which = torch.randint(len(features), (count,), generator=generator)
        return features[which] + spread * torch.randn(count, *features.shape[1:], generator=generator), prediction[
            which
        ]

    queries = drawn(workload.shape[0])[0]
    banks = {}
    for capacity in CAPACITIES if not settings.quick else (20, 40):
        banks[capacity] = MemoryBank(capacity=capacity, neighbors=workload.neighbors)
        while len(banks[capacity]) < capacity:
            banks[capacity].push(*drawn(min(200, capacity)))
    runs = {str(k): (lambda held=held: held.recall(queries)) for k, held in banks.items()}
    seconds = medians(interleaved(runs, settings.repeats or 5))
    return [{"pairs": int(k), "seconds": seconds[k]} for k in runs]


def stream(workload: Workload, settings: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step, beside a plain pass at the same moment, and resident memory along a stream of small images."""
    torch.set_num_threads(1)  # images as small as these gain nothing from more
    length, window = (STREAM, 1000) if not settings.quick else (200, 50)
    model = Architecture("unet", 2, 1, 3, {"width": 4}).build(seed=0).eval()
    adapter = Adapter(model, Tent(), Proportional(1e-3), memory=MemoryBank("down_4"))
    generator = torch.Generator().manual_seed(4)
    seconds, plain, resident = [], [], {}
    for number in range(1, length + 1):
        x = torch.rand(1, 1, 32, 32, generator=generator)
        started = time.perf_counter()
        adapter.step(x)
        between = time.perf_counter()
        with torch.inference_mode():
            model(x)
        seconds.append(between - started)
        plain.append(time.perf_counter() - between)
        if number in (window, length):
            resident[number] = PeakMemory.now()
    return {
        "images": length,
        "window": window,
        "first": median(seconds[:window]),
        "last": median(seconds[-window:]),
        "plain_first": median(plain[:window]),
        "plain_last": median(plain[-window:]),
        "resident_after_first": resident[window],
        "resident_after_last": resident[length],
    }


def training(workload: Workload, settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds per epoch of our training loop beside a plain loop on the same network, images and batches."""
    small = settings.quick
    kinds = [
        (
            "U-Net, 64 images of 128 × 256, batch 8",
            Architecture("unet", 2, 1, 11),
            (1, 128, 256),
            64 if not small else 8,
            8,
        ),
        (
            "DenseNet-121, 64 images of 96 × 96, batch 16",
            Architecture("densenet121", 2, 3, 2),
            (3, 96, 96),
            64 if not small else 4,
            16,
        ),
    ]
    return [
        _epochs(*kind, augment=augment, repeats=settings.repeats or 5)
        for kind in kinds
        for augment in ("none", "light")
    ]


def _epochs(
    title: str,
    architecture: Architecture,
    shape: tuple[int, ...],
    count: int,
    batch: int,
    *,
    augment: str,
    repeats: int,
) -> dict[str, Any]:
    dense = architecture.name == "unet"
    generator = torch.Generator().manual_seed(5)
    spatial = shape[1:] if dense else ()
    pairs = [
        (torch.rand(shape, generator=generator), torch.randint(architecture.classes, spatial, generator=generator))
        for _ in range(count)
    ]
    changes = Augmentation(augment).compose(2, shape[0], dense=dense)
    with TemporaryDirectory() as folder:
        runs = {
            "plain": _plain_epoch(architecture.build(seed=0), Examples(pairs, changes), batch),
            "ours": _our_epoch(architecture.build(seed=0), Examples(pairs, changes), batch, Path(folder)),
        }
        seconds = medians(interleaved(runs, repeats))
    return {"title": title, "augmentation": augment, **seconds}


def _plain_epoch(model: nn.Module, examples: Examples, batch: int) -> Callable[[], object]:
    """The loop of any tutorial."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def epoch() -> None:
        model.train()
        for images, labels in torch.utils.data.DataLoader(examples, batch_size=batch, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            loss.item()

    return epoch


def _our_epoch(model: nn.Module, examples: Examples, batch: int, folder: Path) -> Callable[[], object]:
    module = TaskTraining(model, TaskLoss("ce"), None)
    journal = TrainingState(folder / "resume.pt", {}, resume=False)

    def epoch() -> None:
        plan, ranks = Plan("task", 1, batch, 1e-3, 0), Ranks()
        learn(
            supervised(module, plan, ranks),
            examples,
            plan,
            journal,
            device=torch.device("cpu"),
            ranks=ranks,
            report=lambda *at: None,
            finish=lambda epoch, row: None,
        )

    return epoch


def has_bf16() -> bool:
    """Whether this CPU computes in bfloat16."""
    information = Path("/proc/cpuinfo")
    words = set(information.read_text().split()) if information.is_file() else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


PARTS = {
    "timing": timing,
    "methods": methods,
    "options": options,
    "compile": compiled,
    "memory": memory,
    "recall": recall,
    "stream": stream,
    "training": training,
}
