"""The client against a service that listens: images out, answers and masks back; who waits, who gives up."""

import io
import threading
import time

import numpy as np
import pytest
from PIL import Image as Pillow

pytest.importorskip("fastapi", reason="the service is not installed: pip install 'dltta[serve]'")
pytest.importorskip("uvicorn", reason="the service is not installed: pip install 'dltta[serve]'")

import uvicorn

import streams
from dltta.client import Client, ServiceError
from dltta.models.io.opening import ModelSource
from dltta.serving.access import Access, new_token
from dltta.serving.cluster import BusyError
from dltta.serving.http import make_app
from dltta.serving.shard import ShardSettings
from services import InProcess
from streams import write_images


@pytest.fixture
def service(tmp_path):
    """A cluster, its address and a token; two models that are told apart by what they predict."""
    models = {name: ModelSource(str(streams.save_model(tmp_path / name))) for name in ("a", "b")}
    cluster = InProcess(ShardSettings(tmp_path / "state", models, streams.settings(guard=False)), shards=1)
    token, table = new_token("program", "submit", ["*"])
    (tmp_path / "tokens").write_text(table)
    app = make_app(cluster, Access.from_file(tmp_path / "tokens"))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield cluster, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", token
    server.should_exit = True
    thread.join(60)


def test_an_image_is_sent_and_its_mask_saved_whichever_model_it_was_for(service, tmp_path):
    _, address, token = service
    client = Client(address, token=token)
    image = write_images(tmp_path / "images", 1, size=(32, 32)) / "case_0.png"
    answer = client.predict(image, site="st-mary/3", request="r1", model="b")
    assert (answer["status"], answer["sequence"], answer["model"]) == ("answered", 1, "b")
    assert client.answer("r1", site="st-mary/3", model="b") == answer
    saved = client.save_mask(answer, tmp_path / "masks")
    assert saved == tmp_path / "masks" / "r1.png"
    assert np.asarray(Pillow.open(saved)).shape == (32, 32)
    assert saved.read_bytes() == client.mask("r1", site="st-mary/3", model="b")
    assert [site["site"] for site in client.sites()] == ["st-mary/3"]


def test_bytes_without_a_name_or_an_id_are_an_image_too(service):
    _, address, token = service
    buffer = io.BytesIO()
    Pillow.new("L", (32, 32), 7).save(buffer, "PNG")
    answer = Client(address, token=token).predict(buffer.getvalue(), site="s")
    assert len(answer["request"]) == 32


def test_what_is_refused_is_raised_with_its_status_at_once(service, tmp_path):
    _, address, token = service
    image = write_images(tmp_path / "images", 1, size=(32, 32)) / "case_0.png"
    for client, content, status in (
        (Client(address, token="wrong"), image, 401),
        (Client(address), image, 401),
        (Client(address, token=token), b"nonsense", 422),
    ):
        with pytest.raises(ServiceError) as caught:
            client.predict(content, site="s")
        assert caught.value.status == status
        assert "\n" not in caught.value.detail


def test_a_full_queue_is_waited_out_under_the_same_id(service, tmp_path, monkeypatch):
    cluster, address, token = service
    image = write_images(tmp_path / "images", 1, size=(32, 32)) / "case_0.png"
    asked, answer = [], cluster.answer

    async def busy_at_first(key, request):
        asked.append(request.id)
        if len(asked) < 3:
            raise BusyError(0.0)
        return await answer(key, request)

    monkeypatch.setattr(cluster, "answer", busy_at_first)
    assert Client(address, token=token).predict(image, site="s")["sequence"] == 1
    assert len(asked) == 3
    assert len(set(asked)) == 1


def test_a_service_that_is_not_there_is_said_in_the_end():
    with pytest.raises(ServiceError, match="cannot be reached"):
        Client("http://127.0.0.1:9", patience=0.1).sites()
