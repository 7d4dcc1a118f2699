"""What the README shows runs as it stands."""

import importlib.util
import json
import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def load(name):
    """A script of docs/figures."""
    spec = importlib.util.spec_from_file_location(f"figures_{name}", README.parent / "docs" / "figures" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_quickstart_runs_and_says_what_it_promises(capsys):
    code = re.search(r"## Quickstart.*?```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)
    scope = {}
    exec(code, scope)
    assert scope["step"].logits.shape == (1, 2, 64, 64)
    assert scope["step"].rate == 1e-3 * scope["step"].discrepancy
    assert re.fullmatch(r"discrepancy [\d.e-]+ → learning rate [\d.e-]+\n", capsys.readouterr().out)


def test_quoted_numbers_are_those_that_the_results_give():
    script = load("numbers_of_pages")
    found = script.passages()
    quoted = {name for page in script.PAGES for name, _ in script.BLOCK.findall(page.read_text())}
    assert quoted == set(found)
    assert [page.name for page in script.PAGES if script.filled(page.read_text(), found) != page.read_text()] == []


def test_the_better_of_source_model_and_ptbn_is_what_the_default_is_compared_with():
    scores = [{"source": 0.8, "ptbn": 0.6, "recommended": 0.75}, {"source": 0.2, "ptbn": 0.6, "recommended": 0.65}]
    rows = [{"task": "cells", "seeds": seeds, "scores": each} for seeds, each in enumerate(scores, start=2)]
    said = load("numbers_of_pages").recommended(rows)
    assert "(small models, 2 to 3 seeds)" in said
    assert "20.0 points above the source model (worst site: 5.0 points below)" in said
    assert "0.0 points above the better of source model and PTBN (worst site: 5.0 points below)" in said
    assert "at 1 of 2 sites" in said


def test_links_lead_somewhere():
    """Those of the documentation: tests/test_docs.py."""
    for page in (README, README.with_name("ARCHITECTURE.md"), README.with_name("CONTRIBUTING.md")):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert link.startswith("https:") or (page.parent / link).exists(), f"{page.name} links to {link}"


def test_page_on_the_recommended_recipe_is_the_one_that_its_numbers_give():
    docs, script = README.parent / "docs", load("recommended")
    rows = json.loads((docs / "results" / "recommended.json").read_text())
    assert script.page(rows, script.kept_ranking()) == (docs / "recommended.md").read_text()


def test_page_on_real_images_is_the_one_that_its_results_give():
    docs, script = README.parent / "docs", load("real")
    assert script.page(json.loads((docs / "results" / "real.json").read_text()), docs) == (docs / "real.md").read_text()


def test_the_safety_page_names_tests_that_are_there():
    page, tests = (README.parent / "docs" / "safety.md").read_text(), README.parent / "tests"
    known = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    names, files = re.findall(r"`(test_\w+|Test\w+)`", page), re.findall(r"`tests/([\w/]+\.py)`", page)
    assert len(names) > 15
    assert len(files) > 10
    assert [name for name in names if not re.search(rf"(def|class) {name}\b", known)] == []
    assert [name for name in files if not (tests / name).is_file()] == []
