"""Disks that fail, clocks that go back, folders that somebody locks: one line, and the stream goes on where it was."""

import errno
import os
import time
from pathlib import Path

import pytest

from dltta.data.inbox import find_incoming
from dltta.errors import StateError
from dltta.serving.verification import verify
from streams import left, run, segmenter

OPERATIONS = ("fsync", "pwrite", "replace")


def failing_after(monkeypatch, number, error):
    """From the n-th operation on files on, the disk gives this error."""
    count = iter(range(10**9))

    def wrap(real):
        def operation(*args, **kwargs):
            if next(count) >= number:
                raise OSError(error, os.strerror(error))
            return real(*args, **kwargs)

        return operation

    for name in OPERATIONS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.EDQUOT, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("number", [0, 3, 11, 23])
def test_a_disk_that_fails_stops_in_one_line_and_loses_nothing(images, tmp_path, monkeypatch, error, number):
    cases = find_incoming(images)[:3]
    run(segmenter(), cases, tmp_path / "whole")
    with monkeypatch.context() as patch:
        failing_after(patch, number, error)
        with pytest.raises(StateError, match=rf"cannot be written \({os.strerror(error)}\)"):
            run(segmenter(), cases, tmp_path / "out", on_error="skip")
    run(segmenter(), cases, tmp_path / "out", resume=True)
    assert left(tmp_path / "out") == left(tmp_path / "whole")
    assert verify(tmp_path / "out") == []


def test_an_image_on_a_bad_sector_is_skipped_and_the_others_go_on(images, tmp_path, monkeypatch):
    real = Path.open

    def open_(path, *args, **kwargs):
        if path.name == "case_2.png":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *args, **kwargs)

    cases = find_incoming(images)
    monkeypatch.setattr(Path, "open", open_)
    summary = run(segmenter(), cases, tmp_path / "out", on_error="skip")
    assert summary.predicted == len(cases) - 1
    assert summary.failed == [
        f"{images / 'case_2.png'}: cannot be read (Input/output error); check that it is still there"
    ]


def test_a_clock_that_is_set_back_changes_nothing(images, tmp_path, monkeypatch):
    """Times of the clock are written nowhere that counts; files of the future, and of 1960, are files."""
    cases = find_incoming(images)
    run(segmenter(), cases, tmp_path / "whole")
    now = iter(range(2_000_000_000, 0, -86400))
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    run(segmenter(), cases[:3], tmp_path / "out")
    for number, file in enumerate(sorted((tmp_path / "out").rglob("*"))):
        os.utime(file, (4e9, 4e9) if number % 2 else (-3e8, -3e8))
    run(segmenter(), cases, tmp_path / "out", resume=True)
    assert left(tmp_path / "out") == left(tmp_path / "whole")
    assert verify(tmp_path / "out") == []
