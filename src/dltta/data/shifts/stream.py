"""1 images. A labeled data set as a stream of simulated sites: one that stays, or several one after another."""

from dataclasses import dataclass, replace

from dltta.data.case import Case, Dataset, Task
from dltta.data.shifts.site import SimulatedSite
from dltta.errors import SettingError


@dataclass(frozen=True)
class SimulatedStream:
    """The cases of `dataset` as they would look at `sites`, in blocks of equal length.

    One site: a stream that stays. Two: it changes half-way. `SOURCE_SITE` among them is the source itself. Images are
    changed as they are on disk, so give it the data set before preprocessing.
    """

    dataset: Dataset
    sites: tuple[SimulatedSite, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.sites) <= len(self.dataset):
            raise SettingError(
                f"{len(self.sites)} site(s) for {len(self.dataset)} case(s); give at least one, each needs a case"
            )

    @property
    def site(self) -> str:
        return "+".join(site.name for site in self.sites)

    @property
    def task(self) -> Task:
        return self.dataset.task

    @property
    def classes(self) -> tuple[str, ...]:
        return self.dataset.classes

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Case:
        if not 0 <= index < len(self):
            raise IndexError(f"case {index} of {len(self)}")
        site, case = self.sites[index * len(self.sites) // len(self)], self.dataset[index]
        if case.label is None:
            return replace(case, site=site.name, image=site.image(case.image, case=index))
        image, label = site.pair(case.image, case.label, case=index)
        return replace(case, site=site.name, image=image, label=label)
