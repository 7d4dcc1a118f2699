"""Imports point one way: data flows images → model → objective → memory → rate → update → metrics → report."""

import ast
from pathlib import Path

import pytest

import dltta

ROOT = Path(dltta.__file__).parent
RANK = [
    {"version", "errors", "files", "allocator"},
    {"data"},
    {"predictions", "discrepancy", "neighbors"},
    {"models"},
    {"objectives"},
    {"memory", "rates", "guard"},
    {"adapter"},
    {"windows", "journal", "naming"},
    {"state", "answering", "record"},
    {"evaluation", "testing"},
    {"training"},
    {"uda"},
    {"config"},
    {"experiment", "overview", "stream"},
    {"maintenance"},
    {"demo", "progress"},
    {"reproduce"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(RANK) for name in names}


def part(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dltta."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dltta."))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    if path == ROOT / "__init__.py":
        return
    here = LEVEL[part(path)]
    wrong = {name for name in imported(path) if name != part(path) and LEVEL[name] >= here}
    assert not wrong, f"{path.name} imports {sorted(wrong)}, which come after it in the flow"


@pytest.mark.parametrize("number", range(2, 7))
def test_each_equation_is_defined_in_one_place(number):
    """The definition carries its number after a dash; `adapter.py` refers to them in the margin."""
    sources = {path: path.read_text() for path in ROOT.rglob("*.py")}
    defining = [path.name for path, text in sources.items() if f"— Eq. ({number})" in text]
    assert len(defining) == (0 if number == 2 else 1), defining
