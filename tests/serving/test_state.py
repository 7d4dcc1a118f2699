"""Versions of a stream on disk: they come back bit for bit, they are bounded, and alterations are found."""

import os

import pytest
import torch

from dltta import Adapter, Fixed, GuardedAdapter, MemoryBank, Proportional, Relative, SourceGuard
from dltta.errors import StateError
from dltta.models.statistics import Running
from dltta.objectives import PTBN, Source, Tent
from dltta.quality.guarded import decision_of
from dltta.serving.state import StateFolder, pack, unpack
from networks import Classifier, Segmenter, stream, trained
from streams import child

pytestmark = pytest.mark.usefixtures("no_power_cut")


def tent(guard=True, **changes):
    bank = MemoryBank(capacity=3, neighbors=2, ready="neighbors")
    given = {"memory": bank, "optimizer": torch.optim.Adam, **changes}
    if not guard:
        return Adapter(trained(Segmenter()), Tent(), Relative(0.05), **given)
    return GuardedAdapter(trained(Segmenter()), Tent(), Relative(0.05), guard=SourceGuard(), **given)


def batches(adapter):
    """Batches that need the bank several times over, one of them larger than it."""
    kept = stream((1, 1, 8, 8), 6)
    return [*kept[:2], torch.cat(kept[2:6]), *stream((2, 1, 8, 8), 4, seed=7)]


def steps(adapter, images):
    return [adapter.step(x) for x in images]


ADAPTERS = {
    "memory, optimizer, rate and guard": tent,
    "image by image": lambda: tent(mode="image-specific"),
    "no memory": lambda: Adapter(trained(Segmenter()), Tent(), Fixed(0.05)),
    "running statistics": lambda: Adapter(trained(Segmenter()), Tent(Running()), Fixed(0.05)),
    "nothing that moves": lambda: Adapter(trained(Segmenter()), PTBN()),
    "not even a buffer": lambda: Adapter(trained(Segmenter(kind="instance")), Source()),
    "keys of half precision": lambda: Adapter(
        trained(Segmenter()), Tent(), Proportional(0.05), memory=MemoryBank(capacity=3, neighbors=1, dtype=torch.half)
    ),
}


@pytest.mark.parametrize("make", ADAPTERS.values(), ids=ADAPTERS)
def test_a_loaded_version_goes_on_bit_for_bit(tmp_path, make):
    whole, first = make(), make()
    images = batches(whole)
    expected = steps(whole, images)
    folder = StateFolder(tmp_path)
    folder.save(0, first)
    for number, x in enumerate(images[:5], 1):
        first.step(x)
        sha256 = folder.save(number, first)
    again = make()
    StateFolder(tmp_path).load(5, sha256, again)
    for found, wanted in zip(steps(again, images[5:]), expected[5:], strict=True):
        assert torch.equal(found.logits, wanted.logits)
        assert (found.updates, decision_of(found)) == (wanted.updates, decision_of(wanted))


def test_every_pair_returns_to_its_slot(tmp_path):
    """Whatever version it came with, and however often the bank has gone round."""
    adapter, folder = tent(guard=False), StateFolder(tmp_path)
    sums = [folder.save(0, adapter)]
    held = [adapter.memory.state_dict()]
    for number, x in enumerate(batches(adapter), 1):
        adapter.step(x)
        sums.append(folder.save(number, adapter))
        held.append(adapter.memory.state_dict())
    for number in reversed(range(len(sums))):
        found = tent(guard=False)
        StateFolder(tmp_path).load(number, sums[number], found)
        state = found.memory.state_dict()
        assert (state["layer"], state["pushed"]) == (held[number]["layer"], held[number]["pushed"])
        assert all(map(torch.equal, state["values"], held[number]["values"]))
        assert state["keys"] is held[number]["keys"] or torch.equal(state["keys"], held[number]["keys"])
    assert [held[i]["pushed"] for i in range(len(held))] == [0, 1, 2, 6, 8, 10, 12, 14]


def test_later_versions_never_were(tmp_path):
    adapter, folder = tent(), StateFolder(tmp_path)
    sums = [folder.save(number, adapter) for number in range(4)]
    folder.load(1, sums[1], adapter)
    assert folder.numbers() == [0, 1]


def test_the_same_state_is_the_same_bytes(tmp_path):
    """Also from another process: nothing of chance, of the clock or of the order of a hash table is in it."""

    def write(place):
        adapter, folder = tent(), StateFolder(tmp_path / place)
        for number, x in enumerate(batches(adapter)):
            adapter.step(x)
            folder.save(number, adapter)

    write("a")
    assert child(lambda: write("b")) == 0
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.safetensors"))
    assert len(files) == 14
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)


def test_old_versions_and_their_pairs_go(tmp_path):
    adapter, folder = tent(), StateFolder(tmp_path, keep=4)
    for number in range(12):
        adapter.step(torch.randn(1, 1, 8, 8))
        sha256 = folder.save(number, adapter)
    assert folder.numbers() == [8, 9, 10, 11]
    memory = sorted(int(path.stem) for path in (tmp_path / "memory").iterdir())
    assert memory == [6, 7, 8, 9, 10, 11]  # version 8 needs its own pair and the two before
    again = tent()
    StateFolder(tmp_path, keep=4).load(11, sha256, again)
    assert torch.equal(adapter.step(torch.ones(1, 1, 8, 8)).logits, again.step(torch.ones(1, 1, 8, 8)).logits)


