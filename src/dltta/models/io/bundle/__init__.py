"""2 networks. MONAI bundles, read and written."""

from dltta.models.io.bundle.archive import is_bundle
from dltta.models.io.bundle.export import export_bundle
from dltta.models.io.bundle.opening import open_bundle

__all__ = ["export_bundle", "is_bundle", "open_bundle"]
