"""`dltta node`: a DICOM node that predicts what it receives."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from dltta.cli.adapt import Adapting
from dltta.cli.options import FLAG, MODEL_HELP, Device, OwnModel, require_device, split_size
from dltta.errors import SettingError
from dltta.serving.settings import OnError, StreamSettings
from dltta.serving.site_rule import USUAL, SiteRule

if TYPE_CHECKING:
    import ssl

    from dltta.serving.node import Backend
    from dltta.serving.outbox import Certificates


@dataclass(frozen=True)
class Listening:
    """Where it listens, and to whom."""

    panel: ClassVar[str] = "Where it listens, and to whom"
    ae: Annotated[str, typer.Option("--ae", metavar="TITLE", help="Its application entity title.")] = "DLTTA"
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Interface to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0 finds a free one.")] = 11112
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="AET[@HOST]", help="Who may send; several times for several.", show_default="anybody on loopback"
        ),
    ] = None
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain (PEM) for TLS.", show_default="no TLS")
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key (PEM) of the certificate.", show_default="none")
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Certificates (PEM) that peers must present.", show_default="not asked for"),
    ] = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_ca is not None and self.tls_cert is None):
            raise SettingError("--tls-cert and --tls-key go together, and --tls-ca with both")
        if not self.peer and self.host not in ("127.0.0.1", "localhost", "::1"):
            raise SettingError(f"{self.host} can be reached by others; name who may send: --peer AET@HOST")
        from dltta.serving.outbox import valid_title

        for title in (self.ae, *(peer.partition("@")[0] for peer in self.peer or ())):
            if not valid_title(title):
                raise SettingError(f"{title!r} is no application entity title; use 1 to 16 plain characters")
        if not 0 <= self.port < 65536:
            raise SettingError(f"--port must be from 0 to 65535, got {self.port}")

    def certificates(self) -> "tuple[ssl.SSLContext | None, Certificates | None]":
        """For receiving and for sending; None without TLS."""
        if self.tls_cert is None or self.tls_key is None:
            return None, None
        import ssl

        from dltta.serving.outbox import Certificates

        try:
            receiving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.tls_ca)
            receiving.load_cert_chain(self.tls_cert, self.tls_key)
            if self.tls_ca is not None:
                receiving.verify_mode = ssl.CERT_REQUIRED
            sending = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.tls_ca)
            sending.load_cert_chain(self.tls_cert, self.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise SettingError(f"the certificate cannot be used: {error}") from error
        return receiving, Certificates(sending, self.tls_cert, self.tls_key, self.tls_ca)


@dataclass(frozen=True)
class Routing:
    """What belongs together, and where predictions go."""

    panel: ClassVar[str] = "What belongs together, and where predictions go"
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE",
            help="Where segmentations go: AET@HOST:PORT (C-STORE) or http://HOST/dicom-web (STOW-RS); several times "
            "for several.",
            show_default="nowhere: they stay in the state folder",
        ),
    ] = None
    site: Annotated[
        str,
        typer.Option(metavar="RULE", help="The site of a series, from its header; each site adapts on its own."),
    ] = USUAL
    quiet: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="A series is complete when nothing of it came for so long."),
    ] = 10.0
    capture: Annotated[
        bool,
        typer.Option("--capture", metavar=FLAG, help="Also send a picture with overlay and expected quality in words."),
    ] = False
    service: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Predict with a running dltta serve instead of a model here; its token in DLTTA_TOKEN.",
            show_default="none",
        ),
    ] = None

    def __post_init__(self) -> None:
        if not self.quiet >= 0:
            raise SettingError(f"--quiet must be at least 0 seconds, got {self.quiet:g}")


def node(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="STATE", help="Where series, streams and the outbox are kept.")
    ],
    listening: Listening,
    routing: Routing,
    adapting: Adapting,
    own: OwnModel,
    model: Annotated[
        str | None, typer.Option("-m", "--model", metavar="MODEL", help=MODEL_HELP, show_default="that of --service")
    ] = None,
    device: Device = "cpu",
) -> None:
    """Receive DICOM series, predict each with the model of its site, and send the segmentation on.

    A series that is sent again is predicted once. What is received, predicted or waits to be sent survives a restart.
    Stop with Ctrl-C or SIGTERM.

    Examples:
        dltta node -m models/a -o state --to ARCHIVE@127.0.0.1:4242
        dltta node -m models/a -o state --to http://archive/dicom-web --capture
        dltta node -m models/a -o state --host 0.0.0.0 --peer CT1@10.0.0.7
        dltta node -o state --service http://127.0.0.1:8000
    """
    import signal
    import threading

    from dltta.serving.keys import KeyFolders
    from dltta.serving.node import Node, NodeSettings, run_node
    from dltta.serving.outbox import parse_destination

    receiving, sending = listening.certificates()
    destinations = [parse_destination(place, listening.ae, sending) for place in routing.to or []]
    settings = NodeSettings(
        output,
        listening.ae,
        listening.host,
        listening.port,
        tuple(listening.peer or ()),
        SiteRule(routing.site),
        routing.quiet,
        routing.capture,
        receiving,
    )
    backend = _backend(output, model, routing.service, adapting, own, device)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    _log_to_stderr()
    with KeyFolders(output).locked():
        run_node(Node(settings, backend, destinations), typer.echo, stop)


def _backend(
    output: Path, model: str | None, service: str | None, adapting: Adapting, own: OwnModel, device: str
) -> "Backend":
    import os

    from dltta.serving.node import OwnShard, RemoteService

    if (model is None) == (service is None):
        raise SettingError("give a model (-m MODEL) or a running service (--service URL), one of them")
    if service is not None:
        from dltta.client import Client

        return RemoteService(Client(service, os.environ.get("DLTTA_TOKEN")))
    from dltta.serving.shard import Shard, ShardSettings

    source = own.source(model or "", patch=split_size(adapting.patch))
    opened = source.open()
    if opened.task != "segmentation":
        raise SettingError(f"{model} gives a {opened.task}; a node sends segmentations")
    stream = StreamSettings(adapting.recipe(), adapting.deployment, OnError.STOP)
    threads = os.cpu_count() or 1
    shard = Shard(
        ShardSettings(output.resolve(), {"model": source}, stream, threads=threads, device=require_device(device))
    )
    return OwnShard(shard, "model")


def _log_to_stderr() -> None:
    import logging
    import sys

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("dltta.node")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
