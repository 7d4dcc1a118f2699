"""nnU-Net's result folders: `Dataset…/TRAINER__PLANS__CONFIGURATION`. Needs the extra `nnunet`."""

from dltta.models.io.nnunet.folder import is_nnunet, misplaced
from dltta.models.io.nnunet.opening import open_nnunet

__all__ = ["is_nnunet", "misplaced", "open_nnunet"]
