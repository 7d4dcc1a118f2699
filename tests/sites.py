"""Small labeled data sets that a network can learn in seconds."""

from dataclasses import dataclass

import torch

from dltta.data.case import Case


@dataclass(frozen=True)
class Blobs:
    """Bright rectangles on a gradient: segment them, or say whether there is one."""

    task: str = "segmentation"
    count: int = 8
    axes: int = 2
    site: str = "here"
    size: int = 32

    @property
    def classes(self):
        return ("background", "blob") if self.task == "segmentation" else ("without", "with")

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(1, *[self.size] * self.axes, generator=generator) * 0.1
        image += torch.linspace(0, 1, self.size).view(-1, *[1] * (self.axes - 1))  # so that up and down differ
        label = torch.zeros([self.size] * self.axes, dtype=torch.long)
        there = self.task == "segmentation" or index % 2 == 1
        if there:
            corner = torch.randint(2, self.size // 2, (self.axes,), generator=generator).tolist()
            box = tuple(slice(c, c + self.size // 3) for c in corner)
            label[box] = 1
            image[(0, *box)] += 2
        answer = label if self.task == "segmentation" else torch.tensor(int(there))
        return Case(f"case_{index}", self.site, f"patient_{index // 2}", image, answer)


class LockedCase(Case):
    """A case whose label fails the test that reads it."""

    def __getattribute__(self, name):
        assert name != "label", "a target's label was read"
        return super().__getattribute__(name)


@dataclass(frozen=True)
class Locked:
    """A data set whose labels must not be read."""

    dataset: object

    @property
    def site(self):
        return self.dataset.site

    @property
    def task(self):
        return self.dataset.task

    @property
    def classes(self):
        return self.dataset.classes

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        case = self.dataset[index]
        return LockedCase(case.name, case.site, case.group, case.image, case.label, case.spacing)
