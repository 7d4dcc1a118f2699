"""The page: sites at a glance, and each site's stream along time. Server-rendered; nothing is loaded from elsewhere."""

import asyncio
import hashlib
import hmac
import secrets
import time
from html import escape
from importlib.resources import files
from typing import Annotated, Literal
from urllib.parse import urlencode

from fastapi import FastAPI, Form, HTTPException, Query, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from dltta.quality.decision import Outcome
from dltta.serving.access import Grant, Role
from dltta.serving.charts import COLORS, line_chart
from dltta.serving.journal import Fields
from dltta.serving.service import Bearer, Service, record, require, respond_event
from dltta.serving.shard import Mode
from dltta.serving.views import RECENT, SiteView

COOKIE = "dltta_token"
_SECRET = secrets.token_bytes(32)  # of this process: forms of an earlier one are refused
POLICY = "default-src 'none'; style-src 'self'; img-src 'self'; form-action 'self'; frame-ancestors 'none'"
CHARTS = {  # fields of the log by what they are called here
    "Expected quality, with its 90 % interval": "quality",
    "Learning rate": "rate",
    "Discrepancy to similar earlier predictions": "discrepancy",
    "OOD score (source images: about 1)": "ood_score",
}
WORDS = {
    Outcome.ACCEPTED: "adapted, and the adapted model predicts",
    Outcome.IN_DISTRIBUTION: "looks like the source's images: the source model predicts",
    Outcome.KEPT: "predicted without an update",
    Outcome.ROLLED_BACK: "an update was undone",
    Outcome.SOURCE: "the source model predicts",
}

MODES = {  # what a switch does
    "live": "Live: the adapted model predicts.",
    "shadow": "Shadow: it adapts, but the source model predicts.",
    "pause": "Paused: images are refused (503) until somebody continues.",
    "continue": "Continued: images are taken again.",
}


