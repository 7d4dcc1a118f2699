"""How long does `dltta adapt` take beside the adaptation itself, and does its memory grow along a stream?

    python benchmarks/adapt.py                              200 images of 512 x 512, then 5000 of 64 x 64
    python benchmarks/adapt.py --images 10 --stream 50      to see that it works
    python benchmarks/adapt.py --only memory                keeps the rest of what was measured before

The command is run as one types it: a new Python, files in, predictions, log and state out; a clock in it counts the
seconds that it spends in `Adapter.step`. Besides, an eighth of the images before the command and an eighth after it are
adapted to by a process that has them in memory and does nothing else. Writes docs/results/speed_adapt.json and from it
docs/speed-adapt.md.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image as Pillow
from scipy.ndimage import gaussian_filter

from dltta import GuardedAdapter, cli
from dltta.data.inbox import find_incoming, read_incoming
from dltta.data.preprocessing import Preprocessing
from dltta.evaluation.provenance import Provenance
from dltta.models.allocator import keep_freed_memory
from dltta.models.io.checkpoint import Checkpoint, save_checkpoint
from dltta.models.io.opening import open_model
from dltta.models.nets.architecture import Architecture
from dltta.serving.folder import Stream

DOCS = Path(__file__).parent.parent / "docs"
TARGET = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--stream", type=int, default=5000, help="images along which memory is watched")
    parser.add_argument("--stream-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=16, help="of the U-Net; 16 is the paper's")
    parser.add_argument("--only", choices=("time", "memory"), help="measure this, keep the rest")
    parser.add_argument("--output", type=Path, default=DOCS, help="where the result and the page go")
    parser.add_argument("--alone", nargs=3, metavar=("MODEL", "IMAGES", "PART"), help=argparse.SUPPRESS)
    parser.add_argument("--command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--memory", nargs=3, metavar=("MODEL", "IMAGES", "OUT"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        print(json.dumps(alone(*chosen.alone)))
    elif chosen.command:
        command(chosen.command)
    elif chosen.memory:
        print(json.dumps(memory(*chosen.memory)))
    else:
        results = chosen.output / "results" / "speed_adapt.json"
        result = json.loads(results.read_text()) if chosen.only else {}
        result |= measure(chosen)
        results.parent.mkdir(parents=True, exist_ok=True)
        results.write_text(json.dumps(result, indent=1) + "\n")
        (chosen.output / "speed-adapt.md").write_text(page(result))
        print(page(result))


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    measured: dict[str, Any] = {"width": chosen.width, "provenance": asdict(Provenance.collect(seeds=(0,), data={}))}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder / "model", chosen.width)
        if chosen.only != "memory":
            measured |= measure_time(folder, model, chosen)
        if chosen.only != "time":
            many = make_images(folder / "many", chosen.stream, chosen.stream_size)
            grown, _, _ = timed(sys.executable, __file__, "--memory", model, many, folder / "grown")
            measured["memory"] = {"images": chosen.stream, "size": chosen.stream_size, **grown}
    return measured


def measure_time(folder: Path, model: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    images = make_images(folder / "images", chosen.images, chosen.size)
    alone = (sys.executable, __file__, "--alone", model, images)
    before, _, _ = timed(*alone, "first")
    adapt = ("adapt", "-m", model, "-i", images, "-o", folder / "out")
    spent, wall, processor = timed(sys.executable, __file__, "--command", *adapt)
    after, _, _ = timed(*alone, "last")
    predicted = sum(b'"prediction"' in line for line in (folder / "out" / "stream.jsonl").read_bytes().splitlines())
    if predicted != chosen.images:
        raise SystemExit(f"{predicted} of {chosen.images} images were predicted")
    return {
        "images": chosen.images,
        "size": chosen.size,
        "alone": {"images": 2 * (chosen.images // 8), **{name: before[name] + after[name] for name in before}},
        "adapt": {"seconds": wall, "processor": processor, **spent},
    }


def make_model(folder: Path, width: int) -> Path:
    """The paper's U-Net with weights of chance: as fast as a trained one."""
    architecture = Architecture("unet", 2, 1, 2, {"width": width})
    checkpoint = Checkpoint(
        architecture.build(seed=0), architecture, "segmentation", ("background", "x"), Preprocessing("scale", 255.0)
    )
    save_checkpoint(folder, checkpoint)
    return folder


