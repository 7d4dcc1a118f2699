"""How much faster is a grid of streams with two tasks at the same time? Writes docs/results/grid.json, docs/grid.md.

    make bench-grid                                             # a quarter of an hour on two cores that are free
    python benchmarks/grid.py --images 4 --rounds 1 --output X  # to see that it works; X has a copy of the page

The same streams are run one after the other and two at the same time, each with one thread. A speed-up is a ratio
within a round, and the median over rounds is reported. Starting processes takes seconds, however long the streams are,
so the grid takes minutes. A machine that others use too makes wall time worthless, so processor time stands beside it,
and how much of the cores was ours: a speed-up beyond that is the machine's own speed, which drifts, and does not count.
Standard error tells of each run as it ends.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dltta.evaluation.bench import run_experiment
from dltta.evaluation.experiment import Experiment
from dltta.evaluation.provenance import Provenance
from dltta.evaluation.runners import Local, variables
from dltta.models.allocator import keep_freed_memory
from dltta.recipes import Recipe
from dltta.training import TrainingSettings

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- measured by benchmarks/grid.py -->\n", "<!-- end -->"
TARGET = 1.7


@dataclass(frozen=True)
class Way:
    """How many tasks run at the same time, with how many threads each."""

    jobs: int
    threads: int

    @property
    def name(self) -> str:
        return f"{self.jobs} x {self.threads}"


WAYS = (Way(1, 1), Way(2, 1))


def experiment(folder: Path, images: int, width: int, orders: int) -> Experiment:
    return Experiment(
        source=("phantom:oct:spectralis:4",), targets=(f"phantom:oct:cirrus:{images}:1",), output=str(folder),
        network_options={"width": width}, methods=("tent",), rates=("fixed", "dynamic"), orders=orders, examples=1,
        in_domain="none", training=TrainingSettings(epochs=1, batch_size=2, validation=0.25),
        adaptation=Recipe(batches_kept=4, neighbors=2),
    )  # fmt: skip


def run(folder: Path, way: Way, chosen: argparse.Namespace) -> dict[str, float]:
    """Seconds of all streams, of the clock and of the processor; the model is trained before."""
    work = folder / way.name.replace(" ", "")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder / "trained", work)
    arguments = [str(work), str(way.jobs), str(way.threads), str(chosen.images), str(chosen.width), str(chosen.orders)]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, **variables(way.threads)}
    subprocess.run([sys.executable, __file__, "--way", *arguments], check=True, env=environment)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    sys.stderr.write(f"{way.name} threads: {seconds:.1f} s, {used:.1f} s of the processor\n")
    return {"seconds": seconds, "processor": used, "load": os.getloadavg()[0]}


def summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Against one after the other with one thread: the median of the ratios within each round."""
    first = WAYS[0].name
    return {
        way.name: {
            "speedup": median(each[first]["seconds"] / each[way.name]["seconds"] for each in rounds),
            "processor": median(each[way.name]["processor"] / each[first]["processor"] for each in rounds),
            "cores": median(each[way.name]["processor"] / each[way.name]["seconds"] for each in rounds),
        }
        for way in WAYS
    }


def block(result: dict[str, Any]) -> str:
    """What docs/grid.md says of it."""
    found, machine = result["ways"], "{cores} cores ({cpu})".format(**result["machine"])
    load = max(each["load"] for way in result["rounds"] for each in way.values())
    rows = [
        f"| {way.jobs} | {way.threads} | {found[way.name]['speedup']:.2f} × | {found[way.name]['processor']:.2f} × "
        f"| {found[way.name]['cores']:.2f} |"
        for way in WAYS
    ]
    reached = min(found["2 x 1"]["speedup"], found["2 x 1"]["cores"])
    verdict = "reached" if reached >= TARGET else "missed"
    shared = f", shared with other work (load average up to {load:.0f})" if load > 2.5 else ""
    count = len(result["rounds"])
    times = "once" if count == 1 else f"median of {count} rounds"
    lines = [
        f"{result['streams']} streams of {result['images']} images, {machine}{shared}, {times}, starting of processes "
        "included; ratios to the first row:",
        "",
        "| tasks at the same time | threads of each | speed | processor time | cores that it got |",
        "|--:|--:|--:|--:|--:|",
        *rows,
        "",
        f"Two tasks are {reached:.2f} × as fast as one after the other ({TARGET} wanted: {verdict}).",
    ]
    if load > 2.5:
        lines[-1] += (
            " On a machine that others use too, this says little; processor time says what tasks cost each other."
        )
    return "\n".join(lines) + "\n"


def write(result: dict[str, Any], docs: Path) -> None:
    (docs / "results" / "grid.json").write_text(json.dumps(result, indent=1) + "\n")
    page = (docs / "grid.md").read_text()
    head, _, rest = page.partition(BEGIN)
    (docs / "grid.md").write_text(head + BEGIN + block(result) + END + rest.partition(END)[2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60, help="of each stream")
    parser.add_argument("--orders", type=int, default=20, help="twice as many streams")
    parser.add_argument("--width", type=int, default=16, help="of the U-Net; 16 is the paper's")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--output", type=Path, default=DOCS, help="where the result and the page are")
    parser.add_argument("--way", nargs=6, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way:
        work, *numbers = chosen.way
        jobs, threads, images, width, orders = map(int, numbers)
        keep_freed_memory()  # as `dltta bench` does
        run_experiment(experiment(Path(work), images, width, orders), runner=Local(jobs, threads))
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        trained = experiment(folder / "trained", 2, chosen.width, 1)
        run_experiment(trained, runner=Local(1, 1))
        shutil.rmtree(folder / "trained" / "streams")
        rounds = [{way.name: run(folder, way, chosen) for way in WAYS} for _ in range(chosen.rounds)]
    result = {
        "machine": Provenance.collect(seeds=[], data={}).machine,
        "streams": 2 * chosen.orders,
        "images": chosen.images,
        "width": chosen.width,
        "settings": [asdict(way) for way in WAYS],
        "rounds": rounds,
        "ways": summary(rounds),
    }
    write(result, chosen.output)
    sys.stdout.write(block(result))


if __name__ == "__main__":
    main()
