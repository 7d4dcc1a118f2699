"""A model from somebody's own code that does not work: one line with the cause, the traceback on demand."""

import pytest

from streams import typed

RAISES = {
    "raises": (
        "def build():\n    made = {}\n    return made['best']\n",
        "raised KeyError: 'best' (own.py, line 3)",
    ),
    "does_not_import": (
        "import torch\n\nimport no_such_package\n",
        "'no_such_package' (own.py, line 3); correct",
    ),
    "is_not_python": ("def build(:\n", "raised SyntaxError: invalid syntax (own.py, line 1); correct"),
    "says_nothing": ("def build():\n    raise RuntimeError\n", "raised RuntimeError (own.py, line 2)"),
    "breaks_lines": ("def build():\n    raise ValueError('two\\nlines')\n", "raised ValueError: two lines (own.py"),
}


@pytest.fixture
def dltta(monkeypatch, capsys):
    return lambda *arguments: typed(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("how", ["file", "package"])
@pytest.mark.parametrize("kind", RAISES)
def test_an_error_in_own_code_is_one_line_with_its_cause(dltta, tmp_path, monkeypatch, kind, how):
    source, words = RAISES[kind]
    monkeypatch.chdir(tmp_path)
    name = "own.py" if how == "file" else f"own_{kind}.py"
    (tmp_path / name).write_text(source)
    spec = f"{name}:build" if how == "file" else f"own_{kind}:build"
    code, _, err = dltta("inspect", spec)
    assert (code, err.count("\n")) == (2, 1)
    assert words.replace("own.py", name) in err
    assert "dltta --debug shows the traceback" in err


def test_debug_shows_the_traceback_and_then_the_line(dltta, tmp_path):
    (tmp_path / "own.py").write_text(RAISES["raises"][0])
    code, _, err = dltta("--debug", "inspect", f"{tmp_path / 'own.py'}:build")
    assert code == 2
    assert "Traceback" in err
    assert "return made['best']" in err
    assert err.splitlines()[-1].startswith("error: ")


def test_markup_in_names_is_printed_not_interpreted_and_tables_fit_80_columns(dltta, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert "[red]x[/red] is not a model" in dltta("inspect", "[red]x[/red]")[2]
    (tmp_path / "own.py").write_text(
        "from torch import nn\n\n\ndef build():\n    net = nn.Sequential(nn.Conv2d(1, 2, 1))\n"
        "    net.add_module('[red]y[/red]', nn.BatchNorm2d(2))\n    return net\n"
    )
    code, out, err = dltta("inspect", f"{tmp_path / 'own.py'}:build", "--classes", "[red]a[/red],b")
    assert code == 0, err
    assert "[red]y[/red]" in out
    assert "[red]a[/red]" in out
    assert max(map(len, out.splitlines())) <= 80
