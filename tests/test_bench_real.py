"""The one command for all comparisons on real sites: what it would run, and what it does when one fails."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def load(path):
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), ROOT / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


real = load("benchmarks/real")


def test_every_task_of_the_page_has_its_commands():
    assert set(real.TASKS) == set(load("docs/figures/real_page").TITLES)


def test_what_would_be_run_is_printed(capsys):
    real.main(["sites", "--work", "runs", "--only", "nuclei_fluo", "prostate_t2_bidmc", "--seeds", "3", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" -o ")[2].split()[0] for line in lines] == [
        "runs/nuclei_fluo/rates", "runs/nuclei_fluo/methods", "runs/nuclei_fluo/initial/rates",
        "runs/nuclei_fluo/there/fluo_360",
        "runs/prostate_t2_bidmc/rates", "runs/prostate_t2_bidmc/methods",
    ]  # fmt: skip
    assert "--methods all --rates fixed --cases 16 --seeds 3 --orders 1" in lines[1]
    assert (
        "--source=slices:prostate_t2/bidmc --target=slices:prostate_t2/radboud --target=slices:prostate_t2/ucl"
        in lines[4]
    )


def test_seeds_can_be_counted_from_a_later_one(capsys):
    real.main(["sites", "--only", "oct_layers", "--seeds", "2", "--first-seed", "1", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # no network is trained at the target once more
    assert all("--seeds 2 --orders 1 --first-seed 1" in line for line in lines)


def test_methods_can_be_chosen(capsys):
    real.main(["sites", "--only", "spinal_cord", "--methods", "source,recommended", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    assert ["--methods source,recommended --rates fixed " in line for line in lines] == [False, True, False]


def test_streams_that_change_have_two_sites_in_every_way_and_one_site_three_times(capsys):
    real.main(["sites", "--only", "wbc_cells", "--dry-run"])
    line, others = [line for line in capsys.readouterr().out.splitlines() if "/changing" in line]
    one, two = "wbc_cells/cellavision", "wbc_cells/bccd"
    assert [word.removeprefix("--target=") for word in line.split() if word.startswith("--target")] == [
        f"sequence:{two},{two},{two}", f"sequence:{one},{two}", f"interleave:{one},{two}", f"drift:{one},{two}",
    ]  # fmt: skip
    assert "atta,recommended --rates fixed,dynamic --seeds 1 --orders 1" in line
    assert "rotta,note --rates fixed --seeds 1 --orders 1" in others


def test_networks_that_trained_longer_meet_the_methods_that_need_no_network_of_their_own(capsys):
    from dltta.methods import METHODS

    real.main(["sites", "--only", "prostate_t2_long", "--dry-run"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    asked = {method for line in lines for method in line[line.index("--methods") + 1].split(",")}
    own = {"ttt", "ttt++", "dtta"}
    assert asked == {*map(str, METHODS), "recommended"} - own
    assert all(line[line.index("--epochs") + 1] == "360" for line in lines)


def test_dltta_takes_the_commands(tmp_path, monkeypatch, capsys):
    """Up to the sites, which are not there."""
    from dltta.cli.app import main

    settings = real._parser().parse_args([str(tmp_path), "--work", str(tmp_path / "runs")])
    for name in ("prostate_t2_ucl", "prostate_t2_long", "oct_layers", "wbc_types"):
        for command in real.commands(name, settings):
            monkeypatch.setattr(sys, "argv", ["dltta", *command])
            with pytest.raises(SystemExit) as stopped:
                main()
            assert stopped.value.code == 2
            assert str(tmp_path) in capsys.readouterr().err.replace("\n", "")  # it is the site that is missing


def test_a_command_that_fails_is_named_at_the_end_and_the_others_run(tmp_path, monkeypatch):
    ran = []

    def run(program, **options):
        ran.append(program)
        return subprocess.CompletedProcess(program, "rates" in " ".join(map(str, program)))

    monkeypatch.setattr(real.subprocess, "run", run)
    with pytest.raises(SystemExit, match="failed: bench .*rates"):
        real.main([str(tmp_path), "--work", str(tmp_path / "runs"), "--only", "spinal_cord", "--jobs", "1"])
    assert [json.dumps(list(map(str, program))).count("spinal_cord.toml") for program in ran] == [
        1,
        1,
        1,
        0,
        0,
        0,
    ]
    assert [Path(program[1]).name for program in ran[3:]] == ["real.py", "numbers_of_pages.py", "methods_page.py"]


def test_an_unknown_task_is_one_line():
    with pytest.raises(SystemExit, match="no task 'oct'; there are oct_layers"):
        real.main(["sites", "--only", "oct"])
