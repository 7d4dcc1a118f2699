"""A model from somebody's own code that does not work: one line with the cause, the traceback on demand."""

import pytest

from streams import typed

RAISES = {
    "raises": (
        "def build():\n    made = {}\n    return made['best']\n",
        "raised KeyError: 'best' (own.py, line 3)",
    ),
    "does_not_import": ("import torch\n\nimport no_such_package\n", "raised ModuleNotFoundError: No module named"),
    "is_not_python": ("def build(:\n", "raised SyntaxError: invalid syntax"),
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


def test_markup_in_a_name_is_printed_not_interpreted(dltta):
    assert "[red]x[/red] is not a model" in dltta("inspect", "[red]x[/red]")[2]
