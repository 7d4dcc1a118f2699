"""Which methods are there, and what belongs to each? One row for each; every command, table and page reads it here.

Pure data: nothing here imports torch. A new method is one file in `core/objectives` and one row of `Method`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Task = Literal["segmentation", "classification"]
PAPER = "the DLTTA paper"


class Optimizer(StrEnum):
    """Which optimizer takes the step; SGD is Eq. (2)."""

    SGD = "sgd"
    ADAM = "adam"


class Mode(StrEnum):
    """What one image leaves behind for the next."""

    CONTINUAL = "continual"
    IMAGE_SPECIFIC = "image-specific"


class Predict(StrEnum):
    """From which pass of the network a batch is predicted."""

    AFTER = "after"
    BEFORE = "before"


class Normalization(StrEnum):
    """Kinds of normalization layers that a method works with."""

    BATCH = "batch"
    INSTANCE = "instance"
    GROUP = "group"
    LAYER = "layer"


@dataclass(frozen=True)
class Step:
    """How a method's authors take their steps in one task; `of` says where the numbers are from."""

    alpha: float
    batch_size: int
    optimizer: Optimizer = Optimizer.SGD
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    updates: int = 1  # gradient steps per batch
    of: str = PAPER


STEPS: dict[Task, Step] = {"segmentation": Step(1e-3, 1), "classification": Step(3e-4, 200)}  # Sec. IV
NORMALIZED = tuple(Normalization)
BATCH_ONLY = (Normalization.BATCH,)


@dataclass(frozen=True)
class Facts:
    """What belongs to a method beside its class."""

    title: str  # as tables write it
    paper: str
    path: str  # package.module:Class
    idea: str
    moves: str
    passes: str  # of the network for one batch, forward + backward
    loss: bool = True
    tasks: tuple[Task, ...] = ("segmentation", "classification")
    mode: Mode = Mode.CONTINUAL
    rate: str = "fixed"  # the authors' rule, of methods that the DLTTA paper does not compare
    predict: Predict = Predict.AFTER
    part: str | None = None  # what `dltta train --with` must have trained
    calibration: bool = False  # whether the model's calibration decides what it does
    source: str = "nothing"  # what it needs from the source beside the network
    normalizations: tuple[Normalization, ...] = NORMALIZED  # of networks it works with; () for any network at all
    batch_of_one: str = "yes"
    volumes: str = "yes"
    statistics: bool = True  # whether it leaves the choice of normalization statistics to the recipe
    steps: tuple[Step, Step] | None = None  # segmentation, classification; None: the DLTTA paper's

    def step(self, task: Task) -> Step:
        """The authors' settings for a task, or the DLTTA paper's for the methods that it compares."""
        if self.steps is None:
            return STEPS[task]
        return self.steps[0] if task == "segmentation" else self.steps[1]

    @property
    def of_paper(self) -> bool:
        """Whether it runs with the settings of the DLTTA paper."""
        return self.steps is None


_ROOM = "dltta.core.objectives"


