"""`dltta serve`: one adapting model per site, for many sites, over the network. `dltta token`: who may use it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from dltta.cli.adapt import Adapting
from dltta.cli.options import FLAG, MODEL_HELP, Device, OwnModel, require_device, split_size
from dltta.errors import SettingError, require
from dltta.serving.settings import OnError, StreamSettings
from dltta.serving.site_rule import USUAL, SiteRule

if TYPE_CHECKING:
    from dltta.models.io.opening import ModelSource
    from dltta.serving.access import Access


@dataclass(frozen=True)
class Listening:
    """Where the service listens, and to whom."""

    panel: ClassVar[str] = "Where it listens, and to whom"
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Interface to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="N", help="Port to listen on; 0 finds a free one.")] = 8000
    tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Who may do what: see dltta token.", show_default="none: needs --insecure"),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", metavar=FLAG, help="Serve anybody who can reach it; only on the loopback interface."
        ),
    ] = False
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate chain (PEM) for HTTPS.", show_default="plain HTTP")
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Private key (PEM) of the certificate.", show_default="none")
    ] = None

    def access(self) -> "Access":
        """Who may do what; nothing is served to strangers by accident."""
        from dltta.serving.access import LOOPBACK, Access

        if self.tokens is not None:
            return Access.from_file(self.tokens)
        if not self.insecure:
            raise SettingError(
                "give --tokens FILE (dltta token makes one), or --insecure to serve anybody on this machine"
            )
        if self.host not in LOOPBACK:
            raise SettingError(f"--insecure serves loopback only, not {self.host}; give --tokens FILE")
        return Access(None)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingError("--tls-cert and --tls-key go together")
        for file in (self.tls_cert, self.tls_key):
            if file is not None and not file.is_file():
                raise SettingError(f"{file}: no such file")


@dataclass(frozen=True)
class Capacity:
    """How much it does at a time."""

    panel: ClassVar[str] = "How much it does at a time"
    shards: Annotated[
        int | None, typer.Option(metavar="N", help="Processes that adapt.", show_default="one for each core")
    ] = None
    live: Annotated[int, typer.Option(metavar="N", help="Sites that each shard keeps in memory.")] = 4
    queue: Annotated[int, typer.Option(metavar="N", help="Requests of one site that may wait; more get 429.")] = 16
    max_sites: Annotated[int, typer.Option(metavar="N", help="Sites that may be begun.")] = 10_000
    max_bytes: Annotated[int, typer.Option(metavar="BYTES", help="Size of the largest image.")] = 256 << 20
    previews: Annotated[
        int, typer.Option(metavar="N", help="Pictures kept per site for the page; each costs a pass. 0 keeps none.")
    ] = 8
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads of each shard.", show_default="cores / shards")
    ] = None
    site: Annotated[
        str,
        typer.Option(metavar="RULE", help="The site of a DICOM image that comes without one, from its header."),
    ] = USUAL
    address: Annotated[
        str | None,
        typer.Option(metavar="RAY", help="Join a running Ray cluster, such as auto.", show_default="start one here"),
    ] = None


def serve(
    model: Annotated[
        list[str],
        typer.Option("-m", "--model", metavar="[NAME=]MODEL", help=f"{MODEL_HELP} Several times for several models."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="STATE", help="Where every site's stream is kept.")],
    listening: Listening,
    capacity: Capacity,
    adapting: Adapting,
    own: OwnModel,
    device: Device = "cpu",
) -> None:
    """Serve adapted predictions over HTTP: every site has its own adapting copy, memory and log.

    Images are posted with a site and a request id; one that is sent again gets the same reply from the log. The same
    address shows a page with all sites. Stop with Ctrl-C or SIGTERM: what is under way is finished first.

    Examples:
        dltta serve -m models/a -o state --insecure
        dltta serve -m models/a -o state --tokens tokens.toml --port 8443
        dltta serve -m oct=models/a -m mri=models/b -o state --insecure
    """
    access = listening.access()
    sources = _models(model, own, split_size(adapting.patch))
    from dltta.serving.running import Serving, run_service  # after the arguments are known to be good

    settings = StreamSettings(adapting.recipe(), adapting.deployment, OnError.STOP)
    run_service(
        Serving(
            output, sources, settings, access, host=listening.host, port=listening.port, tls_cert=listening.tls_cert,
            tls_key=listening.tls_key, shards=capacity.shards, live=capacity.live, queue=capacity.queue,
            max_sites=capacity.max_sites, max_bytes=capacity.max_bytes, previews=capacity.previews,
            threads=capacity.threads, address=capacity.address, device=require_device(device),
            rule=SiteRule(capacity.site),
        ),
        typer.echo,
    )  # fmt: skip


def _models(given: list[str], own: OwnModel, patch: tuple[int, ...] | None) -> "dict[str, ModelSource]":
    """By name: NAME=MODEL, or the last part of the model's path."""
    named = {}
    for spec in given:
        name, equals, path = spec.partition("=")
        if not equals:
            name, path = Path(spec).name, spec
        if not name or name in named:
            raise SettingError(f"two models are called {name!r}; give names: -m NAME=MODEL")
        named[name] = own.source(path, patch=patch)
    return named


def token(
    name: Annotated[str, typer.Option(metavar="TEXT", help="Who will use it; appears in the service's log.")],
    role: Annotated[str, typer.Option(metavar="ROLE", help="read, submit (and read), or admin.")] = "submit",
    site: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Sites it is for; several times for several.", show_default="*"),
    ] = None,
) -> None:
    """Make a token for dltta serve: its table goes to standard output, the token itself is shown once.

    The table holds only a hash. Append it to the file that `dltta serve --tokens` reads.

    Examples:
        dltta token --name scanner-3 --site 'st-mary/*' >> tokens.toml
        dltta token --name night-shift --role admin >> tokens.toml
    """
    from dltta.serving.access import new_token

    require("role", role, ("read", "submit", "admin"))
    secret, table = new_token(name, role, site or ["*"])
    typer.echo(table)
    typer.echo(f"token of {name}: {secret}", err=True)
