"""The record of a stream in its output folder: log, table and state, opened together and brought to the same moment.

OUT/
  NAME.png …          the predictions, in the format and geometry of their images
  predictions.csv     classification instead: image, prediction, probability of each class
  stream.jsonl        one line per case, hash-chained (`journal.py`)
  state/              what was learned, version by version (`state.py`)
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from os.path import realpath  # unlike `Path.resolve`, no error where links go round
from pathlib import Path
from typing import Any

from dltta.core.ensemble import AnyAdapter
from dltta.data.formats import dicom
from dltta.data.formats.format import endings
from dltta.data.inbox import is_file
from dltta.errors import SettingError, StateError
from dltta.files import remove_parts, require_no_link
from dltta.recipes import RECOMMENDED
from dltta.serving.index import PredictionTable, StreamIndex
from dltta.serving.journal import Fields, Journal, on_disk
from dltta.serving.naming import Naming
from dltta.serving.signing import Signer
from dltta.serving.state import Packed, StateFolder

SCHEMA = 2  # of stream.jsonl and the state folder
LOG, TABLE, STATE = "stream.jsonl", "predictions.csv", "state"


class Record:
    """A stream that is begun, or continued where its log ends. The caller holds the lock of `folder`.

    `description` is what a continued stream must share with its beginning; it stands in the first line of the log.
    `may_write` is asked before every write; it raises when the stream belongs to somebody else by now.
    """

    def __init__(
        self,
        output: Path,
        folder: StateFolder,
        description: Fields,
        adapter: AnyAdapter,
        signer: Signer | None = None,
        *,
        resume: bool,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self.output, self.folder, self.adapter, self.may_write = output, folder, adapter, may_write
        journal = Journal(output / LOG, folder.head_file, signer)
        if journal.size and not resume:
            raise SettingError(f"{output} already holds a stream; add --resume to continue it, or choose another")
        self.may_write()
        remove_parts(output)
        folder.clean()
        if journal.size:
            require_schema(folder.description(), output)
            _require_same(folder.description(), description, output)
        else:
            self._start(journal, description)
        self.naming = Naming(folder.description().get("key"))
        self.index = StreamIndex(journal)
        classes = description["classes"] if description["task"] == "classification" else None
        self.table = (
            None if classes is None else PredictionTable(output / TABLE, classes, quality=expects_quality(description))
        )
        if self.table is not None:
            self.table.rewrite(line.entry for line in journal)
        self.may_write()
        journal.mark()
        self.restore_adapter()
        folder.forget(self.index.oldest)

    def restore_adapter(self) -> None:
        """Bring the adapter to the version that the log names last."""
        self.folder.load(self.index.version, self.index.sha256, self.adapter)

    def put(self, packed: Packed, lines: Sequence[Mapping[str, Any]]) -> None:
        """A version of the state and the lines of the batch that led to it; on return they count."""
        self.require_folder()
        self.folder.put(packed)
        oldest = self.folder.oldest()
        self.append([{**line, "oldest_state": oldest} for line in lines])
        self.folder.forget(oldest)

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Lines of cases with a prediction; on return they count."""
        self.require_folder()
        self.index.append(lines)
        self.may_write()  # a successor that came meanwhile may not have seen these lines: they do not count
        if self.table is not None:
            self.table.append(lines)

    def append_event(self, event: Mapping[str, Any]) -> None:
        """A line about the stream itself, not about a case."""
        self.require_folder()
        self.index.append([{**event, "state": self.index.version}])

    def fail(self, line: Mapping[str, Any]) -> None:
        """The line of a case that has no prediction."""
        self.require_folder()
        self.index.fail(line)

    def require_folder(self) -> None:
        """Raise if somebody put a symbolic link in the place of the output folder, or took the stream over."""
        self.may_write()
        with on_disk(self.output):
            require_no_link(self.output)

    def _start(self, journal: Journal, description: Fields) -> None:
        _require_no_foreign_files(self.output)
        key = {"key": secrets.token_hex(16)} if description["anonymize"] else {}
        self.folder.describe({**description, **key})
        journal.mark()
        first = {"state": 0, "state_sha256": self.folder.save(0, self.adapter), "oldest_state": 0}
        journal.append([{"event": "start", **description, **first}])


def expects_quality(description: Mapping[str, Any]) -> bool:
    """Whether predictions of this stream come with an expected quality."""
    return bool(description.get("rehearsed")) and description["recipe"]["method"] == RECOMMENDED


def require_own_place(output: Path) -> None:
    """A new stream must not grow within a model, or within another stream, where all is accounted for."""
    for folder in (output, *output.parents):
        if (folder / "model.json").is_file():
            raise SettingError(f"{output} lies in the model {folder}; choose a folder of its own for the predictions")
        if folder != output and (folder / LOG).is_file() and (folder / STATE).is_dir():
            raise SettingError(f"{output} lies in the stream of {folder}; choose a folder of its own")


def require_folder_name(output: Path) -> None:
    """Refuses what can never become a folder, before anything is read."""
    place = Path(realpath(output))
    if place.is_symlink():
        raise SettingError(f"{output}: a link that leads in a circle; choose another folder for the predictions")
    if is_file(place):
        raise SettingError(f"{output} is a file; choose a folder for the predictions")


def require_apart(images: Path, output: Path) -> None:
    """Images and predictions need a folder each: no prediction is ever taken for an image, every file is in the log.

    A folder of images is looked through one level deep, and in a site folder or in `images` first, so that a folder of
    predictions in it is taken for one of images sooner or later.
    """
    source, target = Path(realpath(images)), Path(realpath(output))
    if source.is_dir() and target.is_relative_to(source):
        raise SettingError(f"{output} lies in {images}, where images are looked for; choose a folder outside of it")
    if source.is_relative_to(target):
        raise SettingError(f"{images} lies in {output}; choose a folder for the predictions that holds no images")


def require_schema(description: Mapping[str, Any], output: Path) -> None:
    """Refuses the stream of another release."""
    if description.get("schema") != SCHEMA:
        found = description.get("schema", 1)
        raise StateError(f"{output} has a log of schema {found}, this version writes {SCHEMA}; begin a new stream")


def _require_same(found: Mapping[str, Any], wanted: Mapping[str, Any], output: Path) -> None:
    for key, value in wanted.items():
        if isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            _require_same(found[key], value, output)
        elif key != "dltta" and found.get(key) != value:
            begun, now = ("another network", "this one") if key == "network" else (f"{key} {found.get(key)}", value)
            raise StateError(
                f"{output} was begun with {begun}, not {now}; resume with the same, or choose another folder"
            )


def _require_no_foreign_files(output: Path) -> None:
    """A new stream must not replace files of somebody else."""
    ours = (*endings(), *dicom.ENDINGS, ".npz")
    there = [path.name for path in output.iterdir() if path.name.lower().endswith(ours) or path.name == TABLE]
    if there:
        raise SettingError(f"{output} holds {min(there)}, which is not ours; choose an empty folder")
