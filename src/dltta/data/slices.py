"""1 images. How is a volume cut into slices for a 2-D network, and its predictions put together again?"""

from torch import Tensor

from dltta.data.formats.images import Geometry


def slice_axis(geometry: Geometry) -> int:
    """The spatial axis across which a volume is cut: that of the largest spacing, the last where it is as large."""
    last = len(geometry.shape) - 1
    if geometry.spacing is None:
        return last
    widest = max(geometry.spacing)
    return last if geometry.spacing[last] > 0.999 * widest else geometry.spacing.index(widest)


def to_slices(volume: Tensor, axis: int) -> Tensor:
    """A volume (C, *spatial) as 2-D images (slices, C, *plane), cut across a spatial axis; a view, no copy."""
    return volume.movedim(1 + axis, 0)


def from_slices(slices: Tensor, axis: int) -> Tensor:
    """2-D images (slices, C, *plane) put back as a volume (C, *spatial): the inverse of `to_slices`, for any C."""
    return slices.movedim(0, 1 + axis)
