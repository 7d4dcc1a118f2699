"""Pictures of a site's latest cases for the page: the image, the source model's prediction, and the one that was given.

Costs one more pass of the source model for each request. They show patients, so they are private files, few, and go
with the next ones; `--previews 0` keeps none.
"""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dltta.data.formats.images import Image
from dltta.data.inbox import read_incoming
from dltta.errors import DlttaError
from dltta.files import PRIVATE, PRIVATE_FOLDER, make_folder, write_atomically
from dltta.predictor import Predictor, load
from dltta.serving.journal import Fields, on_disk
from dltta.serving.session import Request, Session, spooled

LARGEST = 320  # pixels along the longer side
COLORS = np.array(  # of classes from the first one after background on
    [[255, 127, 14], [31, 119, 180], [44, 160, 44], [214, 39, 40], [148, 103, 189], [227, 119, 194], [188, 189, 34],
     [23, 190, 207], [140, 86, 75]], np.float32,
)  # fmt: skip


def keep_preview(folder: Path, source: Predictor, session: Session, request: Request, line: Fields, most: int) -> None:
    """Write the picture of a request that was answered, unless it is there; only the latest `most` stay.

    `source` predicts with the source model.
    """
    place = folder / "previews"
    target = place / f"{int(line.get('sequence', 0)):08d}.png"
    if source.opened.task != "segmentation" or target.is_file():
        return
    kept = sorted(place.glob("*.png"))
    if len(kept) >= most and target < kept[0]:  # sent again; its picture has gone
        return
    content = _picture(source, session, request)
    if content is None:
        return
    with on_disk(place):
        make_folder(place, mode=PRIVATE_FOLDER)
        write_atomically(target, content, mode=PRIVATE)
        for old in sorted(place.glob("*.png"))[:-most]:
            old.unlink(missing_ok=True)


def _picture(source: Predictor, session: Session, request: Request) -> bytes | None:
    """The middle slice three times side by side: plain, before and after; None if it cannot be drawn."""
    from PIL import Image as Picture

    from dltta.data.formats.format import format_of

    mask = session.mask(request.id)
    if mask is None:
        return None
    try:
        with spooled(session.spool, request) as case:
            image = read_incoming(case)
        loaded = load(source.opened, image, "")
        middle = len(loaded.parts) // 2
        part = replace(loaded, parts=(loaded.parts[middle],), axis=None)
        before = source.segment("preview", part).labels(source.opened).numpy()
        after = np.asarray(format_of(mask).read_pixels(mask))
    except DlttaError:
        return None
    plane = _plane(image, loaded.axis, middle)
    after = after.reshape(image.array.shape[1:])
    if after.ndim == 3:  # a volume: the slice that is drawn
        axis = -1 if loaded.axis is None else loaded.axis
        after = np.take(after, _position(image, loaded.axis, middle), axis)
    if before.ndim == 3:
        before = np.take(before, _position(image, None, middle), -1)
    tiles = [plane, _overlay(plane, before), _overlay(plane, after)]
    picture = Picture.fromarray(np.concatenate(tiles, axis=1).astype(np.uint8))
    picture.thumbnail((3 * LARGEST, LARGEST))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def _plane(image: Image, axis: int | None, position: int) -> NDArray[np.float32]:
    """(H, W, 3) from 0 to 255."""
    array = image.array
    if array.ndim == 4:
        array = np.take(array, _position(image, axis, position), -1 if axis is None else 1 + axis)
    low, high = np.percentile(array, [1, 99])
    scaled = np.clip((array - low) / max(high - low, 1e-6), 0, 1) * 255
    channels = scaled if len(scaled) == 3 else np.repeat(scaled[:1], 3, axis=0)
    return np.moveaxis(channels, 0, -1).astype(np.float32)


def _position(image: Image, axis: int | None, middle: int) -> int:
    """Which slice of a volume is drawn: the one in the middle."""
    return image.array.shape[-1] // 2 if axis is None else middle


def _overlay(plane: NDArray[np.float32], labels: NDArray[np.generic]) -> NDArray[np.float32]:
    colors = COLORS[(np.asarray(labels).astype(int) - 1) % len(COLORS)]
    inside = (np.asarray(labels) > 0)[..., None]
    return np.where(inside, 0.6 * plane + 0.4 * colors, plane).astype(np.float32)
