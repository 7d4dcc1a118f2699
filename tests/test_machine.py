"""How much memory is there: of the machine, of the container, and as somebody types it."""

import pytest

from dltta import machine
from dltta.errors import SettingError
from dltta.machine import available_memory, parse_bytes, show_bytes, total_memory


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A system without control groups, of 8000 kB, 5000 kB of them free."""
    (tmp_path / "meminfo").write_text("MemTotal:  8000 kB\nMemFree: 1 kB\nMemAvailable:   5000 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "OWN_CGROUPS", tmp_path / "self")
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "groups")
    return tmp_path


def group(system, place, **files):
    folder = system / "groups" / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_of_the_machine(system):
    assert total_memory() == 8000 * 1024
    assert available_memory() == 5000 * 1024


def test_a_container_allows_less(system):
    (system / "self").write_text("0::/a/b\n")
    group(system, "a/b", memory__max="max", memory__current="7")
    group(system, "a", memory__max="3000", memory__current="1000", memory__stat="anon 5\ninactive_file 400")
    assert total_memory() == 3000
    assert available_memory() == 3000 - (1000 - 400)


def test_so_does_an_older_kind_of_container(system):
    (system / "self").write_text("5:cpu,memory:/job\n3:pids:/x\n")
    group(system, "memory/job", memory__limit_in_bytes="2000", memory__usage_in_bytes="500")
    assert (total_memory(), available_memory()) == (2000, 1500)


def test_a_container_without_a_limit_changes_nothing(system):
    (system / "self").write_text("0::/\n")
    group(system, "", memory__max="max", memory__current="7")
    assert total_memory() == 8000 * 1024


def test_a_system_that_does_not_say(system):
    (system / "meminfo").unlink()
    assert (total_memory(), available_memory()) == (None, None)


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("8GB", 8 * 10**9), ("500 mb", 5 * 10**8), ("1.5GiB", 3 * 2**29), ("2g", 2 * 10**9), ("123", 123), ("1k", 1000)],
)
def test_amounts_as_they_are_typed(text, bytes_):
    assert parse_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["", "8 apples", "-1GB", "0", "GB", "1e9", "1ib", "8GBB"])
def test_anything_else_is_one_line(text):
    with pytest.raises(SettingError, match="write 8GB"):
        parse_bytes(text)


def test_amounts_as_they_are_shown():
    assert [show_bytes(n) for n in (1, 350e6, 1.24e9)] == ["1 MB", "350 MB", "1.2 GB"]
