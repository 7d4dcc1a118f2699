"""Small trainings with source and target, for the tests of all methods."""

import torch

from dltta.data.preprocessing import Preprocessing
from dltta.models.io.checkpoint import Checkpoint
from dltta.models.nets.architecture import Architecture
from dltta.training import TrainingSettings
from dltta.training.uda import UDATraining
from sites import Blobs, Locked


class Stop(Exception):
    pass


def stop_at(*moment):
    """A report that ends the training at (stage, epoch, batch)."""

    def report(plan, epoch, batch, batches, loss):
        if (plan.stage, epoch, batch) == moment:
            raise Stop

    return report


def frame(
    folder, method, *, axes=2, size=32, targets=None, resume=False, report=None, log=None, source=None, **settings
):
    """A training of bright rectangles, four at the source and three at a target whose labels must not be read."""
    return UDATraining(
        method,
        [Blobs(count=4, axes=axes, size=size)],
        targets or [Locked(Blobs(site="there", count=3, axes=axes, size=size))],
        Architecture("unet", axes, 1, 2, {"width": 2}),
        Preprocessing(),
        TrainingSettings(**{"epochs": 1, "batch_size": 2, "validation": 0.5, **settings}),
        folder,
        torch.device("cpu"),
        resume,
        report or (lambda *at: None),
        log or (lambda row: None),
        source,
    )


def untrained(axes=2):
    """A source model that knows nothing, for tests of what is done with it."""
    architecture = Architecture("unet", axes, 1, 2, {"width": 2})
    model = architecture.build(seed=0).eval()
    return Checkpoint(model, architecture, "segmentation", ("background", "blob"), Preprocessing())


def same(one, other):
    """Whether two networks agree in every bit."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == other_name and torch.equal(a, b) for (name, a), (other_name, b) in pairs)
