"""A method whose first workers are killed, as by a preemption: for grids that must not notice."""

import os
import signal
from pathlib import Path

from dltta.objectives import Tent

DEATHS = "DLTTA_TEST_DEATHS"  # a folder; every file in it is one death to come


class Dying(Tent):
    """Tent, in a process that is killed while there are deaths to come."""

    def prepare(self, model):
        for death in Path(os.environ[DEATHS]).glob("*"):
            death.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prepare(model)
