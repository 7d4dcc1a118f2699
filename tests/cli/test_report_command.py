"""`dltta report` and the tables that commands print."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from dltta.evaluation.formats import rich_table
from dltta.evaluation.results import Results
from dltta.evaluation.tables import by_target
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


def test_the_table_fits_80_columns_and_prints_names_as_they_are(results):
    console = Console(file=io.StringIO(), width=80)
    table = by_target(Results.load(results))
    rows = tuple(replace(row, worst=("[red]x[/red]", 0.5)) for row in table.rows)
    console.print(rich_table(replace(table, title="of [red]y[/red]", notes=("from [red]z[/red]",), rows=rows)))
    shown = console.file.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert "of [red]y[/red]" in shown
    assert "from [red]z[/red]" in shown
    words = " ".join(shown.replace("│", " ").replace("┃", " ").split())
    assert "([red]x[/red])" in words  # the worst site
