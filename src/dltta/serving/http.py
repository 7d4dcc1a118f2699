"""The service over HTTP: images in, answers out, and what is needed to run it: health, metrics, limits, access.

Everything that identifies a patient stays out of log and metrics: requests are named by a hash, sites by their folder.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import generate_latest
from starlette.datastructures import UploadFile

from dltta.errors import SettingError
from dltta.serving.access import Access, Role
from dltta.serving.cluster import BusyError, Cluster
from dltta.serving.keys import Key, KeyFolders
from dltta.serving.page import add_page
from dltta.serving.service import (
    CODES,
    Asked,
    Bearer,
    Limits,
    Metrics,
    Model,
    Service,
    Site,
    change_mode,
    record,
    require,
    respond_event,
    service_of,
    shown,
)
from dltta.serving.session import Request as ImageRequest
from dltta.serving.shard import Reply
from dltta.serving.views import Views
from dltta.version import __version__


def make_app(cluster: Cluster, access: Access, *, limits: Limits | None = None) -> FastAPI:
    """The application; starting and stopping it starts and stops the shards."""
    folders = KeyFolders(cluster.settings.root)
    service = Service(
        cluster, access, folders, limits or Limits(), next(iter(cluster.settings.models)), Views(folders), Metrics()
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
    app.middleware("http")(_limit(service))
    _routes(app)
    _watching(app)
    add_page(app)
    return app


# answering


def _routes(app: FastAPI) -> None:
    @app.post(
        "/v1/images",
        responses={
            200: {"content": {"application/json": {"example": EXAMPLE}}},
            202: {"description": "taken; ask /v1/answers"},
            409: {"description": "the id was used with another image"},
            413: {"description": "too large"},
            422: {"description": "not an image that the model takes"},
            429: {"description": "too many requests wait; Retry-After says when"},
        },
        openapi_extra={"requestBody": UPLOAD},
    )
    async def submit(request: Request, grant: Bearer) -> Response:
        """Predict an image: multipart with `image` (PNG, TIFF, NIfTI, or a DICOM series as a zip), `site`, `request`.

        `model` names one of the service's models, `wait=false` answers 202 at once.
        """
        service = service_of(request)
        fields, filename, content = await _form(request, service.limits)
        site = fields.get("site", "")
        require(grant, Role.SUBMIT, site)
        key = service.key(site, fields.get("model"))
        if service.stopping:
            raise HTTPException(503, "the service stops", {"Retry-After": "10"})
        if key in service.paused:
            raise HTTPException(503, "this site is paused", {"Retry-After": "60"})
        if not service.folders.exists(key) and service.folders.count() >= service.limits.keys:
            raise HTTPException(429, f"there are {service.limits.keys} sites already", {"Retry-After": "3600"})
        try:
            image = ImageRequest(fields.get("request", ""), filename, content)
        except SettingError as error:
            raise HTTPException(422, str(error)) from error
        if fields.get("wait", "true").lower() in ("false", "0", "no"):
            return _later(service, key, image)
        return await _respond(service, service.answer(key, image))

    @app.get("/v1/answers", responses={200: {"content": {"application/json": {"example": EXAMPLE}}}})
    async def answer(request: Request, grant: Bearer, site: Site, asked: Asked, model: Model = None) -> Response:
        """The answer to an earlier request; 202 while it is being worked on."""
        service = service_of(request)
        require(grant, Role.READ, site)
        key = service.key(site, model)
        task = service.pending.get((key, asked))
        if task is not None and not task.done():
            return JSONResponse({"status": "pending"}, 202, {"Retry-After": "1"})
        if task is not None:
            service.pending.pop((key, asked), None)
            return await _respond(service, task)
        return await _respond(service, service.cluster.result(key, asked))

    @app.get("/v1/masks", response_class=Response)
    async def mask(request: Request, grant: Bearer, site: Site, asked: Asked, model: Model = None) -> Response:
        """The mask of an earlier request, in the format of its image."""
        service = service_of(request)
        require(grant, Role.READ, site)
        reply = await service.cluster.result(service.key(site, model), asked, mask=True)
        if reply.mask is None:
            raise HTTPException(404 if reply.detail is None else 503, reply.detail or "there is no such mask")
        name = (reply.mask_name or "mask").replace('"', "")
        return Response(
            reply.mask, 200, {"Content-Disposition": f'attachment; filename="{name}"'}, "application/octet-stream"
        )


def _later(service: Service, key: Key, image: ImageRequest) -> Response:
    if (key, image.id) not in service.pending or service.pending[key, image.id].done():
        service.pending[key, image.id] = asyncio.create_task(service.answer(key, image))
    return JSONResponse({"status": "pending", "request": image.id}, 202, {"Retry-After": "1"})


async def _respond(service: Service, coming: Awaitable[Reply]) -> Response:
    try:
        reply = await coming
    except BusyError as error:
        service.metrics.refused("busy")
        raise HTTPException(429, str(error), {"Retry-After": f"{error.after:.0f}"}) from error
    if reply.line is None:
        raise HTTPException(CODES[reply.status], reply.detail or "there is no such request at this site")
    return JSONResponse({"status": reply.status, **shown(reply.line)})


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


def _limit(service: Service) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    """Refuses bodies that are too large, by what they say and by what arrives."""

    async def middleware(request: Request, following: Callable[[Request], Awaitable[Response]]) -> Response:
        most = service.limits.bytes + (1 << 16)  # and the other fields
        said = request.headers.get("content-length", "0")
        if not said.isdigit() or int(said) > most:
            service.metrics.refused("too-large")
            return JSONResponse({"detail": f"more than {service.limits.bytes} bytes"}, 413)
        received, arriving = 0, request.receive

        async def counted() -> Any:
            nonlocal received
            message = await arriving()
            received += len(message.get("body", b""))
            if received > most:
                raise HTTPException(413, f"more than {service.limits.bytes} bytes")
            return message

        request._receive = counted
        response = await following(request)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cache-Control"] = "no-store"
        return response

    return middleware


# watching


def _watching(app: FastAPI) -> None:
    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok", "version": __version__}

    @app.get("/readyz")
    async def ready(request: Request) -> Response:
        """Whether every shard answers, so that requests can be sent."""
        service = service_of(request)
        alive = await service.cluster.memory()
        good = len(alive) == service.cluster.shards and not service.stopping
        return JSONResponse({"ready": good, "shards": len(alive)}, 200 if good else 503)

    @app.get("/metrics")
    async def metrics(request: Request, grant: Bearer) -> Response:
        """For Prometheus."""
        service = service_of(request)
        require(grant, Role.READ)
        service.metrics.waiting.set(service.cluster.waiting)
        service.metrics.sites.set(service.folders.count())
        service.metrics.restarts.set(service.cluster.restarts)
        for number, shard in enumerate(await service.cluster.memory()):
            service.metrics.resident.labels(str(number)).set(shard["resident"])
        return Response(generate_latest(service.metrics.registry), media_type="text/plain; version=0.0.4")

    @app.get("/v1/sites")
    async def sites(request: Request, grant: Bearer) -> list[dict[str, Any]]:
        """Every site that the token may see: traffic, quality, alarms."""
        service = service_of(request)
        require(grant, Role.READ)
        views = await asyncio.to_thread(service.views.sites)
        return [
            {
                "site": view.key.site,
                "model": view.key.model,
                "answered": len(view.cases),
                "quality": view.quality,
                "to_review": view.to_review,
                "alarm": view.alarm,
                "mode": "paused" if view.key in service.paused else view.deployment,
                "version": view.version,
            }
            for view in views
            if grant.allows(Role.READ, view.key.site)
        ]

    @app.get("/v1/stream")
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
        view = await asyncio.to_thread(service.views.site, service.key(site, model))
        if view is None:
            raise HTTPException(404, "there is no such site")
        return [shown(line) for line in view.cases[-latest:]]

    @app.post("/v1/rollback")
    async def roll_back(
        request: Request, grant: Bearer, site: Site, version: Annotated[int, Query(ge=0)], model: Model = None
    ) -> Response:
        """Continue from an older version of what was learned (admin); logged."""
        service = service_of(request)
        require(grant, Role.ADMIN, site)
        record("rollback", by=grant.name, key=service.key(site, model).name, version=version)
        return await respond_event(service.cluster.roll_back(service.key(site, model), version))

    @app.post("/v1/mode")
    async def mode(
        request: Request,
        grant: Bearer,
        site: Site,
        mode: Annotated[str, Query(pattern="^(live|shadow|pause|continue)$")],
        model: Model = None,
    ) -> Response:
        """live: adapted predictions; shadow: adapt, but the source model predicts; pause, continue (admin)."""
        service = service_of(request)
        require(grant, Role.ADMIN, site)
        key = service.key(site, model)
        record("mode", by=grant.name, key=key.name, mode=mode)
        return await change_mode(service, key, mode)


EXAMPLE = {
    "status": "answered",
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
UPLOAD = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["image", "site", "request"],
                "properties": {
                    "image": {"type": "string", "format": "binary"},
                    "site": {"type": "string", "example": "st-mary/scanner-3"},
                    "request": {"type": "string", "example": "20261117-0001"},
                    "model": {"type": "string"},
                    "wait": {"type": "string", "example": "true"},
                },
            }
        }
    },
}
