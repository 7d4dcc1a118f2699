"""2 networks. A bundle as a folder, whether it came as one or as a zip file."""

import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from dltta.errors import SettingError, StateError
from dltta.models.io.bundle.config import FILES

LARGEST = 16 * 2**30  # bytes that a zip may unpack to


def is_bundle(path: Path) -> bool:
    """Whether this is a bundle's folder, or a file that may hold one."""
    return path.suffix in (".zip", ".ts") or any((path / name).is_file() for name in FILES)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The bundle's folder; a zip is unpacked for as long as the context lasts, and only into a folder of its own."""
    if path.is_dir():
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dltta-") as place:
        try:
            with zipfile.ZipFile(path) as archive:
                _refuse_tricks(path, archive)
                archive.extractall(place)
        except OSError as error:
            raise StateError(f"{path} cannot be unpacked: {error.strerror or error}") from error
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
            raise StateError(f"{path} is not a zip file that can be read: {error}") from error
        yield _root(path, Path(place))


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
    if sum(member.file_size for member in members) > LARGEST:
        raise StateError(f"{path} would unpack to more than {LARGEST // 2**30} GiB; give the bundle's folder")


def _root(path: Path, place: Path) -> Path:
    found = {file.parent.parent for name in FILES for file in place.rglob(name)}
    if len(found) != 1:
        raise SettingError(f"{path} holds {len(found) or 'no'} MONAI bundles; one with {FILES[0]} is needed")
    return found.pop()
