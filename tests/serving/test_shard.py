"""A shard: few sites in memory, however many there are."""

import gc
import weakref

import streams
from dltta.models.io.opening import ModelSource
from dltta.serving.keys import Key
from dltta.serving.session import Request
from dltta.serving.shard import Shard, ShardSettings
from streams import write_images


def test_the_network_of_a_site_that_rests_leaves_memory_at_once(tmp_path):
    model = ModelSource(str(streams.save_model(tmp_path / "model")))
    shard = Shard(ShardSettings(tmp_path / "state", {"a": model}, streams.settings(guard=False), live=1))
    content = (write_images(tmp_path / "images", 1, size=(32, 32)) / "case_0.png").read_bytes()
    first, second = Key("a", "first"), Key("a", "second")
    gc.disable()  # not by chance
    try:
        shard.answer(first, Request("r", "x.png", content))
        network = weakref.ref(shard._sessions[first].stream.adapter)
        shard.answer(second, Request("r", "x.png", content))
        assert network() is None
    finally:
        gc.enable()
        shard.close()
