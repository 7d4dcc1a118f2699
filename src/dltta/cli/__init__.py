"""The `dltta` command."""

from dltta.cli.app import main

__all__ = ["main"]
