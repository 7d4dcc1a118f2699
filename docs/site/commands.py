"""The reference of the command line, as a page in Markdown: every command with its options, from the commands."""

from collections.abc import Iterator
from typing import Any

import typer

from dltta.cli.app import app

PAGE = "reference/commands.md"
HEAD = """# Commands

Made from the commands themselves; `dltta COMMAND --help` says the same in a terminal, `dltta help TOPIC` explains a
topic.
Errors are one line and exit code 2. `--json` is for programs.
"""


def render() -> str:
    """The page."""
    command = typer.main.get_command(app)
    return "\n".join([HEAD, *(_section(path, each) for path, each in walk(command) if not hasattr(each, "commands"))])


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every group and command with its words on the command line."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


def _section(path: tuple[str, ...], command: Any) -> str:
    words = " ".join(["dltta", *path])
    examples = (command.epilog or "").partition("Examples:")[2].strip()
    rows = "\n".join(map(_row, command.params))
    table = f"| option | what it does | default |\n|---|---|---|\n{rows}\n" if command.params else ""
    return f"## {words}\n\n{(command.help or '').strip()}\n\n{examples}\n\n{table}"


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    elif parameter.metavar:
        names = f"{names} {parameter.metavar}"
    return f"| {names} | {_cell(parameter.help or '')} | {_cell(_default(parameter))} |"


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    value = parameter.default
    if value is None or value is False or value == "":
        return ""
    return str(getattr(value, "value", value))


def _cell(text: str) -> str:
    """Text that stays in its cell: no line breaks, no bars, no angle brackets taken for tags."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")
