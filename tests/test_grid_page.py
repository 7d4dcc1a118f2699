"""What docs/grid.md says of two tasks at the same time follows from what was measured."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import grid


def measured(seconds, processor=None, load=1.0):
    processor = 2 * seconds if processor is None else processor
    return {"seconds": seconds, "processor": processor, "load": load}


def rounds(pair, load=1.0):
    """The machine was three times as slow in the last of three."""
    one, two = pair
    ways = {"1 x 1": one, "2 x 1": two}
    return [{name: measured(slow * value, load=load) for name, value in ways.items()} for slow in (1.0, 1.0, 3.0)]


def result(found):
    machine = {"cores": 2, "cpu": "a chip"}
    return {"machine": machine, "streams": 16, "images": 60, "rounds": found, "ways": grid.summary(found)}


def test_a_speed_up_is_a_ratio_within_a_round():
    ways = grid.summary(rounds((18.0, 10.0)))
    assert ways["2 x 1"]["speedup"] == pytest.approx(1.8)


def test_a_speed_up_beyond_the_cores_that_it_got_does_not_count():
    found = [{"1 x 1": measured(21.0, 20.0), "2 x 1": measured(10.0, 18.0)}]
    page = grid.block(result(found))
    assert "| 2 | 1 | 2.10 × | 0.90 × | 1.80 |" in page
    assert "Two tasks are 1.80 × as fast" in page


def test_the_page_says_whether_it_was_reached_and_whether_others_used_the_machine():
    free = grid.block(result(rounds((18.0, 10.0))))
    assert "Two tasks are 1.80 × as fast as one after the other (1.7 wanted: reached)." in free
    assert "shared" not in free
    busy = grid.block(result(rounds((16.0, 10.0), load=5.0)))
    assert "1.60 × as fast as one after the other (1.7 wanted: missed)" in busy
    assert "shared with other work (load average up to 5)" in busy


def test_only_the_table_of_the_page_is_replaced(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "grid.md").write_text(f"before\n{grid.BEGIN}old\n{grid.END}\nafter\n")
    found = result(rounds((18.0, 10.0)))
    for _ in range(2):
        grid.write(found, tmp_path)
        assert (tmp_path / "grid.md").read_text() == f"before\n{grid.BEGIN}{grid.block(found)}{grid.END}\nafter\n"
    assert json.loads((tmp_path / "results" / "grid.json").read_text()) == found


def test_the_page_is_the_one_that_its_result_gives():
    docs = Path(__file__).parent.parent / "docs"
    page = (docs / "grid.md").read_text()
    if not (docs / "results" / "grid.json").is_file():
        assert "Not measured yet" in page
        return
    assert grid.block(json.loads((docs / "results" / "grid.json").read_text())) in page
