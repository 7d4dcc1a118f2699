"""1 images. Synthetic prostate MRI: T2-weighted volumes of the pelvis as six centers would acquire them.

Each tissue has a proton density and a T2; the spin echo makes them a signal, `density * exp(-TE / T2)`. Coils make it
uneven (those in the rectum very much so), noise is Rician, and each volume is standardized at the end.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from dltta.data.phantom.fields import Array, positions, smooth_field
from dltta.data.phantom.modality import Modality, Site, Size

CLASSES = ("background", "prostate")

Millimeters = tuple[float, float, float]  # left to right, front to back, feet to head


class Tissue(IntEnum):
    """What a voxel is made of."""

    FAT = 0
    MUSCLE = 1
    BONE = 2
    BLADDER = 3
    RECTUM_WALL = 4
    RECTUM = 5
    VESICLES = 6
    CAPSULE = 7
    PERIPHERAL = 8
    CENTRAL = 9


# proton density, T2 in ms; fat is brighter in fast spin echo than its T2 alone would say
DENSITY = np.array([0.85, 0.75, 0.45, 1.00, 0.80, 0.25, 0.90, 0.75, 0.95, 0.85], dtype=np.float32)
T2 = np.array([115, 40, 70, 350, 62, 60, 190, 48, 165, 88], dtype=np.float32)


@dataclass(frozen=True)
class Pelvis:
    """The region around a prostate. All arrays (x, y, z)."""

    label: NDArray[np.int64]
    density: Array
    t2: Array  # ms
    fat: NDArray[np.bool_]
    to_rectum: Array  # mm from the middle of the rectum
    spacing: tuple[float, ...]


@dataclass(frozen=True)
class _Frame:
    """Coordinates in mm around the middle of the gland, slightly warped so that nothing is a perfect ellipsoid."""

    x: Array
    y: Array
    z: Array

    def ellipsoid(self, center: Millimeters, radii: Millimeters) -> Array:
        """1 on the surface, less within."""
        axes = zip((self.x, self.y, self.z), center, radii, strict=True)
        return np.sqrt(sum(((axis - c) / r) ** 2 for axis, c, r in axes)).astype(np.float32)


def anatomy(rng: np.random.Generator, size: Size, spacing: tuple[float, ...]) -> Pelvis:
    """A male pelvis whose gland measures some 20 to 90 ml; larger glands owe it to their central part."""
    frame = _frame(rng, size, spacing)
    growth = rng.uniform(0.92, 1.25)
    gland = (24 * growth * rng.normal(1, 0.04), 17.5 * growth * rng.normal(1, 0.05), 20 * growth * rng.normal(1, 0.06))
    tissue, to_rectum = _paint(rng, frame, gland, growth)

    nodules = smooth_field(rng, size, [5 / s for s in spacing])
    grain = smooth_field(rng, size, [2 / s for s in spacing])
    t2 = T2[tissue] * (1 + 0.05 * grain)
    t2 *= 1 + np.where(tissue == Tissue.CENTRAL, 0.16, np.where(tissue == Tissue.PERIPHERAL, 0.08, 0.03)) * nodules
    density = DENSITY[tissue] * (1 + 0.04 * nodules)
    return Pelvis(
        label=(tissue >= Tissue.CAPSULE).astype(np.int64),
        density=density.astype(np.float32),
        t2=np.clip(t2 * rng.normal(1, 0.04), 20, None).astype(np.float32),
        fat=tissue == Tissue.FAT,
        to_rectum=to_rectum,
        spacing=spacing,
    )


def _frame(rng: np.random.Generator, size: Size, spacing: tuple[float, ...]) -> _Frame:
    x, y, z = positions(size, spacing)
    shift = rng.normal(0, (3, 3, 3))
    warp = [1.3 * smooth_field(rng, size, [9 / s for s in spacing]) for _ in range(3)]
    return _Frame(x - shift[0] + warp[0], y - shift[1] + warp[1], z - shift[2] + warp[2])


def _paint(
    rng: np.random.Generator, frame: _Frame, gland: Millimeters, growth: float
) -> tuple[NDArray[np.int64], Array]:
    """Tissue of each voxel, painted from the outside in, and the distance to the rectum."""
    width, depth, height = gland
    tissue = np.full(np.broadcast_shapes(frame.x.shape, frame.y.shape, frame.z.shape), Tissue.FAT, dtype=np.int64)

    def paint(kind: Tissue, center: Millimeters, radii: Millimeters) -> None:
        tissue[frame.ellipsoid(center, radii) < 1] = kind

    for side in (-1, 1):
        paint(Tissue.MUSCLE, (side * (width + 16), 2, -4), (9, 27, 45))  # obturator internus
        paint(Tissue.BONE, (side * (width + 34), 0, 6), (20, 22, 26))  # acetabulum and femoral head
        paint(Tissue.MUSCLE, (side * (width + 4), 8, -16), (3.5, 20, 24))  # levator ani
        paint(Tissue.VESICLES, (side * 12, depth + 1, height + 6), (12, 5, 7))
    paint(Tissue.BONE, (0, -depth - 20, -6), (17, 10, 20))  # pubic symphysis
    fill = rng.uniform(0.85, 1.25)
    bladder = (0.0, -6.0, height + 21 * fill)
    paint(Tissue.MUSCLE, bladder, (30 * fill + 3, 24 * fill + 3, 20 * fill + 3))
    paint(Tissue.BLADDER, bladder, (30 * fill, 24 * fill, 20 * fill))

    lumen = rng.uniform(7, 11)
    behind = depth + lumen + 4.5
    sideways = rng.normal(0, 2)
    paint(Tissue.RECTUM_WALL, (sideways, behind, 0), (lumen + 4, lumen + 3.5, 90))
    paint(Tissue.RECTUM, (sideways, behind, 0), (lumen, lumen * 0.85, 85))

    whole = frame.ellipsoid((0, 0, 0), gland)
    tissue[whole < 1] = Tissue.CAPSULE
    inner = whole < 1 - 1.6 / depth
    tissue[inner] = Tissue.PERIPHERAL
    center, radii = (0, -0.22 * depth, 0.12 * height), (0.70 * width, 0.66 * depth * growth, 0.78 * height)
    tissue[inner & (frame.ellipsoid(center, radii) < 1)] = Tissue.CENTRAL
    to_rectum = np.hypot(frame.x - sideways, frame.y - behind)
    return tissue, np.broadcast_to(to_rectum, tissue.shape).astype(np.float32)


@dataclass(frozen=True)
class MriScanner:
    """Settings of a T2-weighted sequence, its coil and its grid."""

    voxel: Millimeters
    echo_time: float  # ms; longer means more T2 contrast
    fat_signal: float  # 1 as in fast spin echo, less when fat is suppressed
    bias: float  # unevenness of the body coil, relative
    endorectal: float  # brightness added beside a coil in the rectum, relative to none
    blur: float  # mm, standard deviation in the plane
    noise: float  # relative to fat of a source scan

    def spacing(self, size: Size) -> tuple[float, ...]:
        return self.voxel

    def acquire(self, anatomy: Pelvis, rng: np.random.Generator) -> Array:
        """The volume (1, X, Y, Z) with mean 0 and standard deviation 1."""
        signal = anatomy.density * np.exp(-self.echo_time / anatomy.t2)
        signal *= np.where(anatomy.fat, self.fat_signal, 1) * self._sensitivity(anatomy, rng)
        signal = gaussian_filter(signal, [self.blur / step for step in anatomy.spacing[:2]] + [0.3])
        real, imaginary = self.noise * rng.standard_normal((2, *signal.shape), dtype=np.float32)
        magnitude = np.hypot(signal + real, imaginary)
        return np.asarray(((magnitude - magnitude.mean()) / magnitude.std())[None], dtype=np.float32)

    def _sensitivity(self, anatomy: Pelvis, rng: np.random.Generator) -> Array:
        """Body coil: a smooth quadratic. Coil in the rectum: falls off with distance."""
        size = anatomy.label.shape
        x, y, z = positions(size, tuple(2 / n for n in size))  # each in [-1, 1]
        terms = (x, y, z, x * y, x * z, y * z, x**2, y**2, z**2)
        uneven = sum(weight * term for weight, term in zip(rng.normal(0, 0.5, len(terms)), terms, strict=True))
        near = 1 / (1 + (anatomy.to_rectum / 18) ** 2)
        return np.asarray(np.exp(self.bias * uneven) * (1 + self.endorectal * near), dtype=np.float32)


# The voxels keep each center's proportions but are some three times coarser in the plane than in hospitals, so that the
# whole region fits a small volume.
SITES = {
    "RUNMC": Site(
        MriScanner((2.0, 2.0, 2.9), 95, 0.9, 0.05, 0.0, 0.7, 0.012),
        MriScanner((2.1, 2.1, 3.1), 110, 1.1, 0.20, 0.0, 1.0, 0.022),
    ),
    "BMC": Site(  # similar protocol on another magnet
        MriScanner((1.9, 1.9, 2.8), 85, 0.8, 0.10, 0.0, 0.8, 0.020),
        MriScanner((2.1, 2.1, 3.1), 105, 1.1, 0.35, 0.3, 1.2, 0.040),
    ),
    "I2CVB": Site(  # coil in the rectum for most, fat darker
        MriScanner((2.0, 2.0, 2.6), 110, 0.45, 0.20, 0.5, 0.8, 0.030),
        MriScanner((2.3, 2.3, 3.0), 145, 0.80, 0.50, 3.0, 1.3, 0.060),
    ),
    "UCL": Site(  # several machines in one study
        MriScanner((1.8, 1.8, 2.8), 80, 0.7, 0.10, 0.0, 0.6, 0.015),
        MriScanner((2.3, 2.3, 3.3), 135, 1.2, 0.45, 0.0, 1.6, 0.050),
    ),
    "BIDMC": Site(  # always a coil in the rectum, strong fall-off
        MriScanner((1.8, 1.8, 2.6), 100, 0.5, 0.20, 2.5, 0.8, 0.025),
        MriScanner((2.0, 2.0, 3.0), 130, 0.9, 0.45, 6.0, 1.4, 0.050),
    ),
    "HK": Site(  # weak field: noisy, fat bright
        MriScanner((2.0, 2.0, 3.0), 75, 1.0, 0.15, 0.0, 0.9, 0.030),
        MriScanner((2.2, 2.2, 3.3), 95, 1.4, 0.45, 0.2, 1.5, 0.065),
    ),
}

PROSTATE = Modality(
    task="segmentation", classes=CLASSES, size=(48, 48, 32), smallest=(32, 32, 16), anatomy=anatomy, sites=SITES
)