class Method(StrEnum):
    """Methods with a name of their own; `package.module:Class` names any other objective."""

    facts: Facts

    def __new__(cls, name: str, facts: Facts) -> "Method":
        method = str.__new__(cls, name)
        method._value_ = name
        method.facts = facts
        return method

    SOURCE = (
        "source",
        Facts(
            "Source",
            "no adaptation",
            f"{_ROOM}.source:Source",
            "The source model as it was trained: what every other row is compared with.",
            "nothing",
            "1 + 0",
            loss=False,
            normalizations=(),
            statistics=False,
        ),
    )
    PTBN = (
        "ptbn",
        Facts(
            "PTBN",
            "Nado et al. 2020",
            f"{_ROOM}.ptbn:PTBN",
            "Normalizes by the statistics of the test batch instead of the training set's.",
            "nothing",
            "1 + 0",
            loss=False,
            normalizations=BATCH_ONLY,
        ),
    )
    TTT = (
        "ttt",
        Facts(
            "TTT",
            "Sun et al., ICML 2020",
            f"{_ROOM}.ttt:TTT",
            "Trains the encoder further on a task that needs no labels: which way up is the image?",
            "the encoder in front of the feature layer",
            "2 + 1, and the encoder on 4 rotations",
            part="ttt",
            source="a second network with a rotation head",
            normalizations=(),
        ),
    )
    TENT = (
        "tent",
        Facts(
            "Tent",
            "Wang et al., ICLR 2021",
            f"{_ROOM}.tent:Tent",
            "Makes predictions confident: minimizes their entropy.",
            "scale and shift of normalization layers",
            "2 + 1",
        ),
    )
    ATTA = (
        "atta",
        Facts(
            "ATTA",
            "He et al., MedIA 2021",
            f"{_ROOM}.atta:ATTA",
            "Makes image, features and prediction look familiar to auto-encoders that know the source.",
            "adaptors put in front of the network and behind three layers",
            "2 + 1, and the auto-encoders",
            part="atta",
            source="auto-encoders",
            normalizations=(),
        ),
    )
    T3A = (
        "t3a",
        Facts(
            "T3A",
            "Iwasawa and Matsuo, NeurIPS 2021",
            f"{_ROOM}.t3a:T3A",
            "Replaces the last layer by class prototypes: the mean of the confident features seen so far.",
            "the last layer, without a gradient",
            "1 + 0",
            loss=False,
            normalizations=(),
            statistics=False,
            steps=(Step(0.0, 1, of="ours: images come one by one"), Step(0.0, 32, of="the authors'")),
        ),
    )
    DTTA = (
        "dtta",
        Facts(
            "DTTA",
            "Karani et al., MedIA 2021",
            f"{_ROOM}.dtta:DTTA",
            "Changes the image by a small network until the prediction is what a denoiser of label maps makes of it.",
            "an image normalizer in front of the network",
            "501 + 500, and the denoiser 21 times",
            tasks=("segmentation",),
            mode=Mode.IMAGE_SPECIFIC,
            part="dtta",
            source="a second network behind an image normalizer; a denoiser of label maps",
            normalizations=(),
            statistics=False,
            steps=(
                Step(1e-3, 1, Optimizer.ADAM, updates=500, of="the authors', brain"),
                Step(1e-3, 1, Optimizer.ADAM, updates=500, of="not defined"),
            ),
        ),
    )
    TTT_PLUS = (
        "ttt++",
        Facts(
            "TTT++",
            "Liu et al., NeurIPS 2021",
            f"{_ROOM}.ttt_plus:TTTPlus",
            "Trains the encoder further on telling images apart, and holds the mean and covariance of its features at "
            "the source's.",
            "the encoder in front of the feature layer",
            "2 + 1, and the encoder on 1 (a batch: 3) views",
            part="ttt++",
            source="a second network with a projection head; moments of its features",
            normalizations=(),
            batch_of_one="alignment only",
            steps=(
                Step(1e-4, 1, momentum=0.9, of="ours: the authors' lower rate, CIFAR-100-C"),
                Step(1e-2, 256, momentum=0.9, of="the authors', CIFAR-10-C"),
            ),
        ),
    )
    COTTA = (
        "cotta",
        Facts(
            "CoTTA",
            "Wang et al., CVPR 2022",
            f"{_ROOM}.cotta:CoTTA",
            "For streams whose appearance keeps changing: learns from a slow teacher's predictions over many views, "
            "and returns some weights to the source at random.",
            "all weights; a teacher follows",
            "3 + 1, and 14 views (32 of a single label) where the source model is unsure",
            predict=Predict.BEFORE,
            normalizations=(),
            steps=(
                Step(7.5e-6, 1, Optimizer.ADAM, of="the authors', Cityscapes to ACDC"),
                Step(1e-3, 200, Optimizer.ADAM, of="the authors', CIFAR-10-C"),
            ),
        ),
    )
    EATA = (
        "eata",
        Facts(
            "EATA",
            "Niu et al., ICML 2022",
            f"{_ROOM}.eata:EATA",
            "Tent on predictions that are certain and not redundant, held near the source where that matters.",
            "scale and shift of normalization layers",
            "1 + 1",
            predict=Predict.BEFORE,
            calibration=True,
            source="Fisher information, measured in calibration; runs without it and says so",
            steps=(
                Step(2.5e-4, 1, momentum=0.9, of="ours: the authors' for classification"),
                Step(2.5e-4, 64, momentum=0.9, of="the authors', ImageNet-C"),
            ),
        ),
    )
    NOTE = (
        "note",
        Facts(
            "NOTE",
            "Gong et al., NeurIPS 2022",
            f"{_ROOM}.note:NOTE",
            "For streams that are sorted by class or patient: corrects the stored statistics only where an image "
            "clearly deviates, and learns from a class-balanced memory.",
            "scale and shift of batch-normalization layers",
            "1 + 0; with an update + 1 + 1 over the memory",
            predict=Predict.BEFORE,
            normalizations=BATCH_ONLY,
            statistics=False,
            steps=(
                Step(1e-4, 1, Optimizer.ADAM, of="ours: the authors' for classification"),
                Step(1e-4, 64, Optimizer.ADAM, of="the authors', CIFAR-10-C"),
            ),
        ),
    )
    ROTTA = (
        "rotta",
        Facts(
            "RoTTA",
            "Yuan et al., CVPR 2023",
            f"{_ROOM}.rotta:RoTTA",
            "For correlated streams: slowly moving statistics, a balanced memory of timely images, and a teacher that "
            "predicts.",
            "scale and shift of batch-normalization layers; a teacher follows",
            "2 + 0; with an update + 2 + 1 over the memory",
            predict=Predict.BEFORE,
            normalizations=BATCH_ONLY,
            statistics=False,
            steps=(
                Step(1e-3, 1, Optimizer.ADAM, of="ours: the authors' for classification"),
                Step(1e-3, 64, Optimizer.ADAM, of="the authors', CIFAR-10-C"),
            ),
        ),
    )
    SAR = (
        "sar",
        Facts(
            "SAR",
            "Niu et al., ICLR 2023",
            f"{_ROOM}.sar:SAR",
            "Tent for small batches: takes the gradient where the loss is highest nearby, on certain predictions, and "
            "starts over when the network collapses.",
            "scale and shift of normalization layers but the last",
            "2 + 2",
            predict=Predict.BEFORE,
            steps=(
                Step(2.5e-4 / 16, 1, momentum=0.9, of="the authors' for single images, ResNet-50"),
                Step(2.5e-4, 64, momentum=0.9, of="the authors', ResNet-50"),
            ),
        ),
    )
    DEYO = (
        "deyo",
        Facts(
            "DeYO",
            "Lee et al., ICLR 2024",
            f"{_ROOM}.deyo:DeYO",
            "Tent on predictions that are certain and rest on shape: shuffling the patches of the image changes them.",
            "scale and shift of normalization layers but the last",
            "2 + 1",
            predict=Predict.BEFORE,
            steps=(
                Step(2.5e-4 / 16, 1, momentum=0.9, of="the authors' for single images, ResNet-50"),
                Step(2.5e-4, 64, momentum=0.9, of="the authors', ResNet-50"),
            ),
        ),
    )
    INTENT = (
        "intent",
        Facts(
            "InTEnt",
            "Dong et al., CVPR workshops 2024",
            f"{_ROOM}.intent:InTEnt",
            "Predicts under several mixtures of source and test statistics and averages, the certain ones with more "
            "weight.",
            "nothing",
            "7 + 0",
            loss=False,
            normalizations=BATCH_ONLY,
            statistics=False,
            steps=(Step(0.0, 1, of="the authors'"), Step(0.0, 64, of="ours")),
        ),
    )
    VPTTA = (
        "vptta",
        Facts(
            "VPTTA",
            "Chen et al., CVPR 2024",
            f"{_ROOM}.vptta:VPTTA",
            "Changes the image instead of the network: factors on its lowest frequencies, until the statistics of all "
            "layers look like the source's.",
            "a prompt of a few numbers in front of the network",
            "2 + 1",
            normalizations=BATCH_ONLY,
            statistics=False,
            steps=(
                Step(0.05, 1, Optimizer.ADAM, betas=(0.9, 0.99), of="the authors', optic disc and cup"),
                Step(0.05, 1, Optimizer.ADAM, betas=(0.9, 0.99), of="ours: the authors' for segmentation"),
            ),
        ),
    )
    GRATA = (
        "grata",
        Facts(
            "GraTa",
            "Chen et al., AAAI 2025",
            f"{_ROOM}.grata:GraTa",
            "Follows the gradient of consistency between views; the more it agrees with that of the entropy, the "
            "further.",
            "scale and shift of normalization layers",
            "9 + 2",
            rate="aligned",
            steps=(
                Step(1e-4, 1, Optimizer.ADAM, of="the authors', optic disc and cup"),
                Step(1e-4, 64, Optimizer.ADAM, of="ours: the authors' for segmentation"),
            ),
        ),
    )


METHODS = {str(method): method for method in Method}
PAPER_METHODS = tuple(method for method in Method if method.facts.of_paper)
