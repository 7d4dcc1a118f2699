"""What a long run has to say, at once: on standard error, and in a file that does not grow without end."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dltta.files import PRIVATE, open_in_place

LARGEST, KEPT = 1_000_000, 5  # bytes of the file, and how many older ones are kept: FILE.1 is the newest of them


@dataclass(frozen=True)
class Messages:
    """Sentences with the time they were said. `path` None keeps none of them.

    The file is opened anew for each sentence, so that other programs may rotate it too.
    """

    path: Path | None = None
    largest: int = LARGEST
    clock: Callable[[], time.struct_time] = time.localtime

    def __call__(self, sentence: str) -> None:
        if self.path is None:
            return
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S', self.clock())} {' '.join(sentence.split())}\n".encode()
        try:
            self._rotate(self.path, len(line))
            handle = open_in_place(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode=PRIVATE)
            try:
                os.write(handle, line)
            finally:
                os.close(handle)
        except OSError as error:  # the stream itself is more important
            typer.echo(f"{self.path}: messages cannot be written ({error.strerror or error})", err=True)

    def skipped(self, line: Mapping[str, Any]) -> str | None:
        """Note the line of a case that has no prediction; what was noted."""
        if "error" not in line:
            return None
        sentence = f"skipped: {line['case']}: {line['detail']}"
        self(sentence)
        return sentence

    def _rotate(self, path: Path, more: int) -> None:
        if not path.is_file() or path.stat().st_size + more <= self.largest:
            return
        numbered = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, KEPT + 1))]
        for older, newer in zip(reversed(numbered[1:]), reversed(numbered[:-1]), strict=True):
            if newer.exists():
                newer.replace(older)
