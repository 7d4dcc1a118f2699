"""The page as people see it: in a real browser, at the width of a desk and of a phone."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest

import streams
from dltta.client import Client
from streams import write_images

pytest.importorskip("ray", reason="the service is not installed: pip install 'dltta[serve]'")
DRIVER = shutil.which("chromedriver")
if DRIVER is None or shutil.which("chromium") is None:
    pytest.skip("no browser here: apt-get install chromium chromium-driver", allow_module_level=True)
pytestmark = pytest.mark.long


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(port, method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}, method=method
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.loads(reply.read())["value"]


def wait_for(address, process):
    while process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"{address}: the process ended with {process.returncode}")


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("service")
    model, port = streams.save_model(folder / "model"), free_port()
    command = [sys.executable, "-m", "dltta", "serve", "-m", f"a={model}", "-o", folder / "state", "--insecure"]
    process = subprocess.Popen([*map(str, command), "--port", str(port), "--shards", "1", "--method", "tent"])
    address = f"http://127.0.0.1:{port}"
    wait_for(f"{address}/readyz", process)
    client = Client(address)
    images = write_images(folder / "images", 3, size=(32, 32))
    for number in range(3):
        client.predict(images / f"case_{number}.png", site="st-mary/scanner 3", request=f"r{number}")
    yield address
    process.terminate()
    assert process.wait(120) == 0


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    port = free_port()
    process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL)
    wait_for(f"http://127.0.0.1:{port}/status", process)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    flags += ["--disable-component-update", "--disable-sync", "--disable-quic"]
    flags += [f"--user-data-dir={tmp_path_factory.mktemp('browser')}"]
    wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": flags}}}}
    session = f"/session/{ask(port, 'POST', '/session', wanted)['sessionId']}"
    yield lambda method, path, body=None: ask(port, method, session + path, body)
    ask(port, "DELETE", session)
    process.terminate()
    process.wait(30)


def run(browser, script):
    return browser("POST", "/execute/sync", {"script": script, "args": []})


@pytest.mark.parametrize("width", [1280, 500])  # 500: the narrowest window that Chromium opens
@pytest.mark.parametrize("path", ["/", "/site?site=st-mary/scanner%203"])
def test_pages_fit_their_window_and_load_without_errors(service, browser, width, path):
    browser("POST", "/window/rect", {"width": width, "height": 900})
    browser("POST", "/url", {"url": service + path})
    assert run(browser, "return document.documentElement.scrollWidth <= window.innerWidth")
    run(browser, "for (const image of document.images) image.loading = 'eager'")  # those far below come late
    deadline = time.monotonic() + 60
    while not run(browser, "return [...document.images].every(image => image.complete)"):
        assert time.monotonic() < deadline
    assert run(browser, "return [...document.images].every(image => image.naturalWidth > 0)")
    assert run(browser, "return getComputedStyle(document.body).margin") == "0px"  # the style sheet was taken


def test_a_visitor_goes_from_the_sites_to_a_case_and_switches_to_shadow(service, browser):
    browser("POST", "/url", {"url": service})
    assert "st-mary/scanner 3" in run(browser, "return document.body.innerText")
    run(browser, "document.querySelector('a.card').click()")
    deadline = time.monotonic() + 60
    while "Latest cases" not in run(browser, "return document.body.innerText"):
        assert time.monotonic() < deadline
    assert "r2" in run(browser, "return document.body.innerText")
    run(browser, "document.querySelector('button[value=shadow]').click()")
    assert "mode: shadow" not in run(browser, "return document.body.innerText")  # the browser asks to tick the box
    run(browser, "document.querySelector('form:has(button[value=shadow]) input[name=sure]').click()")
    run(browser, "document.querySelector('button[value=shadow]').click()")
    while "mode: shadow" not in run(browser, "return document.body.innerText"):
        assert time.monotonic() < deadline
