"""Shards on Ray: whatever dies, each request is answered once, in order, from the states of a serial stream."""

import asyncio
import os
import random
import re
import signal
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="the service is not installed: pip install 'dltta[serve]'")

from ray.cluster_utils import Cluster as RayCluster

import streams
from dltta.data.inbox import find_incoming
from dltta.models.io.opening import ModelSource
from dltta.serving.cluster import Cluster
from dltta.serving.folder import Stream
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.session import Request
from dltta.serving.shard import ShardSettings
from dltta.serving.verification import verify
from streams import lines, write_images

pytestmark = pytest.mark.long
KEYS, REQUESTS, KILLS = 5, 4, 3


def states(folder):
    return [(line["state_sha256"], line["sha256"]) for line in lines(folder) if "prediction" in line]


def kill_one(processes, rng):
    """Kills one of them; those of the lost machine may just have ended by themselves."""
    for pid in rng.sample(processes, len(processes)):
        try:
            return os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


@pytest.fixture
def machines(monkeypatch):
    """Two nodes of a Ray cluster on this machine, which notices soon that one is gone."""
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as the service starts Ray
    soon = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    usual = {"num_cpus": 2, "include_dashboard": False, "_system_config": soon}
    cluster = RayCluster(initialize_head=True, head_node_args=usual)
    cluster.add_node(num_cpus=2)
    yield cluster
    cluster.shutdown()


def test_killed_shards_a_lost_machine_duplicates_and_disorder_change_nothing(machines, tmp_path):
    """Requests come out of order and several times; every line is written once, as a serial stream would."""
    rng = random.Random(0)
    model = ModelSource(str(streams.save_model(tmp_path / "model")))
    settings = ShardSettings(tmp_path / "state", {"a": model}, streams.settings(guard=False), live=2)
    cluster = Cluster(settings, shards=2, waiting=50, address=machines.address)
    cluster.start()
    keys = [Key("a", f"site {number}") for number in range(KEYS)]
    images = {key: write_images(tmp_path / key.name, REQUESTS, size=(32, 32), seed=i) for i, key in enumerate(keys)}
    answered = 0

    async def send(key, number):
        """As a client does: again, while the service says that it cannot now."""
        content = (images[key] / f"case_{number}.png").read_bytes()
        while (reply := await cluster.answer(key, Request(f"case_{number}", "x.png", content))).status == "unavailable":
            await asyncio.sleep(0.2)
        return number, reply

    async def one_site(key):
        nonlocal answered
        order = rng.sample(range(REQUESTS), REQUESTS)
        replies = []
        for number in order:
            again = [rng.choice(order[: order.index(number) + 1]) for _ in range(2) if rng.random() < 0.5]
            replies += await asyncio.gather(*(send(key, each) for each in [number, *again]))
            answered += 1
        return order, replies

    async def die():
        for number in range(KILLS + 1):
            while answered < (number + 1) * KEYS * REQUESTS // (KILLS + 3):
                await asyncio.sleep(0.02)
            if number == 1:
                (worker,) = machines.worker_nodes
                await asyncio.to_thread(machines.remove_node, worker, allow_graceful=False)
            else:
                kill_one([int(shard["pid"]) for shard in await cluster.memory(patience=60)], rng)

    async def all_of_it():
        *found, _ = await asyncio.gather(*map(one_site, keys), die())
        return found

    found = asyncio.run(all_of_it())
    cluster.stop()
    for key, (order, replies) in zip(keys, found, strict=True):
        stream = KeyFolders(tmp_path / "state").stream(key)
        logged = [line for line in lines(stream) if "prediction" in line]
        assert [line["request"] for line in logged] == [f"case_{number}" for number in order]
        assert all((reply.status, reply.line) == ("answered", logged[order.index(n)]) for n, reply in replies)
        cases = {case.name: case for case in find_incoming(images[key])}
        with Stream(model.open(), tmp_path / f"serial {key.name}", streams.settings(guard=False)) as serial:
            serial.run([cases[f"case_{number}"] for number in order])
        assert states(stream) == states(tmp_path / f"serial {key.name}")
        assert verify(stream) == []
    assert cluster.restarts > 0  # some calls found their shard dead


def test_the_files_for_several_machines_in_the_docs_are_such_files():
    """That of `ray up` by Ray's own schema; that of KubeRay has a head and workers with one volume between them."""
    import yaml
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
    ours, kubernetes = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    validate_config(prepare_config(ours))
    assert (kubernetes["apiVersion"], kubernetes["kind"]) == ("ray.io/v1", "RayCluster")
    groups = [kubernetes["spec"]["headGroupSpec"], *kubernetes["spec"]["workerGroupSpecs"]]
    for machine in (group["template"]["spec"] for group in groups):
        assert [each["name"] for each in machine["volumes"]] == ["shared"]
        assert machine["containers"][0]["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}]


def test_a_stopped_service_leaves_folders_that_verify_and_goes_on_where_it_was(tmp_path):
    model = streams.save_model(tmp_path / "model")
    settings = ShardSettings(tmp_path / "state", {"a": ModelSource(str(model))}, streams.settings(guard=False))
    images = write_images(tmp_path / "images", 2, size=(32, 32))
    key = Key("a", "s")
    for number in range(2):
        cluster = Cluster(settings, shards=1)
        cluster.start()
        content = (images / f"case_{number}.png").read_bytes()
        reply = asyncio.run(cluster.answer(key, Request(f"r{number}", "x.png", content)))
        cluster.stop()
        assert reply.line["sequence"] == number + 1
        assert verify(KeyFolders(tmp_path / "state").stream(key)) == []
