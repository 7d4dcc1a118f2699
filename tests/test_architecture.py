"""Imports point one way: data flows images → model → objective → memory → rate → update → metrics → report."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import dltta

ROOT = Path(dltta.__file__).parent
GROUND = {"client", "errors", "files", "machine", "methods", "metrics", "recipes", "version"}  # import only each other
DOORS = {"__init__", "__main__", "objectives"}  # nothing but names of other modules
RANKS = [
    {"data"},
    {"models"},
    {"core"},
    {"fitting", "quality", "training"},
    {"config", "predictor"},
    {"evaluation", "serving"},
    {"cli", "testing"},
]
RANK = {name: rank for rank, names in enumerate(RANKS) for name in names} | dict.fromkeys(GROUND, -1)
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem not in DOORS)


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path):
    """Modules of ours that a module names, also within functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dltta."):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dltta."))


def module_name(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_there_are_at_most_seven_ranks_and_every_room_has_one():
    assert len(RANKS) <= 7
    assert {room(path) for path in MODULES} <= RANK.keys()


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_imports_point_one_way(path):
    here = room(path)
    others = {name.split(".")[1] for name in imports(path)} - {here}
    wrong = {other for other in others if other in RANK and RANK[other] >= RANK[here] and RANK[other] >= 0}
    if RANK[here] < 0:
        wrong = others - GROUND
    assert not wrong, f"{path.name} imports {sorted(wrong)}, which come after it in the flow"


def test_modules_of_one_room_do_not_import_in_circles():
    names = {module_name(path): path for path in MODULES}
    graph = {name: {other for other in imports(path) if other in names} - {name} for name, path in names.items()}
    packages = {name for name, path in names.items() if path.name == "__init__.py"}
    modules = {name: others - packages for name, others in graph.items() if name not in packages}
    try:
        TopologicalSorter(modules).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' → '.join(error.args[1])}")


@pytest.mark.parametrize("number", range(2, 7))
def test_each_equation_is_defined_in_one_place(number):
    """The definition carries its number after a dash; `adapter.py` refers to them in the margin."""
    sources = {path: path.read_text() for path in ROOT.rglob("*.py")}
    defining = [path.name for path, text in sources.items() if f"— Eq. ({number})" in text]
    assert len(defining) == (0 if number == 2 else 1), defining
