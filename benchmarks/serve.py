"""Does the service keep its promises under load, and what does it cost? Writes docs/speed-serve.md and its numbers.

    python benchmarks/serve.py                # 1,000 keys, 8 shards, 20 requests each, 50 kills: hours on two cores
    python benchmarks/serve.py --keys 40 --shards 2 --requests 6 --kills 10

Every number is from one run on one machine, which is written beside it; speeds are ratios within the run.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image as Pillow

from dltta.data.inbox import find_incoming
from dltta.data.preprocessing import Preprocessing
from dltta.evaluation.provenance import Provenance
from dltta.models.io.checkpoint import Checkpoint, save_checkpoint
from dltta.models.io.opening import ModelSource
from dltta.models.nets.architecture import Architecture
from dltta.recipes import paper
from dltta.serving.cluster import Cluster
from dltta.serving.folder import Stream
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.session import Request
from dltta.serving.settings import StreamSettings
from dltta.serving.shard import ShardSettings

ROOT = Path(__file__).parents[1]
SETTINGS = StreamSettings(paper("tent", "dynamic"))


@dataclass(frozen=True)
class Load:
    """What is asked of the service."""

    keys: int = 1000
    shards: int = 8
    requests: int = 20
    kills: int = 50
    live: int = 4
    size: int = 64


def model(folder: Path) -> ModelSource:
    architecture = Architecture("unet", 2, 1, 3, {"width": 8})
    scaled = Preprocessing("scale", 255.0, None)
    save_checkpoint(
        folder,
        Checkpoint(architecture.build(seed=0), architecture, "segmentation", ("bg", "a", "b"), scaled, {"epoch": 1}),
    )
    return ModelSource(str(folder))


def draw(folder: Path, count: int, size: int, seed: int) -> Path:
    folder.mkdir(parents=True)
    random_ = np.random.default_rng(seed)
    for index in range(count):
        Pillow.fromarray(random_.integers(0, 255, (size, size)).astype(np.uint8)).save(folder / f"case_{index:03d}.png")
    return folder


def states(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "stream.jsonl").read_text().splitlines()]
    return [line["state_sha256"] for line in lines if "state_sha256" in line]


async def chaos(cluster: Cluster, load: Load, folder: Path, rng: random.Random) -> dict[str, float]:
    """Every key's requests, with duplicates and disorder, while shards are killed; what came back."""
    pending = [Key("m", f"hospital/{number}") for number in range(load.keys)]
    images = {key: draw(folder / "images" / key.name, load.requests, load.size, i) for i, key in enumerate(pending)}
    wrong, latencies = 0, []
    at_a_time = asyncio.Semaphore(4 * load.shards)

    async def site(key: Key) -> None:
        nonlocal wrong
        async with at_a_time:
            for number in range(load.requests):
                again = [rng.randrange(number + 1) for _ in range(rng.random() < 0.3)]
                asked = [number, *again]
                rng.shuffle(again)
                started = time.perf_counter()
                replies = await asyncio.gather(*(cluster.answer(key, request(images[key], n)) for n in asked))
                latencies.append(time.perf_counter() - started)
                for n, reply in zip(asked, replies, strict=True):
                    wrong += reply.status != "answered" or reply.line["sequence"] != n + 1

    killed = 0

    async def kill() -> None:
        nonlocal killed
        while killed < load.kills:
            await asyncio.sleep(rng.uniform(0.5, 3))
            alive = await cluster.memory()
            if alive:
                os.kill(int(rng.choice(alive)["pid"]), signal.SIGKILL)
                killed += 1

    killing = asyncio.create_task(kill())
    await asyncio.gather(*map(site, pending))
    killing.cancel()
    memory = await cluster.memory()
    return {
        "wrong": wrong,
        "killed": killed,
        "calls_that_found_their_shard_dead": cluster.restarts,
        "p50_seconds": statistics.median(latencies),
        "p99_seconds": sorted(latencies)[int(0.99 * (len(latencies) - 1))],
        "resident_mb": max(each["resident"] for each in memory) / 1e6,
        "live": max(each["live"] for each in memory),
    }


def request(images: Path, number: int) -> Request:
    name = f"case_{number:03d}"
    return Request(name, "x.png", (images / f"{name}.png").read_bytes())


def compare(source: ModelSource, folder: Path, load: Load, sample: int) -> tuple[int, int]:
    """How many of some keys have the states of a serial stream, bit for bit."""
    torch.set_num_threads(1)
    opened, folders = source.open(), KeyFolders(folder / "state")
    keys = [Key("m", f"hospital/{number}") for number in range(load.keys)][:sample]
    same = 0
    for key in keys:
        serial = folder / "serial" / key.name
        with Stream(opened, serial, SETTINGS) as stream:
            stream.run(find_incoming(folder / "images" / key.name))
        same += states(serial) == states(folders.stream(key))
        shutil.rmtree(serial)
    return same, len(keys)


