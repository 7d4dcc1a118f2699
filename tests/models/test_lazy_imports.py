"""Importing a part of the library does not import all of MONAI, which takes seconds."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "code",
    [
        "import dltta; dltta.Adapter",
        "import dltta.objectives",
        "import dltta.models.nets.architecture, dltta.models.parts.autoencoders",
        "import dltta.models.io.opening",
        "import dltta.config, dltta.training.uda",
    ],
)
def test_monai_is_not_imported_before_a_network_is_built(code):
    check = f"{code}; import sys; print([name for name in ('torch', 'monai') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['torch']"
