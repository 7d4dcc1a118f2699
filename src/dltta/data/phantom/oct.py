"""1 images. Synthetic retinal OCT: B-scans of eight layers as a quiet and a noisy scanner would show them.

Light returns from each layer according to its reflectivity, weakens with depth and under vessels, interferes with
itself (speckle, quieter the more looks are averaged), sits on a noise floor and is shown through a contrast curve.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from dltta.data.phantom.fields import Array, positions, smooth_field
from dltta.data.phantom.modality import Modality, Site, Size

CLASSES = ("background", "RNFL", "GCIP", "INL", "OPL", "ONL", "IS", "OS", "RPE")
FIELD_OF_VIEW = (0.52, 6.0)  # mm, axial and lateral, whatever the size in pixels
THINNEST = 0.0095  # mm; keeps two pixels of every layer at 128 rows, also of the RNFL that the fovea lacks

# micrometers: at the rim of the pit, in the middle of the fovea
THICKNESS = np.array([[34, 80, 38, 30, 62, 27, 35, 27], [9, 16, 15, 16, 105, 32, 44, 27]], dtype=np.float32)
# fraction of light returned at the top and at the bottom of: vitreous, the eight layers, choroid
REFLECTIVITY = np.array(
    [
        [0.02, 0.02],
        [0.86, 0.80],
        [0.44, 0.52],
        [0.30, 0.28],
        [0.54, 0.50],
        [0.20, 0.17],
        [0.42, 0.30],  # opens with the external limiting membrane
        [0.92, 0.48],  # opens with the bright ellipsoid zone
        [0.98, 0.90],
        [0.46, 0.14],
    ],
    dtype=np.float32,
)


@dataclass(frozen=True)
class Retina:
    """A slice of a retina. All arrays (rows, columns); row 0 is the vitreous."""

    label: NDArray[np.int64]
    reflectivity: Array
    depth: Array  # mm of tissue above, 0 in the vitreous
    transmission: Array  # what vessels let through, 1 where there are none
    spacing: tuple[float, ...]


def anatomy(rng: np.random.Generator, size: Size, spacing: tuple[float, ...]) -> Retina:
    """A healthy retina near the fovea; how far from it the slice passes, and all shapes, are drawn."""
    axial, lateral = positions(size, spacing)
    surfaces = _surfaces(rng, lateral[0], spacing)  # (9, W)
    compartment = (axial >= surfaces[:, None, :]).sum(axis=0)  # (H, W), 0 vitreous, 1..8 layers, 9 choroid
    edges = np.concatenate([axial[:1].repeat(size[1], 1), surfaces, surfaces[-1:] + 0.2])  # (11, W)
    top = np.take_along_axis(edges, compartment, axis=0)
    bottom = np.take_along_axis(edges, compartment + 1, axis=0)
    within = np.clip((axial - top) / np.maximum(bottom - top, spacing[0]), 0, 1)

    levels = REFLECTIVITY * rng.normal(1, 0.06, (10, 1)).astype(np.float32)
    reflectivity = levels[compartment, 0] * (1 - within) + levels[compartment, 1] * within
    grain = smooth_field(rng, size, (0.012 / spacing[0], 0.10 / spacing[1]))
    reflectivity *= 1 + np.where(compartment == 9, 0.35, 0.06) * grain  # the choroid is full of vessels
    return Retina(
        label=np.where(compartment == 9, 0, compartment).astype(np.int64),
        reflectivity=np.clip(reflectivity, 0, None).astype(np.float32),
        depth=np.clip(axial - surfaces[0], 0, None).astype(np.float32),
        transmission=_vessels(rng, axial, lateral[0], surfaces),
        spacing=spacing,
    )


def _surfaces(rng: np.random.Generator, x: Array, spacing: tuple[float, ...]) -> Array:
    """Nine boundaries (9, W) in mm from the middle of the image, from the inner limiting membrane downward."""
    width, step = x.size, spacing[1]
    fovea, beside, pit = rng.uniform(-1, 1), rng.uniform(0, 1.4), rng.uniform(0.45, 0.7)  # mm
    distance = np.sqrt((x - fovea) ** 2 + beside**2)
    foveal = np.exp(-((distance / pit) ** 2))
    thickness = THICKNESS[0, :, None] * (1 - foveal) + THICKNESS[1, :, None] * foveal  # (8, W)
    nasal = rng.choice([-1.0, 1.0])
    thickness[0] *= np.clip(1 + 0.18 * nasal * (x - fovea), 0.5, 1.8)  # fibers gather toward the optic nerve
    thickness[1:3] *= np.clip(1.12 - 0.09 * np.clip(distance - 0.8, 0, None), 0.5, None)  # ganglion cells thin out
    waves = np.stack([smooth_field(rng, (width,), 0.5 / step) for _ in range(8)])
    thickness *= rng.normal(1, 0.05) * rng.normal(1, 0.07, (8, 1)) * (1 + 0.05 * waves)
    thickness = np.maximum(thickness / 1000, THINNEST)

    bend, tilt = rng.normal(0, 0.003), rng.normal(0, 0.005)
    floor = tilt * x + bend * x**2 + 0.003 * smooth_field(rng, (width,), 1.0 / step)
    above = np.cumsum(thickness[::-1], axis=0)[::-1]  # what lies between each surface and the floor
    surfaces = np.concatenate([floor - above, floor[None]])
    surfaces -= (surfaces.min() + surfaces.max()) / 2
    margin = FIELD_OF_VIEW[0] / 2 - surfaces.max()  # the operator keeps the whole retina in the image
    return np.asarray(surfaces + margin * rng.uniform(-0.6, 0.2), dtype=np.float32)


def _vessels(rng: np.random.Generator, axial: Array, x: Array, surfaces: Array) -> Array:
    """Shadows (H, W) that the vessels of the inner retina cast on everything below them."""
    count = rng.integers(1, 6)
    center, radius, strength = rng.uniform(-3, 3, count), rng.uniform(0.03, 0.09, count), rng.uniform(0.25, 0.6, count)
    profile = strength[:, None] * np.exp(-(((x - center[:, None]) / radius[:, None]) ** 4))  # (vessels, W)
    below = 1 / (1 + np.exp(-(axial - 0.5 * (surfaces[1] + surfaces[2])) / 0.008))
    return np.asarray(1 - below * profile.max(axis=0), dtype=np.float32)


@dataclass(frozen=True)
class OctScanner:
    """Settings of an OCT scanner."""

    looks: float  # independent scans averaged; speckle contrast is 1 / sqrt(looks)
    floor: float  # noise floor, as a fraction of the brightest layer
    attenuation: float  # per mm of tissue
    shading: float  # light lost toward one side, where the pupil cuts the beam; relative
    blur_axial: float  # mm, standard deviation
    blur_lateral: float  # mm
    gamma: float  # contrast curve of the display: below 1 lifts the dark layers
    gain: float  # display value of the brightest layer; what exceeds 1 is cut

    def spacing(self, size: Size) -> tuple[float, ...]:
        return tuple(extent / n for extent, n in zip(FIELD_OF_VIEW, size, strict=True))

    def acquire(self, anatomy: Retina, rng: np.random.Generator) -> Array:
        """The B-scan (1, H, W) in [0, 1]."""
        signal = anatomy.reflectivity * anatomy.transmission * np.exp(-self.attenuation * anatomy.depth)
        signal = signal * self._illumination(rng, anatomy.depth.shape[1]) + self.floor
        speckle = rng.standard_gamma(self.looks, signal.shape, dtype=np.float32) / self.looks
        blur = (self.blur_axial / anatomy.spacing[0], self.blur_lateral / anatomy.spacing[1])
        seen = gaussian_filter(signal * speckle, blur) / (1 + self.floor)
        return np.asarray(np.clip(self.gain * seen**self.gamma, 0, 1)[None], dtype=np.float32)

    def _illumination(self, rng: np.random.Generator, width: int) -> Array:
        side = rng.choice([-1.0, 1.0]) * np.linspace(-1, 1, width, dtype=np.float32)
        return np.asarray(1 - self.shading / (1 + np.exp(-6 * (side - rng.uniform(-0.3, 0.8)))), dtype=np.float32)


SITES = {
    "spectralis": Site(  # averages many scans, dark background
        OctScanner(12, 0.01, 0.6, 0.0, 0.003, 0.012, 0.95, 0.95),
        OctScanner(25, 0.03, 1.0, 0.2, 0.004, 0.016, 1.10, 1.05),
    ),
    "cirrus": Site(  # averages few, shows dark layers brighter, loses light with depth and toward the sides
        OctScanner(1.5, 0.04, 1.0, 0.1, 0.0035, 0.014, 0.65, 0.85),
        OctScanner(5.0, 0.12, 2.6, 0.7, 0.0060, 0.024, 0.90, 1.05),
    ),
}

OCT = Modality(task="segmentation", classes=CLASSES, size=(128, 256), smallest=(96, 32), anatomy=anatomy, sites=SITES)
