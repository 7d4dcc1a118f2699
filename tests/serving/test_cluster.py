"""Shards on Ray: whatever dies, each request is answered once, in order, from the states of a serial stream."""

import asyncio
import os
import random
import signal

import pytest

pytest.importorskip("ray", reason="the service is not installed: pip install 'dltta[serve]'")

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
KEYS, REQUESTS, KILLS = 6, 4, 5


def states(folder):
    return [line["state_sha256"] for line in lines(folder) if "state_sha256" in line]


@pytest.fixture
def cluster(tmp_path):
    model = streams.save_model(tmp_path / "model")
    settings = ShardSettings(tmp_path / "state", {"a": ModelSource(str(model))}, streams.settings(guard=False), live=2)
    cluster = Cluster(settings, shards=2, waiting=50)
    cluster.start()
    yield cluster
    cluster.stop()


def test_killed_shards_duplicates_and_disorder_change_nothing(cluster, tmp_path):
    rng = random.Random(0)
    keys = [Key("a", f"site {number}") for number in range(KEYS)]
    images = {key: write_images(tmp_path / key.name, REQUESTS, size=(32, 32), seed=i) for i, key in enumerate(keys)}

    def request(key, number):
        return Request(f"case_{number}", "x.png", (images[key] / f"case_{number}.png").read_bytes())

    async def one_site(key):
        """In order, with repetitions of earlier requests between them."""
        replies = []
        for number in range(REQUESTS):
            again = [rng.randrange(number + 1)] if rng.random() < 0.5 else []
            found = await asyncio.gather(*(cluster.answer(key, request(key, n)) for n in [number, *again]))
            replies += zip([number, *again], found, strict=True)
        return replies

    async def kill():
        for _ in range(KILLS):
            await asyncio.sleep(rng.uniform(0.05, 0.6))
            alive = await cluster.memory()
            if alive:
                os.kill(int(rng.choice(alive)["pid"]), signal.SIGKILL)

    async def all_of_it():
        *answers, _ = await asyncio.gather(*map(one_site, keys), kill())
        return answers

    answers = asyncio.run(all_of_it())
    folders = KeyFolders(tmp_path / "state")
    for key, replies in zip(keys, answers, strict=True):
        assert [reply.status for _, reply in replies] == ["answered"] * len(replies)
        for number, reply in replies:
            assert (reply.line["request"], reply.line["sequence"]) == (f"case_{number}", number + 1)
        serial = tmp_path / f"serial {key.name}"
        with Stream(ModelSource(str(tmp_path / "model")).open(), serial, streams.settings(guard=False)) as stream:
            stream.run(find_incoming(images[key]))
        assert states(folders.stream(key)) == states(serial)
    assert cluster.restarts > 0  # some calls found their shard dead


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
