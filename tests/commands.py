"""The command line as somebody types it, without a new process."""

import sys


def typed(monkeypatch, capsys, *arguments):
    """Exit code, standard output and standard error of `dltta …`."""
    from dltta import cli

    monkeypatch.setattr(sys, "argv", ["dltta", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code or 0
    printed = capsys.readouterr()
    return code, printed.out, printed.err
