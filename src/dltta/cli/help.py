"""`dltta help`: short texts on topics, one file each in `topics`, as man pages."""

from collections.abc import Mapping
from importlib.resources import files
from typing import Annotated, Any

import typer

from dltta.errors import require


def topics() -> dict[str, str]:
    """The text of every topic, by name."""
    folder = files("dltta.cli").joinpath("topics")
    texts = {file.name.removesuffix(".txt"): file.read_text(encoding="utf-8") for file in folder.iterdir()}
    return dict(sorted(texts.items()))


def help_topic(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Argument(metavar="TOPIC", help="A topic, or a command such as adapt.", show_default="a list of topics"),
    ] = None,
) -> None:
    """Explain a topic in half a page; without one, list the topics.

    Examples:
        dltta help
        dltta help shadow
    """
    known = topics()
    commands: Mapping[str, Any] = getattr(context.find_root().command, "commands", {})
    if topic is None:
        typer.echo("\n".join(f"    {text.splitlines()[0]}" for text in known.values()))
        typer.echo("\n    dltta help TOPIC shows one of them, dltta COMMAND --help explains a command.")
    elif topic in known:
        typer.echo(known[topic].rstrip())
    else:
        require("topic", topic, [*known, *commands])
        typer.echo(f"dltta {topic} is a command; `dltta {topic} --help` explains it and shows examples")
