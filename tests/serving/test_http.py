"""The service over HTTP, with one shard in this process: who may do what, what is refused, what is shown."""

import asyncio
import hashlib
import io
import json
import re
import time

import numpy as np
import pytest
from PIL import Image as Pillow

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'dltta[serve]'")
pytest.importorskip("prometheus_client", reason="the service is not installed: pip install 'dltta[serve]'")
pytest.importorskip("httpx", reason="httpx drives the service in tests")

from starlette.testclient import TestClient

import streams
from dltta.models.io.opening import ModelSource
from dltta.serving.access import Access, Grant, Role, new_token
from dltta.serving.cluster import Cluster
from dltta.serving.http import make_app
from dltta.serving.service import Limits
from dltta.serving.shard import Shard, ShardSettings

ADMIN, SUBMIT, READ, OTHER = "admin-token", "submit-token", "read-token", "other-token"


class InProcess(Cluster):
    """A cluster of one shard without Ray."""

    def start(self):
        self.shard, self.started = Shard(self.settings), True

    def stop(self):
        self.shard.close()
        self.started = False

    async def _call(self, key, method, *args, **kwargs):
        return await asyncio.to_thread(getattr(self.shard, method), *args, **kwargs)

    async def memory(self):
        return [self.shard.memory()]


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
    settings = ShardSettings(root, {"a": ModelSource(str(model))}, streams.settings(guard=False), previews=3)
    cluster = InProcess(settings, shards=1, waiting=2)
    with TestClient(make_app(cluster, ACCESS, limits=Limits(bytes=20_000, keys=3))) as client:
        yield client


def png(seed=0, size=(32, 32)):
    values = np.random.default_rng(seed).integers(0, 255, size)
    buffer = io.BytesIO()
    Pillow.fromarray(values.astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


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
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_written(client, root, change, status):
    reply = post(client, **change)
    assert reply.status_code == status
    assert "\n" not in reply.json()["detail"]
    assert not (root / "keys").exists()
    assert not list(root.glob("spool/*"))
    assert post(client).status_code == 200  # and the service goes on


def test_an_image_of_the_wrong_kind_is_refused(client, root):
    buffer = io.BytesIO()
    Pillow.new("RGB", (32, 32), (1, 200, 3)).save(buffer, "PNG")
    reply = post(client, content=buffer.getvalue())
    assert reply.status_code == 422
    assert "channel" in reply.json()["detail"]
    assert not (root / "keys").exists()


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


def test_a_full_queue_says_when_to_come_back(client, model):
    async def too_many():
        cluster = client.app.state.service.cluster
        from dltta.serving.cluster import BusyError
        from dltta.serving.keys import Key

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
    assert post(client, request="r3", content=png(3)).json()["state"] == 4


def test_a_paused_site_is_not_served_and_a_shadowed_one_says_what_would_have_changed(client):
    admin = {"Authorization": f"Bearer {ADMIN}"}
    post(client)
    client.post("/v1/mode?site=h/1&mode=pause", headers=admin)
    assert post(client, request="r2", content=png(2)).status_code == 503
    client.post("/v1/mode?site=h/1&mode=continue", headers=admin)
    assert client.post("/v1/mode?site=h/1&mode=shadow", headers=admin).status_code == 200
    assert "change" in post(client, request="r2", content=png(2)).json()


def test_health_and_readiness(client):
    assert client.get("/healthz").json()["status"] == "ok"
    assert client.get("/readyz").json() == {"ready": True, "shards": 1}


def test_openapi_shows_an_example_and_loads_nothing_from_elsewhere(client):
    described = client.get("/openapi.json").json()
    example = described["paths"]["/v1/images"]["post"]["responses"]["200"]["content"]["application/json"]["example"]
    assert example["status"] == "answered"
    assert client.get("/docs").status_code == 404


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
