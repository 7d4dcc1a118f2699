"""1 images. PNG: grey of 1 to 16 bits, palettes, RGB of 8 bits.

An alpha channel is dropped, colors as stored. A palette gives its RGB colors as an image and its indices as a mask.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from dltta.data.formats.format import Geometry, channels_first, only_channel, within_limit
from dltta.errors import DataError

_CHANNELS = {"1": 1, "L": 1, "LA": 1, "I": 1, "I;16": 1, "I;16B": 1, "P": 3, "PA": 3, "RGB": 3, "RGBA": 3}
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class PNG:
    """Portable Network Graphics, through Pillow."""

    name = "PNG"
    endings = (".png",)

    def begins(self, start: bytes) -> bool:
        return start.startswith(_SIGNATURE)

    def read_geometry(self, path: Path) -> Geometry:
        with _open(path) as image:
            limit = 1 if image.mode == "1" else 65535 if image.mode.startswith("I") else 255
            return Geometry("png", (image.height, image.width), _CHANNELS[image.mode], limit)

    def read_pixels(self, path: Path) -> NDArray[Any]:
        with _open(path) as image:
            flat = image.convert("RGB") if image.mode in ("P", "PA") else image
            return channels_first(np.asarray(flat), _CHANNELS[image.mode])

    def read_classes(self, path: Path) -> NDArray[Any]:
        with _open(path) as image:
            return only_channel(path, channels_first(np.asarray(image), _CHANNELS[image.mode]))

    def write_classes(self, file: BinaryIO, labels: NDArray[Any], like: Geometry, ending: str) -> None:
        # A mask is made of runs of one value: looking for nothing else gives files as small, several times faster.
        Pillow.fromarray(labels).save(file, format="PNG", compress_type=zlib.Z_RLE)

    def complete(self, path: Path) -> bool | None:
        """Whether the chunks lead to the last one, IEND."""
        return any(kind == b"IEND" for kind, _ in _chunks(path))

    def identifying(self, path: Path) -> tuple[str, ...]:
        return tuple(
            f"{kind.decode()} {name.decode('latin-1')}".strip()
            for kind, start in _chunks(path)
            if kind in (b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"tIME")
            for name in [start.partition(b"\0")[0] if kind.endswith(b"Xt") else b""]
        )

    def without_identity(self, like: Geometry) -> Geometry:
        return like


def _chunks(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Type and first 80 bytes of every chunk that is all there."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(len(_SIGNATURE))
        while len(head := file.read(8)) == 8 and any(head):
            length = int.from_bytes(head[:4], "big")
            after = file.tell() + length + 4  # the checksum
            if after > size:
                return
            yield head[4:], file.read(min(length, 80))
            file.seek(after)


def _open(path: Path) -> Pillow.Image:
    with path.open("rb") as file:
        start = file.read(26)
    depth, color = (start[24], start[25]) if len(start) == 26 else (8, 0)
    if start.startswith(_SIGNATURE) and depth == 16 and color != 0:
        raise DataError(f"{path}: 16-bit color PNG cannot be read exactly; save it as 16-bit TIFF")
    image = Pillow.open(path, formats=["PNG"])
    within_limit(path, image.width * image.height)
    if image.mode not in _CHANNELS:
        raise DataError(f"{path}: PNG of mode {image.mode} is not supported; save it as grey or RGB")
    return image


FORMAT = PNG()