def add_page(app: FastAPI) -> None:
    """Routes of the page, and what is wrong as a page where a person looks."""

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, error: StarletteHTTPException) -> Response:
        person = "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/v1/")
        if not person:
            return await http_exception_handler(request, error)
        if error.status_code == 401:
            return RedirectResponse("/login", 303)
        words = f'<h2>This cannot be done</h2><p class="alarm" role="alert">{escape(str(error.detail))}</p>'
        return _html("Refused", f'{words}<p class="back"><a href="/">← all sites</a></p>', status=error.status_code)

    @app.get("/page.css", include_in_schema=False)
    async def style() -> Response:
        return Response(files("dltta.serving").joinpath("page.css").read_text("utf-8"), media_type="text/css")

    @app.get("/login", include_in_schema=False)
    async def login(wrong: bool = False) -> HTMLResponse:
        warning = '<p class="alarm" role="alert">This token is not known.</p>' if wrong else ""
        form = (
            '<form method="post" action="/login" class="inline"><label for="token">Token</label>'
            '<input id="token" name="token" type="password" autocomplete="off" required>'
            "<button>Enter</button></form>"
        )
        return _html("Enter", f"<h2>Enter</h2>{warning}{form}")

    @app.post("/login", include_in_schema=False)
    async def enter(request: Request, token: Annotated[str, Form()]) -> Response:
        service: Service = request.app.state.service
        if service.access.grant(token) is None:
            return RedirectResponse("/login?wrong=true", 303)
        response = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict", secure=secure, max_age=12 * 3600)
        return response

    @app.get("/", include_in_schema=False)
    async def home(request: Request) -> Response:
        service, grant = _seen(request)
        if grant is None:
            return RedirectResponse("/login", 303)
        require(grant, Role.READ)
        views = [v for v in await asyncio.to_thread(service.views.sites) if grant.allows(Role.READ, v.key.site)]
        return _html("Sites", _home(service, views), refresh=15)

    @app.get("/site", include_in_schema=False)
    async def site(request: Request, site: str, model: str | None = None) -> Response:
        service, grant = _seen(request)
        if grant is None:
            return RedirectResponse("/login", 303)
        require(grant, Role.READ, site)
        view = await asyncio.to_thread(service.views.site, service.key(site, model))
        if view is None:
            raise HTTPException(404, "there is no such site")
        admin = grant.allows(Role.ADMIN, site)
        # a page with a form is not loaded again by itself: what was ticked would be lost
        return _html(site, _site(service, view, _form_token(request) if admin else None), refresh=None if admin else 15)

    @app.get("/preview", include_in_schema=False)
    async def preview(
        request: Request, grant: Bearer, site: str, number: Annotated[int, Query(ge=0)], model: str | None = None
    ) -> Response:
        service: Service = request.app.state.service
        require(grant, Role.READ, site)
        path = service.folders.folder(service.key(site, model)) / "previews" / f"{number:08d}.png"
        if not path.is_file():
            raise HTTPException(404, "there is no such picture any more")
        return Response(path.read_bytes(), media_type="image/png")

    @app.post("/site/change", include_in_schema=False)
    async def change(
        request: Request,
        grant: Bearer,
        site: Annotated[str, Form()],
        model: Annotated[str, Form()],
        what: Annotated[Mode | Literal["rollback"], Form()],
        form_token: Annotated[str, Form()],
        version: Annotated[int | None, Form()] = None,
        sure: Annotated[str | None, Form()] = None,
    ) -> Response:
        """Rollback and modes, from the page: admin, confirmed, from our own form."""
        service: Service = request.app.state.service
        require(grant, Role.ADMIN, site)
        if not hmac.compare_digest(form_token, _form_token(request)):
            raise HTTPException(403, "this form is too old; load the page again")
        key = service.key(site, model)
        if sure is None:
            raise HTTPException(422, "tick the box to confirm")
        record("change", by=grant.name, key=key.name, what=what, version=version)
        if what == "rollback":
            if version is None:
                raise HTTPException(422, "name a version")
            await respond_event(service.cluster.roll_back(key, version, grant.name))
        else:
            await respond_event(service.cluster.change(key, what, grant.name))
        return RedirectResponse(f"/site?{urlencode({'site': site, 'model': model})}", 303)


def _seen(request: Request) -> tuple[Service, Grant | None]:
    service: Service = request.app.state.service
    return service, service.access.grant(request.cookies.get(COOKIE))


def _form_token(request: Request) -> str:
    """Only a page that was shown to this visitor has it."""
    return hmac.new(_SECRET, request.cookies.get(COOKIE, "").encode(), hashlib.sha256).hexdigest()


def _html(title: str, body: str, *, refresh: int | None = None, status: int = 200) -> HTMLResponse:
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">'
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'{again}<title>{escape(title)} – dltta</title><link rel="stylesheet" href="/page.css"></head>'
        f'<body><header><h1><a href="/">dltta</a></h1><span class="soft">adapting models, site by site</span></header>'
        f"<main>{body}</main></body></html>"
    )
    return HTMLResponse(page, status, {"Content-Security-Policy": POLICY, "Referrer-Policy": "no-referrer"})


def _home(service: Service, views: list[SiteView]) -> str:
    if not views:
        return "<h2>Sites</h2><p>No image has arrived yet. Send one to <code>/v1/images</code>.</p>"
    alarms = [view for view in views if view.alarm]
    total = sum(view.answered for view in views)
    top = (
        '<div class="cards few">'
        f'<div class="card"><span class="soft">sites</span><div class="big">{len(views)}</div></div>'
        f'<div class="card"><span class="soft">images answered</span><div class="big">{total:,}</div></div>'
        f'<div class="card"><span class="soft">waiting now</span><div class="big">{service.cluster.waiting}</div></div>'
        f'<div class="card"><span class="soft">alarms</span><div class="big {"alarm" if alarms else "good"}">'
        f"{len(alarms)}</div></div></div>"
    )
    ordered = sorted(views, key=lambda view: (view.alarm is None, view.key))
    return f'{top}<h2>Sites</h2><div class="cards">{"".join(_card(service, view) for view in ordered)}</div>'


