"""Which sites does a service know, and where does each keep its stream?

STATE/
  keys/3f…/key.json     {"model": …, "site": …}; the folder's name is a hash of both
  keys/3f…/stream/      the stream of that site, as `dltta adapt` writes it (`record.py`)
  keys/3f…/leases/      who may write it (`lease.py`)
  keys/3f…/previews/    pictures of the latest cases for the page
  keys/3f…/paused       there while the site takes no images
  spool/0/              requests that shard 0 works on
  lock                  held by the service that works here
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from dltta.errors import SettingError, StateError
from dltta.files import PRIVATE, PRIVATE_FOLDER, make_folder, write_atomically
from dltta.serving.journal import on_disk
from dltta.serving.lease import holders
from dltta.serving.lock import locked
from dltta.serving.record import LOG

LONGEST = 200  # characters of a site's name


@dataclass(frozen=True, order=True)
class Key:
    """One model at one site: what has its own state. A site is any text, such as hospital/scanner/protocol."""

    model: str
    site: str

    def __post_init__(self) -> None:
        if not 0 < len(self.site) <= LONGEST or not self.site.isprintable() or self.site != self.site.strip():
            raise SettingError(f"a site's name is 1 to {LONGEST} printable characters, got {self.site[:40]!r}")

    @property
    def name(self) -> str:
        """A name for its folder that no site can choose."""
        return hashlib.sha256(f"{self.model}\0{self.site}".encode()).hexdigest()[:32]

    def shard(self, shards: int) -> int:
        """Which of so many writers it belongs to."""
        return int(self.name, 16) % shards


@dataclass(frozen=True)
class KeyFolders:
    """The folders of all keys of a service."""

    root: Path

    def folder(self, key: Key) -> Path:
        return self.root / "keys" / key.name

    def stream(self, key: Key) -> Path:
        return self.folder(key) / "stream"

    @property
    def spool(self) -> Path:
        return self.root / "spool"

    def exists(self, key: Key) -> bool:
        """Whether this site ever got an answer, or was begun."""
        return (self.folder(key) / "key.json").is_file()

    def begin(self, key: Key) -> Path:
        """The key's folder, which from now on exists."""
        folder = self.folder(key)
        with on_disk(folder):
            make_folder(self.root / "keys", mode=PRIVATE_FOLDER)
            make_folder(folder, mode=PRIVATE_FOLDER)
            if not self.exists(key):
                write_atomically(folder / "key.json", json.dumps(asdict(key)) + "\n", mode=PRIVATE)
        return folder

    def count(self) -> int:
        try:
            return sum(1 for _ in (self.root / "keys").iterdir())
        except FileNotFoundError:
            return 0

    def __iter__(self) -> Iterator[Key]:
        """Every key that has a folder."""
        keys = self.root / "keys"
        if not keys.is_dir():
            return
        for folder in sorted(keys.iterdir()):
            try:
                key = Key(**json.loads((folder / "key.json").read_text("utf-8")))
            except FileNotFoundError:
                continue
            except (OSError, ValueError, TypeError, SettingError) as error:
                raise StateError(f"{folder / 'key.json'} was altered; restore it or remove the folder") from error
            yield key

    def locked(self) -> AbstractContextManager[None]:
        """Only one service at a time works on a state folder."""
        with on_disk(self.root):
            make_folder(self.root, mode=PRIVATE_FOLDER)
        return locked(self.root / "lock", f"{self.root}: another service works here; stop it, or choose another folder")

    def paused(self, key: Key) -> bool:
        return (self.folder(key) / "paused").is_file()

    def forget(self, key: Key) -> None:
        """Remove a site that was just begun and has no answer, unless somebody else took it over."""
        if holders(self.folder(key)) in ([], [1]):
            shutil.rmtree(self.folder(key), ignore_errors=True)

    def clear_spool(self) -> None:
        """Remove what killed processes left of requests. The caller holds the lock."""
        shutil.rmtree(self.spool, ignore_errors=True)

    def has_stream(self, key: Key) -> bool:
        return (self.stream(key) / LOG).is_file()
