"""1 images. Which sites are rehearsed: seeded draws from mild to strong, and the sites that must be refused."""

from collections.abc import Mapping, Sequence

import numpy as np

from dltta.data.shifts.bias import BiasField
from dltta.data.shifts.blur import Blur
from dltta.data.shifts.brightness import Brightness
from dltta.data.shifts.change import Change
from dltta.data.shifts.color import ColorMixing, Tint
from dltta.data.shifts.contrast import Contrast
from dltta.data.shifts.curve import Curve
from dltta.data.shifts.gamma import Gamma
from dltta.data.shifts.harmful import Constant, Negative, OnlyNoise, Remapped, Shuffled
from dltta.data.shifts.jpeg import Jpeg
from dltta.data.shifts.kspace import Ghosting, Spikes
from dltta.data.shifts.magnification import Magnification
from dltta.data.shifts.noise import GaussianNoise, RicianNoise, Speckle
from dltta.data.shifts.resolution import Anisotropy, Resolution
from dltta.data.shifts.site import CHANGES, SimulatedSite
from dltta.data.shifts.stain import Stain
from dltta.errors import SettingError

Family = tuple[type[Change], ...]

COLORS: Family = (Stain, ColorMixing, Tint)
CURVES: Family = (Gamma, Curve)
WINDOWS: Family = (Contrast, Brightness)
DETAIL: Family = (Blur, Resolution)
NOISES: Family = (GaussianNoise, RicianNoise, Speckle)
MAGNIFICATION: Family = (Magnification,)
SHADING: Family = (BiasField,)
FREQUENCY: Family = (Ghosting, Spikes)
COMPRESSION: Family = (Jpeg,)
TONES: Family = COLORS + CURVES + WINDOWS

GOLDEN = (5**0.5 - 1) / 2
MILDEST = 0.15  # severity of the mildest site; the strongest has 1
LEAST_TONE = 0.7  # of its severity: what differs most between real sites is contrast and color
MOST_OTHERS = 3  # changes beside tone and one more, at the strongest sites
HARMFUL_SEVERITY = 2.0
DRAWN = "site "  # begins the name of a drawn site; its number follows

SOURCE_SITE = SimulatedSite("source", ())
"""The source itself: images stay as they are."""


def draw_sites(count: int, *, seed: int = 0, spatial_dims: int = 2, channels: int = 1) -> tuple[SimulatedSite, ...]:
    """`count` sites whose severities are spread evenly from mild to strong; the first n of a longer draw are the same.

    A site changes the tones and one or more other things, up to four when severe, that suit the images: color and stain
    for 2-D images of three channels, thick slices for volumes, frequency space for grey images, JPEG for 2-D.
    """
    if count < 0 or seed < 0:
        raise SettingError(f"count is {count} and seed {seed}; choose 0 or more")
    if spatial_dims not in (2, 3) or channels < 1:
        raise SettingError(f"{spatial_dims} axes and {channels} channel(s); choose 2 or 3 axes and 1 channel or more")
    return tuple(_draw(index, seed, spatial_dims, channels) for index in range(count))


def related_sites(sites: Mapping[str, Sequence[SimulatedSite]]) -> dict[str, frozenset[str]]:
    """For each name the names that share a kind of tone change with it, itself included.

    What a real site does to tones is none of the kinds that are simulated, so what is learned from some of them must
    hold for another.
    """
    kinds = {
        name: {type(change) for site in each for change in site.changes} & set(TONES) for name, each in sites.items()
    }
    return {name: frozenset({name, *(other for other in kinds if kinds[name] & kinds[other])}) for name in kinds}


def _draw(index: int, seed: int, spatial_dims: int, channels: int) -> SimulatedSite:
    rng = np.random.default_rng([seed, index, spatial_dims, channels])
    start = np.random.default_rng(seed).random()
    severity = MILDEST + (1 - MILDEST) * ((start + index * GOLDEN) % 1)
    tones, others = _families(spatial_dims, channels)
    families = [tones[int(rng.integers(len(tones)))]]
    more = 1 + int(rng.integers(1 + round(MOST_OTHERS * severity)))
    families += [others[int(family)] for family in rng.permutation(len(others))[:more]]
    kinds: list[type[Change]] = []
    for family in families:
        left = [kind for kind in family if kind not in kinds]
        kinds.append(left[int(rng.integers(len(left)))])
    levels = severity * np.append(rng.uniform(LEAST_TONE, 1), rng.uniform(0.3, 1, len(kinds) - 1))
    drawn = [kind.draw(rng, float(level)) for kind, level in zip(kinds, levels, strict=True)]
    ordered = sorted(drawn, key=lambda change: CHANGES.index(type(change)))
    return SimulatedSite(f"{DRAWN}{index + 1}", tuple(ordered), float(severity), int(rng.integers(2**31)))


def _families(spatial_dims: int, channels: int) -> tuple[list[Family], list[Family]]:
    """Families of tone changes, of which a site has one, and the others, of which it has several."""
    others = [DETAIL, NOISES, SHADING, MAGNIFICATION]
    if spatial_dims == 2 and channels == 3:
        return [COLORS, COLORS, CURVES, WINDOWS], [
            DETAIL,
            (GaussianNoise,),
            SHADING,
            MAGNIFICATION,
            CURVES,
            COMPRESSION,
        ]
    others += [FREQUENCY, CURVES + WINDOWS]
    others += [COMPRESSION] if spatial_dims == 2 else [(Anisotropy,)]
    return [CURVES, CURVES, WINDOWS], others  # a window is undone where images are standardized


HARMFUL: tuple[SimulatedSite, ...] = (
    SimulatedSite("noise", (OnlyNoise(),), HARMFUL_SEVERITY, seed=1),
    SimulatedSite("negative", (Negative(),), HARMFUL_SEVERITY, seed=2),
    SimulatedSite("other modality", (Remapped(0.4),), HARMFUL_SEVERITY, seed=3),
    SimulatedSite("shuffled", (Shuffled(8),), HARMFUL_SEVERITY, seed=4),
    SimulatedSite("constant", (Constant(),), HARMFUL_SEVERITY, seed=5),
)
"""Sites that nothing may be learned from. The labels stay, though most of these images no longer show them."""
