"""The programs keep freed memory; counted in page faults, not in seconds."""

import os
import platform
import subprocess
import sys

import pytest

from dltta.cli import app as cli

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")

FAULTS = """
import resource
from dltta.models.allocator import keep_freed_memory
kept = {call}
def used():
    block = bytearray(64 << 20)  # 16,384 pages, all written
    for place in range(0, len(block), 4096):
        block[place] = 1
used()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    used()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(call, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS.format(call=call)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**clean, **environment})
    kept, count = done.stdout.split()
    return kept == "True", int(count)


@pytest.mark.long
@glibc
def test_a_block_that_was_freed_is_not_asked_for_again():
    assert faults("None") == (False, pytest.approx(3 * 16_384, rel=0.2))
    kept, count = faults("keep_freed_memory()")
    assert kept
    assert count < 1000


@pytest.mark.long
@glibc
def test_settings_of_the_environment_are_left_alone():
    kept, count = faults("keep_freed_memory()", MALLOC_ARENA_MAX="2")
    assert not kept
    assert count > 30_000


def test_other_systems_are_left_alone(monkeypatch):
    from dltta.models import allocator

    monkeypatch.setattr(platform, "libc_ver", lambda: ("musl", "1.2"))
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: pytest.fail("called"))
    assert not allocator.keep_freed_memory()


def test_the_command_line_asks_for_it(monkeypatch):
    asked = []
    monkeypatch.setattr(cli, "keep_freed_memory", lambda: asked.append(1))
    monkeypatch.setattr(sys, "argv", ["dltta", "--version"])
    with pytest.raises(SystemExit):
        cli.main()
    assert asked
