"""What is imported before a command runs: nothing that takes seconds."""

import json
import os
import subprocess
import sys

import pytest

from walking import ALL

HEAVY = {"torch", "monai", "numpy", "scipy", "matplotlib", "nibabel", "PIL", "tifffile", "pydicom"}
SHOW = """
import json, sys
try:
    {statement}
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def imported(statement, *arguments, **environment):
    """Top-level modules that a new process has imported after a statement."""
    script = [sys.executable, "-c", SHOW.format(statement=statement), *arguments]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments", [*((*path, "--help") for path in ALL), ("--version",), ("data", "card", "oct")], ids=" ".join
)
def test_help_and_version_import_nothing_heavy(arguments):
    found = imported("from dltta.cli import main; main()", *arguments)
    assert "dltta" in found
    assert not found & HEAVY


def test_a_misspelled_name_is_told_before_anything_heavy_is_imported():
    """Not after five seconds."""
    wrong = ("adapt", "-m", "models/a", "-i", "in", "-o", "out", "--method", "tents")
    statement = "import pytest; from dltta.cli import main; pytest.raises(SystemExit, main)"
    assert not imported(statement, *wrong) & HEAVY


def test_shell_completion_knows_commands_options_and_choices_and_stays_light():
    words = {"_DLTTA_COMPLETE": "complete_bash", "COMP_WORDS": "dltta adapt --mode f", "COMP_CWORD": "3"}
    script = [sys.executable, "-c", "import sys; sys.argv[0] = 'dltta'; from dltta.cli import main; main()"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env={**os.environ, **words})
    assert done.stdout.split() == ["frozen"]


def test_the_package_imports_nothing_heavy():
    assert not imported("import dltta") & HEAVY


def test_the_adapter_needs_torch_and_nothing_else_that_is_heavy():
    found = imported("import dltta; dltta.Adapter")
    assert "torch" in found
    assert not found & {"monai", "nibabel", "matplotlib", "PIL"}
