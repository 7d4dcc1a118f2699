"""9 figures. What does a case look like, and where is a prediction wrong?

Every rendering is an array (height, width, 3) uint8; `png_uri` makes it part of an HTML page.
"""

import base64
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dltta.errors import DataError
from dltta.evaluation.examples import Array, Example

Rendering = NDArray[np.uint8]
Color = tuple[int, int, int]

# Distinguishable with the common color deficiencies (after Okabe and Ito).
CLASS_COLORS: tuple[Color, ...] = (
    (86, 180, 233), (230, 159, 0), (0, 158, 115), (240, 228, 66),
    (0, 114, 178), (213, 94, 0), (204, 121, 167), (190, 190, 190),
)  # fmt: skip
MISSED: Color = (86, 180, 233)  # foreground that the prediction has as background
INVENTED: Color = (230, 159, 0)  # background that the prediction has as foreground
CONFUSED: Color = (204, 121, 167)  # one structure taken for another
SMALLEST, LARGEST = 320, 1024  # pixels of the longer side


def class_color(value: int) -> Color:
    """Color of label value 1, 2, …; they repeat after eight."""
    return CLASS_COLORS[(value - 1) % len(CLASS_COLORS)]


def slice_of(example: Example) -> int | None:
    """Which slice of a volume is shown: the middle of the labeled structure, or of the volume; None for 2-D images."""
    if example.image.ndim != 4:
        return None
    axis = example.axis % 3
    if example.label is not None and example.label.any():
        others = tuple(other for other in range(3) if other != axis)
        inside = np.flatnonzero((example.label > 0).any(axis=others))
        return int(inside[0] + inside[-1]) // 2
    return int(example.image.shape[1 + axis]) // 2


def render_image(example: Example) -> Rendering:
    """The image in gray, or in color when it has three channels; the middle 98 % of its values fill the range."""
    image = _cut(example.image, example, lead=1).astype(np.float64)  # (C, H, W)
    channels = image if len(image) == 3 else image[:1].repeat(3, axis=0)
    low, high = np.percentile(channels, [1, 99])
    scaled = np.clip((channels - low) / max(high - low, 1e-12), 0, 1)
    return _sized((255 * scaled).round().astype(np.uint8).transpose(1, 2, 0))


def render_overlay(example: Example, values: Array, *, opacity: float = 0.5) -> Rendering:
    """Class values (*spatial) in color over the image."""
    base = render_image(example).astype(np.float64)
    shown = _sized(_cut(values, example, lead=0))
    colors = np.array([(0, 0, 0), *(class_color(value) for value in range(1, int(shown.max(initial=0)) + 1))])
    inside = (shown > 0)[..., None]
    return np.where(inside, (1 - opacity) * base + opacity * colors[shown], base).round().astype(np.uint8)


def render_errors(example: Example, values: Array) -> Rendering:
    """Where class values differ from the label: missed, invented and confused positions over the dimmed image."""
    if example.label is None:
        return render_overlay(example, values)
    truth, predicted = (_sized(_cut(item, example, lead=0)) for item in (example.label, values))
    errors = render_image(example) // 3
    errors[(truth > 0) & (predicted == 0)] = MISSED
    errors[(truth == 0) & (predicted > 0)] = INVENTED
    errors[(truth > 0) & (predicted > 0) & (truth != predicted)] = CONFUSED
    return errors


def absolute_error(example: Example, values: Array) -> Array:
    """|class value − label| at every position of the shown slice, (H, W)."""
    if example.label is None:
        raise DataError(f"{example.name} has no label, so there is no error to show")
    truth, predicted = (_sized(_cut(item, example, lead=0)).astype(np.int64) for item in (example.label, values))
    return np.asarray(np.abs(predicted - truth))


def png_uri(rendering: Rendering) -> str:
    """The rendering as a `data:` address."""
    out = io.BytesIO()
    Image.fromarray(rendering).save(out, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")


def _cut(values: Array, example: Example, *, lead: int) -> Array:
    """The shown slice of a volume (x to the right, y down); 2-D values as they are. `lead` axes are not spatial."""
    place = slice_of(example)
    return values if place is None else values.take(place, axis=lead + example.axis % 3).swapaxes(-1, -2)


def _sized(values: Array) -> Array:
    """Small renderings enlarged and large ones thinned by a whole factor, (H, W, …)."""
    longest = max(values.shape[:2])
    enlarge, thin = max(1, SMALLEST // longest), -(-longest // LARGEST)
    return values.repeat(enlarge, axis=0).repeat(enlarge, axis=1)[::thin, ::thin]
