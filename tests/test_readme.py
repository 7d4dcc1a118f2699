"""What the README shows runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_quickstart_runs_and_says_what_it_promises(capsys):
    code = re.search(r"## Quickstart.*?```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    scope = {}
    exec(code, scope)
    assert scope["step"].logits.shape == (1, 2, 64, 64)
    assert scope["step"].rate == 1e-3 * scope["step"].discrepancy
    assert re.fullmatch(r"discrepancy [\d.e-]+ → learning rate [\d.e-]+\n", capsys.readouterr().out)
