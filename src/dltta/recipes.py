"""What is a stream run with? `paper` and `recommended` are written here once; every command takes a `Recipe`.

Pure data: nothing here imports torch. `config.make_adapter` turns a recipe and a model into an adapter.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Task = Literal["segmentation", "classification"]


class Method(StrEnum):
    """Methods with a name of their own; `package.module:Class` names any other objective."""

    SOURCE = "source"
    PTBN = "ptbn"
    TTT = "ttt"
    TENT = "tent"
    ATTA = "atta"


RECOMMENDED = "recommended"  # on the command line and in results: a method that brings everything else along


class Rule(StrEnum):
    """Learning-rate rules with a name of their own; `package.module:Class` names any other."""

    FIXED = "fixed"
    DYNAMIC = "dynamic"  # Eq. (6)
    EXPONENTIAL = "exponential"
    RELATIVE = "relative"


NO_RATE = "none"  # of methods without a loss


class Statistics(StrEnum):
    """What batch normalization normalizes by."""

    BATCH = "batch"
    SHRINKAGE = "shrinkage"
    BLENDED = "blended"
    RUNNING = "running"


class Optimizer(StrEnum):
    """Which optimizer takes the step; SGD is Eq. (2)."""

    SGD = "sgd"
    ADAM = "adam"


class Mode(StrEnum):
    """What one image leaves behind for the next."""

    CONTINUAL = "continual"
    IMAGE_SPECIFIC = "image-specific"


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what a stream of images does to a model; None stands for the paper's value for the task.

    `name` says where the values come from: `paper`, `recommended` or `own`. `method` and `rate` are names of this
    module, or `package.module:Class`. `statistics` None is `shrinkage` for a calibrated model, else `batch`.
    """

    method: str = Method.TENT
    rate: str = Rule.DYNAMIC
    alpha: float | None = None
    statistics: Statistics | None = Statistics.BATCH
    optimizer: Optimizer = Optimizer.SGD
    steps: int = 1
    mode: Mode = Mode.CONTINUAL
    batch_size: int | None = None
    batches_kept: int | None = None  # the memory's capacity, in batches
    neighbors: int | None = None
    ready: Literal["full", "neighbors"] = "full"
    distance: Literal["l2", "cosine"] = "l2"
    pool: int | None = None  # positions per axis of the memory's keys; None keeps all
    positions: Literal["mean", "sum"] = "mean"  # how Eq. (4) treats the positions of an image
    prefill: bool = False  # the memory begins with the pairs of source images that the checkpoint keeps
    guard: bool = False
    name: str = "own"
