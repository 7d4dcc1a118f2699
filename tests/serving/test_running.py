"""`dltta serve` as a process: on a running Ray, with TLS and tokens; what it refuses, and how it stops."""

import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

pytest.importorskip("ray", reason="the service is not installed: pip install 'dltta[serve]'")
pytest.importorskip("uvicorn", reason="the service is not installed: pip install 'dltta[serve]'")

import streams
from dltta.client import _multipart
from dltta.serving.access import new_token
from dltta.serving.verification import verify
from streams import write_images


def command(*given):
    return [sys.executable, "-m", "dltta", "serve", *map(str, given)]


def refused(*given):
    done = subprocess.run(command(*given), capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    return done.stderr


@pytest.fixture
def model(tmp_path):
    return streams.save_model(tmp_path / "model")


@pytest.mark.long
def test_what_is_wrong_is_said_before_anything_starts(tmp_path, model):
    usual = ("-m", model, "-o", tmp_path / "state", "--insecure")
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_text("not a certificate")
    tls = ("--tls-cert", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem")
    assert "cannot be used" in refused(*usual, *tls)
    assert "did you mean 'StationName'" in refused(*usual, "--site", "{StatonName}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another --port" in refused(*usual, "--port", taken.getsockname()[1])
    assert "serves loopback only" in refused(*usual, "--host", "0.0.0.0")
    assert not (tmp_path / "state" / "keys").exists()


@pytest.mark.long
def test_sigterm_lets_what_is_under_way_finish_and_frees_the_folder(tmp_path, model):
    """On a Ray that runs already, with TLS and a token; a second service on the same folder is refused."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    from ray.cluster_utils import Cluster as RayCluster

    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*make.split(), "-keyout", tmp_path / "key", "-out", tmp_path / "cert"], check=True)
    secret, table = new_token("scanner", "submit", ["*"])
    (tmp_path / "tokens").write_text(table)
    machines = RayCluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    usual = ["-m", f"a={model}", "-o", tmp_path / "state", "--tokens", tmp_path / "tokens", "--host", "localhost"]
    usual += ["--tls-cert", tmp_path / "cert", "--tls-key", tmp_path / "key", "--port", "0", "--shards", "1"]
    usual += ["--address", machines.address, "--method", "tent"]
    process = subprocess.Popen(command(*usual), stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split()[-1]
        assert address.startswith("https://localhost:")
        assert "another service works here" in refused(*usual)

        def send(number, token=secret):
            image = tmp_path / "images" / f"case_{number}.png"
            body, kind = _multipart({"site": "s", "request": f"r{number}"}, image.name, image.read_bytes())
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            request = urllib.request.Request(f"{address}/v1/images", body, headers)
            trusted = ssl.create_default_context(cafile=str(tmp_path / "cert"))
            with urllib.request.urlopen(request, context=trusted, timeout=300) as reply:
                return json.loads(reply.read())

        write_images(tmp_path / "images", 4, size=(32, 32))
        with pytest.raises(urllib.error.HTTPError, match="401"):
            send(0, token="wrong")
        assert send(0)["sequence"] == 1
        answers = []
        under_way = [threading.Thread(target=lambda n=n: answers.append(send(n)["sequence"])) for n in (1, 2, 3)]
        for thread in under_way:
            thread.start()
        while not list((tmp_path / "state" / "spool").glob("*/*")):  # until one of them is worked on
            pass
        process.send_signal(signal.SIGTERM)
        for thread in under_way:
            thread.join(300)
        assert process.wait(300) == 0
        (stream,) = (tmp_path / "state" / "keys").glob("*/stream")
        logged = [line["sequence"] for line in streams.lines(stream) if "sequence" in line]
        assert logged == list(range(1, len(logged) + 1))
        assert sorted(answers) == logged[1:]  # who got an answer is in the log, and the other way round
        assert answers
        assert verify(stream) == []
    finally:
        process.kill()
        machines.shutdown()
