"""Does the service keep its promises under load, and what does it cost? Writes docs/speed-serve.md and its numbers.

    python benchmarks/serve.py --scratch FOLDER      # 1,000 keys, 8 shards, 20 requests each, 50 kills, a lost node
    python benchmarks/serve.py --keys 40 --shards 2 --requests 6 --kills 10
    python benchmarks/serve.py --page                # the page again, from the numbers that are there

With `--scratch` a run that was stopped goes on where it was. Every number is from one run on one machine, which is
written beside it; speeds are ratios within the run. Networks and images are tiny: what is measured is the service.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image as Pillow
from ray.cluster_utils import Cluster as RayCluster

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
from dltta.serving.shard import Reply, ShardSettings
from serve_page import NODES, page

ROOT = Path(__file__).parents[1]
SETTINGS = StreamSettings(paper("tent", "dynamic"))
LITERAL = 3  # keys that are compared with the command `dltta adapt` itself


@dataclass(frozen=True)
class Load:
    """What is asked of the service."""

    keys: int = 1000
    shards: int = 8
    requests: int = 20
    kills: int = 50
    live: int = 6
    size: int = 32
    latency_seconds: int = 60
    memory_keys: int = 128
    minutes: int = 0  # after which no more keys are begun; 0: no bound


# what is sent


def model(folder: Path) -> ModelSource:
    if not folder.exists():
        architecture = Architecture("unet", 2, 1, 3, {"width": 4})
        scaled = Preprocessing("scale", 255.0, None)
        network = architecture.build(seed=0)
        save_checkpoint(
            folder, Checkpoint(network, architecture, "segmentation", ("bg", "a", "b"), scaled, {"epoch": 1})
        )
    return ModelSource(str(folder))


def tiny() -> ModelSource:
    """A network that costs next to nothing."""
    scaled = Preprocessing("scale", 255.0, None)
    return ModelSource(
        "tiny:Tiny", task="segmentation", classes=("bg", "a", "b"), channels=1, preprocessing=scaled, untrained=True
    )


def draw(folder: Path, count: int, size: int, seed: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    random_ = np.random.default_rng(seed)
    for index in range(count):
        Pillow.fromarray(random_.integers(0, 255, (size, size)).astype(np.uint8)).save(folder / f"case_{index:03d}.png")
    return folder


def request(images: Path, number: int) -> Request:
    name = f"case_{number:03d}"
    return Request(name, "x.png", (images / f"{name}.png").read_bytes())


def plan(requests: int, rng: random.Random) -> list[list[int]]:
    """Groups of requests that are sent at once: out of order, some of them twice, some of them again later."""
    order = list(range(requests))
    for begin in range(0, requests, 3):
        part = order[begin : begin + 3]
        rng.shuffle(part)
        order[begin : begin + 3] = part
    groups, sent = [], 0
    while sent < requests:
        new = order[sent : sent + rng.choice([1, 1, 2, 3])]
        sent += len(new)
        again = [rng.choice(order[:sent]) for _ in range(3) if rng.random() < 0.2]
        for number in again:
            new.insert(rng.randrange(len(new) + 1), number)
        groups.append(new)
    return groups


# what dies


def killed(pid: int) -> bool:
    """Kills a process; False if it had just ended by itself, as those of a lost machine do."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@dataclass
class Deaths:
    """Shards that are killed, and one machine that is lost, at random moments of the run."""

    cluster: Cluster
    machines: RayCluster
    moments: list[int]  # answers after which a shard is killed
    loss: int | None  # answers after which a machine is lost
    rng: random.Random
    note: Callable[[dict[str, Any]], None]

    async def watch(self, answered: Callable[[], int]) -> None:
        while self.moments or self.loss is not None:
            await asyncio.sleep(self.rng.uniform(0.02, 0.3))
            if self.loss is not None and answered() >= self.loss:
                gone = self.rng.choice(sorted(self.machines.worker_nodes, key=str))
                await asyncio.to_thread(self.machines.remove_node, gone, allow_graceful=False)
                self.loss = None
                self.note({"died": "machine"})
            if self.moments and answered() >= self.moments[0]:
                alive = await self.cluster.memory(patience=60)
                if alive and killed(int(self.rng.choice(alive)["pid"])):
                    self.moments.pop(0)
                    self.note({"died": "shard"})


