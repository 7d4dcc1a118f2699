"""The service over HTTP: images in, answers out, and what is needed to run it: health, metrics, limits, access.

Everything that identifies a patient stays out of log and metrics: requests are named by a hash, sites by their folder.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from starlette.datastructures import MutableHeaders, UploadFile
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dltta.errors import DataError, SettingError
from dltta.serving.access import LOOPBACK, Access, Role
from dltta.serving.cluster import BusyError, Cluster
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.page import add_page
from dltta.serving.service import (
    Asked,
    Bearer,
    Later,
    Limits,
    Metrics,
    Model,
    Service,
    Site,
    record,
    refusal,
    require,
    respond_event,
    service_of,
    shown,
)
from dltta.serving.session import Request as ImageRequest
from dltta.serving.shard import Mode, Reply
from dltta.serving.site_rule import SiteRule
from dltta.serving.views import Views
from dltta.version import __version__

MOST_FAILURES = 1000  # of requests that nobody waited for


# examples for /openapi.json


def _shows(example: object, description: str = "") -> dict[str, Any]:
    said = {"description": description} if description else {}
    return {"content": {"application/json": {"example": example}}, **said}


EXAMPLE = {
    "status": "answered",
    "site": "st-mary/scanner-3",
    "model": "a",
    "request": "20261117-0001",
    "sequence": 12,
    "decision": "accepted",
    "quality": 0.91,
    "quality_low": 0.82,
    "quality_high": 0.96,
    "review": False,
    "prediction": "20261117-0001.png",
    "state": 12,
}
SITE = {
    "site": "st-mary/scanner-3",
    "model": "a",
    "answered": 412,
    "quality": 0.88,
    "to_review": 1,
    "alarm": None,
    "mode": "live",
    "version": 412,
}
METRICS = 'dltta_requests_total{status="answered"} 412.0\n'
REFUSALS: dict[int | str, dict[str, Any]] = {
    401: _shows({"detail": "give a token: Authorization: Bearer TOKEN"}, "no token, or one that nobody has"),
    403: _shows({"detail": "this token may not admin at this site"}, "a token that may not do this"),
    404: _shows({"detail": "there is no such site"}, "no such site, request or model"),
}
UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image", "request"],
                "properties": {
                    "image": {"type": "string", "format": "binary"},
                    "site": {
                        "type": "string",
                        "example": "st-mary/scanner-3",
                        "description": "left out: from a DICOM header",
                    },
                    "request": {"type": "string", "example": "20261117-0001"},
                    "model": {"type": "string"},
                    "wait": {"type": "string", "example": "true"},
                },
            }
        }
    },
}


# the application


def make_app(
    cluster: Cluster, access: Access, *, limits: Limits | None = None, rule: SiteRule | None = None
) -> FastAPI:
    """The application; starting and stopping it starts and stops the shards."""
    folders = KeyFolders(cluster.settings.root)
    service = Service(
        cluster,
        access,
        folders,
        limits or Limits(),
        next(iter(cluster.settings.models)),
        Views(folders),
        Metrics(),
        rule or SiteRule(),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if not cluster.started:
            await asyncio.to_thread(cluster.start)
        record("started", shards=cluster.shards, models=list(cluster.settings.models))
        yield
        service.stopping = True
        await cluster.idle()
        await asyncio.to_thread(cluster.stop)
        record("stopped")

    app = FastAPI(
        title="dltta",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from the network
        redoc_url=None,
        description="Test-time adaptation as a service: one adapting model per site. Every request needs a bearer "
        "token. A request that is sent again under the same id is answered from the log: it is learned from once.",
    )
    app.state.service = service
    app.add_middleware(Limiting, service=service)
    _routes(app)
    _watching(app)
    add_page(app)
    return app


# answering


def _routes(app: FastAPI) -> None:
    @app.post(
        "/v1/images",
        responses={
            200: _shows(EXAMPLE),
            202: _shows({"status": "pending", "request": "20261117-0001"}, "taken (wait=false); ask /v1/answers"),
            408: _shows({"detail": "the request took longer than 60 s to arrive"}, "too slow"),
            409: _shows({"detail": "was predicted before with other content"}, "the id was used with another image"),
            413: _shows({"detail": "more than 268435456 bytes"}, "too large"),
            422: _shows({"detail": "has 3 channels, the network takes 1"}, "not an image that the model takes"),
            429: _shows({"detail": "too many requests are waiting; try again in 2 s"}, "busy; Retry-After says when"),
            503: _shows({"detail": "this site is paused"}, "send again later"),
            **REFUSALS,
        },
        openapi_extra={"requestBody": UPLOAD},
    )
    async def submit(request: Request, grant: Bearer) -> Response:
        """Predict an image: multipart with `image` (PNG, TIFF, NIfTI, or a DICOM series as a zip), `site`, `request`.

        Without a `site`, that of a DICOM image is taken from its header, by the rule of the service. `model` names one
        of the service's models, `wait=false` answers 202 at once.
        """
        service = service_of(request)
        require(grant, Role.SUBMIT)  # before its bytes are taken
        if service.stopping:
            raise HTTPException(503, "the service stops", {"Retry-After": "10"})
        fields, filename, content = await _form(request, service.limits)
        site = fields.get("site") or await _site_of(service, content)
        require(grant, Role.SUBMIT, site)
        key = service.key(site, fields.get("model"))
        if service.folders.paused(key):
            raise HTTPException(503, "this site is paused", {"Retry-After": "60"})
        service.require_place(key)
        try:
            image = ImageRequest(fields.get("request", ""), filename, content)
        except SettingError as error:
            raise HTTPException(422, str(error)) from error
        if fields.get("wait", "true").lower() in ("false", "0", "no"):
            return _later(service, key, image)
        return await _respond(service, key, service.answer(key, image))

    @app.get("/v1/answers", responses={200: _shows(EXAMPLE), 202: _shows({"status": "pending"}), **REFUSALS})
    async def answer(request: Request, grant: Bearer, site: Site, asked: Asked, model: Model = None) -> Response:
        """The answer to an earlier request; 202 while it is being worked on."""
        service = service_of(request)
        require(grant, Role.READ, site)
        key = service.key(site, model)
        later = service.later.get((key, asked))
        if later is None:
            return await _respond(service, key, service.cluster.result(key, asked))
        if later.task.done():
            return await _respond(service, key, later.task)
        return JSONResponse({"status": "pending", "request": asked, "site": site}, 202, {"Retry-After": "1"})

    @app.get(
        "/v1/masks",
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}, "description": "the file"}, **REFUSALS},
    )
    async def mask(request: Request, grant: Bearer, site: Site, asked: Asked, model: Model = None) -> Response:
        """The mask of an earlier request, in the format of its image."""
        service = service_of(request)
        require(grant, Role.READ, site)
        try:
            reply = await service.cluster.result(service.key(site, model), asked, mask=True)
        except BusyError as error:
            raise HTTPException(429, str(error), {"Retry-After": f"{error.after:.0f}"}) from error
        if reply.mask is None:
            raise HTTPException(404, "there is no such mask") if reply.detail is None else refusal(reply, "")
        name = (reply.mask_name or "mask").replace('"', "")
        return Response(
            reply.mask, 200, {"Content-Disposition": f'attachment; filename="{name}"'}, "application/octet-stream"
        )


def _later(service: Service, key: Key, image: ImageRequest) -> Response:
    """Begin to answer; what failed stays to be asked for, what was answered is in the log."""
    name, sha256 = (key, image.id), hashlib.sha256(image.content).hexdigest()
    earlier = service.later.get(name)
    if earlier is None or earlier.task.done():
        try:
            service.cluster.require_room(key, len(image.content))
        except BusyError as error:
            service.metrics.refused("busy")
            raise HTTPException(429, str(error), {"Retry-After": f"{error.after:.0f}"}) from error
        task = asyncio.create_task(service.answer(key, image))
        service.later[name] = Later(task, sha256)
        task.add_done_callback(lambda done: _tidy(service, name, done))
    elif earlier.sha256 != sha256:
        raise HTTPException(409, "another image is worked on under this id; give this one another")
    return JSONResponse({"status": "pending", "request": image.id, "site": key.site}, 202, {"Retry-After": "1"})


def _tidy(service: Service, name: tuple[Key, str], done: asyncio.Task[Reply]) -> None:
    """Forget what was answered, and the oldest of too many failures."""
    good = not done.cancelled() and done.exception() is None and done.result().line is not None
    if good and name in service.later and service.later[name].task is done:
        del service.later[name]
    failed = [name for name, later in service.later.items() if later.task.done()]
    for name in failed[:-MOST_FAILURES]:
        del service.later[name]


async def _site_of(service: Service, content: bytes) -> str:
    try:
        return await asyncio.to_thread(service.rule.site_of_upload, content)
    except (DataError, SettingError) as error:
        raise HTTPException(422, str(error)) from error


async def _respond(service: Service, key: Key, coming: Awaitable[Reply]) -> Response:
    try:
        reply = await coming
    except BusyError as error:
        service.metrics.refused("busy")
        raise HTTPException(429, str(error), {"Retry-After": f"{error.after:.0f}"}) from error
    if reply.line is None:
        raise refusal(reply, "there is no such request at this site")
    return JSONResponse({"status": reply.status, "site": key.site, "model": key.model, **shown(reply.line)})


async def _form(request: Request, limits: Limits) -> tuple[dict[str, str], str, bytes]:
    """The fields of a multipart request, and its image."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise HTTPException(415, "send multipart/form-data with image, site and request")
    try:
        form = await asyncio.wait_for(request.form(max_files=1, max_fields=8), limits.seconds)
        files = [(name, part) for name, part in form.multi_items() if isinstance(part, UploadFile)]
        if len(files) != 1 or files[0][0] != "image":
            raise HTTPException(422, "send the image as the file 'image'")
        content = await files[0][1].read()
    except TimeoutError as error:
        raise HTTPException(408, f"the request took longer than {limits.seconds:.0f} s to arrive") from error
    fields = {name: part for name, part in form.multi_items() if isinstance(part, str)}
    return fields, files[0][1].filename or "", content


