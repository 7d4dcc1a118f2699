"""Scripts that make the pages' figures and tables are run once in a while; what they import must not go meanwhile."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((*ROOT.glob("docs/figures/*.py"), *ROOT.glob("benchmarks/*.py")))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_takes_from_the_package_is_there(script):
    for node in ast.walk(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dltta"):
            module = importlib.import_module(node.module)
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")
