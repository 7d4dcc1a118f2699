"""A shard: few sites in memory, however many there are; nothing is left of what could not be used."""

import errno
import gc
import weakref

import pytest

import streams
from dltta.models.io.opening import ModelSource
from dltta.serving.keys import Key
from dltta.serving.lease import Lease
from dltta.serving.session import Request
from dltta.serving.shard import Shard, ShardSettings
from dltta.serving.state import StateFolder
from dltta.serving.verification import verify
from streams import lines, write_images

KEY = Key("a", "first")


@pytest.fixture
def settings(tmp_path):
    model = ModelSource(str(streams.save_model(tmp_path / "model")))
    return ShardSettings(tmp_path / "state", {"a": model}, streams.settings(guard=False), live=1)


@pytest.fixture
def shard(settings):
    shard = Shard(settings)
    yield shard
    shard.close()


@pytest.fixture
def asked(tmp_path):
    images = write_images(tmp_path / "images", 3, size=(32, 32))
    return [Request(f"r{i}", "x.png", (images / f"case_{i}.png").read_bytes()) for i in range(3)]


def full(*given, **named):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_the_network_of_a_site_that_rests_leaves_memory_at_once(shard, asked):
    gc.disable()  # not by chance
    try:
        shard.answer(KEY, asked[0])
        network = weakref.ref(shard._sessions[KEY].stream.adapter)
        shard.answer(Key("a", "second"), asked[0])
        assert network() is None
    finally:
        gc.enable()


# nothing is left


def test_what_a_killed_shard_left_of_an_image_is_removed_by_its_successor_only(settings):
    for number in (0, 1):
        (settings.root / "spool" / str(number) / "tmp1").mkdir(parents=True)
        (settings.root / "spool" / str(number) / "tmp1" / "image.png").write_bytes(b"a patient")
    Shard(settings, 1)
    assert [path.parent.parent.name for path in settings.root.rglob("image.png")] == ["0"]


@pytest.mark.parametrize(
    "place", ["keys.write_atomically", "state.write_atomically", "journal.write_head", "lease.open_in_place"]
)
def test_a_disk_that_is_full_at_the_first_image_leaves_no_site_behind(shard, asked, monkeypatch, place):
    with monkeypatch.context() as patch:
        patch.setattr(f"dltta.serving.{place}", full)
        reply = shard.answer(KEY, asked[0])
    assert (reply.status, "No space left" in reply.detail) == ("unavailable", True)
    assert "--resume" not in reply.detail  # nobody typed a command
    assert not list(shard.settings.root.glob("keys/*"))
    assert shard.answer(KEY, asked[0]).line["sequence"] == 1


def test_a_disk_that_is_full_later_keeps_the_site(shard, asked, monkeypatch):
    shard.answer(KEY, asked[0])
    with monkeypatch.context() as patch:
        patch.setattr("dltta.serving.state.write_atomically", full)
        assert shard.answer(KEY, asked[1]).status == "unavailable"
    assert shard.answer(KEY, asked[1]).line["sequence"] == 2
    assert verify(shard.folders.stream(KEY)) == []


def test_a_site_that_somebody_else_took_over_is_not_removed_with_its_first_image(shard, asked, monkeypatch):
    """Cut off while it works on the first image, and the disk is full."""

    def meanwhile(*given, **named):
        Lease(shard.folders.folder(KEY), "successor")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("dltta.serving.state.write_atomically", meanwhile)
        assert shard.answer(KEY, asked[0]).status == "unavailable"
    assert shard.folders.exists(KEY)


def test_an_image_that_is_too_large_for_memory_is_refused_before_it_is_read(settings, asked, monkeypatch):
    read = []
    monkeypatch.setattr("dltta.data.inbox.read_channels", read.append)
    small = Shard(ShardSettings(settings.root, settings.models, streams.settings(guard=False, max_memory=1000)))
    reply = small.answer(KEY, asked[0])
    assert (reply.status, "to be read" in reply.detail) == ("refused", True)
    assert read == []
    assert not list(settings.root.glob("keys/*"))


# changes by hand


def test_a_change_that_the_disk_has_no_room_for_can_be_tried_again(shard, asked, monkeypatch):
    shard.answer(KEY, asked[0])
    with monkeypatch.context() as patch:
        patch.setattr("dltta.serving.journal._write", full)
        for reply in (shard.change(KEY, "pause"), shard.roll_back(KEY, 0)):
            assert (reply.status, "No space left" in reply.detail) == ("unavailable", True)
    assert shard.roll_back(KEY, 7).status == "refused"  # there is no such version
    assert shard.roll_back(KEY, 0).line == {"event": "rollback", "to": 0, "state": 2}
    assert verify(shard.folders.stream(KEY)) == []


def test_a_rollback_of_who_lost_the_site_writes_nothing(shard, asked, monkeypatch):
    """The successor comes after the lease was taken and before the first write."""
    shard.answer(KEY, asked[0])

    def successor(self, *given, **named):
        Lease(shard.folders.folder(KEY), "successor")
        return known(self, *given, **named)

    known = StateFolder.numbers
    monkeypatch.setattr(StateFolder, "numbers", successor)
    before = lines(shard.folders.stream(KEY))
    reply = shard.roll_back(KEY, 0)
    monkeypatch.setattr(StateFolder, "numbers", known)
    assert (reply.status, "took this site over" in reply.detail) == ("unavailable", True)
    assert lines(shard.folders.stream(KEY)) == before
    assert not shard.folders.stream(KEY).joinpath("state/versions/000002.safetensors").exists()