def throughput(source: ModelSource, folder: Path, shards: int, size: int, count: int = 60) -> dict[str, float]:
    """Images per second of the service, one site for each shard, against `dltta adapt` on the same images.

    `dltta adapt` with one thread or with all, whichever is faster at the moment.
    """
    images = [draw(folder / f"speed_{i}", count, size, 100 + i) for i in range(shards)]
    adapt = max(_adapting(source, folder, images, threads) for threads in {1, os.cpu_count() or 1})
    settings = ShardSettings(folder / "speed_state", {"m": source}, SETTINGS, threads=1)
    cluster = Cluster(settings, shards=shards, waiting=count + 1, total=10_000)
    cluster.start()
    keys = _one_key_per_shard(shards)

    async def site(key: Key, each: Path) -> None:
        for number in range(count):
            await cluster.answer(key, request(each, number))

    async def all_sites() -> float:
        await asyncio.gather(*(cluster.answer(key, request(each, 0)) for key, each in zip(keys, images, strict=True)))
        begun = time.perf_counter()
        await asyncio.gather(*(site(key, each) for key, each in zip(keys, images, strict=True)))
        return shards * (count - 1) / (time.perf_counter() - begun)

    served = asyncio.run(all_sites())
    cluster.stop()
    return {"adapt_per_second": adapt, "service_per_second": served, "ratio": served / adapt}


def _adapting(source: ModelSource, folder: Path, images: list[Path], threads: int) -> float:
    """Images per second of one process that takes one folder after the other."""
    torch.set_num_threads(threads)
    opened = source.open()
    started, count = time.perf_counter(), 0
    for i, each in enumerate(images):
        with Stream(opened, folder / f"adapt_{threads}_{i}", SETTINGS) as stream:
            count += stream.run(find_incoming(each)).predicted
    return count / (time.perf_counter() - started)


def _one_key_per_shard(shards: int) -> list[Key]:
    found: dict[int, Key] = {}
    number = 0
    while len(found) < shards:
        key = Key("m", f"speed/{number}")
        found.setdefault(key.shard(shards), key)
        number += 1
    return [found[shard] for shard in range(shards)]


def page(result: dict) -> str:
    load, chaotic, speed = result["load"], result["chaos"], result["throughput"]
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items() if value is not None)
    memory = f"{chaotic['live']:.0f} of {load['keys']} keys in memory | {chaotic['resident_mb']:.0f} MB"
    same, compared = result["same"]
    return f"""# The service under load

Generated by `python benchmarks/serve.py`; numbers of one run on {machine}.

| | |
|:--|--:|
| keys × requests, shards | {load["keys"]} × {load["requests"]}, {load["shards"]} |
| shards killed (`kill -9`) while they worked | {chaotic["killed"]} |
| calls that found their shard dead and were repeated | {chaotic["calls_that_found_their_shard_dead"]} |
| answers missing, doubled or out of order | {chaotic["wrong"]} |
| keys whose states equal those of serial `dltta adapt`, bit for bit | {same} of {compared} compared |
| time to an answer with all keys at once, p50 / p99 | {chaotic["p50_seconds"]:.2f} s / {chaotic["p99_seconds"]:.2f} s |
| memory of the largest shard, {memory} |
| images per second against `dltta adapt` on the same images | {speed["ratio"]:.2f} × |

Load of the machine when the run began (processes that wanted a core): {result["load_average"]:.1f}.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in asdict(Load()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compare", type=int, default=10_000, help="keys to compare with serial streams")
    given = vars(parser.parse_args())
    sample = given.pop("compare")
    load = Load(**given)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    begun = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = model(folder / "model")
        speed = throughput(source, folder, min(load.shards, os.cpu_count() or 1), 128)
        settings = ShardSettings(folder / "state", {"m": source}, SETTINGS, live=load.live)
        cluster = Cluster(settings, shards=load.shards, waiting=100, total=100_000)
        cluster.start()
        chaotic = asyncio.run(chaos(cluster, load, folder, random.Random(0)))
        cluster.stop()
        same = compare(source, folder, load, sample)
    result = {
        "machine": Provenance.collect(seeds=[], data={}).machine,
        "load": asdict(load),
        "chaos": chaotic,
        "throughput": speed,
        "same": same,
        "load_average": begun,
    }
    (ROOT / "docs" / "results" / "serve.json").write_text(json.dumps(result, indent=1) + "\n")
    (ROOT / "docs" / "speed-serve.md").write_text(page(result))
    sys.stdout.write(page(result))


if __name__ == "__main__":
    main()
