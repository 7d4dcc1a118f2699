"""What the README shows runs as it stands."""

import importlib.util
import json
import re
from pathlib import Path

from dltta.evaluation.formats import markdown
from dltta.evaluation.results import Results
from dltta.evaluation.tables import by_target

README = Path(__file__).parent.parent / "README.md"


def test_quickstart_runs_and_says_what_it_promises(capsys):
    code = re.search(r"## Quickstart.*?```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    scope = {}
    exec(code, scope)
    assert scope["step"].logits.shape == (1, 2, 64, 64)
    assert scope["step"].rate == 1e-3 * scope["step"].discrepancy
    assert re.fullmatch(r"discrepancy [\d.e-]+ → learning rate [\d.e-]+\n", capsys.readouterr().out)


def test_table_is_the_one_that_the_results_give():
    results = Results.load(README.parent / "docs" / "results" / "demo_oct.json")
    shown = README.read_text().split("<!-- demo table -->")[1].split("<!-- end of demo table -->")[0]
    assert shown.strip() == markdown(by_target(results)).strip()


def test_links_lead_somewhere():
    """Those of the documentation: tests/test_docs.py."""
    for page in (README, README.with_name("ARCHITECTURE.md"), README.with_name("CONTRIBUTING.md")):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("https:") or (page.parent / link).exists(), f"{page.name} links to {link}"


def test_page_on_the_recommended_recipe_is_the_one_that_its_numbers_give():
    docs = README.parent / "docs"
    spec = importlib.util.spec_from_file_location("recommended_page", docs / "figures" / "recommended.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    rows = json.loads((docs / "results" / "recommended.json").read_text())
    assert script.page(rows) == (docs / "recommended.md").read_text()


def test_page_on_real_images_is_the_one_that_its_results_give():
    docs = README.parent / "docs"
    spec = importlib.util.spec_from_file_location("real", docs / "figures" / "real.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page(json.loads((docs / "results" / "real.json").read_text())) == (docs / "real.md").read_text()


def test_the_safety_page_names_tests_that_are_there():
    page, tests = (README.parent / "docs" / "safety.md").read_text(), README.parent / "tests"
    known = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    names, files = re.findall(r"`(test_\w+|Test\w+)`", page), re.findall(r"`tests/([\w/]+\.py)`", page)
    assert len(names) > 15
    assert len(files) > 10
    assert [name for name in names if not re.search(rf"(def|class) {name}\b", known)] == []
    assert [name for name in files if not (tests / name).is_file()] == []
