"""The command line: reads arguments, runs a command, prints one line for every mistake."""

import sys
import traceback
from dataclasses import dataclass
from typing import Annotated, NoReturn

import typer

from dltta.cli import data, model, state
from dltta.cli.adapt import adapt
from dltta.cli.bench import bench
from dltta.cli.calibrate import calibrate
from dltta.cli.demo import demo
from dltta.cli.evaluate import evaluate
from dltta.cli.help import help_topic
from dltta.cli.inspect import inspect
from dltta.cli.node import node
from dltta.cli.options import FLAG, add_command, one_line
from dltta.cli.report import report
from dltta.cli.reproduce import reproduce
from dltta.cli.serve import serve, token
from dltta.cli.train import train
from dltta.errors import DlttaError
from dltta.models.allocator import keep_freed_memory
from dltta.version import __version__

INTERRUPTED = 130  # what typer makes of Ctrl-C
FAILED = 2

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Test-time adaptation for medical images: a model trained at one hospital adapts to the images of another, "
    "without labels, and chooses for each image how much.",
    epilog="`dltta COMMAND --help` explains a command and shows examples, `dltta help` has texts on topics. Try "
    "`dltta demo` first.",
)
for command in (
    demo, train, calibrate, inspect, adapt, evaluate, bench, reproduce, report, serve, token, node,
):  # fmt: skip
    add_command(app, command)
add_command(app, help_topic, "help")
app.add_typer(state.app, name="state")
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="model")


@dataclass
class Run:
    """What was said before the command's name."""

    debug: bool = False


@app.callback(invoke_without_command=True)
def _before(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", metavar=FLAG, help="Print the version and exit.")] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", metavar=FLAG, help="Show where an error came from (the Python traceback)."),
    ] = False,
) -> None:
    context.obj.debug = debug
    if version:
        typer.echo(__version__)
        raise typer.Exit


def main() -> None:
    """The entry point: a mistake is one line and exit code 2; anything that is not one keeps its traceback."""
    keep_freed_memory()
    run = Run()
    try:
        code = app(standalone_mode=False, obj=run)
    except DlttaError as error:
        if run.debug:
            traceback.print_exc()
        _fail(one_line(error))
    except typer.TyperException as error:
        if message := error.format_message().replace("Value error, ", ""):
            _fail(f"{message}{' ' if message[-1] in '.?' else '. '}Try --help.")
        sys.exit(FAILED)  # nothing was asked, and help has been shown
    if code == INTERRUPTED:
        typer.echo("interrupted; the same command continues where it stopped, adapt and train with --resume", err=True)
    sys.exit(code)


def _fail(message: str) -> NoReturn:
    typer.secho("error: ", fg="red", nl=False, err=True)
    typer.echo(message, err=True)
    sys.exit(FAILED)
