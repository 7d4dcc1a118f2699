"""`dltta report` and the tables that commands print."""

import io

import pytest
from rich.console import Console

from dltta.evaluation import by_target, rich_table
from dltta.evaluation.results import Results
from streams import typed


@pytest.fixture
def results(tmp_path, monkeypatch, capsys):
    """Of a comparison whose target has a name that looks like markup."""
    config = tmp_path / "bench.toml"
    config.write_text(
        'source = ["phantom:oct:spectralis:6"]\ntargets = ["phantom:oct:cirrus:2:1"]\nin_domain = "none"\n'
        "examples = 0\nnetwork_options = { width = 2 }\n[training]\nepochs = 1\nbatch_size = 2\n"
    )
    code, _, err = typed(monkeypatch, capsys, "bench", config, "--methods", "source,ptbn", "-o", tmp_path / "run")
    assert code == 0, err
    file = tmp_path / "run" / "results.json"
    file.write_text(file.read_text().replace("cirrus", "[red]x[/red]"))
    return file


def test_names_are_printed_not_interpreted(results, monkeypatch, capsys):
    code, out, err = typed(monkeypatch, capsys, "report", results)
    assert code == 0, err
    assert out.count("[red]x[/red]") >= 2  # the table and a sentence
    assert out.endswith(f"Report: {results.parent / 'report.html'}\n")


def test_the_table_fits_80_columns(results):
    console = Console(file=io.StringIO(), width=80)
    console.print(rich_table(by_target(Results.load(results))))
    assert max(map(len, console.file.getvalue().splitlines())) <= 80
