"""2 networks. MONAI bundles, read and written."""

from dltta.models.bundle.archive import is_bundle
from dltta.models.bundle.opening import open_bundle

__all__ = ["is_bundle", "open_bundle"]
