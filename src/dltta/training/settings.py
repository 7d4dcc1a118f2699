"""Source side. How is the source model trained? Every default with where it comes from."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dltta.data.case import Task
from dltta.errors import SettingError

LEARNING_RATES: dict[Task, float] = {"segmentation": 1e-3, "classification": 3e-4}  # the paper's
AUXILIARIES = ("ttt", "ttt++", "dtta", "atta", "memory")


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of source training, Eq. (1)."""

    epochs: int = 100  # the paper's
    batch_size: int = 8
    learning_rate: float | None = None  # None: the paper's for the task, Adam
    loss: Literal["ce", "ce+dice"] = "ce"  # the paper names cross-entropy
    augmentation: Literal["none", "light"] = "light"
    patch: tuple[int, ...] | None = None  # random crops of this size; None trains on whole images
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
            "autoencoder_epochs",
            "autoencoder_batch",
            "denoiser_epochs",
            "denoiser_batch",
        ):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not isinstance(self.validation, tuple) and not 0 <= self.validation < 1:
            raise SettingError(f"validation must be a share from 0 to below 1, got {self.validation}")
        if self.loss not in ("ce", "ce+dice"):
            raise SettingError(f"loss must be 'ce' or 'ce+dice', got {self.loss!r}")
        if self.augmentation not in ("none", "light"):
            raise SettingError(f"augmentation must be 'none' or 'light', got {self.augmentation!r}")
        unknown = [name for name in self.with_ if name not in AUXILIARIES]
        if unknown:
            raise SettingError(f"cannot train {unknown[0]!r} with the source model; there are {', '.join(AUXILIARIES)}")

    def as_json(self) -> dict[str, Any]:
        """Without the settings of a denoiser where none is trained: models of before there were any stay the same."""
        kept = "dtta" in self.with_
        return {key: value for key, value in asdict(self).items() if kept or not key.startswith("denoiser_")}
