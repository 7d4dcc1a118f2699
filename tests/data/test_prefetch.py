import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from dltta.data.prefetch import prefetch
from dltta.data.watch import watch_incoming
from dltta.errors import DataError, SettingError

PATIENCE = 10  # seconds that no test should need


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_cases_come_in_order_with_what_was_read():
    assert list(prefetch("abc", str.upper)) == [("a", "A"), ("b", "B"), ("c", "C")]
    assert list(prefetch([], str.upper)) == []
    assert not threads()


def test_tensors_are_computed_on_one_core_there_and_on_all_elsewhere():
    def cores(case="here"):
        return None if case == "a" else torch.get_num_threads()

    before = cores()
    torch.set_num_threads(3)
    try:
        results = prefetch("ab", cores)
        assert next(results) == ("a", None)
        assert cores() == 3
        with ThreadPoolExecutor(1) as later:
            assert later.submit(cores).result() == 3
        assert next(results) == ("b", 1)
        assert cores() == 3
        results.close()
    finally:
        torch.set_num_threads(before)


def test_the_next_case_is_read_while_the_caller_works():
    reading = {name: threading.Event() for name in "abc"}
    results = prefetch("abc", lambda name: reading[name].set())
    next(results)
    assert reading["b"].wait(PATIENCE)  # nobody has asked for it yet
    assert not reading["c"].wait(0.05)  # right code passes however slow the machine is
    next(results)
    assert reading["c"].wait(PATIENCE)
    results.close()


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_no_more_images_are_held_than_asked_for(ahead):
    alive, most = weakref.WeakSet(), 0

    class Volume:
        pass

    def read(number):
        nonlocal most
        volume = Volume()
        alive.add(volume)
        most = max(most, len(alive))
        return volume

    for _, volume in prefetch(range(20), read, ahead=ahead):
        assert isinstance(volume, Volume)
        del volume
    assert most <= ahead + 1  # the one the caller works with


def test_an_error_of_one_case_is_its_value_and_the_next_follows():
    def read(name):
        if name == "b":
            raise DataError("b: broken; leave it out")
        return name.upper()

    (_, a), (name, error), (_, c) = prefetch("abc", read)
    assert (a, name, c) == ("A", "b", "C")
    assert isinstance(error, DataError)
    assert str(error) == "b: broken; leave it out"


@pytest.mark.parametrize("mistake", [ZeroDivisionError, StopIteration, KeyboardInterrupt])
def test_a_mistake_in_the_program_is_raised_in_its_place(mistake):
    def read(name):
        if name == "b":
            raise mistake
        return name

    results = prefetch("abc", read)
    assert next(results) == ("a", "a")
    with pytest.raises((mistake, RuntimeError)):  # a generator turns StopIteration into RuntimeError
        next(results)
    assert not threads()


def test_an_error_of_the_listing_is_raised_after_what_was_listed():
    def cases():
        yield "a"
        raise DataError("the folder has gone; mount it again")

    results = prefetch(cases(), str.upper)
    assert next(results) == ("a", "A")
    with pytest.raises(DataError, match="the folder has gone"):
        next(results)


def test_closing_early_stops_thread_and_listing():
    ended = threading.Event()

    def cases():
        try:
            yield from range(1000)
        finally:
            ended.set()

    read = []
    results = prefetch(cases(), read.append)
    next(results)
    results.close()
    assert not threads()
    assert len(read) <= 3
    gc.collect()
    assert ended.wait(PATIENCE)


def test_closing_wakes_a_watch_that_waits_for_files(tmp_path):
    taken, waits = threading.Event(), threading.Event()

    def clock():
        if taken.is_set():
            waits.set()
        return time.monotonic()

    Image.new("L", (3, 4)).save(tmp_path / "a.png")
    results = prefetch(watch_incoming(tmp_path, poll=0.01, clock=clock), lambda case: case.name)
    assert next(results)[1] == "a"
    taken.set()
    assert waits.wait(PATIENCE)
    closing = threading.Thread(target=results.close, daemon=True)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert not threads()


def test_closing_waits_for_a_listing_that_runs():
    runs, closing = threading.Event(), threading.Event()

    class Listing:
        """A generator that goes on only after somebody has tried to close it."""

        def __init__(self):
            self.cases = self.list()

        def list(self):
            yield "a"
            runs.set()
            assert closing.wait(PATIENCE)
            yield "b"

        def __iter__(self):
            return self.cases

        def close(self):
            try:
                self.cases.close()
            finally:
                closing.set()

    read = []
    results = prefetch(Listing(), read.append)
    next(results)
    assert runs.wait(PATIENCE)
    results.close()
    assert read == ["a"]
    assert not threads()


def test_closing_before_the_first_case_reads_nothing():
    read = []
    prefetch("abc", read.append).close()
    assert read == []
    assert not threads()


def test_at_least_one_case_is_read_ahead():
    with pytest.raises(SettingError, match="ahead must be at least 1, got 0"):
        prefetch("abc", str.upper, ahead=0)
