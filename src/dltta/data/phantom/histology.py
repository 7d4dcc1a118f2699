"""1 images. Synthetic H&E histology: patches of normal and tumor tissue as five hospitals would stain and scan them.

Two dyes absorb light: hematoxylin in nuclei, eosin in cytoplasm and stroma. Optical densities add (Beer-Lambert), so a
hospital is its pair of dye colors, how much of each it uses, and its microscope.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter, shift

from dltta.data.phantom.fields import Array, positions, smooth_field
from dltta.data.phantom.modality import Modality, Site, Size

CLASSES = ("normal", "tumor")
PIXEL = 0.001  # mm, about what a tenfold objective gives
REACH = 11  # pixels around its center; no nucleus is larger

RGB = tuple[float, float, float]


@dataclass(frozen=True)
class Tissue:
    """A patch of tissue. Arrays (rows, columns); amounts of dye are 1 in an average nucleus or cytoplasm."""

    label: NDArray[np.int64]  # (), 0 normal, 1 tumor
    nuclei: NDArray[np.bool_]
    hematoxylin: Array
    eosin: Array


@dataclass(frozen=True)
class _Cells:
    """How the nuclei of a kind of tissue look; lengths in pixels."""

    apart: float  # distance between neighbors
    present: float  # fraction of places that hold a nucleus
    radius: float
    spread: float  # of the radius, relative
    elongation: float  # long over short axis
    irregularity: float  # of the outline, relative


def _cells(rng: np.random.Generator, tumor: bool) -> _Cells:
    """Tumor nuclei are larger, more crowded and more irregular; both kinds vary from patch to patch."""
    if tumor:
        return _Cells(
            rng.uniform(8.5, 12), rng.uniform(0.8, 0.95), rng.uniform(2.9, 4.2), 0.20, rng.uniform(1.1, 1.5), 0.10
        )
    return _Cells(rng.uniform(8, 13), rng.uniform(0.5, 0.9), rng.uniform(2.2, 3.0), 0.10, rng.uniform(1.1, 2.0), 0.04)


def anatomy(rng: np.random.Generator, size: Size, spacing: tuple[float, ...]) -> Tissue:
    """Normal or tumor tissue, equally often."""
    tumor = bool(rng.random() < 0.5)
    cover, chromatin = _nuclei(rng, size, _cells(rng, tumor))
    stroma = _fibers(rng, size)
    gaps = np.clip(smooth_field(rng, size, 7) - rng.uniform(1.2, 2.2), 0, 1)  # empty spaces let the light through
    cytoplasm = (0.75 + 0.25 * stroma + 0.12 * smooth_field(rng, size, 1.5)) * (1 - gaps)
    basophilia = rng.uniform(0.12, 0.26) if tumor else rng.uniform(0.06, 0.20)  # RNA of busy cells takes hematoxylin
    return Tissue(
        label=np.array(int(tumor), dtype=np.int64),
        nuclei=cover > 0.5,
        hematoxylin=(basophilia * cytoplasm * (1 - cover) + chromatin).clip(0).astype(np.float32),
        eosin=(cytoplasm * (1 - 0.65 * cover)).clip(0).astype(np.float32),
    )


def _nuclei(rng: np.random.Generator, size: Size, cells: _Cells) -> tuple[Array, Array]:
    """Where nuclei lie and how dark their chromatin is, both (H, W); every nucleus is stamped at once."""
    rows = np.arange(-REACH, size[0] + REACH, cells.apart * 0.87)
    columns = np.arange(-REACH, size[1] + REACH, cells.apart)
    centers = np.stack(np.meshgrid(rows, columns, indexing="ij"), axis=-1)
    centers[1::2, :, 1] += cells.apart / 2  # rows interlock
    centers = centers.reshape(-1, 2)
    centers = centers + rng.normal(0, 0.18 * cells.apart, centers.shape)
    centers = centers[rng.random(len(centers)) < cells.present]
    count = len(centers)

    def each(drawn: NDArray[np.float64]) -> Array:
        """One value per nucleus, ready to meet its pixels."""
        return drawn.astype(np.float32)[:, None, None]  # (N, 1, 1)

    offset = np.arange(-REACH, REACH + 1)
    corner = np.round(centers).astype(np.int64)
    y, x = np.moveaxis((corner - centers)[:, :, None] + offset, 1, 0).astype(np.float32)  # (N, 23) each
    y, x = y[:, :, None], x[:, None, :]
    turn = each(rng.uniform(0, np.pi, count))
    along, across = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    stretch = each(np.sqrt(cells.elongation * rng.uniform(0.9, 1.1, count)))
    angle = np.arctan2(across, along)
    outline = 1 + sum(
        each(rng.normal(0, cells.irregularity, count) / wave**0.5) * np.cos(wave * angle + each(phase))
        for wave, phase in zip((2, 3, 5), rng.uniform(0, 2 * np.pi, (3, count)), strict=True)
    )
    radius = each(cells.radius * rng.normal(1, cells.spread, count).clip(0.6, 1.5)) * np.clip(outline, 0.6, 1.3)
    inside = radius - np.hypot(along / stretch, across * stretch)  # pixels from the membrane, positive within
    stamp = np.clip(inside + 0.5, 0, 1)
    membrane = 0.25 * np.exp(-(((inside - 0.8) / 0.8) ** 2))
    darkness = stamp * (each(rng.normal(1, 0.12, count)) + membrane)

    place = (corner[:, 0, None, None] + offset[:, None], corner[:, 1, None, None] + offset)
    rows_at, columns_at = np.broadcast_arrays(*place)
    visible = (rows_at >= 0) & (rows_at < size[0]) & (columns_at >= 0) & (columns_at < size[1]) & (stamp > 0)
    cover, chromatin = np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
    np.maximum.at(cover, (rows_at[visible], columns_at[visible]), stamp[visible])
    np.maximum.at(chromatin, (rows_at[visible], columns_at[visible]), darkness[visible])
    clumps = 1 + (0.06 + 1.2 * cells.irregularity) * smooth_field(rng, size, 0.9)
    return cover, np.asarray(chromatin * clumps.clip(0.3, 1.8), dtype=np.float32)


def _fibers(rng: np.random.Generator, size: Size) -> Array:
    """Wavy bundles in [-1, 1]."""
    rows, columns = positions(size, (1.0, 1.0))
    angle, wavelength = rng.uniform(0, np.pi), rng.uniform(5, 9)
    phase = (rows * np.sin(angle) + columns * np.cos(angle)) / wavelength + 0.6 * smooth_field(rng, size, 8)
    return np.asarray(np.sin(2 * np.pi * phase), dtype=np.float32)


@dataclass(frozen=True)
class Microscope:
    """Settings of a laboratory and its slide scanner; dyes as optical density in red, green and blue."""

    hematoxylin: RGB
    eosin: RGB
    nuclear_stain: float  # how much hematoxylin was used
    counterstain: float  # how much eosin
    white: RGB  # color of an empty slide
    blur: float  # pixels, standard deviation
    fringe: float  # pixels by which a line scanner displaces red against blue along its way; gives patches an "up"
    shading: float  # how much darker the far corner is
    noise: float  # of the camera, standard deviation

    def spacing(self, size: Size) -> tuple[float, ...]:
        return (PIXEL, PIXEL)

    def acquire(self, anatomy: Tissue, rng: np.random.Generator) -> Array:
        """The patch (3, H, W) in [0, 1]."""
        dyes = np.stack([self.nuclear_stain * anatomy.hematoxylin, self.counterstain * anatomy.eosin])
        colors = np.array([self.hematoxylin, self.eosin], dtype=np.float32)
        light = np.exp(-np.einsum("dc,dhw->chw", colors, dyes)) * np.array(self.white, dtype=np.float32)[:, None, None]
        light *= self._illumination(rng, anatomy.eosin.shape)
        light[0] = shift(light[0], (self.fringe / 2, 0), order=1, mode="nearest")
        light[2] = shift(light[2], (-self.fringe / 2, 0), order=1, mode="nearest")
        image = gaussian_filter(light, (0, self.blur, self.blur)) + rng.normal(0, self.noise, light.shape)
        return np.asarray(np.clip(image, 0, 1), dtype=np.float32)

    def _illumination(self, rng: np.random.Generator, size: Size) -> Array:
        rows, columns = positions(size, tuple(2 / n for n in size))
        angle = rng.uniform(0, 2 * np.pi)
        slope = (rows * np.sin(angle) + columns * np.cos(angle)) / np.sqrt(2)  # in [-1, 1]
        return np.asarray(1 - self.shading * (slope + 1) / 2, dtype=np.float32)


SITES = {
    "hospital_0": Site(  # violet nuclei, pink background
        Microscope((0.85, 1.00, 0.45), (0.10, 0.80, 0.35), 0.9, 0.50, (0.94, 0.93, 0.94), 0.4, 1.0, 0.0, 0.010),
        Microscope((0.85, 1.00, 0.45), (0.10, 0.80, 0.35), 1.2, 0.70, (0.97, 0.96, 0.97), 0.7, 1.4, 0.08, 0.015),
    ),
    "hospital_1": Site(  # close to the source, a little paler
        Microscope((0.85, 1.00, 0.50), (0.12, 0.75, 0.30), 0.75, 0.40, (0.93, 0.92, 0.90), 0.5, 1.0, 0.0, 0.010),
        Microscope((0.90, 0.95, 0.55), (0.15, 0.80, 0.35), 1.00, 0.65, (0.98, 0.96, 0.94), 0.9, 1.4, 0.10, 0.020),
    ),
    "hospital_2": Site(  # much eosin
        Microscope((0.75, 1.00, 0.50), (0.10, 0.90, 0.45), 0.8, 0.55, (0.94, 0.90, 0.90), 0.5, 1.0, 0.0, 0.010),
        Microscope((0.80, 1.05, 0.55), (0.15, 0.95, 0.50), 1.1, 0.95, (0.98, 0.94, 0.94), 0.9, 1.4, 0.12, 0.020),
    ),
    "hospital_3": Site(  # blue, pale, out of focus
        Microscope((1.00, 0.80, 0.30), (0.20, 0.70, 0.25), 0.50, 0.30, (0.86, 0.88, 0.95), 0.8, 1.0, 0.05, 0.015),
        Microscope((1.10, 0.85, 0.35), (0.25, 0.80, 0.30), 0.85, 0.60, (0.92, 0.94, 0.99), 1.3, 1.4, 0.20, 0.030),
    ),
    "hospital_4": Site(  # everything stained heavily, which varies from patient to patient
        Microscope((0.90, 1.10, 0.60), (0.15, 0.90, 0.45), 1.1, 0.70, (0.85, 0.82, 0.84), 0.5, 1.0, 0.05, 0.010),
        Microscope((1.00, 1.20, 0.70), (0.30, 1.00, 0.55), 1.9, 1.50, (0.95, 0.92, 0.94), 1.0, 1.4, 0.25, 0.025),
    ),
}

HISTOLOGY = Modality(
    task="classification",
    classes=CLASSES,
    size=(64, 64),
    smallest=(32, 32),
    anatomy=anatomy,
    sites=SITES,
    patient_cases=8,
)
