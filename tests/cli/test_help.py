"""Help as somebody reads it who has never seen the project."""

import re
from enum import Enum

import pytest

from dltta.cli import options
from streams import typed
from walking import ALL, COMMANDS


@pytest.fixture
def shown(monkeypatch, capsys):
    """The help of a command on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    return lambda path: typed(monkeypatch, capsys, *path, "--help")[1]


def words(text):
    """Without frames and line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())


@pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "dltta")
def test_help_fits_80_columns_and_nothing_is_cut(shown, path):
    text = shown(path)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text.replace("dltta train …", "")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_ends_with_examples_that_can_be_typed(shown, path):
    options_part, examples = shown(path).split("Examples:")
    lines = [line.strip() for line in examples.splitlines() if line.strip()]
    assert lines
    assert all(line.startswith(f"dltta {' '.join(path)} ") or line == f"dltta {' '.join(path)}" for line in lines)
    assert "Options" in options_part
    known = {name for parameter in COMMANDS[path].params for name in parameter.opts}
    for line in lines:
        assert {part for part in line.split() if part.startswith("-")} <= known


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_says_what_it_does_and_its_default(shown, path):
    for parameter in COMMANDS[path].params:
        assert len(parameter.help or "") > 10, parameter.name
        flag = getattr(parameter, "is_flag", False)
        if not (parameter.required or flag or parameter.param_type_name == "argument"):
            given = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
            assert given not in (None, ""), parameter.name


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_choice_is_named_in_the_help_of_its_option(path):
    for parameter in COMMANDS[path].params:
        kind = parameter.type_descriptor.annotation
        if isinstance(kind, type) and issubclass(kind, Enum):
            assert all(choice.value in parameter.help for choice in kind), parameter.name


def test_the_options_about_a_model_of_ones_own_are_the_same_everywhere(shown):
    panels = {path: shown(path).split(options.OwnModel.panel) for path in COMMANDS}
    found = {path: parts[1].split("╰")[0] for path, parts in panels.items() if len(parts) == 2}
    known = {("adapt",), ("bench",), ("calibrate",), ("inspect",), ("model", "card"), ("node",), ("serve",)}
    assert set(found) == {*known, ("state", "export")}
    assert "--calibration" not in found.pop(("calibrate",))  # which writes what the others read
    assert len(set(found.values())) == 1
    assert all("--calibration" in panel for panel in found.values())


def test_choices_are_those_that_the_library_knows():
    from typing import get_args

    from dltta import recipes
    from dltta.data.case import Task
    from dltta.data.check import PUBLISHED
    from dltta.data.inbox import Order
    from dltta.data.phantom import SITES
    from dltta.evaluation.demo import TASKS
    from dltta.models.nets.architecture import BUILDERS
    from dltta.serving.settings import Deployment
    from dltta.training.augmentation import Kind
    from dltta.training.schedules import Schedule
    from dltta.training.settings import TrainingSettings

    assert tuple(options.Task) == get_args(Task)
    assert set(options.StreamMode) == {*recipes.Mode, *Deployment} - {Deployment.LIVE}
    assert tuple(options.Order) == get_args(Order)
    assert (*TASKS, "all") == tuple(options.DemoTask)
    assert tuple(SITES) == tuple(options.PhantomTask)
    assert tuple(PUBLISHED) == tuple(options.PublishedData)
    assert ("own", *PUBLISHED) == tuple(options.DataKind)
    assert set(options.Network) < set(BUILDERS)
    for loss in options.Loss:
        assert TrainingSettings(loss=loss.value).loss == loss
    assert tuple(options.Augmenting) == get_args(Kind)
    assert tuple(options.Schedule) == get_args(Schedule)


def test_reproduce_names_every_table_and_figure(shown):
    from dltta.evaluation.paper.reproduce import ALIASES, REPRODUCTIONS

    text = words(shown(("reproduce",)))
    assert all(re.search(rf"\b{name}\b", text) for name in (*REPRODUCTIONS, *ALIASES, "all"))


@pytest.mark.parametrize("riddle", ["Write these too", "as it gives", "quiet seconds", "answer", "get leave"])
def test_no_riddles(shown, riddle):
    assert not [path for path in ALL if riddle in words(shown(path))]
