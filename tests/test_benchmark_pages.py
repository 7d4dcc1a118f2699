"""What the benchmarks' pages say follows from what was measured."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import harm_page
import measuring
import speed_page
from dltta.methods import Method
from steps import newer_rows
from workloads import WORKLOADS


def workload():
    rows = {"plain forward": 1.0, "Tent, dynamic": 2.5, "TTT, fixed": 4.0, "TTT, dynamic": 4.2}
    rows |= {"ATTA, fixed": 5.0, "ATTA, dynamic": 5.5}
    parts = {"forward 1": 4.0, "recall": 0.1, "discrepancy": 0.2, "loss and backward": 3.0, "push": 0.1, "rest": 2.6}
    return {
        "title": "OCT",
        "shape": [1, 1, 8, 8],
        "repeats": 3,
        "rows": [{"name": n, "batch": 1, "seconds": s, "ratio": s, "peak_bytes": 5e6} for n, s in rows.items()],
        "dynamic_to_fixed": {"Tent": 1.0, "TTT": 1.05, "ATTA": 1.1},
        "breakdown": parts,
        "options": {"default": {"given": 4.0, "auto": 2.0}, "keep": {"given": 3.2, "auto": 1.0}},
        "bank": {
            "pairs": 20,
            "key": 100,
            "value": 900,
            "bytes": {"float32": 80_000, "float16": 40_000},
            "rates": {"float32": [1.0, 2.0], "float16": [1.001, 1.99]},
        },
    }


def test_shares_and_ratios_by_hand():
    assert speed_page.dynamic_share(workload()) == pytest.approx(0.04)


def test_a_ratio_is_taken_within_each_round():
    seconds = {"step": [2.0, 30.0, 9.0], "plain": [1.0, 10.0, 1.0]}  # the machine was slow in the second
    assert measuring.ratio(seconds, "step", "plain") == 3.0


def test_the_speed_page():
    machine = {"packages": {"torch": "2", "monai": "1"}, "cpu": "a chip", "torch_threads": 2, "version": "0"}
    text = speed_page.page(
        {
            "quick": False,
            "machine": machine | {"allocator": "a"},
            "workloads": {"histology": workload()},
            "recall": [{"pairs": 1000, "seconds": 0.05}],
            "stream": {
                "images": 20_000,
                "window": 1000,
                "first": 0.002,
                "last": 0.003,
                "plain_first": 0.001,
                "plain_last": 0.001,
                "resident_after_first": 4e8,
                "resident_after_last": 4e8,
            },
            "training": [{"title": "a net", "augmentation": "none", "plain": 2.0, "ours": 1.5}],
        }
    )
    assert "| OCT | 2.50 | 4.0 % | 1.05 | 1.10 |" in text
    assert "| OCT | 1.25 | 2.00 | 4.00 | not on this CPU | not measured |" in text  # of 4 seconds
    assert "| OCT | 20 | 100 + 900 | 80.0 kB | 80.0 kB | 40.0 kB | within 0.5 % |" in text
    assert "| 1,000 | 50.0 | 2.0 % |" in text
    assert "| last 1,000 | 3.000 | 3.00 | 400.0 MB |" in text
    assert "| a net | none | 2.000 | 1.500 | 0.75 |" in text


def harmed():
    entry = {
        "source": {"scores": [50.0, 70.0, None]},
        "unguarded": {"scores": [90.0, 20.0, None]},
        "guarded": {"scores": [80.0, 60.0, None], "decisions": ["accepted", "kept", "source"]},
    }
    return {"title": "a site", "task": "segmentation", "streams": {"noise": {"default": entry}}}


def test_harm_by_hand():
    (row,) = harm_page.table(harmed())
    assert (row["source"], row["unguarded"], row["guarded"]) == (60.0, 55.0, 70.0)
    assert row["margin"] == 10.0  # over the better of the two
    assert dict(row["genuine"]) == {"accepted": 1, "kept": 1}
    assert dict(row["useless"]) == {"source": 1}


def test_the_guards_page_counts_what_was_kept(tmp_path):
    results = {
        "quick": False,
        "strengths": {"default": "as it is"},
        "provenance": {"version": "0", "machine": {"cpu": "a chip"}},
        "beds": {"oct": harmed()},
    }
    harm_page.write_page(results, tmp_path)
    text = (tmp_path / "guard.md").read_text()
    assert "In 1 of 1 streams" in text
    assert "the worst is +10.0 (noise, default)" in text
    assert "greatest damage is 5.0 points" in text
    assert (tmp_path / "images" / "guard_oct_default.png").stat().st_size > 1000


def test_runs_of_useless_images():
    assert harm_page._runs([False, True, True, False, True]) == [(1, 3), (4, 5)]
    assert harm_page._runs([True]) == [(0, 1)]
    assert harm_page._runs([False]) == []


def test_newer_methods_are_shown_against_a_plain_pass():
    rows = [{"name": "plain forward", "seconds": 0.1, "ratio": 1.0, "peak_bytes": 2e6}]
    rows += [{"name": "SAR", "seconds": 0.35, "ratio": 3.46, "peak_bytes": 5e6}]
    text = speed_page._methods([{"title": "OCT", "repeats": 3, "threads": 1, "load": 0.2, "rows": rows}])
    assert "| SAR | 3.5 | 350 | 5 |" in text
    assert "### OCT; threads: 1, load of the machine before: 0.2" in text
    assert speed_page._methods([]) == ""


def test_every_newer_method_has_a_row_that_can_be_made():
    small = WORKLOADS["oct"].small()
    made = newer_rows(small)
    assert len(made) == 1 + sum(not method.facts.of_paper for method in Method)
    for make in made.values():
        assert make(small).batch == 1
