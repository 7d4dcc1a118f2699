"""Lets `python -m dltta` and `torchrun -m dltta` be the `dltta` command."""

from dltta.cli import main

main()
