"""Starts the service: Ray, the shards, HTTP; and stops it without losing a request."""

import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from dltta.errors import SettingError
from dltta.models.io.opening import ModelSource
from dltta.serving.access import Access
from dltta.serving.cluster import NEEDS_SERVE, Cluster
from dltta.serving.keys import KeyFolders
from dltta.serving.settings import StreamSettings
from dltta.serving.shard import ShardSettings
from dltta.serving.site_rule import SiteRule


@dataclass(frozen=True)
class Serving:
    """What `dltta serve` was asked for."""

    root: Path
    models: Mapping[str, ModelSource]
    stream: StreamSettings
    access: Access
    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    shards: int | None = None
    live: int = 4
    queue: int = 16
    max_sites: int = 10_000
    max_bytes: int = 256 << 20
    previews: int = 8
    threads: int | None = None
    address: str | None = None
    device: str = "cpu"
    rule: SiteRule = field(default_factory=SiteRule)

    def cluster(self) -> Cluster:
        cores = os.cpu_count() or 1
        shards = cores if self.shards is None else self.shards
        if min(shards, self.live, self.queue) < 1:
            raise SettingError("--shards, --live and --queue must be at least 1")
        threads = max(1, cores // shards) if self.threads is None else self.threads
        settings = ShardSettings(
            self.root.resolve(), self.models, self.stream, self.live, threads, self.device, self.previews
        )
        return Cluster(settings, shards=shards, waiting=self.queue, address=self.address)


def run_service(serving: Serving, say: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM; then finish what is under way, flush, release."""
    try:
        import uvicorn

        from dltta.serving.http import make_app
        from dltta.serving.service import Limits
    except ImportError as error:
        raise SettingError(NEEDS_SERVE) from error
    cluster = serving.cluster()
    for source in serving.models.values():  # what is wrong with a model is said before anything starts
        source.open()
    _require_certificate(serving)
    folders = KeyFolders(serving.root)
    with folders.locked(), closing(_listen(serving.host, serving.port)) as listener:
        folders.clear_spool()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # while the shards start
        try:
            cluster.start()
            limits = Limits(serving.max_bytes, keys=serving.max_sites)
            app = make_app(cluster, serving.access, limits=limits, rule=serving.rule)
            _log_to_stderr()
            say(f"dltta serves {', '.join(serving.models)} at {_address(serving, listener)}")
            config = uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=120,
                ssl_certfile=None if serving.tls_cert is None else str(serving.tls_cert),
                ssl_keyfile=None if serving.tls_key is None else str(serving.tls_key),
            )
            for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again once it has stopped: no error
                signal.signal(number, lambda *_: None)
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            cluster.stop()


def _require_certificate(serving: Serving) -> None:
    """Raise unless certificate and key can be used."""
    if serving.tls_cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(serving.tls_cert, serving.tls_key)
    except OSError as error:
        raise SettingError(
            f"{serving.tls_cert} and its key cannot be used ({error.strerror or error}); give both as PEM"
        ) from error


def _address(serving: Serving, listener: socket.socket) -> str:
    scheme = "http" if serving.tls_cert is None else "https"
    host = f"[{serving.host}]" if ":" in serving.host else serving.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket; one line if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --port"
        ) from error
    return listener


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("dltta.service")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
