"""How is a stream run? Pure data: nothing here imports torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, get_args

from dltta.errors import SettingError
from dltta.recipes import Recipe, choice, recommended

Uids = Literal["keep", "new"]


class Deployment(StrEnum):
    """What the adapted model is allowed to do."""

    LIVE = "live"  # it predicts
    SHADOW = "shadow"  # it adapts, the source model predicts; how the two differ is recorded
    FROZEN = "frozen"  # nothing adapts, the source model predicts


class OnError(StrEnum):
    """What to do about a case that cannot be used."""

    STOP = "stop"
    SKIP = "skip"


@dataclass(frozen=True)
class StreamSettings:
    """How a stream is adapted and predicted; the defaults are those of `dltta adapt`.

    `anonymize` puts the image's hash in the place of its name, in the log and in the predictions' file names; `uids`
    says whether anonymous DICOM segmentations keep the identifiers of their images or get new ones. `sign` is a file
    with a key that signs every line of the log. `max_memory` is in bytes: larger images are predicted in windows, or
    refused; None is half of the machine's.
    """

    recipe: Recipe = field(default_factory=recommended)
    deployment: Deployment = Deployment.LIVE
    on_error: OnError = OnError.STOP
    save_probabilities: bool = False
    anonymize: bool = False
    sign: Path | None = None
    max_memory: int | None = None
    uids: Uids = "keep"

    def __post_init__(self) -> None:
        object.__setattr__(self, "deployment", choice("deployment", self.deployment, Deployment))
        object.__setattr__(self, "on_error", choice("on_error", self.on_error, OnError))
        if self.uids not in get_args(Uids):
            raise SettingError(f"uids are kept or new, got {self.uids!r}")
        if self.uids == "new" and not self.anonymize:
            raise SettingError("new UIDs are for anonymous predictions; add --anonymize, or leave --new-uids out")