def make_images(folder: Path, count: int, size: int) -> Path:
    """Grey PNG files of soft structures with noise, which compress like images do."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for number in range(count):
        soft = gaussian_filter(random.normal(size=(size, size)), size / 30)
        values = 128 + 50 * soft / soft.std() + 8 * random.normal(size=(size, size))
        Pillow.fromarray(values.clip(0, 255).astype(np.uint8)).save(folder / f"image{number:05d}.png")
    return folder


def timed(*command: Any) -> tuple[Any, float, float]:
    """What a process printed, as JSON if it is, and its seconds by the clock and by the processor."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout) if done.stdout.startswith("{") else done.stdout, wall, processor


def command(arguments: Sequence[str]) -> None:
    """`dltta` with these arguments; prints what its steps took."""
    step, spent = GuardedAdapter.step, {"steps": 0.0}

    def timed_step(adapter: GuardedAdapter, *given: Any, **options: Any) -> Any:
        started = time.perf_counter()
        try:
            return step(adapter, *given, **options)
        finally:
            spent["steps"] += time.perf_counter() - started

    clock, typed = patch.object(GuardedAdapter, "step", timed_step), patch.object(sys, "argv", ["dltta", *arguments])
    with clock, typed, redirect_stdout(sys.stderr), suppress(SystemExit):
        cli.main()
    print(json.dumps(spent))


def alone(model: str, images: str, part: str) -> dict[str, float]:
    """Adaptation and nothing else, to the first or the last eighth of the images."""
    keep_freed_memory()  # as the command does
    opened = open_model(model)
    adapter = Stream(opened, Path("nowhere")).adapter
    cases = find_incoming(images)
    eighth = len(cases) // 8
    chosen = cases[:eighth] if part == "first" else cases[-eighth:]
    ready = [opened.prepare(read_incoming(case)).image[None] for case in chosen]
    started, processor = time.perf_counter(), time.process_time()
    for x in ready:
        adapter.step(x)
    return {"seconds": time.perf_counter() - started, "processor": time.process_time() - processor}


def memory(model: str, images: str, output: str) -> dict[str, Any]:
    """Resident megabytes along a stream, at twenty places."""
    torch.set_num_threads(1)  # images as small as these gain nothing from more
    keep_freed_memory()
    cases = find_incoming(images)
    every = max(len(cases) // 20, 1)
    seen: list[list[float]] = []

    numbers = itertools.count(1)

    def look(line: Any) -> None:
        number = next(numbers)
        if number % every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            seen.append([number, pages * os.sysconf("SC_PAGE_SIZE") / 1e6])

    with Stream(open_model(model), Path(output)) as stream:
        stream.run(cases, look)
    return {"megabytes": seen}


def page(result: dict[str, Any]) -> str:
    adapt, pure, grown = result["adapt"], result["alone"], result["memory"]
    count, size = result["images"], result["size"]
    ratio = adapt["seconds"] / adapt["steps"]
    slower, busy = (adapt[name] / count / (pure[name] / pure["images"]) for name in ("seconds", "processor"))
    seconds, processor = (f"{pure[name] / pure['images']:.3f}" for name in ("seconds", "processor"))
    machine = result["provenance"]["machine"]
    samples = [grown["megabytes"][i] for i in (0, len(grown["megabytes"]) // 2, -1)]
    steps, every = np.diff([megabytes for _, megabytes in grown["megabytes"]]), grown["megabytes"][0][0]
    memory = "\n".join(f"| {int(case)} | {megabytes:.0f} MB |" for case, megabytes in samples)
    return f"""# What `dltta adapt` costs beside the adaptation

Made by `python benchmarks/adapt.py`: {count} images of {size} × {size}, U-Net of width {result["width"]}, `tent` with
the relative rate and the guard, {machine["torch_threads"]} of {machine["cores"]} cores of {machine["cpu"]}.

| | seconds per image | processor seconds per image |
|---|---|---|
| `dltta adapt`, from start to end | {adapt["seconds"] / count:.3f} | {adapt["processor"] / count:.3f} |
| of this in `Adapter.step` | {adapt["steps"] / count:.3f} | |
| ratio to these steps | {ratio:.2f} | |
| adaptation alone, {pure["images"]} images in memory | {seconds} | {processor} |
| **ratio to adaptation alone** | **{slower:.2f}** | **{busy:.2f}** |

While the network works on an image, the next one is read and the state and the log of the one before it go to the disk.
The target is a ratio of at most {TARGET} to adaptation alone. The reading thread computes on one core only: a second
team of OpenMP threads makes the network's threads sleep at every barrier of every layer, and steps take longer.

Resident memory along a stream of {grown["images"]} images of {grown["size"]} × {grown["size"]}:

| after images | resident |
|---|---|
{memory}

Every {int(every)} images add {1e6 * float(np.median(steps)) / every:.0f} bytes per image in the median; the most
that they added was {max(steps):.1f} MB.
"""


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    main()
