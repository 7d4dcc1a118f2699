"""`dltta inspect`: what can be done with a model."""

import json
from typing import Annotated

import typer

from dltta.cli.options import MODEL_HELP, Json, OwnModel, split_size


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    own: OwnModel,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Try the model with an image of this size, such as 128x128.", show_default="as trained"
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a model's layers, what each method would adapt in it, and which methods do not work and why.

    Every method takes one step on an image of noise. Nothing is written.

    Examples:
        dltta inspect models/a
        dltta inspect bundles/spleen.zip --classes background,spleen
        dltta inspect my_code.networks:build --weights best.pt --size 256x256
    """
    from rich.console import Console

    from dltta.cli.progress import bars
    from dltta.evaluation.overview import overview

    chosen = split_size(size)
    opened = own.source(model, size=chosen).open(predicting=False)
    with bars() as listener:
        seen = overview(opened, chosen, progress=listener.count("try methods"))
    if as_json:
        typer.echo(json.dumps(seen.as_json()))
    else:
        Console().print(seen.tables(), highlight=False)
