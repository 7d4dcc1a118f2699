"""Every command of `dltta`, found by walking the app: new ones are tested without anybody thinking of it."""

import typer

from dltta.cli.app import app


def walk(command=None, path=()):
    """Every group and command: its words on the command line, and what typer makes of it."""
    command = command or typer.main.get_command(app)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from walk(child, (*path, name))


ALL = dict(walk())
COMMANDS = {path: command for path, command in ALL.items() if not hasattr(command, "commands")}