class Limiting:
    """Refuses bodies that are too large, by what they say and by what arrives, and pages of others in a browser."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request, most, received = Request(scope), self.service.limits.bytes + (1 << 16), 0  # and the other fields
        too_large = f"more than {self.service.limits.bytes} bytes"

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > most:
                self.service.metrics.refused("too-large")
                raise HTTPException(413, too_large, {"Connection": "close"})
            return message

        async def safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Content-Type-Options"], headers["Cache-Control"] = "nosniff", "no-store"
            await send(message)

        said = request.headers.get("content-length", "0")
        if _from_elsewhere(request, self.service):
            refused = JSONResponse({"detail": "a page of another site may not use this service"}, 403)
            await refused(scope, receive, safe)
        elif not said.isdigit() or int(said) > most:
            self.service.metrics.refused("too-large")
            await JSONResponse({"detail": too_large}, 413)(scope, receive, safe)
        else:
            await self.app(scope, counted, safe)


def _from_elsewhere(request: Request, service: Service) -> bool:
    """Whether a page of somebody else, open in the browser, sends this; without tokens it would be let in.

    Browsers say so in a header. A name that leads to the loopback interface is no loopback name (DNS rebinding).
    """
    site = request.headers.get("sec-fetch-site")
    changes = request.method not in ("GET", "HEAD") and site not in (None, "none", "same-origin")
    strange = service.access.grants is None and request.url.hostname not in LOOPBACK
    return changes or strange


# watching


def _watching(app: FastAPI) -> None:
    @app.get("/healthz", responses={200: _shows({"status": "ok", "version": __version__})})
    async def health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok", "version": __version__}

    @app.get(
        "/readyz", responses={200: _shows({"ready": True, "shards": 2}), 503: _shows({"ready": False, "shards": 1})}
    )
    async def ready(request: Request) -> Response:
        """Whether every shard is alive, so that requests can be sent."""
        service = service_of(request)
        alive = await service.cluster.memory()
        good = len(alive) == service.cluster.shards and not service.stopping
        return JSONResponse({"ready": good, "shards": len(alive)}, 200 if good else 503)

    @app.get("/metrics", responses={200: {"content": {"text/plain": {"example": METRICS}}}, **REFUSALS})
    async def metrics(request: Request, grant: Bearer) -> Response:
        """For Prometheus."""
        service = service_of(request)
        require(grant, Role.READ)
        service.metrics.waiting.set(service.cluster.waiting)
        service.metrics.sites.set(service.folders.count())
        service.metrics.restarts.set(service.cluster.restarts)
        for shard in await service.cluster.memory():
            service.metrics.resident.labels(f"{shard['shard']:.0f}").set(shard["resident"])
        return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")

    @app.get("/v1/sites", responses={200: _shows([SITE]), **REFUSALS})
    async def sites(request: Request, grant: Bearer) -> list[dict[str, Any]]:
        """Every site that the token may see: traffic, quality, alarms."""
        service = service_of(request)
        require(grant, Role.READ)
        views = await asyncio.to_thread(service.views.sites)
        return [
            {
                "site": view.key.site,
                "model": view.key.model,
                "answered": view.answered,
                "quality": view.quality,
                "to_review": view.to_review,
                "alarm": view.alarm,
                "mode": "paused" if service.folders.paused(view.key) else view.deployment,
                "version": view.version,
            }
            for view in views
            if grant.allows(Role.READ, view.key.site)
        ]

    @app.get("/v1/stream", responses={200: _shows([EXAMPLE]), **REFUSALS})
    async def stream(
        request: Request,
        grant: Bearer,
        site: Site,
        model: Model = None,
        latest: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> list[dict[str, Any]]:
        """The latest answers of a site, oldest first."""
        service = service_of(request)
        require(grant, Role.READ, site)
        found = await asyncio.to_thread(service.views.cases, service.key(site, model), latest)
        if found is None:
            raise HTTPException(404, "there is no such site")
        return [shown(line) for line in found]

    @app.post("/v1/rollback", responses={200: _shows({"event": "rollback", "to": 9, "state": 13}), **REFUSALS})
    async def roll_back(
        request: Request, grant: Bearer, site: Site, version: Annotated[int, Query(ge=0)], model: Model = None
    ) -> Response:
        """Continue from an older version of what was learned (admin); logged."""
        service = service_of(request)
        require(grant, Role.ADMIN, site)
        key = service.key(site, model)
        record("rollback", by=grant.name, key=key.name, version=version)
        return await respond_event(service.cluster.roll_back(key, version, grant.name))

    @app.post("/v1/mode", responses={200: _shows({"event": "mode", "deployment": "shadow"}), **REFUSALS})
    async def mode(
        request: Request,
        grant: Bearer,
        site: Site,
        mode: Mode,
        model: Model = None,
    ) -> Response:
        """live: adapted predictions; shadow: adapt, but the source model predicts; pause, continue (admin)."""
        service = service_of(request)
        require(grant, Role.ADMIN, site)
        key = service.key(site, model)
        record("mode", by=grant.name, key=key.name, mode=mode)
        return await respond_event(service.cluster.change(key, mode, grant.name))