def _card(service: Service, view: SiteView) -> str:
    address = urlencode({"site": view.key.site, "model": view.key.model})
    quality = "" if view.quality is None else f'<div>expected quality <span class="big">{view.quality:.2f}</span></div>'
    alarm = "" if view.alarm is None else f'<div class="alarm">{escape(view.alarm)}</div>'
    review = f'<strong class="warn">{view.to_review} to review</strong>' if view.to_review else "none to review"
    among = f" of the latest {len(view.recent)}" if view.answered > len(view.recent) else ""
    return (
        f'<a class="card" href="/site?{escape(address)}"><strong>{escape(view.key.site)}</strong>'
        f'<span class="soft">{escape(view.key.model)}</span> <span class="badge">{_mode(service, view)}</span>{quality}'
        f"<div>{_images(view)}, {review}{among}</div>{alarm}</a>"
    )


def _images(view: SiteView) -> str:
    return f"{_counted(view.answered, 'image')}, the last {_ago(view.latest)}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _ago(moment: float) -> str:
    """How long ago, in the largest unit that fits."""
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            return f"{_counted(int(seconds // size), unit)} ago"
    return "just now"


def _mode(service: Service, view: SiteView) -> str:
    return "paused" if service.folders.paused(view.key) else escape(view.deployment)


def _site(service: Service, view: SiteView, form_token: str | None) -> str:
    recent = list(view.recent)
    colors = [COLORS.get(str(line.get("decision")), "var(--blue)") for line in recent]

    def series(name: str) -> list[float | None]:
        return [None if line.get(name) is None else float(line[name]) for line in recent]

    ends = tuple(f"#{line.get('sequence', '')}" for line in (recent[:1] + recent[-1:]))
    charts = {
        title: line_chart(
            title,
            series(name),
            low=series(f"{name}_low"),
            high=series(f"{name}_high"),
            colors=colors,
            span=(0.0, 1.0) if name == "quality" else None,
            ends=ends,
        )
        for title, name in CHARTS.items()
    }
    missing = ", ".join(title.lower() for title, chart in charts.items() if chart is None)
    none = f'<p class="soft">Not recorded by this method: {escape(missing)}.</p>' if missing else ""
    legend = " ".join(
        f'<span class="badge"><span class="dot {escape(str(outcome))}" aria-hidden="true">●</span> '
        f"{escape(str(outcome))}: {view.decisions[str(outcome)]}</span>"
        for outcome in Outcome
        if view.decisions[str(outcome)]
    )
    alarm = "" if view.alarm is None else f'<p class="alarm" role="alert">{escape(view.alarm)}</p>'
    return (
        f'<p class="back"><a href="/">← all sites</a></p>'
        f'<h2>{escape(view.key.site)} <span class="badge">{_mode(service, view)}</span></h2>'
        f'<p class="soft">model {escape(view.key.model)}, {_images(view)}, version {view.version} of what was learned'
        f"</p>{alarm}<h2>The latest {_counted(len(recent), 'image')}, oldest left</h2>"
        f'<div class="charts">{"".join(chart for chart in charts.values() if chart is not None)}</div>{none}'
        f"<p>{legend}</p><h2>Latest cases</h2>{_pictures(service, view)}{_cases(recent)}"
        f"{_events(view)}{_controls(service, view, form_token) if form_token else ''}"
    )


def _pictures(service: Service, view: SiteView) -> str:
    folder = service.folders.folder(view.key) / "previews"
    shown: list[str] = []
    for line in reversed(view.recent):
        number = int(line.get("sequence", 0))
        if len(shown) < 4 and (folder / f"{number:08d}.png").is_file():
            address = urlencode({"site": view.key.site, "model": view.key.model, "number": number})
            words = f"Image {number}: as it came, the source model's prediction, the prediction given"
            shown.append(
                '<figure><div class="three soft"><span>image</span><span>source model</span><span>given</span></div>'
                f'<img loading="lazy" src="/preview?{escape(address)}" alt="{escape(words)}">'
                f"<figcaption>#{number} {escape(_reason(line))}</figcaption></figure>"
            )
    return f'<div class="pictures">{"".join(shown)}</div>' if shown else ""


