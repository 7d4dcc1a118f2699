"""Locks of the operating system: they end with their process, even when it is killed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dltta.errors import StateError
from dltta.files import PRIVATE, open_in_place
from dltta.serving.journal import on_disk


@contextmanager
def locked(file: Path, taken: str) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is not there; `taken` is what is wrong when somebody else does."""
    import fcntl  # not on every system, and nothing else needs it

    with on_disk(file):
        lock = open_in_place(file, os.O_RDWR | os.O_CREAT, mode=PRIVATE)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(taken) from error
        except OSError as error:
            raise StateError(f"{file}: cannot be locked ({error.strerror}); use a local disk") from error
        yield
    finally:
        os.close(lock)


def is_locked(file: Path) -> bool:
    """Whether a process holds the lock at this moment; changes nothing."""
    import fcntl

    try:
        lock = open_in_place(file, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
