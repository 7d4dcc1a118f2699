"""The notebooks run as they stand, in an empty folder, without Jupyter."""

import json
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

from dltta.quality.decision import Outcome

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"


def cells(name):
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]


def run(name, folder, monkeypatch):
    """All names that the code cells leave."""
    monkeypatch.chdir(folder)
    mpl.use("agg")
    scope = {"__name__": "__main__"}
    try:
        for cell in cells(name):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"{name} {cell['id']}", "exec"), scope)
    finally:
        plt.close("all")
    return scope


def test_notebooks_hold_no_output_and_their_code_compiles():
    names = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
    assert names == ["new_objective", "own_model", "reading_a_stream"]
    for name in names:
        for cell in cells(name):
            if cell["cell_type"] == "code":
                assert cell["outputs"] == []
                assert cell["execution_count"] is None
                compile("".join(cell["source"]), name, "exec")


@pytest.mark.long
def test_own_model(tmp_path, monkeypatch, capsys):
    scope = run("own_model", tmp_path, monkeypatch)
    assert scope["dice"]["PTBN"] > scope["dice"]["Source"] + 5  # what the notebook says where the gain comes from
    assert "so the rate was" in capsys.readouterr().out
    assert (tmp_path / "mine.pt").is_file()


@pytest.mark.long
def test_reading_a_stream(tmp_path, monkeypatch):
    scope = run("reading_a_stream", tmp_path, monkeypatch)
    assert len(scope["cases"]) == 10
    assert {line["decision"] for line in scope["cases"]} <= set(map(str, Outcome))
    assert scope["found"]["before"] == scope["found"]["after"] == []
    assert len(scope["found"]["altered"]) == 1
    assert scope["newest"] > max(scope["versions"])


def test_new_objective(tmp_path, monkeypatch):
    scope = run("new_objective", tmp_path, monkeypatch)
    assert "PerImage" in scope["caught"]
    assert scope["margins"]["Margin"] > scope["margins"]["PTBN"]
    assert scope["rates"][0] == 0.0
    assert scope["rates"][-1] > 0
