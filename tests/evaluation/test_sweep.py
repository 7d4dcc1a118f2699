"""Lists in [adaptation], the tasks they come to, and what tracking tools are told."""

import csv
import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import commands
from dltta.errors import SettingError
from dltta.evaluation.bench import run_sweep
from dltta.evaluation.experiment import Experiment
from dltta.evaluation.plan import Plan, Planned, Timings, make_plan, passes_each
from dltta.evaluation.results import Results, StreamResult
from dltta.evaluation.run import CaseRecord
from dltta.evaluation.sweep import points, write_sweep
from dltta.evaluation.tracking import TAG, MLflow, TensorBoard
from dltta.recipes import Recipe
from dltta.training import TrainingSettings

# the grid of a table


def test_lists_become_a_grid_and_the_last_runs_fastest():
    grid = points({"alpha": [1e-4, 1e-3], "steps": [1, 3], "neighbors": 2})
    assert [point.name for point in grid] == [
        "alpha=0.0001,steps=1", "alpha=0.0001,steps=3", "alpha=0.001,steps=1", "alpha=0.001,steps=3",
    ]  # fmt: skip
    assert grid[2].table == {"alpha": 1e-3, "steps": 1, "neighbors": 2}
    assert grid[2].values == {"alpha": 1e-3, "steps": 1}


def test_without_lists_there_is_one_point_without_a_name():
    (point,) = points({"alpha": 1e-4, "betas": [0.9, 0.99]})
    assert (point.name, point.table) == ("", {"alpha": 1e-4, "betas": [0.9, 0.99]})


def test_a_list_of_lists_sweeps_a_setting_that_is_a_list():
    assert [point.name for point in points({"betas": [[0.9, 0.99], [0.5, 0.9]], "prefill": [True]})] == [
        "betas=0.9-0.99,prefill=true", "betas=0.5-0.9,prefill=true",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"alpha": []}, "different values, at least one"),
        ({"alpha": [1e-3, 0.001]}, "different values"),
        ({"alfa": [1, 2]}, r"no key in \[adaptation\] 'alfa'; did you mean 'alpha'"),
    ],
)
def test_a_grid_that_is_none_is_refused(table, words):
    with pytest.raises(SettingError, match=words):
        points(table)


# a whole sweep, and its plan before and after


def small(folder):
    return Experiment(
        source=("phantom:oct:spectralis:4",), targets=("phantom:oct:cirrus:3:1",), output=str(folder),
        network_options={"width": 2}, methods=("source", "tent"), rates=("fixed", "dynamic"), examples=1,
        in_domain="none", training=TrainingSettings(epochs=2, batch_size=2, validation=0.25),
    )  # fmt: skip


