"""The heart of every service: one model at one site, its state and its log, and an answer to one request at a time.

A session is a stream in a folder (`folder.py`), so all that holds there holds here: an answer counts once its line is
in the log, a crash leaves the state before or after it, and the folder can be looked at with `dltta state`. The line
also has the request's id and its number in the site's sequence, so that a request that is sent again is answered from
the log: once, in order, whatever died in between.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dltta.data.inbox import Incoming, look
from dltta.errors import DataError, SettingError
from dltta.files import PRIVATE_FOLDER, make_folder
from dltta.models.io.opened import OpenedModel
from dltta.serving.folder import Stream
from dltta.serving.journal import Fields, on_disk
from dltta.serving.lease import Lease
from dltta.serving.settings import OnError, StreamSettings
from dltta.serving.upload import unpack_upload

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RESERVED = frozenset({"stream", "state", "predictions"})  # names of files in a stream's folder


@dataclass(frozen=True)
class Request:
    """An image that somebody wants to have predicted; `id` is the sender's and names the answer."""

    id: str
    filename: str  # only its ending matters
    content: bytes

    def __post_init__(self) -> None:
        if not REQUEST_ID.fullmatch(self.id) or self.id.partition(".")[0].lower() in RESERVED:
            raise SettingError(
                f"{self.id[:140]!r} is no request id; use up to 128 letters, digits, dots, hyphens and underscores"
            )


class Session:
    """Requests of one site. `with Session(…) as session: session.answer(request)`."""

    def __init__(
        self, opened: OpenedModel, folder: Path, settings: StreamSettings, *, spool: Path, lease: Lease | None = None
    ) -> None:
        # one request is one image: it is not kept waiting for others
        recipe = replace(settings.recipe, batch_size=1) if opened.task == "classification" else settings.recipe
        self.folder, self.spool, self.lease = folder, spool, lease
        self.stream = Stream(
            opened,
            folder,
            replace(settings, recipe=recipe, on_error=OnError.STOP),
            resume=True,
            may_write=self._require_lease,
        )

    def __enter__(self) -> "Session":
        self.stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.stream.__exit__(*error)

    @property
    def fence(self) -> int | None:
        """The number under which it writes."""
        return None if self.lease is None else self.lease.token

    @property
    def answered(self) -> int:
        """How many requests have an answer."""
        return self.stream.index.predicted

    def known(self, request_id: str) -> Fields | None:
        """The answer that was given to a request, from the log."""
        index = self.stream.index
        return None if index.digest(request_id) is None else index.line(request_id)

    def answer(self, request: Request) -> Fields:
        """Adapt to the image, predict it, and return its line of the log; the same line for the same request.

        Raises `DataError` for an image that cannot be used, or for an id that came with another image before; then
        nothing was written.
        """
        self._require_lease()
        with spooled(self.spool, request) as case:
            note: dict[str, Any] = {"request": request.id, "sequence": self.answered + 1}
            if self.fence is not None:
                note["fence"] = self.fence
            return self.stream.answer(replace(case, name=request.id, note=note))

    def _require_lease(self) -> None:
        if self.lease is not None:
            self.lease.require()

    def mask(self, request_id: str) -> Path | None:
        """The file of a segmentation that was given as an answer."""
        line = self.known(request_id)
        if line is None or "sha256" not in line:
            return None
        return self.folder / str(line["prediction"])


@contextmanager
def spooled(spool: Path, request: Request) -> Iterator[Incoming]:
    """The case of a request, as files in a private folder that is removed in the end."""
    with on_disk(spool):
        make_folder(spool, mode=PRIVATE_FOLDER)
        folder = Path(tempfile.mkdtemp(dir=spool))
    try:
        with on_disk(spool):
            unpack_upload(folder, request.filename, request.content)
        cases = look(folder)
        if len(cases) != 1:
            found = f"{len(cases)} images" if cases else "no image"
            raise DataError(f"{found} in the request; send one PNG, TIFF, NIfTI, or one DICOM series as a zip")
        yield cases[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
