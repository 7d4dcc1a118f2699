"""1 images. A simulated site: what would this image look like if another hospital had taken it?"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from dltta.data.shifts.bias import BiasField
from dltta.data.shifts.blur import Blur
from dltta.data.shifts.brightness import Brightness
from dltta.data.shifts.change import Change, plain
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
from dltta.data.shifts.stain import Stain
from dltta.errors import InputError, SettingError, require

# in the order in which they come about: object, illumination, optics, detector, frequency space, file
CHANGES: tuple[type[Change], ...] = (
    Magnification,
    Stain,
    BiasField,
    Blur,
    Resolution,
    Anisotropy,
    ColorMixing,
    Tint,
    Curve,
    Gamma,
    Contrast,
    Brightness,
    GaussianNoise,
    RicianNoise,
    Speckle,
    Ghosting,
    Spikes,
    Jpeg,
    OnlyNoise,
    Negative,
    Remapped,
    Shuffled,
    Constant,
)
BY_NAME: Mapping[str, type[Change]] = {change.name: change for change in CHANGES}
C = TypeVar("C", bound=Change)
WIDEST = 2.0  # no case has a change more than twice as strong as its site's, or less than half


@dataclass(frozen=True)
class SimulatedSite:
    """Changes that all images of a site share, a little different from case to case.

    What an image becomes depends on the site and the number of the case alone, never on what was drawn before.
    """

    name: str
    changes: tuple[Change, ...]
    severity: float = 0.0  # 0 is the source; for ordering
    seed: int = 0
    variation: float = 0.15  # standard deviation of the logarithm of a change's strength, from case to case

    def image(self, image: Tensor, case: int = 0) -> Tensor:
        """The image (C, *spatial) as this site would have taken it; same shape, type and device.

        An image whose channels all have mean 0 and variance 1 was standardized on its way to the network; the result
        is again, as it would be at the other site.
        """
        if not self.changes:
            return image
        image = plain(image)
        _check(image)
        work = image if image.dtype == torch.float64 else image.float()
        for change in self.changes:
            rng = self._rng(change, case)
            work = self._of_case(change, rng).image(work, rng)
        return (_standardized(work) if _is_standardized(image) else work).to(image.dtype)

    def pair(self, image: Tensor, label: Tensor, case: int = 0) -> tuple[Tensor, Tensor]:
        """Image and label; a dense label (*spatial) moves with what moves the image, a class label () stays."""
        changed = self.image(image, case)
        for change in self.changes:
            if isinstance(change, Magnification) and label.ndim:
                moving = self._of_case(change, self._rng(change, case))
                label = moving.label(label)
        return changed, label

    def describe(self) -> str:
        """The changes and their strengths, as in `gamma 1.4, blur 0.8 px`."""
        return ", ".join(map(str, self.changes)) or "unchanged"

    def as_json(self) -> dict[str, Any]:
        changes = [{"change": change.name, **asdict(change)} for change in self.changes]
        return {
            "name": self.name,
            "seed": self.seed,
            "severity": self.severity,
            "variation": self.variation,
            "changes": changes,
        }

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> "SimulatedSite":
        """The site that `as_json` described."""
        changes = tuple(_change(entry) for entry in description["changes"])
        return cls(description["name"], changes, description["severity"], description["seed"], description["variation"])

    def _rng(self, change: Change, case: int) -> np.random.Generator:
        if case < 0:
            raise SettingError(f"case is {case}; choose 0 or more")
        return np.random.default_rng([self.seed, case, crc32(change.name.encode())])

    def _of_case(self, change: C, rng: np.random.Generator) -> C:
        """The change as strong as this case has it."""
        factor = float(np.exp(self.variation * rng.standard_normal()))
        return change.scaled(min(WIDEST, max(1 / WIDEST, factor)))


def _change(entry: Mapping[str, Any]) -> Change:
    require("change", entry["change"], BY_NAME)
    return BY_NAME[entry["change"]](**{name: value for name, value in entry.items() if name != "change"})


def _check(image: Tensor) -> None:
    if image.ndim not in (3, 4) or not image.is_floating_point():
        raise InputError(
            f"an image of shape {tuple(image.shape)} and {image.dtype} cannot be changed; "
            "give floating-point numbers, channels first, then two or three axes"
        )
    if not torch.isfinite(image).all():
        raise InputError("the image has values that are not numbers; leave it out")


def _is_standardized(image: Tensor) -> bool:
    flat = image.flatten(1).float()
    mean, sd = flat.mean(1), flat.std(1, unbiased=False)
    constant = sd < 1e-6
    return bool((mean.abs() < 1e-3).all() and ((sd - 1).abs() < 1e-2)[~constant].all() and not constant.all())


def _standardized(image: Tensor) -> Tensor:
    dims = tuple(range(1, image.ndim))
    centered = image - image.mean(dims, keepdim=True)
    sd = centered.square().mean(dims, keepdim=True).sqrt()
    return torch.where(sd > 1e-6, centered / sd.clamp_min(1e-6), torch.zeros_like(centered))