@pytest.mark.long
def test_a_sweep_shares_models_and_streams_and_its_plan_knows_what_is_done(tmp_path):
    grid = points({"batches_kept": [1, 2], "neighbors": 1})
    recipes = {point.name: Recipe(**point.table) for point in grid}
    experiment = replace(small(tmp_path), adaptation=recipes[grid[0].name])
    before = make_plan(experiment, recipes)
    assert not tmp_path.joinpath("models").exists()
    # 2 epochs x 3 images x 3 passes; the memory decides nothing without adaptation or with a fixed rate
    assert [(task.name, task.passes) for task in before.trainings] == [("train seed_0", 18)]
    place = "phantom:oct:cirrus:3:1"
    assert [(task.name, task.done, task.passes) for task in before.streams] == [
        (f"{place} source none seed 0 order 0 batches_kept=1", False, 3),
        (f"{place} tent fixed seed 0 order 0 batches_kept=1", False, 12),
        (f"{place} tent dynamic seed 0 order 0 batches_kept=1", False, 12),
        (f"{place} tent dynamic seed 0 order 0 batches_kept=2", False, 12),
    ]
    assert (before.passes, before.seconds(1)) == (57, None)

    tracker = TensorBoard(tmp_path / "tracking")
    results = run_sweep(experiment, recipes, tracker=tracker)
    assert len(list((tmp_path / "streams").iterdir())) == 4
    assert list((tmp_path / "models").iterdir()) == [tmp_path / "models" / "seed_0"]
    assert results[grid[0].name].streams[1] == results[grid[1].name].streams[1]  # tent, fixed
    logs = sorted((tmp_path / "tracking").glob("*/events.*"))
    assert {path.parent.name for path in logs} == {path.stem for path in (tmp_path / "streams").iterdir()}
    run_sweep(experiment, recipes, tracker=tracker)
    assert sorted((tmp_path / "tracking").glob("*/events.*")) == logs

    rows = list(csv.DictReader(write_sweep(tmp_path, grid, results).open()))
    second = results["batches_kept=2"]
    (dice,) = [r for r in second.summary if (r.method, r.rate, r.metric) == ("tent", "dynamic", "dice")]
    (row,) = [
        r for r in rows if (r["batches_kept"], r["method"], r["rate"], r["metric"]) == ("2", "tent", "dynamic", "dice")
    ]
    assert (float(row["mean"]), row["sd"], row["n"]) == (dice.mean, "", "1")
    assert Results.load(tmp_path / "batches_kept=2" / "results.json").config["adaptation"]["batches_kept"] == 2

    after = make_plan(experiment, {**recipes, "steps=3": Recipe(batches_kept=1, neighbors=1, steps=3)})
    waiting = [task.name for task in after.waiting]
    assert waiting == [f"{place} tent {rate} seed 0 order 0 steps=3" for rate in ("fixed", "dynamic")]
    assert after.seconds(1) == pytest.approx(2 * after.seconds(2))


# estimates by hand


def test_passes_of_an_image_are_those_of_the_method_and_its_steps():
    assert passes_each(Recipe("source"), "segmentation") == 1
    assert passes_each(Recipe("tent"), "segmentation") == 4  # two forward passes and a backward one
    assert passes_each(Recipe("tent", steps=3), "segmentation") == 10  # four and three
    assert passes_each(Recipe("own.code:Class"), "segmentation") == 4
    assert passes_each(Recipe("udas"), "segmentation") == 1


def test_an_estimate_is_by_method_or_else_by_passes():
    timings = Timings({"tent": 0.5}, 0.1)
    assert timings.of("tent", 4) == 0.5
    assert timings.of("ptbn", 3) == pytest.approx(0.3)
    assert Timings({}, None).of("tent", 4) is None


def test_the_time_of_a_grid_is_the_work_over_the_jobs_but_no_less_than_the_longest_task():
    streams = (Planned("a", False, 1, 6.0), Planned("b", False, 1, 2.0), Planned("c", True, 1, 9.0))
    assert [Plan((), streams).seconds(jobs) for jobs in (1, 2)] == [8.0, 6.0]
    assert Plan((Planned("train", False, 10, None),), streams).seconds(1) is None
    assert Plan((Planned("train", False, 10, 5.0),), streams).seconds(1) == 13.0


# MLflow, by a stand-in that remembers


class FakeMLflow(SimpleNamespace):
    def __init__(self):
        self.runs, self.uri, self.experiment = [], None, None

    def is_tracking_uri_set(self):
        return self.uri is not None

    def set_tracking_uri(self, uri):
        self.uri = uri

    def set_experiment(self, name):
        self.experiment = name

    def search_runs(self, filter_string, output_format):
        assert output_format == "list"
        return [run for run in self.runs if f"tags.`{TAG}` = '{run.tags.get(TAG)}'" == filter_string]

    def start_run(self, run_name):
        self.runs.append(Run(run_name))
        return self.runs[-1]

    def log_params(self, values):
        self.runs[-1].params |= values

    def log_metrics(self, values, step=None):
        if step is None:
            self.runs[-1].metrics |= values
        else:
            self.runs[-1].curves.append((step, values))

    def set_tag(self, name, value):
        self.runs[-1].tags[name] = value


