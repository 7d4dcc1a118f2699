"""A client of `dltta serve`, for programs: sends images, waits out a full queue, and never has one learned from twice.

    from dltta.client import Client

    client = Client("http://127.0.0.1:8000", token=TOKEN)
    answer = client.predict("scan.nii.gz", site="st-mary/scanner-3", request="20261117-0001")
    client.save_mask(answer, "masks")

Only the standard library is needed.
"""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dltta.errors import DlttaError

Answer = dict[str, Any]


class ServiceError(DlttaError, RuntimeError):
    """What the service refused, with its status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(f"the service answered {status}: {detail}")
        self.status, self.detail = status, detail


class Client:
    """Talks to one service. A request is repeated under the same id while the service is busy or restarting."""

    def __init__(self, address: str, token: str | None = None, *, patience: float = 120.0) -> None:
        self.address, self._token, self.patience = address.rstrip("/"), token, patience

    def predict(self, image: Path | str | bytes, *, site: str | None = None, request: str | None = None,
                model: str | None = None, filename: str | None = None) -> Answer:  # fmt: skip
        """The answer to an image, given as a file or as bytes; without a `request` id it gets a new one.

        Without a `site`, the service takes that of a DICOM image from its header; the answer names it.
        """
        content = image if isinstance(image, bytes) else Path(image).read_bytes()
        name = filename or ("image" if isinstance(image, bytes) else Path(image).name)
        given = {"site": site, "request": request or uuid.uuid4().hex, "model": model}
        fields = {key: value for key, value in given.items() if value is not None}
        body, kind = _multipart(fields, name, content)
        return self._json("POST", "/v1/images", body, kind)

    def answer(self, request: str, *, site: str, model: str | None = None) -> Answer:
        """The answer that was given to an earlier request."""
        return self._json("GET", f"/v1/answers?{_query(site=site, request=request, model=model)}")

    def mask(self, request: str, *, site: str, model: str | None = None) -> bytes:
        """The bytes of the mask of an earlier request."""
        return self._send("GET", f"/v1/masks?{_query(site=site, request=request, model=model)}")

    def save_mask(self, answer: Mapping[str, Any], folder: Path | str, *, model: str | None = None) -> Path:
        """Write the mask of an answer into a folder, under the name that the service gave it."""
        target = Path(folder) / Path(str(answer["prediction"])).name
        target.parent.mkdir(parents=True, exist_ok=True)
        model = model or answer.get("model")
        target.write_bytes(self.mask(str(answer["request"]), site=str(answer["site"]), model=model))
        return target

    def sites(self) -> list[Answer]:
        found: list[Answer] = json.loads(self._send("GET", "/v1/sites"))
        return found

    def _json(self, method: str, path: str, body: bytes | None = None, kind: str | None = None) -> Answer:
        found: Answer = json.loads(self._send(method, path, body, kind))
        return found

    def _send(self, method: str, path: str, body: bytes | None = None, kind: str | None = None) -> bytes:
        """Repeats while the service is busy, restarting or unreachable."""
        deadline = time.monotonic() + self.patience
        while True:
            wait = 1.0
            try:
                return self._once(method, path, body, kind)
            except urllib.error.HTTPError as error:
                detail = _detail(error.read())
                if error.code not in (429, 503) or time.monotonic() > deadline:
                    raise ServiceError(error.code, detail) from error
                wait = min(float(error.headers.get("Retry-After") or 1), 10.0)
            except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise ServiceError(0, f"{self.address} cannot be reached: {error}") from error
            time.sleep(min(wait, max(deadline - time.monotonic(), 0.05)))

    def _once(self, method: str, path: str, body: bytes | None, kind: str | None) -> bytes:
        request = urllib.request.Request(self.address + path, body, method=method)
        if self._token is not None:
            request.add_header("Authorization", f"Bearer {self._token}")
        if kind is not None:
            request.add_header("Content-Type", kind)
        with urllib.request.urlopen(request, timeout=self.patience) as response:
            content: bytes = response.read()
        return content


def _query(**values: str | None) -> str:
    return urllib.parse.urlencode({name: value for name, value in values.items() if value is not None})


def _multipart(fields: Mapping[str, str], filename: str, content: bytes) -> tuple[bytes, str]:
    """A body of form fields and one file, and its content type."""
    boundary = uuid.uuid4().hex
    safe = filename.replace('"', "").replace("\r", "").replace("\n", "")
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="image"; filename="{safe}"\r\n\r\n'.encode()
    return b"".join(
        [*parts, head, content, f"\r\n--{boundary}--\r\n".encode()]
    ), f"multipart/form-data; boundary={boundary}"


def _detail(body: bytes) -> str:
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")[:200]
