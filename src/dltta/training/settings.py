"""Source side. How is the source model trained? Every default with where it comes from."""

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from dltta.data.case import Task
from dltta.errors import SettingError
from dltta.training.augmentation import Augmentation, Kind
from dltta.training.schedules import Schedule

LEARNING_RATES: dict[Task, float] = {"segmentation": 1e-3, "classification": 3e-4}  # the paper's
AUXILIARIES = ("ttt", "ttt++", "dtta", "atta", "memory")
CHOICES = {
    "loss": ("ce", "ce+dice"),
    "schedule": get_args(Schedule),
    "keep": ("best", "last"),
    "augmentation": get_args(Kind),
    "precision": ("float32", "bfloat16"),
}


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of source training, Eq. (1)."""

    epochs: int = 100  # the paper's
    batch_size: int = 8
    learning_rate: float | None = None  # None: the paper's for the task, Adam
    loss: Literal["ce", "ce+dice"] = "ce"  # the paper names cross-entropy
    schedule: Schedule = "constant"  # of the learning rate; polynomial is nnU-Net's
    keep: Literal["best", "last"] = "best"  # epoch whose weights are the model: best by validation, or last
    augmentation: Kind = "light"
    mirror: tuple[int, ...] | None = None  # axes that may be mirrored; None: the last in 2-D, the first in 3-D
    rotation: float = 15.0  # degrees at most, of the augmentation `field`
    patch: tuple[int, ...] | None = None  # random crops of this size, and windows of it afterwards
    crop: tuple[int, ...] | None = None  # random crops of this size for training alone: whole images afterwards
    foreground: float = 0.0  # share of the crops that are around a labeled position; nnU-Net's is a third
    repeats: int = 1  # how often an epoch sees each image
    precision: Literal["float32", "bfloat16"] = "float32"  # bfloat16: mixed, twice as fast where the processor has it
    validation: float | tuple[str, ...] = 0.2  # share of patients, or their names; the paper's OCT split is a fifth
    seed: int = 0
    with_: tuple[str, ...] = ()  # to train or keep too: ttt, ttt++, dtta, atta, memory (pairs of source images)
    rotation_hidden: int = 64
    projection: int = 128  # numbers that TTT++ tells images apart by
    autoencoder_epochs: int = 20  # ATTA's
    autoencoder_batch: int = 2  # ATTA's
    autoencoder_width: int = 64  # ATTA's n
    autoencoder_rate: float = 1e-3  # ATTA's, Adam
    denoiser_epochs: int = 50  # DTTA's authors: 30,000 steps
    denoiser_batch: int = 1  # DTTA's
    denoiser_widths: tuple[int, ...] = (16, 32, 64, 128)  # DTTA's
    denoiser_rate: float = 1e-3  # DTTA's, Adam
    workers: int = 0  # processes that read and augment images

    def __post_init__(self) -> None:
        for name in (
            "epochs",
            "batch_size",
            "repeats",
            "autoencoder_epochs",
            "autoencoder_batch",
            "denoiser_epochs",
            "denoiser_batch",
        ):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not isinstance(self.validation, tuple) and not 0 <= self.validation < 1:
            raise SettingError(f"validation must be a share from 0 to below 1, got {self.validation}")
        if not 0 <= self.foreground <= 1:
            raise SettingError(f"foreground must be a share from 0 to 1, got {self.foreground}")
        if self.patch is not None and self.crop is not None:
            raise SettingError("patch and crop exclude each other; give crop to run the network on whole images")
        for name, choices in CHOICES.items():
            if (given := getattr(self, name)) not in choices:
                raise SettingError(f"{name} must be {' or '.join(map(repr, choices))}, got {given!r}")
        unknown = [name for name in self.with_ if name not in AUXILIARIES]
        if unknown:
            raise SettingError(f"cannot train {unknown[0]!r} with the source model; there are {', '.join(AUXILIARIES)}")

    @property
    def changes(self) -> Augmentation:
        """How training images are changed."""
        return Augmentation(
            self.augmentation, self.patch or self.crop, self.foreground, mirror=self.mirror, rotation=self.rotation
        )

    def as_json(self) -> dict[str, Any]:
        """Without the settings of a denoiser where none is trained: models of before there were any stay the same."""
        kept = "dtta" in self.with_
        return {key: value for key, value in asdict(self).items() if kept or not key.startswith("denoiser_")}
