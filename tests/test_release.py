"""What a release says about itself agrees: versions, licences, bounds, what is in the wheel."""

import re
import tomllib
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

from dltta.version import __version__

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def split(requirement):
    """Name without extras, and the lowest version."""
    name, lowest = re.match(r"([\w-]+)(?:\[.*\])?>=([\d.]+)", requirement).groups()
    return name, tuple(map(int, lowest.split(".")))


def pins(file):
    lines = [line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


def test_version_is_the_same_everywhere():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == __version__
    assert f"dltta-{__version__}-py3-none-any.whl" in (ROOT / "docs" / "install.md").read_text()


@pytest.mark.parametrize("group", ["base", *EXTRAS])
def test_every_dependency_is_pinned_for_the_tests(group):
    for requirement in PROJECT["dependencies"] if group == "base" else EXTRAS[group]:
        name, lowest = split(requirement)
        pinned = pins("constraints.txt")[name]
        assert tuple(int(part) for part in re.findall(r"\d+", pinned)) >= lowest


def test_lowest_versions_are_those_that_the_metadata_allows():
    lowest = pins("constraints-lowest.txt")
    bounds = dict(map(split, PROJECT["dependencies"]))
    assert set(lowest) == set(bounds)
    for name, bound in bounds.items():
        assert tuple(int(part) for part in lowest[name].split("."))[: len(bound)] == bound, name


NOTICES = dict(re.findall(r"^\| ([\w-]+) \| (.+?) \|", (ROOT / "THIRD_PARTY.md").read_text(), re.MULTILINE))


def test_every_dependency_has_its_notice():
    shipped = [*PROJECT["dependencies"], *(each for name in EXTRAS for each in EXTRAS[name])]
    assert {split(each)[0] for each in shipped} <= set(NOTICES)


def test_licences_are_those_that_the_packages_state():
    """Of the pinned versions that are installed here and have an SPDX expression in their metadata."""
    stated, pinned = {}, pins("constraints.txt")
    for name in NOTICES.keys() & pinned.keys():
        with suppress(metadata.PackageNotFoundError):
            found = metadata.metadata(name)
            if found["Version"].partition("+")[0] == pinned[name] and "License-Expression" in found:
                stated[name] = found["License-Expression"]
    assert {name: NOTICES[name] for name in stated} == stated


def test_extras_are_documented():
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert set(listed) == set(EXTRAS)


def test_pythons_are_those_of_the_metadata():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert named == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == ">=3.11,<3.14"


def test_files_beside_the_code_are_packed():
    """Whatever is read at run time must be in the wheel: each kind of file has its pattern."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["dltta"]
    package = ROOT / "src" / "dltta"
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    beside = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert beside
    assert beside <= packed