class Run:
    def __init__(self, name):
        self.name, self.params, self.metrics, self.curves, self.tags = name, {}, {}, [], {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass


def test_mlflow_gets_every_stream_once(tmp_path, monkeypatch):
    fake = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    tracker = MLflow(tmp_path / "tracking", "ab")
    cases = (CaseRecord("x", "b", {"dice": 0.5}, 0.1, loss=2.0), CaseRecord("y", "b", {"dice": float("nan")}, 0.1))
    record = StreamResult("b", "segmentation", {"dice": 0.5}, cases, "a", "tent", "fixed", 0, 1)
    for _ in range(2):
        tracker.stream("key", Recipe("tent", "fixed", alpha=1e-3), record)
    (run,) = fake.runs
    assert (run.name, run.tags, run.metrics) == ("key", {TAG: "key"}, {"dice": 0.5})
    assert run.curves == [(0, {"case_dice": 0.5, "case_loss": 2.0})]
    wanted = {"source": "a", "target": "b", "method": "tent", "rate": "fixed", "seed": 0, "order": 1, "alpha": 1e-3}
    assert wanted.items() <= run.params.items()
    assert (fake.uri, fake.experiment) == (f"sqlite:///{tmp_path / 'tracking' / 'mlflow.db'}", "ab")


def test_mlflow_reports_to_nobody_unless_its_own_variable_is_set(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow())
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "false")
    MLflow(tmp_path, "ab")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "false"
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    MLflow(tmp_path, "ab")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_a_tool_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(SettingError, match=r"MLflow is not installed; pip install 'dltta\[mlflow\]'"):
        MLflow(tmp_path, "ab")


# on the command line


def test_dry_run_lists_the_tasks_of_a_sweep_and_writes_nothing(tmp_path, monkeypatch, capsys):
    config = tmp_path / "config.toml"
    config.write_text(
        'source = ["phantom:oct:spectralis:4"]\ntargets = ["phantom:oct:cirrus:3:1"]\nmethods = ["source", "tent"]\n'
        'rates = ["fixed"]\nin_domain = "none"\n[training]\nepochs = 2\n[adaptation]\nalpha = [1e-4, 1e-3]\n'
    )
    out = tmp_path / "out"
    arguments = ("bench", str(config), "-o", str(out), "--dry-run")
    code, text, _ = commands.typed(monkeypatch, capsys, *arguments)
    assert code == 0
    assert "to run  phantom:oct:cirrus:3:1 tent fixed seed 0 order 0 alpha=0.001  (12 passes)" in text
    assert "4 of 4 tasks to run" in text  # one training, source once, tent twice
    assert "at least 45 forward passes" in text  # 2 x 3 x 3, 3, 12, 12
    code, text, _ = commands.typed(monkeypatch, capsys, *arguments, "--json")
    assert [row["passes"] for row in json.loads(text)["streams"]] == [3, 12, 12]
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--gpus", "1"), "--gpus is for --on ray and slurm"),
        (("--address", "auto"), "--address is that of a Ray cluster; add --on ray"),
        (("--slurm", "partition=gpu"), "--slurm is for jobs of SLURM; add --on slurm"),
        (("--on", "slurm", "--gpus", "0.5"), "whole ones on SLURM"),
        (("--threads", "0"), "--threads must be at least 1, got 0"),
    ],
)
def test_options_of_one_place_are_not_taken_for_another(tmp_path, monkeypatch, capsys, options, words):
    sites = ("--source", "phantom:oct:spectralis:4", "--target", "phantom:oct:cirrus:3:1")
    code, _, err = commands.typed(monkeypatch, capsys, "bench", *sites, "-o", str(tmp_path), *options)
    assert code == 2
    assert words in " ".join(err.split())