class Chaos:
    """Every key's requests while shards and a machine die; what came back is noted key by key, so that it can go on."""

    def __init__(self, cluster: Cluster, machines: RayCluster, load: Load, folder: Path) -> None:
        self.cluster, self.machines, self.load, self.folder = cluster, machines, load, folder
        self.answered = self.unavailable = 0
        self.at_a_time = asyncio.Semaphore(4 * load.shards)
        self.end = time.monotonic() + 60 * load.minutes if load.minutes else float("inf")

    def note(self, found: dict[str, Any]) -> None:
        with (self.folder / "chaos.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")

    async def run(self) -> None:
        known = _notes(self.folder)
        done = {each["site"] for each in known if "site" in each}
        died = Counter(each["died"] for each in known if "died" in each)
        total = self.load.keys * self.load.requests
        rng = random.Random(len(known))
        self.answered = len(done) * self.load.requests
        to_kill = self.load.kills - died["shard"]
        moments = sorted(
            rng.randrange(self.answered + 1, max(self.answered + 2, 17 * total // 20)) for _ in range(to_kill)
        )
        loss = None if died["machine"] else max(total // 2, self.answered)
        deaths = Deaths(self.cluster, self.machines, moments, loss, rng, self.note)
        started = time.perf_counter()
        watching = asyncio.create_task(deaths.watch(lambda: self.answered))
        sites = [self.site(index, key) for index, key in enumerate(_keys(self.load)) if key.site not in done]
        await asyncio.gather(*sites)
        watching.cancel()
        self.note({"seconds": time.perf_counter() - started, "repeated": self.cluster.restarts})

    async def send(self, key: Key, images: Path, number: int) -> tuple[int, Reply, float, int]:
        """As a client would: again, while the service says that it cannot now."""
        started = time.perf_counter()
        for tried in range(300):  # noqa: B007
            reply = await self.cluster.answer(key, request(images, number))
            if reply.status != "unavailable":
                break
            self.unavailable += 1
            await asyncio.sleep(0.5)
        return number, reply, time.perf_counter() - started, tried

    async def site(self, index: int, key: Key) -> None:
        async with self.at_a_time:
            if time.monotonic() > self.end:
                return
            images = self.folder / "images" / key.name
            draw(images, self.load.requests, self.load.size, index)
            order: dict[int, int] = {}  # as they are sent for the first time
            found: list[tuple[int, Reply, float, int]] = []
            for group in plan(self.load.requests, random.Random(index)):
                before = len(order)
                for number in group:
                    order.setdefault(number, len(order) + 1)
                found += await asyncio.gather(*(self.send(key, images, number) for number in group))
                self.answered += len(order) - before
            self.note({"site": key.site, **self.judged(key, order, found)})

    def judged(self, key: Key, order: dict[int, int], found: list[tuple[int, Reply, float, int]]) -> dict[str, Any]:
        """What is wrong with the replies: each must be the one line of its request, in the order of sending.

        Where the service said that it cannot now, the client's repetition may come after later requests: then the log
        decides about the order.
        """
        lines = _lines(KeyFolders(self.folder / "state").stream(key))
        logged = {line["request"]: line for line in lines}
        tried = sum(each[3] for each in found)
        wrong = []
        if not len(lines) == len(logged) == self.load.requests:
            wrong.append(f"{len(lines)} lines of {len(logged)} requests")
        for number, reply, _, _ in found:
            line = logged.get(f"case_{number:03d}")
            if reply.status != "answered" or reply.line != line:
                wrong.append(f"case {number}: {reply.status} {reply.detail}")
            elif not tried and reply.line["sequence"] != order[number]:
                wrong.append(f"case {number}: {reply.line['sequence']} instead of {order[number]}")
        return {"wrong": wrong, "sent": len(found), "tried": tried, "latencies": [round(each[2], 4) for each in found]}

    def summary(self) -> dict[str, Any]:
        known = _notes(self.folder)
        sites = [each for each in known if "site" in each]
        runs = [each for each in known if "seconds" in each]
        died = Counter(each["died"] for each in known if "died" in each)
        latencies = [seconds for each in sites for seconds in each["latencies"]]
        return {
            "keys": len(sites),
            "sent": sum(each["sent"] for each in sites),
            "unavailable": sum(each["tried"] for each in sites),
            "wrong": [f"{each['site']}: {problem}" for each in sites for problem in each["wrong"]],
            "killed": died["shard"],
            "machines_lost": died["machine"],
            "calls_that_found_their_shard_dead": sum(each["repeated"] for each in runs),
            "seconds": sum(each["seconds"] for each in runs),
            "p50_seconds": _percentile(latencies, 50),
            "p99_seconds": _percentile(latencies, 99),
        }


def run_chaos(source: ModelSource, folder: Path, load: Load) -> dict[str, Any]:
    machines = RayCluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    for _ in range(NODES - 1):
        machines.add_node(num_cpus=4)
    settings = ShardSettings(folder / "state", {"m": tiny()}, SETTINGS, live=load.live)
    cluster = Cluster(settings, shards=load.shards, waiting=100, total=100_000, address=machines.address)
    try:
        cluster.start()
        chaos = Chaos(cluster, machines, load, folder)
        asyncio.run(chaos.run())
        return chaos.summary()
    finally:
        cluster.stop()
        machines.shutdown()


# the same, serially


def compare(source: ModelSource, folder: Path, load: Load) -> dict[str, Any]:
    """How many keys have states and masks of a serial stream, bit for bit; two processes share the work."""
    done = folder / "compared.jsonl"
    known = {} if not done.exists() else dict(json.loads(line) for line in done.read_text().splitlines())
    finished = {each["site"] for each in _notes(folder) if "site" in each}
    todo = [key for key in _keys(load) if key.site in finished and key.name not in known]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=spawn) as pool, done.open("a") as file:
        pieces = [todo[begin : begin + 10] for begin in range(0, len(todo), 10)]
        for found in pool.map(_same, [folder] * len(pieces), pieces):
            known |= found
            file.writelines(json.dumps(each) + "\n" for each in found.items())
            file.flush()
    by_command = sum(_same_by_command(folder, key) for key in _keys(load)[:LITERAL])
    return {"same": sum(known.values()), "compared": len(known), "by_command": by_command, "commands": LITERAL}


def _same(folder: Path, keys: Sequence[Key]) -> dict[str, bool]:
    torch.set_num_threads(1)
    opened, folders, found = tiny().open(), KeyFolders(folder / "state"), {}
    for key in keys:
        serial = folder / "serial" / key.name
        shutil.rmtree(serial, ignore_errors=True)
        cases = {case.name: case for case in find_incoming(folder / "images" / key.name)}
        lines = _lines(folders.stream(key))
        with Stream(opened, serial, SETTINGS) as stream:
            stream.run([cases[line["request"]] for line in lines])
        found[key.name] = _bits(_lines(serial)) == _bits(lines)
        shutil.rmtree(serial)
    return found


def _same_by_command(folder: Path, key: Key) -> bool:
    """The command itself, on copies whose names have the order of arrival."""
    lines = _lines(KeyFolders(folder / "state").stream(key))
    with tempfile.TemporaryDirectory() as scratch:
        images = Path(scratch, "in")
        images.mkdir()
        for number, line in enumerate(lines):
            name = f"{line['request']}.png"
            shutil.copy(folder / "images" / key.name / name, images / f"{number:03d}_{name}")
        command = [sys.executable, "-m", "dltta", "adapt", "-m", "tiny:Tiny", "-i", images, "-o", Path(scratch, "out")]
        command += ["--method", "tent", "--task", "segmentation", "--classes", "bg,a,b", "--intensity", "scale:255"]
        subprocess.run([*map(str, command), "--untrained"], check=True, capture_output=True)
        return _bits(_lines(Path(scratch, "out"))) == _bits(lines)


def _bits(lines: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["state_sha256"], line["sha256"]) for line in lines]


# what it costs


def throughput(source: ModelSource, folder: Path, load: Load, *, rounds: int = 3, count: int = 40) -> dict[str, Any]:
    """Images per second of the service, one site for each core, against `dltta adapt` on the same images.

    `dltta adapt` with one thread or with all, whichever is faster at the moment; rounds of both take turns. Other work
    on the machine leaves several processes a larger share than one, so processor time per image is compared too.
    """
    shards = os.cpu_count() or 1
    images = [draw(folder / f"speed_{i}", count, 128, 100 + i) for i in range(shards)]
    cluster = Cluster(
        ShardSettings(folder / "speed_state", {"m": source}, SETTINGS, threads=1),
        shards=shards,
        waiting=count + 1,
        total=10_000,
    )
    cluster.start()
    found: list[tuple[float, float]] = []
    work: list[tuple[float, float]] = []
    for number in range(rounds):
        keys = _one_key_per_shard(shards, f"round {number}")
        begun = time.process_time()
        adapt = _adapting(source, folder, images, 1, number)
        alone = (time.process_time() - begun) / (shards * count)
        adapt = max(adapt, _adapting(source, folder, [draw(folder / "speed_few", 8, 128, 99)], shards, number))
        begun = time.process_time() + sum(_worked(cluster))
        served = asyncio.run(_serving(cluster, keys, images, count))
        work.append((alone, (time.process_time() + sum(_worked(cluster)) - begun) / (shards * count)))
        found.append((adapt, served))
    cluster.stop()
    return {
        "adapt_per_second": [adapt for adapt, _ in found],
        "service_per_second": [served for _, served in found],
        "ratio": statistics.median(served / adapt for adapt, served in found),
        "adapt_processor_seconds": [adapt for adapt, _ in work],
        "service_processor_seconds": [served for _, served in work],
        "processor_ratio": statistics.median(adapt / served for adapt, served in work),
    }


def _worked(cluster: Cluster) -> list[float]:
    """Processor seconds of every shard so far."""
    found = []
    for shard in asyncio.run(cluster.memory(patience=60)):
        times = Path(f"/proc/{int(shard['pid'])}/stat").read_text().rpartition(")")[2].split()
        found.append((int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"))
    return found


async def _serving(cluster: Cluster, keys: Sequence[Key], images: Sequence[Path], count: int) -> float:
    async def site(key: Key, each: Path) -> None:
        for number in range(1, count):
            await cluster.answer(key, request(each, number))

    pairs = list(zip(keys, images, strict=True))
    await asyncio.gather(*(cluster.answer(key, request(each, 0)) for key, each in pairs))
    begun = time.perf_counter()
    await asyncio.gather(*(site(key, each) for key, each in pairs))
    return len(pairs) * (count - 1) / (time.perf_counter() - begun)


def _adapting(source: ModelSource, folder: Path, images: Sequence[Path], threads: int, number: int) -> float:
    """Images per second of one process that takes one folder after the other."""
    torch.set_num_threads(threads)
    opened = source.open()
    started, count = time.perf_counter(), 0
    for i, each in enumerate(images):
        place = folder / f"adapt_{number}_{threads}_{i}"
        shutil.rmtree(place, ignore_errors=True)
        with Stream(opened, place, SETTINGS) as stream:
            count += stream.run(find_incoming(each)).predicted
    return count / (time.perf_counter() - started)


def latency(source: ModelSource, folder: Path, load: Load) -> dict[str, Any]:
    """Time in the queue when requests arrive at random moments, half as often as the service can answer them."""
    shards, sites = os.cpu_count() or 1, 4 * (os.cpu_count() or 1)
    shutil.rmtree(folder / "latency_state", ignore_errors=True)
    settings = ShardSettings(folder / "latency_state", {"m": source}, SETTINGS, live=sites, threads=1)
    cluster = Cluster(settings, shards=shards, waiting=10_000, total=10_000)
    cluster.start()
    keys = [Key("m", f"latency/{number}") for number in range(sites)]
    rng = random.Random(0)

    async def full() -> float:
        """Requests per second with all sites at once."""
        images = [draw(folder / "latency_full" / str(i), 40, 128, 200 + i) for i in range(sites)]
        return await _serving(cluster, keys, images, 40)

    async def half(rate: float) -> list[tuple[float, float]]:
        count = int(rate * load.latency_seconds)
        images = draw(folder / "latency_half", count, 128, 300)

        async def one(number: int) -> tuple[float, float]:
            begun = time.perf_counter()
            case = request(images, number)
            reply = await cluster.answer(rng.choice(keys), Request(f"half_{number}", case.filename, case.content))
            whole = time.perf_counter() - begun
            return whole - reply.seconds, whole

        tasks, begun, due = [], time.perf_counter(), 0.0
        for number in range(count):
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(number)))
        return await asyncio.gather(*tasks)

    async def both() -> tuple[float, list[tuple[float, float]]]:
        most = await full()
        return most, await half(most / 2)

    most, found = asyncio.run(both())
    cluster.stop()
    waited, whole = [pair[0] for pair in found], [pair[1] for pair in found]
    return {
        "per_second_at_full_load": most,
        "requests": len(found),
        "waited_p50": _percentile(waited, 50),
        "waited_p99": _percentile(waited, 99),
        "whole_p50": _percentile(whole, 50),
        "whole_p99": _percentile(whole, 99),
    }


def memory(source: ModelSource, folder: Path, load: Load) -> dict[str, Any]:
    """Resident size of one shard after its first 1, 2, 4 … keys, of which a few stay in memory."""
    shutil.rmtree(folder / "memory_state", ignore_errors=True)
    live = 4
    settings = ShardSettings(folder / "memory_state", {"m": source}, SETTINGS, live=live, threads=1)
    cluster = Cluster(settings, shards=1, waiting=100, total=1000)
    cluster.start()
    images = draw(folder / "memory", 2, 128, 400)
    found: list[tuple[int, float]] = []

    async def keys() -> None:
        for number in range(load.memory_keys):
            for image in range(2):
                await cluster.answer(Key("m", f"memory/{number}"), request(images, image))
            if (number + 1) & number == 0:  # a power of two
                found.append((number + 1, (await cluster.memory(patience=60))[0]["resident"] / 1e6))

    asyncio.run(keys())
    cluster.stop()
    return {"live": live, "resident_mb": found}


# small things


def _keys(load: Load) -> list[Key]:
    return [Key("m", f"hospital/{number}") for number in range(load.keys)]


def _notes(folder: Path) -> list[dict[str, Any]]:
    """What is known of the keys that are finished, and of what died."""
    path = folder / "chaos.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _lines(folder: Path) -> list[dict[str, Any]]:
    """Of cases, in their order."""
    lines = map(json.loads, (folder / "stream.jsonl").read_text().splitlines())
    return [line for line in lines if "prediction" in line]


def _percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[round(percent / 100 * (len(values) - 1))]


def _one_key_per_shard(shards: int, name: str) -> list[Key]:
    found: dict[int, Key] = {}
    number = 0
    while len(found) < shards:
        key = Key("m", f"{name}/{number}")
        found.setdefault(key.shard(shards), key)
        number += 1
    return [found[shard] for shard in range(shards)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Load):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--scratch", type=Path, help="folder that is kept, to go on after an interruption")
    parser.add_argument("--page", action="store_true", help="only write the page again")
    given = vars(parser.parse_args())
    scratch, only_page = given.pop("scratch"), given.pop("page")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # other processes import tiny.py too
    results = ROOT / "docs" / "results" / "serve.json"
    if not only_page:
        with tempfile.TemporaryDirectory() as temporary:
            result = run(Load(**given), scratch or Path(temporary))
        results.write_text(json.dumps(result, indent=1) + "\n")
    text = page(json.loads(results.read_text()))
    (ROOT / "docs" / "speed-serve.md").write_text(text)
    sys.stdout.write(text)


def run(load: Load, folder: Path) -> dict[str, Any]:
    """Every part that has no result in the folder yet."""
    folder.mkdir(parents=True, exist_ok=True)
    source = model(folder / "model")
    parts: dict[str, Callable[[ModelSource, Path, Load], dict[str, Any]]] = {
        "chaos": run_chaos,
        "compare": compare,
        "memory": memory,
        "throughput": throughput,
        "latency": latency,
    }
    result: dict[str, Any] = {
        "machine": Provenance.collect(seeds=[], data={}).machine,
        "load": asdict(load),
        "load_average": os.getloadavg()[0],
    }
    for name, part in parts.items():
        kept = folder / f"{name}.json"
        if not kept.exists():
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} {name}\n")
            result[name] = part(source, folder, load)
            if result["chaos"]["keys"] < load.keys and name in ("chaos", "compare"):
                continue  # the next run goes on with it
            kept.write_text(json.dumps(result[name]))
        result[name] = result.get(name) or json.loads(kept.read_text())
    return result


if __name__ == "__main__":
    main()
