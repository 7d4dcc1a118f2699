"""1 images. Synthetic scanners: what would the same anatomy look like at another site?

Nothing here is a patient: anatomy is drawn from simple shapes, so the truth is exact, and a site is a range of scanner
settings, so the shift between sites, and from case to case within one, is known. Any case can be made again from its
seed, without a download.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, get_args

from dltta.data.case import Case, Task
from dltta.data.phantom.histology import HISTOLOGY
from dltta.data.phantom.modality import Modality, Site, Size
from dltta.data.phantom.oct import OCT
from dltta.data.phantom.prostate import PROSTATE
from dltta.errors import SettingError

__all__ = ["SITES", "Change", "Phantom", "TaskName", "changing", "phantom"]

TaskName = Literal["oct", "histology", "prostate"]
Change = Literal["abrupt", "gradual"]

_MODALITIES: dict[str, Modality[Any, Any]] = {"oct": OCT, "histology": HISTOLOGY, "prostate": PROSTATE}

SITES: dict[str, tuple[str, ...]] = {name: tuple(modality.sites) for name, modality in _MODALITIES.items()}
"""The sites of each task; the first is the source."""


@dataclass(frozen=True)
class Phantom:
    """Synthetic cases of one site, or of several that follow one another. Case i is computed when asked, always alike.

    Build it with `phantom` or `changing`.
    """

    task_name: TaskName
    sites: tuple[str, ...]
    count: int
    seed: int = 0
    size: Size | None = None  # None: the default of the task
    change: Change = "abrupt"

    def __post_init__(self) -> None:
        _check_name("task", self.task_name, tuple(_MODALITIES))
        for site in self.sites:
            _check_name(f"{self.task_name} site", site, SITES[self.task_name])
        _check_name("change", self.change, get_args(Change))
        if not self.sites:
            raise SettingError(f"no site given; choose from {', '.join(SITES[self.task_name])}")
        if self.count < len(self.sites):
            raise SettingError(f"count is {self.count}; {len(self.sites)} site(s) need at least as many cases")
        if self.seed < 0:
            raise SettingError(f"seed is {self.seed}; choose 0 or more")
        smallest = self._modality.smallest
        if self.size and (
            len(self.size) != len(smallest) or any(n < s for n, s in zip(self.size, smallest, strict=True))
        ):
            raise SettingError(f"size {self.size} does not suit {self.task_name}; give at least {smallest}")

    @property
    def site(self) -> str:
        return "-".join(self.sites)

    @property
    def task(self) -> Task:
        return self._modality.task

    @property
    def classes(self) -> tuple[str, ...]:
        return self._modality.classes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Case:
        if not -self.count <= index < self.count:
            raise IndexError(f"case {index} of {self.count}")
        index %= self.count
        name, site = self._site_at(index)
        return self._modality.case(name, site, index, seed=self.seed, size=self.size or self._modality.size)

    @property
    def _modality(self) -> Modality[Any, Any]:
        return _MODALITIES[self.task_name]

    def _site_at(self, index: int) -> tuple[str, Site[Any]]:
        """Where case `index` is scanned. On the way between two sites it carries the name of the nearer one."""
        known = self._modality.sites
        if self.change == "abrupt" or len(self.sites) == 1:
            name = self.sites[index * len(self.sites) // self.count]
            return name, known[name]
        way = index / (self.count - 1) * (len(self.sites) - 1)
        leg = min(int(way), len(self.sites) - 2)
        start, end, weight = self.sites[leg], self.sites[leg + 1], way - leg
        return start if weight < 0.5 else end, known[start].toward(known[end], weight)


def phantom(task_name: TaskName, site: str, count: int, *, seed: int = 0, size: Size | None = None) -> Phantom:
    """`count` synthetic cases of one site; case i does not depend on how many are asked.

    >>> cases = phantom("oct", "cirrus", 20)
    >>> cases[3].image.shape, cases[3].name
    (torch.Size([1, 128, 256]), 'cirrus_0003')
    """
    return Phantom(task_name, (site,), count, seed, size)


def changing(
    task_name: TaskName,
    sites: tuple[str, ...],
    count: int,
    *,
    seed: int = 0,
    size: Size | None = None,
    change: Change = "abrupt",
) -> Phantom:
    """A stream of `count` cases that moves through `sites`: in equal blocks, or gradually from one to the next.

    The scanner settings of a gradual stream are interpolated between the sites; it starts at the first and ends at the
    last. A site may come back: `("spectralis", "cirrus", "spectralis")`.
    """
    return Phantom(task_name, tuple(sites), count, seed, size, change)


def _check_name(what: str, found: str, known: tuple[str, ...]) -> None:
    if found in known:
        return
    by_lower = {name.lower(): name for name in known}
    close = get_close_matches(str(found).lower(), by_lower, n=1)
    hint = f"did you mean {by_lower[close[0]]!r}?" if close else f"choose from {', '.join(known)}"
    raise SettingError(f"there is no {what} {found!r}; {hint}")
