"""2 networks. A bundle as a folder, whether it came as one or as a zip file."""

import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from dltta.errors import SettingError, StateError
from dltta.machine import show_bytes
from dltta.models.io.bundle.config import FILES

LARGEST = 16 * 2**30  # bytes that a zip may unpack to
RATIO, FREE = 100, 64 * 2**20  # and times its own size, beyond so many bytes; weights hardly shrink
OPENED = ("configs", "models")  # folders of a bundle that are needed to open it


def is_bundle(path: Path) -> bool:
    """Whether this is a bundle's folder, or a file that may hold one."""
    return path.suffix in (".zip", ".ts") or any((path / name).is_file() for name in FILES)


@contextmanager
def unpacked(path: Path, needed: Sequence[str] | None = OPENED) -> Iterator[Path]:
    """The bundle's folder; a zip is unpacked for as long as the context lasts, and only into a folder of its own.

    Of a zip only the `needed` files and folders of the bundle are there; None is all of them.
    """
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dltta-") as place:
        try:
            with zipfile.ZipFile(path) as archive:
                _refuse_tricks(path, archive)
                root = _root(path, archive)
                chosen = [member for member in archive.infolist() if _is_needed(member, root, needed)]
                _refuse_bombs(path, chosen)
                archive.extractall(place, chosen)
        except OSError as error:
            raise StateError(f"{path} cannot be unpacked: {error.strerror or error}") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise StateError(f"{path} is not a zip file that can be read: {error}") from error
        yield Path(place) / root


def _refuse_tricks(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise unless every member is a plain file or folder below the place it is unpacked to."""
    members = archive.infolist()
    if any(PurePosixPath(member.filename).parts[-2:] == ("code", "__torch__.py") for member in members) or any(
        PurePosixPath(member.filename).name == "constants.pkl" for member in members
    ):
        raise SettingError(
            f"{path} is a TorchScript archive, which has no layers to adapt and may have no gradient; give the "
            "bundle's folder, with models/model.pt"
        )
    for member in members:
        name = PurePosixPath(member.filename)
        mode = member.external_attr >> 16
        plain = stat.S_IFMT(mode) in (0, stat.S_IFREG, stat.S_IFDIR)
        if name.is_absolute() or ".." in name.parts or {"\\", ":"} & set(member.filename) or not plain:
            raise StateError(f"{path} is not safe to unpack: its member {member.filename[:80]!r} leads elsewhere")


def _refuse_bombs(path: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Raise for members that would fill the disk."""
    size, packed = sum(member.file_size for member in members), path.stat().st_size
    if size > min(LARGEST, max(FREE, RATIO * packed)):
        raise StateError(
            f"{path} of {show_bytes(packed)} would unpack to {show_bytes(size)}, which is not a bundle's; if you trust "
            "it, unpack it and give the folder"
        )


def _is_needed(member: zipfile.ZipInfo, root: PurePosixPath, needed: Sequence[str] | None) -> bool:
    name = PurePosixPath(member.filename)
    if not name.is_relative_to(root) or name == root:
        return False
    return needed is None or name.relative_to(root).parts[0] in needed


def _root(path: Path, archive: zipfile.ZipFile) -> PurePosixPath:
    """The bundle's folder within the zip."""
    names = map(PurePosixPath, archive.namelist())
    found = {name.parent.parent for name in names if f"{name.parent.name}/{name.name}" in FILES}
    if len(found) != 1:
        raise SettingError(f"{path} holds {len(found) or 'no'} MONAI bundles; one with {FILES[0]} is needed")
    return found.pop()
