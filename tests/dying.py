"""A method whose first workers are killed, as by a preemption: for grids and rehearsals that must not notice."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from dltta.evaluation import rehearsal
from dltta.models.io.opening import ModelSource
from dltta.objectives import Tent

SHORT = {  # of a rehearsal: two simulated sites and four cases
    "MOST_SITES": 2, "FEWEST_SITES": 2, "FEWEST_ONE_BY_ONE": 2,
    "CASES": {"segmentation": {1: 4}, "classification": {1: 4, 32: 6}},
}  # fmt: skip
DEATHS = "DLTTA_TEST_DEATHS"  # a folder; every file in it is one death to come


class Dying(Tent):
    """Tent, in a process that is killed while there are deaths to come."""

    def prepare(self, model):
        die()
        return super().prepare(model)


def die():
    """Be killed, if there is a death to come."""
    for death in Path(os.environ[DEATHS]).glob("*"):
        death.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class DyingSource(ModelSource):
    """A model whose workers are killed as they open it, while there are deaths to come; they rehearse shortly."""

    def open(self, *, predicting=True):
        for name, value in SHORT.items():
            setattr(rehearsal, name, value)
        die()
        return super().open(predicting=predicting)
