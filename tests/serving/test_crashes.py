"""Killed at any moment, resumed: the same predictions, the same log and the same state as if nothing had happened."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image as Pillow

from dltta.data.inbox import find_incoming
from dltta.serving.maintenance import roll_back
from dltta.serving.verification import verify
from streams import child, classifier, left, lines, run, save_model, segmenter, start, write_images

DEAD = 77


pytestmark = pytest.mark.usefixtures("no_power_cut")

OPERATIONS = ("fsync", "pwrite", "ftruncate", "replace")
MORE = (*OPERATIONS, "unlink", "mkdir")


def count_to(deadly, among=OPERATIONS):
    """Make this process end before its n-th operation on a file; lines of the log that are the n-th get half written.

    The iterator counts the operations. Nothing can end a process in the middle of the few bytes of the head.
    """
    count = iter(range(10**9))

    def mortal(real, half):
        def operation(*args, **kwargs):
            if next(count) == deadly:
                half(*args, **kwargs)
                os._exit(DEAD)
            return real(*args, **kwargs)

        return operation

    def nothing(*args, **kwargs):
        pass

    real = os.pwrite

    def half(handle, content, place):
        if len(content) > 200:
            real(handle, content[: len(content) // 2], place)

    halves = {"pwrite": half}
    for name in among:
        setattr(os, name, mortal(getattr(os, name), halves.get(name, nothing)))
    return count


def operations(work, among=OPERATIONS) -> int:
    """How many operations on files the work takes, in a process of its own."""
    reading, writing = os.pipe()

    def counted():
        count = count_to(None, among)
        work()
        os.write(writing, str(next(count)).encode())

    assert child(counted) == 0
    return int(os.read(reading, 20))


def dying(work, at, among=OPERATIONS):
    def begin():
        count_to(at, among)
        work()

    return begin


@pytest.fixture
def images(tmp_path):
    """Three images, a copy of one of them, and one that cannot be read."""
    folder = write_images(tmp_path / "in", 3)
    shutil.copy(folder / "case_0.png", folder / "case_1_copy.png")
    (folder / "case_1_broken.png").write_bytes(b"no image")
    return folder


STREAMS = {
    "segmentation": (segmenter, {"save_probabilities": True}),
    "classification": (classifier, {"batch_size": 2}),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(("fewer", "among"), [(1, OPERATIONS), pytest.param(0, MORE, marks=pytest.mark.slow)])
def test_a_stream_that_dies_before_any_operation_goes_on(images, tmp_path, kind, fewer, among):
    make, given = STREAMS[kind]
    opened, given = make(), {**given, "on_error": "skip"}
    cases = find_incoming(images)
    cases = cases[: len(cases) - fewer]
    run(opened, cases, tmp_path / "whole", **given)
    expected = left(tmp_path / "whole")
    total = operations(lambda: run(opened, cases, tmp_path / "counted", **given), among)
    assert total > 30
    for at in range(total):
        output = tmp_path / f"out_{at}"
        assert child(dying(lambda output=output: run(opened, cases, output, **given), at, among)) == DEAD
        run(opened, cases, output, resume=True, **given)
        assert left(output) == expected, f"killed before operation {at} of {total}"
        assert verify(output) == []
        shutil.rmtree(output)
    predicted = [line["case"] for line in lines(tmp_path / "whole") if "prediction" in line]
    assert sorted(predicted) == ["case_0", "case_1", "case_1_copy", "case_2"][: 4 - fewer]


def test_a_resumed_stream_may_die_again(images, tmp_path):
    """Again and again, each time after a few more operations than opening takes."""
    opened, cases = segmenter(), find_incoming(images)
    run(opened, cases, tmp_path / "whole", on_error="skip")
    output, deaths = tmp_path / "out", 0
    for seed in range(1000):
        at = random.Random(seed).randrange(4, 40)
        end = child(dying(lambda: run(opened, cases, output, resume=True, on_error="skip"), at))
        if end == 0:
            break
        assert end == DEAD
        deaths += 1
    assert deaths > 2
    assert left(output) == left(tmp_path / "whole")


def test_a_rollback_happens_or_does_not(images, tmp_path):
    opened, cases = segmenter(), find_incoming(images)
    begun = tmp_path / "begun"
    run(opened, cases[:2], begun, on_error="skip")
    shutil.copytree(begun, tmp_path / "counted")
    total = operations(lambda: roll_back(tmp_path / "counted", 1), MORE)
    expected = {}
    for back in (False, True):
        shutil.copytree(begun, tmp_path / f"back_{back}")
        if back:
            roll_back(tmp_path / "back_True", 1)
        run(opened, cases, tmp_path / f"back_{back}", resume=True, on_error="skip")
        expected[back] = left(tmp_path / f"back_{back}")
    happened = set()
    for at in range(total):
        output = tmp_path / f"out_{at}"
        shutil.copytree(begun, output)
        assert child(dying(lambda output=output: roll_back(output, 1), at, MORE)) == DEAD
        back = any(line.get("event") == "rollback" for line in lines_that_count(output))
        run(opened, cases, output, resume=True, on_error="skip")
        assert left(output) == expected[back], at
        happened.add(back)
    assert happened == {False, True}


def lines_that_count(output):
    text = (output / "stream.jsonl").read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    (output / "whole").mkdir()
    (output / "whole" / "stream.jsonl").write_bytes(whole)
    found = lines(output / "whole")
    shutil.rmtree(output / "whole")
    return found


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model")


def command(model, images, output, *more):
    options = ["-m", str(model), "-i", str(images), "-o", str(output), "--resume", "--on-error", "skip", *more]
    return ["dltta", "adapt", *options]


def in_this_process(arguments):
    """The command as `dltta` runs it; standard error goes nowhere."""
    from dltta import cli

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    sys.argv = arguments
    cli.main()


def kill_until_done(begin, output, expected, *, seed, longest, wanted):
    """Start, kill -9 after a random time, start again …, until the work is done; the kills that hit a running one."""
    luck, kills, round_ = random.Random(seed), 0, 0
    while kills < wanted:
        process = begin()
        time.sleep(luck.uniform(0, longest))
        ended, status = os.waitpid(process, os.WNOHANG)
        if not ended:
            os.kill(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
        kills += os.WIFSIGNALED(status)
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) in (0, 1)
        if not os.WIFSIGNALED(status):  # done: the whole stream again, killed at other moments
            assert left(output) == expected, f"round {round_} after {kills} kills"
            assert verify(output) == []
            shutil.rmtree(output)
            round_ += 1
    while os.waitstatus_to_exitcode(os.waitpid(begin(), 0)[1]) not in (0, 1):
        pytest.fail("an undisturbed run must end well")
    assert left(output) == expected
    assert verify(output) == []
    return kills


@pytest.mark.long
def test_kill_9_at_random_moments(model, images, tmp_path):
    arguments = command(model, images, tmp_path / "whole")
    assert child(lambda: in_this_process(arguments)) == 1  # one was skipped
    expected = left(tmp_path / "whole")
    output = tmp_path / "out"
    arguments = command(model, images, output)
    kills = kill_until_done(
        lambda: start(lambda: in_this_process(arguments)), output, expected, seed=1, longest=0.6, wanted=20
    )
    assert kills >= 20


@pytest.mark.slow
def test_kill_9_of_many_runs(model, tmp_path):
    """60 kills of processes of their own, in the midst of streams of twenty images."""
    images = write_images(tmp_path / "many", 20, size=(40, 48))
    Pillow.fromarray(np.zeros((9, 9), dtype=np.uint8)).save(images / "constant.png")
    (images / "broken.png").write_bytes(b"no image")
    shutil.copy(images / "case_3.png", images / "copy.png")
    python = [sys.executable, "-c", "import sys; from dltta import cli; cli.main()"]

    def begin(output):
        """A process that has opened its stream: starting Python takes longer than all images."""
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        lock = output / "state" / "lock"
        before = lock.stat().st_mtime_ns if lock.exists() else 0
        process = subprocess.Popen([*python, *command(model, images, output)[1:]], **quiet)
        while not (lock.exists() and lock.stat().st_mtime_ns > before):
            time.sleep(0.002)
        return process.pid

    assert os.waitstatus_to_exitcode(os.waitpid(begin(tmp_path / "whole"), 0)[1]) == 1
    started = begin(tmp_path / "timed"), time.perf_counter()
    assert os.waitstatus_to_exitcode(os.waitpid(started[0], 0)[1]) == 1
    longest = 0.7 * (time.perf_counter() - started[1])
    expected = left(tmp_path / "whole")
    kills = kill_until_done(
        lambda: begin(tmp_path / "out"), tmp_path / "out", expected, seed=5, longest=longest, wanted=60
    )
    assert kills >= 60