def test_there_is_a_limit_to_their_bytes(tmp_path):
    """The latest two stay whatever they take: the one that the log names and the one being written."""
    adapter = tent()
    folder = StateFolder(tmp_path / "one")
    folder.save(0, adapter)
    one = folder.size(0)
    limited = StateFolder(tmp_path / "many", room=4 * one + one // 2)
    tiny = StateFolder(tmp_path / "tiny", room=1)
    for number in range(9):
        limited.save(number, adapter)
        tiny.save(number, adapter)
    assert limited.numbers() == [5, 6, 7, 8]
    assert tiny.numbers() == [7, 8]


def test_a_resumed_folder_forgets_as_the_first_would_have(tmp_path):
    for place, cuts in (("a", ()), ("b", (3, 4, 9))):
        adapter, folder = tent(), StateFolder(tmp_path / place, keep=3)
        sha256 = folder.save(0, adapter)
        for number, x in enumerate(stream((1, 1, 8, 8), 12), 1):
            if number in cuts:
                adapter, folder = tent(), StateFolder(tmp_path / place, keep=3)
                folder.load(number - 1, sha256, adapter)
            adapter.step(x)
            sha256 = folder.save(number, adapter)
    names = [sorted(str(p.relative_to(tmp_path / place)) for p in (tmp_path / place).rglob("*")) for place in "ab"]
    assert names[0] == names[1]


def test_every_altered_file_is_found(tmp_path):
    adapter, folder = tent(), StateFolder(tmp_path)
    for number in range(4):
        adapter.step(torch.randn(1, 1, 8, 8))
        sha256 = folder.save(number, adapter)
    for path in (tmp_path / "versions" / "000003.safetensors", *(tmp_path / "memory").glob("00000[123]*")):
        intact = path.read_bytes()
        for place in (0, 9, len(intact) // 2, len(intact) - 1):
            path.write_bytes(intact[:place] + bytes([intact[place] ^ 1]) + intact[place + 1 :])
            with pytest.raises(StateError, match="was altered; roll back"):
                StateFolder(tmp_path).load(3, sha256, tent())
        path.write_bytes(intact[: len(intact) // 2])
        with pytest.raises(StateError, match="was altered; roll back"):
            StateFolder(tmp_path).load(3, sha256, tent())
        path.unlink()
        with pytest.raises(StateError, match="is missing; roll back"):
            StateFolder(tmp_path).load(3, sha256, tent())
        path.write_bytes(intact)
    StateFolder(tmp_path).load(3, sha256, tent())


def test_a_damaged_old_version_does_not_stop_the_stream(tmp_path):
    adapter, folder = tent(), StateFolder(tmp_path, keep=3)
    for number in range(3):
        sha256 = folder.save(number, adapter)
    (tmp_path / "versions" / "000001.safetensors").write_bytes(b"nothing")
    again = StateFolder(tmp_path, keep=3)
    again.load(2, sha256, adapter)
    for number in (3, 4):
        again.save(number, adapter)
    assert again.numbers() == [2, 3, 4]


def test_the_state_of_another_network_is_refused(tmp_path):
    folder = StateFolder(tmp_path)
    sha256 = folder.save(0, tent())
    other = Adapter(trained(Classifier()), Tent(), Fixed(0.1))
    with pytest.raises(StateError, match="belongs to another network"):
        folder.load(0, sha256, other)


def test_a_copy_is_the_version_again(tmp_path):
    adapter, folder = tent(), StateFolder(tmp_path)
    sums = []
    for number in range(5):
        adapter.step(torch.randn(1, 1, 8, 8))
        sums.append(folder.save(number, adapter))
    StateFolder(tmp_path).copy(1, sums[1], 5)
    one, other = tent(), tent()
    StateFolder(tmp_path).load(5, sums[1], one)
    assert folder.numbers() == [0, 1, 2, 3, 4, 5]
    StateFolder(tmp_path).load(1, sums[1], other)
    assert torch.equal(one.step(torch.ones(1, 1, 8, 8)).logits, other.step(torch.ones(1, 1, 8, 8)).logits)


def test_only_one_process_works_on_a_stream(tmp_path):
    def second():
        try:
            with StateFolder(tmp_path / "state").locked():
                pass
        except StateError as error:
            os._exit(7 if "another process works on this stream" in str(error) else 8)

    with StateFolder(tmp_path / "state").locked():
        assert child(second) == 7
    assert child(second) == 0


def test_the_lock_ends_with_its_process(tmp_path):
    def killed():
        with StateFolder(tmp_path).locked():
            os.kill(os.getpid(), 9)

    assert child(killed) == -9
    with StateFolder(tmp_path).locked():
        pass


def test_half_written_files_are_removed(tmp_path):
    folder = StateFolder(tmp_path)
    folder.save(0, tent())
    rests = [tmp_path / ".stream.json.12.part", tmp_path / "versions" / ".000001.safetensors.12.part"]
    for rest in rests:
        rest.write_bytes(b"half")
    folder.clean()
    assert not any(rest.exists() for rest in rests)
    assert folder.numbers() == [0]


def test_packed_values_come_back_as_they_were(tmp_path):
    state = {0: {"a": None, "b": True, "c": 1.5e-300}, "list": [1, (2, "x")], "t": torch.arange(6).view(2, 3).T}
    found, description = unpack(pack(state, {"pairs": []}), tmp_path)
    assert torch.equal(found.pop("t"), state.pop("t"))
    assert (found, description) == (state, {"pairs": []})


def test_what_cannot_be_saved_says_so():
    with pytest.raises(StateError, match="a set cannot be saved; keep tensors, numbers"):
        pack({"a": {1}}, {})
