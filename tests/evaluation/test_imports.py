"""The room opens without what only some of its modules need."""

import subprocess
import sys


def test_the_package_imports_nothing_heavy():
    code = "import sys, dltta.evaluation; print({'torch', 'monai', 'matplotlib'} & sys.modules.keys())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "set()"
