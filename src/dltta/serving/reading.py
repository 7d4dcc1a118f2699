"""1 images. Before the network: is the content of a case new to the stream, and what does the network get of it?"""

from dataclasses import dataclass
from pathlib import Path

from dltta.data.inbox import Incoming, digest, geometries, read_incoming
from dltta.errors import DataError, DlttaError, InputError, SettingError
from dltta.fitting import Fitting
from dltta.models.io.opened import OpenedModel
from dltta.predictor import Loaded, enough_memory, load
from dltta.serving.index import StreamIndex


@dataclass(frozen=True)
class Known:
    """A case whose content was predicted before, or waits in the current batch; it is not read."""

    digest: str


@dataclass(frozen=True)
class Unusable:
    """A case with content that is no image for this network."""

    digest: str
    error: DlttaError


@dataclass(frozen=True)
class Reader:
    """Reads cases for one stream. Called in the thread that reads ahead."""

    opened: OpenedModel
    output: Path
    index: StreamIndex
    fitting: Fitting | None = None

    def __call__(self, case: Incoming) -> Loaded | Known | Unusable:
        if any(file.parent.resolve() == self.output.resolve() for file in case.files):
            raise SettingError(f"{self.output} holds the images; choose another folder for the predictions")
        before = _size_and_time(case)
        found = digest(case)
        if self.index.holds(found):
            return Known(found)
        try:
            loaded = read_case(self.opened, case, found, self.fitting)
        except (DataError, InputError) as error:
            return Unusable(found, error)
        if _size_and_time(case) != before:
            return Unusable(found, DataError("it changed while it was read; give it once it is complete"))
        return loaded


def read_case(opened: OpenedModel, case: Incoming, found: str, fitting: Fitting | None) -> Loaded:
    """What the network gets of a case; raises `DataError` or `InputError`, before it is read if it is too large."""
    for geometry in geometries(case):
        if fitting is not None:
            fitting.require_readable(geometry)
    with enough_memory(case.name):
        image = read_incoming(case)
        try:
            return load(opened, image, found)
        except InputError as error:
            channels = len(image.array)
            if case.kind == "dicom" or len(case.files) == 1 or channels == opened.in_channels:
                raise
            raise InputError(
                f"the network takes images of {opened.in_channels} channels, this one has {channels}; "
                f"{case.files[0].name} to {case.files[-1].name} count as its channels: end names otherwise than in "
                "_0000 if they are cases of their own"
            ) from error


def _size_and_time(case: Incoming) -> list[tuple[int, int]]:
    """What changes while a file is being written."""
    try:
        return [(status.st_size, status.st_mtime_ns) for status in (file.stat() for file in case.files)]
    except OSError:  # gone: reading it will say so
        return []
