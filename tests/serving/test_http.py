"""The service over HTTP, with one shard in this process: who may do what, what is refused, what is shown."""

import asyncio
import errno
import gzip
import hashlib
import io
import json
import re
import time
import zipfile
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'dltta[serve]'")
pytest.importorskip("prometheus_client", reason="the service is not installed: pip install 'dltta[serve]'")
pytest.importorskip("httpx", reason="httpx drives the service in tests")

from fastapi import HTTPException
from starlette.testclient import TestClient

import streams
from dicoms import write_series
from dltta.data.preprocessing import Preprocessing
from dltta.models.io.checkpoint import Checkpoint, save_checkpoint
from dltta.models.io.opening import ModelSource
from dltta.models.nets.architecture import Architecture
from dltta.serving.access import Access, Grant, Role, new_token
from dltta.serving.cluster import BusyError, Cluster
from dltta.serving.http import make_app
from dltta.serving.journal import on_disk
from dltta.serving.keys import Key
from dltta.serving.service import Limits
from dltta.serving.session import Request as ImageRequest
from dltta.serving.shard import ShardSettings
from dltta.serving.site_rule import SiteRule
from dltta.serving.verification import verify
from services import InProcess

ADMIN, SUBMIT, READ, OTHER = "admin-token", "submit-token", "read-token", "other-token"


def grant(token, role, *sites):
    return Grant(token, hashlib.sha256(token.encode()).hexdigest(), role, sites)


