"""1 images. How is the next image read while the network works on this one?"""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

from dltta.errors import DlttaError, SettingError

T = TypeVar("T")
R = TypeVar("R")
Results = Generator[tuple[T, R | DlttaError], None, None]


def prefetch(cases: Iterable[T], read: Callable[[T], R], *, ahead: int = 1) -> Results[T, R]:
    """Every case with what `read` gives for it, in order, read in one other thread up to `ahead` cases in advance.

    An error of ours comes out as the value of its case, and the next case follows; any other is raised here, in its
    place. Closing the iterator closes `cases` (if it can be), waits for a read that has begun and ends the thread.
    Tensors are computed on one core there: a second team of OpenMP threads would make the caller's sleep whenever it
    waits, and every layer of the network would have to wake it (docs/speed-adapt.md).
    """
    if ahead < 1:
        raise SettingError(f"ahead must be at least 1, got {ahead}")
    return _Reader(cases, read, ahead).results()


class _Reader(Generic[T, R]):
    """One thread, and what it has read but nobody has taken: None after the last."""

    def __init__(self, cases: Iterable[T], read: Callable[[T], R], ahead: int) -> None:
        self.cases, self.read = cases, read
        self.room = threading.Semaphore(ahead)
        self.begun, self.closed = threading.Event(), threading.Event()
        self.done: SimpleQueue[tuple[T, R | DlttaError] | BaseException | None] = SimpleQueue()

    def results(self) -> Results[T, R]:
        thread = threading.Thread(target=self.work, name="prefetch", daemon=True)
        threads = torch.get_num_threads()
        thread.start()
        self.begun.wait()
        torch.set_num_threads(threads)  # of this thread as before, and of any that is to come
        try:
            # No name here holds a result while the caller works with it.
            yield from iter(self.take, None)
        finally:
            self.close()
            thread.join()

    def take(self) -> tuple[T, R | DlttaError] | None:
        found = self.done.get()
        if isinstance(found, BaseException):
            raise found
        self.room.release()
        return found

    def work(self) -> None:
        torch.set_num_threads(1)  # of this thread
        torch.get_num_threads()  # a thread that has never asked takes the others' number when it computes
        self.begun.set()
        try:
            for case in self.listed():
                try:
                    self.done.put((case, self.read(case)))
                except DlttaError as error:
                    self.done.put((case, error))
            self.done.put(None)
        except BaseException as error:  # raised again in the caller's thread
            self.done.put(error)

    def listed(self) -> Iterator[T]:
        """Cases, each when there is room for its image, until somebody closes."""
        cases = iter(self.cases)
        while self.room.acquire() and not self.closed.is_set():
            for case in cases:
                if not self.closed.is_set():
                    yield case
                break
            else:
                return

    def close(self) -> None:
        self.closed.set()
        self.room.release()
        close = getattr(self.cases, "close", None)
        if close is not None:
            with suppress(ValueError):  # a generator that runs in the thread at this moment: the thread ends after it
                close()
