"""Who is told how far an experiment has come."""

from collections.abc import Callable

from dltta.evaluation.experiment import (
    Job,
)
from dltta.evaluation.rehearsal import Progress
from dltta.training.fit import Report


class Listener:
    """What an experiment tells while it runs; every method may be left as it is."""

    def training(self, seed: int) -> Report:
        """Of a training in this process, batch by batch."""
        return silent

    def trainings(self, total: int) -> Callable[[str], None]:
        """Of trainings in other processes: the name of each model that is trained."""
        return lambda name: None

    def rehearsal(self, seed: int) -> Progress:
        """Of a rehearsal in this process, stream by stream."""
        return lambda done, total: None

    def rehearsals(self, total: int) -> Callable[[str], None]:
        """Of rehearsals in other processes: the name of each that is done."""
        return lambda name: None

    def streams(self, total: int) -> Callable[[Job], None]:
        return lambda job: None

    def lost(self, name: str) -> None:
        """A worker is gone; what it did is given to another one."""


def silent(*at: object) -> None:
    """A report to nobody."""