ACCESS = Access(
    (
        grant(ADMIN, Role.ADMIN, "*"),
        grant(SUBMIT, Role.SUBMIT, "h/*"),
        grant(READ, Role.READ, "*"),
        grant(OTHER, Role.SUBMIT, "elsewhere"),
    )
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return streams.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def client(model, root):
    with TestClient(made(model, root)) as client:
        yield client


def png(seed=0, size=(32, 32)):
    values = np.random.default_rng(seed).integers(0, 255, size)
    buffer = io.BytesIO()
    Pillow.fromarray(values.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def zipped(*members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number, content in enumerate(members):
            archive.writestr(f"{number}.dcm", content)
    return buffer.getvalue()


def made(model, root, **changes):
    """The application on this state folder."""
    settings = ShardSettings(root, {"a": ModelSource(str(model))}, streams.settings(guard=False), previews=3)
    given = {"access": ACCESS, "limits": Limits(bytes=20_000, keys=3), **changes}
    return make_app(InProcess(settings, shards=1, waiting=2), given.pop("access"), **given)


def post(client, request="r1", site="h/1", content=None, token=SUBMIT, **fields):
    return client.post(
        "/v1/images",
        data={"site": site, "request": request, **fields},
        files={"image": ("scan.png", png() if content is None else content)},
        headers={"Authorization": f"Bearer {token}"},
    )


def get(client, path, token=READ, **query):
    return client.get(path, params=query, headers={"Authorization": f"Bearer {token}"})


def test_an_image_is_answered_and_its_mask_can_be_fetched(client, root):
    answer = post(client).json()
    assert (answer["status"], answer["sequence"], answer["state"]) == ("answered", 1, 1)
    again = get(client, "/v1/answers", site="h/1", request="r1").json()
    assert again == answer
    mask = get(client, "/v1/masks", site="h/1", request="r1")
    with Pillow.open(io.BytesIO(mask.content)) as found:
        assert found.size == (32, 32)


def test_the_same_request_twice_is_learned_from_once(client, root):
    first = post(client).json()
    assert post(client).json() == first
    (stream,) = root.glob("keys/*/stream/stream.jsonl")
    assert len(stream.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("token", "status"), [("wrong", 401), ("", 401), (READ, 403), (OTHER, 403), (SUBMIT, 200), (ADMIN, 200)]
)
def test_only_the_right_token_submits(client, root, token, status):
    assert post(client, token=token).status_code == status
    assert (root / "keys").exists() == (status == 200)


def test_without_a_header_nothing_is_served(client):
    for path in ("/v1/sites", "/metrics", "/v1/answers?site=h/1&request=x", "/preview?site=h/1&number=1"):
        assert client.get(path).status_code == 401


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"content": png()[:80]}, 422),
        ({"content": b""}, 422),
        ({"content": b"hello"}, 422),
        ({"content": b"x" * 200_000}, 413),
        ({"request": "../../x"}, 422),
        ({"request": ""}, 422),
        ({"site": "h/\n"}, 422),
        ({"model": "unknown"}, 404),
        ({"content": png(size=(4, 4, 3))}, 422),
        ({"content": zipped(png())}, 422),
        ({"content": zipped(b"x")[:-30]}, 422),
        ({"content": gzip.compress(b"not an image" * 40)}, 422),
        ({"site": ""}, 422),
        ({"site": "h/" + "x" * 300}, 422),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(client, root, change, status):
    reply = post(client, **change)
    assert reply.status_code == status
    assert "\n" not in reply.json()["detail"]
    assert not (root / "keys").exists()
    assert not list(root.glob("spool/*/*"))
    assert post(client).status_code == 200  # and the service goes on


def test_an_image_of_the_wrong_kind_is_refused(client, root):
    buffer = io.BytesIO()
    Pillow.new("RGB", (32, 32), (1, 200, 3)).save(buffer, "PNG")
    reply = post(client, content=buffer.getvalue())
    assert reply.status_code == 422
    assert "channel" in reply.json()["detail"]
    assert not (root / "keys").exists()


def test_an_image_that_only_the_network_refuses_leaves_no_site_behind(tmp_path, root):
    """A U-Net halves 16 pixels down to one, which has no statistics: nobody knows before it is tried."""
    architecture = Architecture("unet", 2, 1, 3, {"width": 4})
    network, values = architecture.build(seed=0), Preprocessing("scale", 255.0, None)
    checkpoint = Checkpoint(network, architecture, "segmentation", streams.SEGMENTS, values, {"epoch": 1})
    save_checkpoint(tmp_path / "model", checkpoint)
    with TestClient(made(tmp_path / "model", root)) as client:
        reply = post(client, content=png(size=(16, 16)))
        assert (reply.status_code, "single value per channel" in reply.json()["detail"]) == (422, True)
        assert not list(root.glob("keys/*"))
        assert post(client).json()["sequence"] == 1


def test_a_body_that_does_not_say_its_size_is_cut_off_at_the_limit(client, root):
    sent = []

    def pieces():
        for _ in range(100):
            sent.append(None)
            yield b"x" * 10_000

    headers = {"Authorization": f"Bearer {SUBMIT}", "Content-Type": "multipart/form-data; boundary=b"}
    assert client.post("/v1/images", content=pieces(), headers=headers).status_code == 413
    assert not (root / "keys").exists()


def test_a_client_that_sends_too_slowly_is_let_go(model, root):
    """The first bytes come, the others never do."""
    replies = []

    async def talk(app):
        parts = [{"type": "http.request", "body": b"--b\r\n", "more_body": True}]

        async def receive():
            if parts:
                return parts.pop()
            await asyncio.sleep(3600)

        async def send(message):
            replies.append(message)

        headers = [
            (b"authorization", f"Bearer {SUBMIT}".encode()),
            (b"content-type", b"multipart/form-data; boundary=b"),
        ]
        scope = {"type": "http", "method": "POST", "path": "/v1/images", "raw_path": b"/v1/images", "query_string": b""}
        scope |= {"headers": headers, "http_version": "1.1", "scheme": "http", "server": ("h", 80), "root_path": ""}
        await app(scope, receive, send)

    app = made(model, root, limits=Limits(seconds=0.1))
    asyncio.run(talk(app))
    assert replies[0]["status"] == 408
    assert b"longer than" in replies[1]["body"]
    assert not (root / "keys").exists()


@pytest.mark.parametrize("site", ["../../outside", "/etc/passwd", "h/..", "..\\..", "a/../../b", "~root"])
def test_a_path_as_the_name_of_a_site_is_only_a_name(client, root, tmp_path, site):
    answer = post(client, site=site, token=ADMIN)
    assert (answer.status_code, answer.json()["site"]) == (200, site)
    (folder,) = (root / "keys").iterdir()
    assert re.fullmatch("[0-9a-f]{32}", folder.name)
    assert list(tmp_path.iterdir()) == [root]
    assert sorted(path.name for path in root.iterdir()) == ["keys", "spool"]


@pytest.mark.long
def test_ten_thousand_unknown_sites_leave_nothing_behind(client, root):
    """Asked for, sent nonsense from, and sent images from when there are as many sites as there may be."""
    service = client.app.state.service
    for number in range(4000):
        assert get(client, "/v1/answers", site=f"unknown {number}", request="r1").status_code == 404
    for number in range(3000):
        assert post(client, site=f"h/unknown {number}", content=b"nonsense").status_code == 422
    assert not (root / "keys").exists()
    for number in range(3):
        post(client, site=f"h/{number}")
    for number in range(3000):
        assert post(client, site=f"h/more {number}").status_code == 429
    assert len(list((root / "keys").iterdir())) == 3
    assert not list(root.glob("spool/*/*"))
    assert (service.cluster.waiting, len(service.later), len(service.beginning)) == (0, 0, 0)
    assert not service.cluster._locks
    assert post(client, site="h/0", request="r2", content=png(2)).status_code == 200


def test_sites_that_are_being_begun_count_too(client, monkeypatch):
    """Three may be begun: of five that come at once, two are refused."""
    service = client.app.state.service

    async def five():
        async def forever(key, request):
            await asyncio.sleep(3600)

        monkeypatch.setattr(service.cluster, "answer", forever)
        tasks, statuses = [], []
        for number in range(5):
            key = service.key(f"h/{number}", None)
            try:
                service.require_place(key)
                tasks.append(asyncio.create_task(service.answer(key, ImageRequest("r", "x.png", png()))))
                statuses.append(200)
            except HTTPException as error:
                statuses.append(error.status_code)
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return statuses

    assert asyncio.run(five()) == [200, 200, 200, 429, 429]
    assert not service.beginning


@pytest.mark.parametrize("place", ["dltta.serving.upload._write", "dltta.serving.record.Record.put"])
def test_a_full_disk_is_said_and_the_next_request_is_answered(client, root, monkeypatch, place):
    post(client)

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(place, full if "upload" in place else _in_one_sentence(full))
        reply = post(client, request="r2", content=png(2))
    assert (reply.status_code, "No space left" in reply.json()["detail"]) == (503, True)
    assert "Retry-After" in reply.headers
    assert not list(root.glob("spool/*/*"))
    assert post(client, request="r2", content=png(2)).json()["sequence"] == 2


def _in_one_sentence(write):
    def wrapped(*given):
        with on_disk(Path("state")):
            write()

    return wrapped


def test_an_answer_stands_also_where_its_picture_finds_no_room(client, monkeypatch):
    def full(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dltta.serving.previews.write_atomically", full)
    assert post(client).status_code == 200


def test_reading_opens_no_site_and_writes_nothing(client, root):
    """Five sites' answers are read while four may be in memory: the one in use stays there."""
    shard = client.app.state.service.cluster.shard
    post(client)
    key = next(iter(shard._sessions))
    shard._evict(key)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert get(client, "/v1/answers", site="h/1", request="R1").json()["sequence"] == 1
    assert get(client, "/v1/masks", site="h/1", request="r1").content.startswith(b"\x89PNG")
    assert get(client, "/v1/answers", site="h/1", request="r2").status_code == 404
    assert not shard._sessions
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


# the site of a DICOM image


def series(tmp_path, **header):
    slices = np.random.default_rng(0).integers(0, 200, (2, 32, 32)).astype(np.uint16)
    files = write_series(tmp_path / "series", slices, Manufacturer="Acme", StationName="CT1", **header)
    return zipped(*(file.read_bytes() for file in files))


def test_a_dicom_series_without_a_site_belongs_to_its_scanner(model, root, tmp_path):
    with TestClient(made(model, root, rule=SiteRule("h/{Manufacturer} {StationName}"))) as client:
        answer = post(client, site="", content=series(tmp_path))
        assert (answer.status_code, answer.json()["site"]) == (200, "h/Acme CT1")
        assert get(client, "/v1/masks", site="h/Acme CT1", request="r1").status_code == 200
        assert post(client, site="h/other", content=series(tmp_path)).json()["site"] == "h/other"  # what is said counts


def test_the_site_of_the_header_needs_the_token_of_that_site(model, root, tmp_path):
    with TestClient(made(model, root)) as client:
        assert post(client, site="", content=series(tmp_path)).status_code == 403  # Acme/CT1/unknown, not h/*
    assert not (root / "keys").exists()


def test_an_image_without_header_needs_a_site(client, root):
    reply = post(client, site="")
    assert (reply.status_code, "no site was given" in reply.json()["detail"]) == (422, True)


def test_an_id_with_another_image_is_a_conflict(client):
    post(client)
    assert post(client, content=png(1)).status_code == 409


def test_unknown_requests_and_sites_are_not_found_and_not_begun(client, root):
    assert get(client, "/v1/answers", site="h/1", request="x").status_code == 404
    assert get(client, "/v1/stream", site="nowhere").status_code == 404
    assert not (root / "keys").exists()


def test_no_more_sites_than_allowed_are_begun(client, root):
    for number in range(3):
        assert post(client, site=f"h/{number}").status_code == 200
    refused = post(client, site="h/4")
    assert (refused.status_code, "Retry-After" in refused.headers) == (429, True)
    assert post(client, site="h/0", request="r2", content=png(2)).status_code == 200


def test_a_request_may_be_asked_for_later(client):
    taken = post(client, wait="false")
    assert taken.status_code == 202
    while (answer := get(client, "/v1/answers", site="h/1", request="r1")).status_code == 202:
        time.sleep(0.05)
    assert answer.json()["sequence"] == 1


def test_what_failed_later_can_be_asked_for_and_what_was_answered_is_not_kept_in_memory(client):
    later = client.app.state.service.later
    post(client, wait="false", content=b"nonsense")
    while (answer := get(client, "/v1/answers", site="h/1", request="r1")).status_code == 202:
        time.sleep(0.05)
    assert answer.status_code == 422
    assert get(client, "/v1/answers", site="h/1", request="r1").status_code == 422  # also the second time
    post(client, wait="false")
    while get(client, "/v1/answers", site="h/1", request="r1").status_code != 200:
        time.sleep(0.05)
    assert not later


def test_a_failure_is_forgotten_once_the_request_was_answered_after_all(client):
    post(client, wait="false", content=b"nonsense")
    while get(client, "/v1/answers", site="h/1", request="r1").status_code != 422:
        time.sleep(0.05)
    assert post(client).status_code == 200  # this time its sender waits
    assert get(client, "/v1/answers", site="h/1", request="r1").status_code == 200


def test_an_id_that_is_under_way_with_another_image_is_a_conflict(client, monkeypatch):
    service, may_go_on = client.app.state.service, asyncio.Event()
    work = service.cluster.answer

    async def slowly(key, request):
        await may_go_on.wait()
        return await work(key, request)

    monkeypatch.setattr(service.cluster, "answer", slowly)
    assert post(client, wait="false").status_code == 202
    assert post(client, wait="false").status_code == 202  # sent again
    refused = post(client, wait="false", content=png(1))
    assert (refused.status_code, "another image" in refused.json()["detail"]) == (409, True)
    client.portal.call(may_go_on.set)
    while (answer := get(client, "/v1/answers", site="h/1", request="r1")).status_code == 202:
        time.sleep(0.05)
    assert answer.json()["sequence"] == 1


def test_the_answer_names_the_model_that_its_mask_is_asked_of(client):
    assert post(client).json()["model"] == "a"


def test_only_the_latest_failures_are_kept(client, monkeypatch):
    monkeypatch.setattr("dltta.serving.http.MOST_FAILURES", 2)
    for number in range(5):
        post(client, wait="false", request=f"r{number}", content=b"nonsense")
        while get(client, "/v1/answers", site="h/1", request=f"r{number}").status_code == 202:
            time.sleep(0.05)
    assert [request for _, request in client.app.state.service.later] == ["r3", "r4"]


def test_a_full_queue_refuses_also_those_who_do_not_wait(client, monkeypatch):
    monkeypatch.setattr(client.app.state.service.cluster, "_most_waiting", 0)
    for wait in ("true", "false"):
        reply = post(client, wait=wait)
        assert (reply.status_code, "Retry-After" in reply.headers) == (429, True)


def test_images_that_wait_take_no_more_memory_than_they_may(client, monkeypatch):
    monkeypatch.setattr("dltta.serving.cluster.MOST_BYTES", 100)

    async def two():
        cluster = client.app.state.service.cluster
        async with cluster._turn(Key("a", "h/1"), 80):
            with pytest.raises(BusyError):
                cluster.require_room(Key("a", "h/2"), 80)
        cluster.require_room(Key("a", "h/2"), 80)

    asyncio.run(two())


def test_a_full_queue_says_when_to_come_back(client, model):
    async def too_many():
        cluster = client.app.state.service.cluster
        key = Key("a", "h/1")
        async with cluster._turn(key):
            waiting = asyncio.create_task(_hold(cluster, key))
            await asyncio.sleep(0)
            with pytest.raises(BusyError) as caught:
                async with cluster._turn(key):
                    pass
            assert caught.value.after >= 1
        await waiting
        assert cluster.waiting == 0

    async def _hold(cluster, key):
        async with cluster._turn(key):
            pass

    asyncio.run(too_many())


def test_metrics_and_log_name_no_patient_and_no_site(client, caplog):
    with caplog.at_level("INFO", logger="dltta.service"):
        post(client, request="MUELLER-HANS", site="h/secret")
    text = get(client, "/metrics").text + caplog.text
    assert "dltta_requests_total" in text
    assert "MUELLER" not in text
    assert "secret" not in text


def test_sites_are_listed_for_those_who_may_see_them(client):
    post(client)
    (site,) = get(client, "/v1/sites").json()
    assert (site["site"], site["answered"], site["mode"]) == ("h/1", 1, "live")
    assert get(client, "/v1/sites", token=OTHER).json() == []


def test_rollback_is_for_admins_and_in_the_log(client, root):
    post(client)
    post(client, request="r2", content=png(2))
    refused = client.post("/v1/rollback?site=h/1&version=1", headers={"Authorization": f"Bearer {SUBMIT}"})
    assert refused.status_code == 403
    done = client.post("/v1/rollback?site=h/1&version=1", headers={"Authorization": f"Bearer {ADMIN}"})
    assert done.json() == {"event": "rollback", "to": 1, "state": 3}
    (stream,) = root.glob("keys/*/stream")
    line = streams.lines(stream)[-1]
    assert (line["event"], line["to"], line["by"], line["fence"]) == ("rollback", 1, ADMIN, 2)
    assert verify(stream) == []
    assert post(client, request="r3", content=png(3)).json()["state"] == 4


def test_a_paused_site_is_not_served_and_a_shadowed_one_says_what_would_have_changed(client):
    admin = {"Authorization": f"Bearer {ADMIN}"}
    post(client)
    client.post("/v1/mode?site=h/1&mode=pause", headers=admin)
    assert post(client, request="r2", content=png(2)).status_code == 503
    client.post("/v1/mode?site=h/1&mode=continue", headers=admin)
    assert client.post("/v1/mode?site=h/1&mode=shadow", headers=admin).status_code == 200
    assert "change" in post(client, request="r2", content=png(2)).json()


def test_a_paused_site_stays_paused_when_the_service_starts_again_and_the_log_says_who_did_it(model, root):
    admin = {"Authorization": f"Bearer {ADMIN}"}
    with TestClient(made(model, root)) as client:
        assert client.post("/v1/mode?site=h/1&mode=pause", headers=admin).status_code == 404  # not there yet
        post(client)
        assert client.post("/v1/mode?site=h/1&mode=pause", headers=admin).json() == {"event": "pause"}
    with TestClient(made(model, root)) as client:
        assert post(client, request="r2", content=png(2)).json()["detail"] == "this site is paused"
        assert get(client, "/v1/sites").json()[0]["mode"] == "paused"
        client.post("/v1/mode?site=h/1&mode=continue", headers=admin)
        assert post(client, request="r2", content=png(2)).status_code == 200
    (stream,) = root.glob("keys/*/stream")
    events = [(line["event"], line["by"]) for line in streams.lines(stream) if "by" in line]
    assert events == [("pause", ADMIN), ("continue", ADMIN)]
    assert verify(stream) == []


def test_pages_of_others_cannot_use_a_visitors_browser(model, root):
    with TestClient(made(model, root, access=Access(None)), base_url="http://127.0.0.1") as client:
        post(client)
        for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
            reply = client.post("/v1/mode?site=h/1&mode=shadow", headers={"Sec-Fetch-Site": site})
            assert reply.status_code == status
        assert client.get("/v1/sites", headers={"Host": "evil.example"}).status_code == 403  # a name that leads here
        assert client.get("/v1/sites", headers={"Host": "localhost:8000"}).status_code == 200


def test_health_and_readiness(client):
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/readyz").json() == {"ready": True, "shards": 1}


class Calls:
    """A shard that answers questions about its memory when the test says so."""

    def __init__(self):
        self.asked = []
        self.memory = self

    def remote(self):
        return self

    def future(self):
        self.asked.append(Future())
        return self.asked[-1]


def test_a_shard_at_work_is_alive_and_a_dead_one_is_not():
    """Nobody waits for a shard that works for minutes, and it is not asked again meanwhile."""
    cluster, shards = Cluster(None, shards=2), [Calls(), Calls()]
    cluster._actors = shards

    def seen():
        return {shard["shard"]: shard["resident"] for shard in asyncio.run(cluster.memory(patience=0.01))}

    assert seen() == {}
    shards[0].asked[0].set_result({"resident": 5})
    shards[1].asked[0].set_result({"resident": 7})
    assert seen() == {0: 5, 1: 7}  # both were asked again, and work
    assert seen() == {0: 5, 1: 7}
    assert [len(shard.asked) for shard in shards] == [2, 2]
    shards[1].asked[1].set_exception(RuntimeError("dead"))
    assert seen() == {0: 5}


def test_openapi_shows_an_example_and_loads_nothing_from_elsewhere(client):
    described = client.get("/openapi.json").json()
    example = described["paths"]["/v1/images"]["post"]["responses"]["200"]["content"]["application/json"]["example"]
    assert example["status"] == "answered"
    assert client.get("/docs").status_code == 404


def test_every_route_of_the_api_has_an_example(client):
    for path, methods in client.get("/openapi.json").json()["paths"].items():
        for method in methods.values():
            contents = method["responses"]["200"]["content"].values()
            assert any("example" in content for content in contents) or path == "/v1/masks", path


# the page


def entered(client, token):
    reply = client.post("/login", data={"token": token}, follow_redirects=False)
    return reply.headers["location"]


def test_the_page_asks_for_a_token_first(client):
    assert client.get("/", follow_redirects=False).headers["location"] == "/login"
    assert entered(client, "wrong") == "/login?wrong=true"
    assert entered(client, READ) == "/"


def test_the_page_shows_sites_cases_and_pictures_and_escapes_names(client):
    post(client, site="h/<script>alert(1)</script>")
    entered(client, READ)
    home = client.get("/").text
    assert "&lt;script&gt;" in home
    assert "<script" not in home
    page = client.get("/site", params={"site": "h/<script>alert(1)</script>"}).text
    assert "<script" not in page
    (picture,) = re.findall(r'src="(/preview[^"]*)"', page)
    assert client.get(picture.replace("&amp;", "&")).content.startswith(b"\x89PNG")
    assert "Roll back" not in page  # not an admin


def test_every_page_forbids_what_comes_from_elsewhere(client):
    entered(client, READ)
    for path in ("/", "/login"):
        assert "default-src 'none'" in client.get(path).headers["content-security-policy"]
    assert not re.search(r'(src|href)="(https?:)?//', client.get("/").text)


def test_admins_roll_back_from_the_page_once_they_are_sure(client):
    for number in range(3):
        post(client, request=f"r{number}", content=png(number))
    entered(client, ADMIN)
    page = client.get("/site", params={"site": "h/1"}).text
    (form,) = set(re.findall(r'name="form_token" value="([0-9a-f]+)"', page))
    given = {"site": "h/1", "model": "a", "what": "rollback", "version": "1", "form_token": form}
    assert client.post("/site/change", data=given).status_code == 422  # not sure
    assert client.post("/site/change", data={**given, "sure": "on", "form_token": "0" * 64}).status_code == 403
    assert client.post("/site/change", data={**given, "sure": "on"}).status_code == 200
    assert "rolled back to version 1" in client.get("/site", params={"site": "h/1"}).text


@pytest.mark.parametrize("what", ["shadow", "pause"])
def test_switches_on_the_page_are_confirmed_too(client, what):
    post(client)
    entered(client, ADMIN)
    page = client.get("/site", params={"site": "h/1"}).text
    (form,) = set(re.findall(r'name="form_token" value="([0-9a-f]+)"', page))
    given = {"site": "h/1", "model": "a", "what": what, "form_token": form}
    assert client.post("/site/change", data=given).status_code == 422  # not sure
    assert get(client, "/v1/sites").json()[0]["mode"] == "live"
    assert client.post("/site/change", data={**given, "sure": "on"}).status_code == 200
    assert get(client, "/v1/sites").json()[0]["mode"] == {"pause": "paused"}.get(what, what)


def test_what_is_wrong_is_a_page_for_people_and_json_for_programs(client):
    entered(client, READ)
    page = client.get("/site?site=%3Cb%3Enowhere", headers={"Accept": "text/html,*/*"})
    assert (page.status_code, "text/html" in page.headers["content-type"]) == (404, True)
    assert "there is no such site" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/site?site=nowhere").json() == {"detail": "there is no such site"}
    api = client.get("/v1/stream?site=nowhere", headers={"Accept": "text/html"})
    assert (api.status_code, api.json()) == (404, {"detail": "there is no such site"})


def test_a_person_whose_token_is_gone_is_asked_for_one(client):
    reply = client.post(
        "/site/change", data={"site": "h/1", "model": "a", "what": "pause", "form_token": "0"},
        headers={"Accept": "text/html"}, follow_redirects=False,
    )  # fmt: skip
    assert (reply.status_code, reply.headers["location"]) == (303, "/login")


# tokens


def test_a_new_token_is_granted_by_the_table_that_is_printed(tmp_path):
    secret, table = new_token('scanner "3"', "submit", ["a/*"])
    assert secret not in table
    (tmp_path / "tokens.toml").write_text(table)
    granted = Access.from_file(tmp_path / "tokens.toml").grant(secret)
    assert (granted.name, granted.role, granted.sites) == ('scanner "3"', Role.SUBMIT, ("a/*",))
    assert Access.from_file(tmp_path / "tokens.toml").grant(secret + "x") is None
    assert Access.from_file(tmp_path / "tokens.toml").grant(None) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no [[token]]"),
        ("[[token]]\nrole='submit'", "64 hexadecimal"),
        ("nonsense", "not TOML"),
        (f"[[token]]\nsha256='{'0' * 64}'\nrole='boss'\nsites=['*']", "read, submit or admin"),
        (f"[[token]]\nsha256='{'0' * 64}'\nrole='read'\nsites=[]", "list of patterns"),
        (f"[[token]]\nsha256='{'0' * 64}'\nrole='read'\nsites=['*']\nsite='x'", "'site'"),
    ],
)
def test_a_file_of_tokens_says_what_is_wrong_with_it(tmp_path, text, said):
    (tmp_path / "tokens.toml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        Access.from_file(tmp_path / "tokens.toml")


def test_answers_are_json_that_any_program_reads(client):
    assert json.loads(post(client).text)["case"] == "r1"
