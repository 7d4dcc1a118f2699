"""What the benchmarks' pages say follows from what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import harm_page
import instance_norm_page
import measuring
import serve_page
import speed
import speed_page
from dltta.methods import Method
from dltta.quality.candidates import EFFORTS
from steps import RECOMMENDED, newer_rows
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


def test_the_guards_page_keeps_the_table_of_its_rules():
    docs = Path(__file__).parent.parent / "docs"
    text, results = (docs / "guard.md").read_text(), json.loads((docs / "results" / "harm.json").read_text())
    rules = harm_page.rules_in(text)
    assert "| whole guard |" in rules
    assert harm_page.page(results, rules) == text, "run python benchmarks/harm_page.py"


def test_runs_of_useless_images():
    assert harm_page._runs([False, True, True, False, True]) == [(1, 3), (4, 5)]
    assert harm_page._runs([True]) == [(0, 1)]
    assert harm_page._runs([False]) == []


def newer(default, low, load=0.2):
    ratios = {"plain forward": 1.5, "plain forward, channels-last": 1.0, "Recommended": default}
    ratios |= {"Recommended, low effort": low, "SAR": 3.46}
    rows = [
        {"name": name, "seconds": 0.1 * times, "ratio": times / 1.5, "fastest": times, "peak_bytes": 5e6}
        for name, times in ratios.items()
    ]
    return {"title": "OCT, U-Net", "repeats": 3, "version": "9", "threads": 1, "load": load, "rows": rows}


def test_newer_methods_are_shown_against_plain_passes():
    text = speed_page._methods([newer(5.94, 2.9)])
    assert "| SAR | 2.3 | 3.5 | 346 | 5 |" in text
    assert "3 rounds; dltta 9, threads: 1, load of the machine before: 0.2.\n" in text
    assert speed_page._methods([]) == ""


def test_a_limit_of_the_recommended_recipe_is_kept_or_missed():
    assert "Recommended, limit 6 × it: OCT 5.9: kept. Recommended, low effort, limit 3 × it: OCT 3.1: missed." in (
        speed_page._methods([newer(5.94, 3.1)])
    )


def test_a_busy_machine_is_said():
    elsewhere = {**newer(5, 2), "cpu": "a chip"}
    assert "3 rounds on a chip; dltta 9, threads: 1, load of the machine before: 0.2.\n" in speed_page._methods(
        [elsewhere]
    )
    assert "Other programs were running" in speed_page._methods([newer(5, 2, load=1.3)])
    assert "Other programs were running" not in speed_page._methods([newer(5, 2, load=0.9)])


def test_the_recommended_recipe_is_timed_with_as_many_passes_as_it_may_take():
    small = WORKLOADS["oct"].small()
    for effort, passes in EFFORTS.items():
        row = newer_rows(small)[RECOMMENDED[effort]](small)
        assert row.adapter.plan.passes == passes
        assert row.run().decision.expected is not None


def test_every_newer_method_has_a_row_that_can_be_made():
    small = WORKLOADS["oct"].small()
    made = newer_rows(small)
    assert len(made) == 4 + sum(not method.facts.of_paper for method in Method)
    for make in made.values():
        assert make(small).batch == 1


def test_the_page_of_the_service():
    result = {
        "machine": {"cpu": "a chip", "cores": 2, "gpu": None},
        "load": {"keys": 9, "shards": 2, "requests": 4, "size": 32},
        "load_average": 1.25,
        "chaos": {
            "keys": 9,
            "sent": 1234,
            "killed": 7,
            "machines_lost": 1,
            "calls_that_found_their_shard_dead": 11,
            "unavailable": 2,
            "wrong": ["a", "b"],
            "p50_seconds": 0.5,
            "p99_seconds": 2.0,
            "seconds": 120.0,
        },
        "compare": {"same": 8, "compared": 9, "by_command": 3, "commands": 3},
        "memory": {"live": 2, "resident_mb": [[1, 100.0], [2, 110.0], [4, 120.0], [8, 122.0]]},
        "throughput": {"service_per_second": [1.0], "ratio": 1.5, "processor_ratio": 0.75},
        "latency": {"per_second_at_full_load": 20.0, "requests": 600, "waited_p50": 0.002, "waited_p99": 0.05,
                    "whole_p50": 0.04, "whole_p99": 0.09},
    }  # fmt: skip
    text = serve_page.page(result)
    for said in (
        "9 keys × 4 requests over 2 shards",
        "random moments | 7 |",
        "out of order | 2 |",  # what was wrong is counted
        "bit for bit | 8 of 9 |",
        "itself | 3 of 3 |",
        "| 1.50 × |",
        "| 0.75 × |",
        "2 ms / 50 ms",
        "500 kB more for each key beyond",  # (122 - 120) MB over four keys
        "| 8 | 122 |",
        "a core): 1.2",
    ):
        assert said in " ".join(text.split()), said


def test_the_page_of_instance_normalization_counts_gains_over_the_source_model():
    def run(simulated, source, away):
        return {"source": source, "simulated 1": simulated[0], "simulated 2": simulated[1], "elsewhere": away}

    seeds = {
        "0": {"source": run((40, 60), 90, 50), "matched": run((50, 64), 90, 45), "sar": run((40.2, 60), 90, 50)},
        "1": {"source": run((42, 60), 92, 50), "matched": run((50, 60), 92, 47), "sar": run((42.2, 60), 92, 50)},
    }
    tasks = {"a": {"title": "A task, small", "seeds": seeds}}
    text = instance_norm_page.page({"sites": 2, "images": 4, "dtta_updates": {"2": 50, "3": 10}, "tasks": tasks})
    assert "## A task, small; training seeds: 2\n" in text
    assert "| **source model** | nothing | 50.5 | 50.0 … 51.0 | 41.0 |  | 91.0 | 50.0 |" in text
    values = "the image's values, mapped to the source's"
    assert f"| matched | {values} | +5.5 | +4.0 … +7.0 | +2.0 | 2 / 0 of 2 | +0.0 | -4.0 |" in text
    assert "| sar | scale and shift | +0.1 | +0.1 … +0.1 | +0.0 | 0 / 0 of 2 | +0.0 | +0.0 |" in text
    assert "every task, and no worse at the source: matched." in text
    assert "Next to nothing either way: sar." in text
    assert "Cost more than half a point at the source site itself: none." in text
    assert "Best on average at simulated sites: A task: matched (+5.5)." in text
    assert "A task, mean over the other scanners, where it differs from the source model: matched -4.0." in text
    assert "Not measured: tent fixed (A task), " in text


def test_an_interrupted_measurement_of_speed_goes_on_where_it_was(tmp_path, monkeypatch):
    ran = []

    def run(command, **options):
        if "--part" not in command:  # git, which says what code this is
            return subprocess.CompletedProcess(command, 0, stdout="abc\n")
        part = command[command.index("--part") + 1]
        if part == "training" and "training" not in ran:
            ran.append(part)
            raise KeyboardInterrupt
        ran.append(part)
        return subprocess.CompletedProcess(command, 0, stdout=f'noise\n"{part} {len(ran)}"\n')

    monkeypatch.setattr(speed.subprocess, "run", run)
    monkeypatch.setattr(speed, "page", str)
    file = tmp_path / "speed.json"
    file.write_text('{"workloads": {"oct": {}}}')
    command = [
        "--workloads",
        "oct",
        "--again",
        "stream",
        "training",
        "--output",
        str(file),
        "--page",
        str(tmp_path / "speed.md"),
    ]
    with pytest.raises(KeyboardInterrupt):
        speed.main(command)
    assert file.read_text() == '{"workloads": {"oct": {}}}'  # nothing half-written
    speed.main(command)
    assert ran == ["stream", "training", "training"]
    assert json.loads(file.read_text()) == {"workloads": {"oct": {}}, "stream": "stream 1", "training": "training 3"}
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".json"] == ["speed.json"]
