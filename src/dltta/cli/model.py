"""`dltta model`: what a model says of itself."""

from pathlib import Path
from typing import Annotated

import typer

from dltta.cli.options import MODEL_HELP, OwnModel, add_command

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="What a model says of itself.",
    epilog="Examples:\n\n```text\ndltta model card models/a\n```",
)


def card(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    own: OwnModel,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write it there.", show_default="printed"),
    ] = None,
) -> None:
    """Describe a model: training data, in-domain score, rehearsal, intended use, limits; Markdown for Hugging Face.

    Every number is read from the model's own files; what they do not say is said to be unknown.

    Examples:
        dltta model card models/a
        dltta model card bundles/spleen -o README.md
    """
    from dltta.evaluation.card import model_card
    from dltta.files import write_atomically

    text = model_card(own.source(model).open(predicting=False))
    if output is None:
        typer.echo(text)
    else:
        write_atomically(output, text)


add_command(app, card)
