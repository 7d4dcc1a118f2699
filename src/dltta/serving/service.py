"""What the routes of the service share: who asks, what may be done, what is counted and logged.

Everything that identifies a patient stays out of log and metrics: requests are named by a hash, sites by their folder.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections import Counter as Counts
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Header, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from dltta.errors import SettingError
from dltta.serving.access import Access, Grant, Role
from dltta.serving.cluster import BusyError, Cluster
from dltta.serving.journal import Fields
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.session import Request as ImageRequest
from dltta.serving.shard import Reply
from dltta.serving.site_rule import SiteRule
from dltta.serving.views import Views

LOG = logging.getLogger("dltta.service")
CODES = {"refused": 422, "conflict": 409, "unavailable": 503, "unknown": 404}
# of a line of the log, what an answer says
SHOWN = (
    "request", "sequence", "case", "decision", "reason", "detail", "quality", "quality_low", "quality_high", "review",
    "ood_score", "loss", "discrepancy", "rate", "seconds", "state", "repeats", "prediction", "probabilities", "change",
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What one request may take."""

    bytes: int = 256 << 20  # of an image
    seconds: float = 60.0  # for its bytes to arrive
    keys: int = 10_000  # sites of all models together


@dataclass(frozen=True)
class Later:
    """A request that nobody waits for."""

    task: asyncio.Task[Reply]
    sha256: str  # of its bytes


@dataclass
class Service:
    """What the routes share."""

    cluster: Cluster
    access: Access
    folders: KeyFolders
    limits: Limits
    default_model: str
    views: Views
    metrics: "Metrics"
    rule: SiteRule = field(default_factory=SiteRule)  # for images that come without a site
    stopping: bool = False
    later: dict[tuple[Key, str], Later] = field(default_factory=dict)  # under way, or failed
    beginning: Counts[Key] = field(default_factory=Counts)  # sites that are not on the disk yet: requests under way

    def key(self, site: str, model: str | None) -> Key:
        chosen = model or self.default_model
        if chosen not in self.cluster.settings.models:
            known = ", ".join(self.cluster.settings.models)
            raise HTTPException(404, f"there is no model {chosen[:80]!r}; there are {known}")
        try:
            return Key(chosen, site)
        except SettingError as error:
            raise HTTPException(422, str(error)) from error

    def require_place(self, key: Key) -> None:
        """Raise unless the site may be begun, or is there."""
        if self.folders.exists(key) or key in self.beginning:
            return
        if self.folders.count() + len(self.beginning) >= self.limits.keys:
            raise HTTPException(429, f"there are {self.limits.keys} sites already", {"Retry-After": "3600"})

    async def answer(self, key: Key, request: ImageRequest) -> Reply:
        started = time.perf_counter()
        new = not self.folders.exists(key)
        self.beginning[key] += new
        try:
            reply = await self.cluster.answer(key, request)
        finally:
            self.beginning[key] -= new
            if not self.beginning[key]:
                del self.beginning[key]
        failed = self.later.get((key, request.id))
        if reply.line is not None and failed is not None and failed.task.done():
            del self.later[key, request.id]
        self.metrics.answered(reply, time.perf_counter() - started)
        record("request", key=key.name, request=_hash(request.id), status=reply.status, seconds=round(reply.seconds, 4))
        return reply


class Metrics:
    """For Prometheus; a registry of its own, so that two services in one process do not meet."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        given: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("dltta_requests", "Requests by what became of them", ["status"], **given)
        self._seconds = Histogram("dltta_request_seconds", "Time from arrival to answer, waiting included", **given)
        self._decisions = Counter("dltta_decisions", "Predictions by decision", ["decision"], **given)
        self._review = Counter("dltta_reviews", "Predictions that should be reviewed", **given)
        self.waiting = Gauge("dltta_waiting", "Requests that wait or are worked on", **given)
        self.sites = Gauge("dltta_sites", "Sites with a stream", **given)
        self.restarts = Gauge("dltta_shard_restarts", "Calls that found their shard dead", **given)
        self.resident = Gauge("dltta_shard_resident_bytes", "Memory of each shard", ["shard"], **given)

    def answered(self, reply: Reply, seconds: float) -> None:
        self._requests.labels(reply.status).inc()
        self._seconds.observe(seconds)
        if reply.line is not None and reply.line.get("decision"):
            self._decisions.labels(str(reply.line["decision"])).inc()
        if reply.line is not None and reply.line.get("review"):
            self._review.inc()

    def refused(self, status: str) -> None:
        self._requests.labels(status).inc()


# who asks


def service_of(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


def bearer(request: Request, authorization: Annotated[str | None, Header(description="Bearer TOKEN")] = None) -> Grant:
    """The grant of the token in the header, or of the page's cookie."""
    service = service_of(request)
    scheme, _, token = (authorization or "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else request.cookies.get("dltta_token")
    grant = service.access.grant(given)
    if grant is None:
        service.metrics.refused("unauthorized")
        raise HTTPException(401, "give a token: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"})
    return grant


Bearer = Annotated[Grant, Depends(bearer)]
Site = Annotated[str, Query(description="Any text: hospital/scanner/protocol", examples=["st-mary/scanner-3"])]
Model = Annotated[str | None, Query(description="A name that the service was started with; the first one unless given")]
Asked = Annotated[str, Query(alias="request", description="The id under which the image was sent")]


def require(grant: Grant, role: Role, site: str | None = None) -> None:
    """Raise unless the token allows it."""
    if not grant.allows(role, site):
        place = "" if site is None else " at this site"
        raise HTTPException(403, f"this token may not {role.name.lower()}{place}")


def shown(line: Mapping[str, Any]) -> Fields:
    """What an answer says of a line of the log."""
    return {name: line[name] for name in SHOWN if name in line}


async def respond_event(coming: Awaitable[Reply]) -> Response:
    try:
        reply = await coming
    except BusyError as error:
        raise HTTPException(429, str(error), {"Retry-After": f"{error.after:.0f}"}) from error
    if reply.line is None:
        raise refusal(reply, "there is no such site")
    return JSONResponse(reply.line)


def refusal(reply: Reply, unknown: str) -> HTTPException:
    """The status of a reply without an answer; `unknown` is said where the shard says nothing."""
    again = {"Retry-After": "2"} if reply.status == "unavailable" else None
    return HTTPException(CODES[reply.status], reply.detail or unknown, again)


def record(event: str, **fields: Any) -> None:
    """A line of the service's own log: JSON, no names of patients, images or sites."""
    LOG.info(json.dumps({"time": round(time.time(), 3), "event": event, **fields}))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