def _cases(recent: list[Fields]) -> str:
    rows = "".join(
        f'<tr><td class="number">{line.get("sequence", "")}</td>'
        f'<td class="request">{escape(str(line.get("request", line["case"])))}</td>'
        f'<td class="why">{escape(_reason(line))}</td><td class="number">{_interval(line)}</td>'
        f"<td>{'<strong class=warn>review</strong>' if line.get('review') else ''}</td></tr>"
        for line in reversed(recent[-20:])
    )
    return (
        "<table><thead><tr><th>#</th><th>request</th><th>what was decided, and why</th>"
        f'<th class="number">expected quality</th><th></th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _reason(line: Fields) -> str:
    """The decision in words."""
    if line.get("repeats"):
        return f"the same image as {line['repeats']}"
    decision = line.get("decision")
    words = WORDS.get(Outcome(decision), str(decision)) if decision in set(map(str, Outcome)) else "predicted"
    if decision == Outcome.ACCEPTED and line.get("candidate"):
        given = "is given, by rehearsal" if line.get("quality") is not None else "is given"
        words = f"adapted: the candidate “{line['candidate']}” {given}"
    low = "; its expected quality is low" if line.get("review") else ""
    return f"{words}: {line['detail']}{low}" if line.get("detail") else f"{words}{low}"


def _interval(line: Fields) -> str:
    if line.get("quality") is None:
        return "–"
    low, high = line.get("quality_low"), line.get("quality_high")
    bounds = "" if low is None or high is None else f" ({float(low):.2f}–{float(high):.2f})"
    return f"{float(line['quality']):.2f}{bounds}"


def _events(view: SiteView) -> str:
    if not view.changes:
        return ""
    said = "".join(f"<li>{escape(_event(line))}</li>" for line in view.changes)
    return f"<h2>Changes by hand</h2><ul>{said}</ul>"


def _event(line: Fields) -> str:
    said = {
        "rollback": f"rolled back to version {line.get('to')}",
        "mode": f"mode: {line.get('deployment')}",
        "pause": "paused",
        "continue": "continued",
    }
    by = f", by {line['by']}" if line.get("by") else ""
    return f"{said[line['event']]}{by}"


def _controls(service: Service, view: SiteView, form_token: str) -> str:
    hidden = "".join(
        f'<input type="hidden" name="{name}" value="{escape(value)}">'
        for name, value in (("site", view.key.site), ("model", view.key.model), ("form_token", form_token))
    )
    sure = '<label class="sure"><input type="checkbox" name="sure" required>I am sure</label>'
    paused = service.folders.paused(view.key)
    other = "live" if view.deployment == "shadow" else "shadow"
    buttons = (
        f'<p class="soft">{MODES[other]} {MODES["continue" if paused else "pause"]}</p>'
        f'<form method="post" action="/site/change" class="inline">{hidden}{sure}'
        f'<button name="what" value="{other}">Switch to {other}</button>'
        f'<button name="what" value="{"continue" if paused else "pause"}">{"Continue" if paused else "Pause"}</button>'
        "</form>"
    )
    versions = range(view.oldest_version, view.version)
    if not versions:
        return f"<h2>Controls</h2>{buttons}"
    options = "".join(f"<option>{number}</option>" for number in reversed(versions[-RECENT:]))
    back = (
        f'<form method="post" action="/site/change" class="inline">{hidden}<label for="version">Roll back to version'
        f'</label><select id="version" name="version">{options}</select>'
        f'{sure}<button class="danger" name="what" value="rollback">Roll back</button></form>'
    )
    return f"<h2>Controls</h2>{buttons}{back}"
