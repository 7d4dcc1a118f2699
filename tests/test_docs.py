"""The documentation as a reader uses it: links lead somewhere, code compiles, what is marked runs."""

import importlib.util
import re
import unicodedata
from dataclasses import fields
from pathlib import Path

import pytest

import dltta.objectives
from dltta.evaluation.run import CaseRecord
from walking import COMMANDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.parent.name != "figures")
GENERATED = DOCS / "reference" / "commands.md"  # made when the site is built
BLOCK = re.compile(r"^```python( run| no-run)?\n(.*?)^```", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def name(page):
    return page.relative_to(DOCS).as_posix()


def blocks(page, *marks):
    return [code for mark, code in BLOCK.findall(page.read_text()) if mark.strip() in marks]


def anchors(page):
    """What headings are called in an address; the second of a name gets a number, as forges do."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        text = unicodedata.normalize("NFKD", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading))
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text.encode("ascii", "ignore").decode()).strip().lower())
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def load(path):
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_and_anchors_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", page.read_text())):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists() or target == GENERATED, f"{name(page)} links to {link}"
        if anchor and target.suffix == ".md" and target != GENERATED:
            assert anchor in anchors(target), f"{name(page)} links to {link}"


def test_every_page_has_its_place_in_the_site():
    listed = re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1], re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == {*map(name, PAGES), name(GENERATED)}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_code_compiles(page):
    for code in blocks(page, "", "run", "no-run"):
        compile(code, name(page), "exec")


RUNNABLE = [page for page in PAGES if blocks(page, "run")]


@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_code_that_is_marked_runs(page):
    """The blocks of a page share their names, as a reader would type them."""
    scope = {"__name__": "docs"}
    for code in blocks(page, "run"):
        exec(code, scope)


def test_there_is_code_that_runs():
    assert {"write-objective.md", "write-rate.md"} <= set(map(name, RUNNABLE))


def test_the_way_to_read_a_log_finds_every_alteration(tmp_path):
    from dltta.serving.journal import Journal

    journal = Journal(tmp_path / "stream.jsonl", tmp_path / "head")
    for case in ("a", "b", "c"):
        journal.append([{"case": case, "rate": 1e-3}])
    scope = {}
    for code in blocks(DOCS / "reference" / "files.md", "run"):
        exec(code, scope)
    lines = (tmp_path / "stream.jsonl").read_text().splitlines()
    unbroken = scope["unbroken"]
    assert unbroken(lines)
    assert not unbroken([lines[0], lines[2]])
    assert not unbroken([lines[1], lines[0], lines[2]])
    assert not unbroken([lines[0], lines[1].replace('"b"', '"d"'), lines[2]])


def test_page_on_python_has_every_public_name():
    shown = re.findall(r"^::: \S+\.(\w+)$", (DOCS / "reference" / "python.md").read_text(), re.MULTILINE)
    public = {*dltta.__all__, *dltta.objectives.__all__} - {"__version__", "DlttaError"}  # all errors are one entry
    assert public <= set(shown)


def test_page_on_files_has_every_key_of_a_case():
    page = (DOCS / "reference" / "files.md").read_text()
    assert [each.name for each in fields(CaseRecord) if f"`{each.name}`" not in page] == []


def test_page_of_commands_has_every_command_and_option():
    text = load(DOCS / "site" / "commands.py").render()
    sections = dict(re.findall(r"^## dltta (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert list(sections) == [" ".join(path) for path in COMMANDS]
    for path, command in COMMANDS.items():
        section = sections[" ".join(path)]
        for parameter in command.params:
            shown = parameter.metavar if parameter.param_type_name == "argument" else parameter.opts[-1]
            assert f"`{shown}`" in section, (path, shown)


def test_a_default_of_zero_is_shown():
    demo = load(DOCS / "site" / "commands.py").render().split("## dltta demo\n")[1].split("\n## ")[0]
    assert re.search(r"\| `--seed` N \| [^|]+ \| 0 \|", demo)


def test_pages_load_nothing_from_the_network():
    for page in PAGES:
        assert not re.search(r"!\[[^\]]*\]\(https?:|<(script|img|link|iframe)\b", FENCED.sub("", page.read_text())), (
            page
        )
    assert "font: false" in (ROOT / "mkdocs.yml").read_text()
