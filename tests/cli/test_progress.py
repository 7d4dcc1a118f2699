"""Progress on a terminal and in a log, by a clock that is turned by hand."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.console import Console

from dltta.cli.progress import bars
from streams import lines, run, segmenter, typed, write_images


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def log():
    """A console that is no terminal."""
    return Console(file=io.StringIO(), width=80)


@pytest.fixture
def terminal():
    return Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)


def test_without_a_terminal_there_is_a_line_every_30_seconds_and_one_at_the_end(log, clock):
    with bars(log, clock) as listener:
        tick = listener.count("check")
        for done in range(1, 11):  # 4 s each: lines at 32 s, and at the end
            clock.now += 4
            tick(done, 10)
    assert log.file.getvalue().splitlines() == ["check 8/10 after 0:00:32, 0:00:08 left", "check 10/10 after 0:00:40"]


def test_a_stream_whose_length_nobody_knows_has_no_time_left(log, clock):
    with bars(log, clock) as listener:
        tick = listener.cases(None)
        clock.now += 65
        tick({"rate": 0.00123, "discrepancy": 0.5, "decision": "kept"})
    assert log.file.getvalue().splitlines() == ["adapt 1 after 0:01:05 rate 0.0012 discrepancy 0.5 kept"]


def test_a_stream_tells_what_its_log_says_of_the_latest_case(log, clock, tmp_path):
    """An absurd rate: the guard does not accept the update."""
    images = write_images(tmp_path / "in", 1)
    with bars(log, clock) as listener:
        run(segmenter(), images, tmp_path / "out", tick=listener.cases(1), alpha=1e3)
    (line,) = [line for line in lines(tmp_path / "out") if "case" in line]
    assert line["decision"] != "accepted"
    assert log.file.getvalue() == f"adapt 1/1 after 0:00:00 rate {line['rate']:.2g} {line['decision']}\n"


def test_what_was_done_before_does_not_shorten_the_time_left(log, clock):
    """A resumed training begins at 500 of 600 steps; 10 s a step."""
    with bars(log, clock) as listener:
        report = listener.training(2)
        plan = SimpleNamespace(stage="task", epochs=6)
        for batch in range(1, 6):
            report(plan, 6, batch, 100, 0.25)
            clock.now += 10
        report(plan, 6, 6, 100, 0.25)
    last = log.file.getvalue().splitlines()[-1]
    assert last == "train model (seed 2) 506/600 after 0:00:50, 0:15:40 left epoch 6 loss 0.250"


def test_a_terminal_shows_elapsed_and_left_within_80_columns(terminal, clock):
    """Ten of 10,000 steps, a minute each; the bar gives way, the words do not."""
    with bars(terminal, clock) as listener:
        report = listener.training(12)
        for batch in range(1, 12):
            report(SimpleNamespace(stage="style", epochs=20), 1, batch, 500, 0.123)
            clock.now += 60
        listener.progress.refresh()
    last = terminal.file.getvalue().rstrip("\n\x1b[?25h").splitlines()[-1]
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).strip()
    assert len(shown) <= 80
    assert shown.startswith("restyle images (seed 12) ")
    assert shown.endswith(" 11/10000 0:11:00, 6 d 22 h left epoch 1 loss 0.123")


@pytest.mark.parametrize("kind", ["log", "terminal"])
def test_markup_in_names_is_printed_not_interpreted(request, kind, clock):
    console = request.getfixturevalue(kind)
    with bars(console, clock) as listener:
        listener.count("check [red]x[/red]")(1, 1)
        listener.cases(1)({"decision": "[bold]kept[/bold]"})
        listener.progress.refresh()
    shown = console.file.getvalue()
    assert "check [red]x[/red]" in shown
    assert "[bold]kept[/bold]" in shown


def test_what_never_began_is_not_told_in_a_log(monkeypatch, capsys, tmp_path):
    """An error before the first file is one line."""
    code, _, err = typed(monkeypatch, capsys, "evaluate", "-p", tmp_path, "-l", tmp_path / "none")
    assert (code, err) == (2, f"error: there is no {tmp_path / 'none'}; give a folder of masks or a labels.csv\n")
    code, out, err = typed(monkeypatch, capsys, "data", "check", tmp_path / "none")
    assert (code, out.splitlines()[-1], err) == (1, "1 problem", "")
