"""A whole experiment: run, interrupt, continue, and every number from the streams."""

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import pytest

import dltta.evaluation.outputs
import dltta.evaluation.stream_jobs
from dltta.errors import DataError, NonFiniteError, SettingError
from dltta.evaluation.bench import run_experiment, run_sweep
from dltta.evaluation.experiment import Bench, Experiment, Job
from dltta.evaluation.results import Results
from dltta.evaluation.runners import Local
from dltta.models.io.checkpoint import load_checkpoint, save_checkpoint
from dltta.recipes import Recipe, paper, recipe_for
from dltta.training import TrainingSettings


def small(folder, **options):
    settings = {
        "source": ("phantom:oct:spectralis:6:0:96x64",),
        "targets": ("phantom:oct:cirrus:4:1:96x64",),
        "output": str(folder),
        "network_options": {"width": 4},
        "methods": ("source", "tent"),
        "examples": 2,
        "training": TrainingSettings(epochs=1, batch_size=2, validation=0.34),
        "adaptation": Recipe(batches_kept=2, neighbors=1),
        **options,
    }
    return Experiment(**settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experiment")
    return folder, run_experiment(small(folder))


def test_every_stream_is_there_once(finished):
    _, results = finished
    kinds = [(s.source, s.target, s.method, s.rate) for s in results.streams]
    assert kinds == [
        ("spectralis", "spectralis", "source", "none"),
        ("spectralis", "cirrus", "source", "none"),
        ("spectralis", "cirrus", "tent", "fixed"),
        ("spectralis", "cirrus", "tent", "dynamic"),
    ]
    assert [len(s.cases) for s in results.streams[1:]] == [4, 4, 4]
    dynamic = results.streams[3].cases
    assert [case.discrepancy is None for case in dynamic] == [True, True, False, False]
    assert dynamic[3].rate == pytest.approx(1e-3 * dynamic[3].discrepancy)


def test_outputs_are_written(finished):
    folder, results = finished
    assert Results.load(folder / "results.json").streams == results.streams
    assert {"table.md", "table.tex", "table.csv", "report.html"} <= {path.name for path in folder.iterdir()}
    assert "cirrus" in (folder / "table.md").read_text()


def test_a_second_run_runs_nothing_and_changes_no_byte(finished, monkeypatch):
    folder, _ = finished
    before = {name: (folder / name).read_bytes() for name in ("results.json", "table.md", "report.html")}
    monkeypatch.setattr(
        dltta.evaluation.stream_jobs, "run_job", lambda *job: pytest.fail("a finished stream was run again")
    )
    run_experiment(small(folder))
    assert before == {name: (folder / name).read_bytes() for name in before}


@pytest.mark.long
def test_an_interrupted_experiment_continues_with_what_is_missing(finished, tmp_path, monkeypatch):
    folder, _ = finished
    real, ran = dltta.evaluation.stream_jobs.run_job, []

    def third_fails(bench, job, device):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(job)
        real(bench, job, device)

    monkeypatch.setattr(dltta.evaluation.stream_jobs, "run_job", third_fails)
    with pytest.raises(KeyboardInterrupt):
        run_experiment(small(tmp_path))
    monkeypatch.setattr(dltta.evaluation.stream_jobs, "run_job", lambda *job: (ran.append(job[1]), real(*job)))
    run_experiment(small(tmp_path))
    assert len(ran) == len(set(ran)) == 4
    assert (tmp_path / "results.json").read_bytes() == (folder / "results.json").read_bytes()


@pytest.mark.long
def test_other_settings_run_the_streams_that_they_decide(finished, monkeypatch):
    folder, _ = finished
    ran = []
    real = dltta.evaluation.stream_jobs.run_job
    monkeypatch.setattr(
        dltta.evaluation.stream_jobs, "run_job", lambda *job: (ran.append(f"{job[1].method} {job[1].rate}"), real(*job))
    )
    run_experiment(small(folder, adaptation=Recipe(alpha=5e-3, batches_kept=2, neighbors=1)))
    assert ran == ["tent fixed", "tent dynamic"]
    ran.clear()
    run_experiment(small(folder, adaptation=Recipe(batches_kept=3, neighbors=1)))
    assert ran == ["tent dynamic"]


@pytest.mark.long
def test_another_calibration_runs_the_streams_that_measure_with_it(finished, tmp_path, monkeypatch):
    folder, _ = finished
    work = tmp_path / "work"
    shutil.copytree(folder, work)
    experiment = small(work, rates=("fixed", "relative"))
    run_experiment(experiment)
    checkpoint = load_checkpoint(work / "models" / "seed_0")
    predictions = {**checkpoint.calibration.predictions, "discrepancy": 123.0}
    other = replace(checkpoint.calibration, predictions=predictions)
    save_checkpoint(work / "models" / "seed_0", replace(checkpoint, calibration=other))
    ran = []
    real = dltta.evaluation.stream_jobs.run_job
    monkeypatch.setattr(
        dltta.evaluation.stream_jobs, "run_job", lambda *job: (ran.append(f"{job[1].method} {job[1].rate}"), real(*job))
    )
    run_experiment(experiment)
    assert ran == ["tent relative"]


@pytest.mark.long
def test_what_another_method_needs_may_be_trained_later(finished, tmp_path, monkeypatch):
    folder, results = finished
    work = tmp_path / "work"
    shutil.copytree(folder, work)
    ran, real = [], dltta.evaluation.stream_jobs.run_job
    monkeypatch.setattr(
        dltta.evaluation.stream_jobs, "run_job", lambda *job: (ran.append(f"{job[1].method} {job[1].rate}"), real(*job))
    )
    training = TrainingSettings(epochs=1, batch_size=2, validation=0.34, with_=("ttt",))
    more = small(work, methods=("source", "tent", "ttt"), rates=("fixed",), training=training)
    assert run_experiment(more).streams[1:3] == results.streams[1:3]
    assert ran == ["ttt fixed"]


def test_experiments_that_share_their_work_train_and_run_nothing_twice(finished, tmp_path, monkeypatch):
    folder, results = finished
    monkeypatch.setattr(
        dltta.evaluation.stream_jobs, "run_job", lambda *job: pytest.fail("a finished stream was run again")
    )
    again = run_experiment(small(tmp_path / "other", work=str(folder)))
    assert again.streams == results.streams
    assert not (tmp_path / "other" / "models").exists()
    assert (tmp_path / "other" / "results.json").is_file()


@pytest.mark.long
def test_orders_differ_and_are_shared_by_methods(tmp_path):
    results = run_experiment(small(tmp_path, orders=2, methods=("source", "ptbn")))
    at_target = [s for s in results.streams if s.target == "cirrus"]
    orders = {(s.method, s.order): [case.case for case in s.cases] for s in at_target}
    assert orders["source", 0] == orders["ptbn", 0] != orders["source", 1] == orders["ptbn", 1]


@pytest.mark.long
def test_seeds_counted_from_a_later_one_are_those_of_a_comparison_of_all(tmp_path):
    """So a second machine, or another day, can run the seeds that are missing."""
    both = run_experiment(small(tmp_path / "both", seeds=2, rates=("fixed",)))
    second = run_experiment(small(tmp_path / "second", first_seed=1, rates=("fixed",)))
    assert second.streams == tuple(stream for stream in both.streams if stream.seed == 1)
    assert len(second.streams) == 3
    assert second.provenance.seeds == (1,)
    assert [path.name for path in (tmp_path / "second" / "models").iterdir()] == ["seed_1"]


def test_a_first_seed_below_zero_is_refused(tmp_path):
    with pytest.raises(SettingError, match="the first seed must be 0 or more, got -1"):
        small(tmp_path, first_seed=-1)


def test_targets_of_another_task_fail_before_anything_is_trained(tmp_path):
    with pytest.raises(DataError, match="hospital_1 has classification"):
        run_experiment(small(tmp_path / "out", targets=("phantom:histology:hospital_1:2",)))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_processes_give_the_same_results_as_one(finished, tmp_path):
    folder, _ = finished
    run_experiment(replace(small(folder), output=str(tmp_path)), runner=Local(2))
    ours, theirs = (Results.load(path / "results.json") for path in (tmp_path, folder))
    assert ours.streams == theirs.streams


def test_sites_below_a_root_are_named_without_it(tmp_path):
    experiment = Experiment(
        ("site_a",), ("site_b", "phantom:oct:cirrus:4"), "out", root=str(tmp_path), in_domain="none"
    )
    assert str(tmp_path) not in json.dumps(experiment.describe())
    assert {job.target for job in experiment.jobs()} == {"site_b", "phantom:oct:cirrus:4"}
    assert experiment.open("phantom:oct:cirrus:4").site == "cirrus"
    with pytest.raises(DataError, match=str(tmp_path / "site_b")):
        experiment.open("site_b")


@pytest.mark.long
@pytest.mark.usefixtures("short_rehearsal")
def test_matched_runs_at_the_mean_rate_of_the_dynamic_stream(finished, tmp_path):
    folder, _ = finished
    rates = ("matched", "shuffled", "dynamic", "fixed:1e-2", "adam:1e-3")
    results = run_experiment(small(tmp_path, work=str(folder), methods=("ptbn", "tent", "recommended"), rates=rates))
    by_rate = {(stream.method, stream.rate): stream for stream in results.streams}
    dynamic = [case.rate for case in by_rate["tent", "dynamic"].cases]
    assert {case.rate for case in by_rate["tent", "matched"].cases} == {fmean(dynamic)}
    shuffled = [case.rate for case in by_rate["tent", "shuffled"].cases]
    assert sorted(shuffled) == sorted(dynamic)
    assert shuffled != dynamic
    assert {case.rate for case in by_rate["tent", "fixed:1e-2"].cases} == {1e-2}
    assert {case.rate for case in by_rate["tent", "adam:1e-3"].cases} == {1e-3}
    assert recipe_for("tent", "adam:1e-3") == replace(paper("tent", "fixed"), alpha=1e-3, optimizer="adam", name="own")
    assert [rate for method, rate in by_rate if method == "recommended"] == ["none"]
    assert all(case.decision is not None for case in by_rate["recommended", "none"].cases)


def test_controls_are_run_again_when_the_memory_that_gave_their_rates_changes(tmp_path):
    def keys(**recipe):
        experiment = small(tmp_path, adaptation=Recipe(batches_kept=2, neighbors=1, **recipe))
        job = Job(experiment.targets[0], "tent", "fixed", 0, 0)
        bench = Bench(experiment, {"seed_0": {"": "weights"}}, {(job.target, 0): "images"}, {}, {})
        return {rate: bench.key(replace(job, rate=rate)) for rate in ("fixed", "dynamic", "matched", "shuffled")}

    before, after = keys(), keys(ready="neighbors")
    assert [rate for rate in before if before[rate] != after[rate]] == ["dynamic", "matched", "shuffled"]


@dataclass
class Elsewhere:
    """A runner whose tasks do not run here, as far as anybody can tell."""

    names: list[str] = field(default_factory=list)
    jobs: int = 2
    threads: int | None = 1

    def here(self, count: int) -> bool:
        return False

    def run(self, tasks, *, threads, done, lost):
        for task in tasks:
            self.names.append(task.name)
            task.call()
            done(task)


@pytest.mark.long
@pytest.mark.usefixtures("short_rehearsal")
def test_models_rehearse_where_the_other_tasks_run_and_learn_the_same(finished, tmp_path):
    folder, _ = finished
    here, there = (small(tmp_path / name, methods=("source", "recommended"), seeds=2) for name in ("here", "there"))
    for experiment in (here, there):
        shutil.copytree(folder / "models", Path(experiment.output) / "models")
        for file in Path(experiment.output).rglob("rehearsal.json"):
            file.unlink()
    run_experiment(here, runner=Local(1, 1))
    runner = Elsewhere()
    run_experiment(there, runner=runner)
    seeds = range(there.seeds)
    assert [name for name in runner.names if "rehears" in name] == [f"rehearsal of seed_{seed}" for seed in seeds]
    for seed in seeds:
        file = Path("models") / f"seed_{seed}" / "rehearsal.json"
        assert (Path(there.output) / file).read_bytes() == (Path(here.output) / file).read_bytes()


@pytest.mark.long
@pytest.mark.usefixtures("short_rehearsal")
def test_the_streams_of_one_rehearsal_run_at_the_same_time_and_teach_the_same(finished, tmp_path):
    class Streams(Elsewhere):
        def here(self, count):
            return count < 2

    folder, _ = finished
    found, runner = [], Streams()
    for name, chosen in (("alone", Local(1, 1)), ("several", runner)):
        experiment = small(tmp_path / name, methods=("source", "recommended"), seeds=1)
        shutil.copytree(folder / "models", Path(experiment.output) / "models")
        for file in Path(experiment.output).rglob("rehearsal.json"):
            file.unlink()
        run_experiment(experiment, runner=chosen)
        found.append((Path(experiment.output) / "models" / "seed_0" / "rehearsal.json").read_bytes())
    assert found[0] == found[1]
    assert len([name for name in runner.names if name.startswith("rehearsal at ")]) == 9


@pytest.mark.parametrize("rate", ["fixd", "fixed:fast"])
def test_a_rate_that_is_none_is_refused(tmp_path, rate):
    with pytest.raises(SettingError, match="rate"):
        small(tmp_path, rates=(rate,))


TINY = {"cyclegan": {"epochs": 1, "width": 2, "blocks": 1, "discriminator_width": 2}, "udas": {"epochs": 1, "width": 2}}


@pytest.mark.long
def test_methods_that_learn_with_the_target_have_a_model_for_each_seed_and_target(tmp_path, monkeypatch):
    options = {
        "targets": ("phantom:oct:cirrus:3:1", "phantom:oct:spectralis:2:2"), "methods": ("source", "udas"), "seeds": 2,
        "in_domain": "none", "uda": TINY,
    }  # fmt: skip
    monkeypatch.setattr(dltta.evaluation.outputs, "write_report", lambda *_, **__: None)
    results = run_experiment(small(tmp_path, **options))
    streams = [s for s in results.streams if s.method == "udas"]
    assert [(s.source, s.target, s.rate, s.seed) for s in streams] == [
        ("spectralis", target, "none", seed) for seed in (0, 1) for target in ("cirrus", "spectralis")
    ]
    models = {path.name for path in (tmp_path / "models").iterdir()}
    names = {f"udas_phantom-oct-{case}_seed_{seed}" for case in ("cirrus-3-1", "spectralis-2-2") for seed in (0, 1)}
    assert models == {"seed_0", "seed_1"} | names
    record = load_checkpoint(tmp_path / "models" / "udas_phantom-oct-cirrus-3-1_seed_1").record
    assert (record["uda"]["targets"], record["uda"]["target_images"]) == (["cirrus"], 3)
    assert (
        "UDAS was trained with labeled source images and all images of the target"
        in (tmp_path / "table.md").read_text()
    )

    def train(*_):
        raise AssertionError("trained again")

    monkeypatch.setattr("dltta.training.uda.udas.UDAS.train", train)
    assert run_experiment(small(tmp_path, **options)) == results


@pytest.mark.long
def test_a_translated_network_runs_in_a_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(dltta.evaluation.outputs, "write_report", lambda *_, **__: None)
    results = run_experiment(small(tmp_path, methods=("source", "cyclegan"), in_domain="none", uda=TINY))
    source, translated = results.streams
    assert translated.method == "cyclegan"
    assert [case.metrics["dice"] for case in source.cases] != [case.metrics["dice"] for case in translated.cases]


@pytest.mark.parametrize(
    ("uda", "words"),
    [
        ({"udass": {}}, "no method that learns with target images 'udass'; did you mean 'udas'"),
        ({"udas": {"epoch": 3}}, r"no key in \[uda.udas\] 'epoch'; did you mean 'epochs'"),
        ({"cyclegan": {"epochs": 0}}, "epochs of cyclegan must be at least 1"),
    ],
)
def test_settings_of_these_methods_are_checked_before_anything_runs(tmp_path, uda, words):
    with pytest.raises(SettingError, match=words):
        small(tmp_path, uda=uda)


# methods newer than the paper


def jobs(experiment):
    return {(job.method, job.rate): experiment.recipe(job) for job in experiment.jobs() if job.method != "source"}


def test_a_method_with_a_rule_of_its_authors_runs_with_it_too(tmp_path):
    experiment = small(tmp_path, methods=("tent", "grata", "t3a"), rates=("fixed", "dynamic"))
    rates = {method: [rate for name, rate in jobs(experiment) if name == method] for method in experiment.methods}
    assert rates == {"tent": ["fixed", "dynamic"], "grata": ["aligned", "fixed", "dynamic"], "t3a": ["none"]}


def test_what_one_method_has_alone_is_given_by_its_name(tmp_path):
    own = {"dtta": {"steps": 5, "alpha": 0.5}, "rotta": {"settings": {"capacity": 4}}}
    experiment = small(tmp_path, methods=("tent", "dtta", "rotta"), rates=("fixed",), recipes=own)
    found = {
        method: recipe.resolved("segmentation", calibrated=False) for (method, _), recipe in jobs(experiment).items()
    }
    assert (found["dtta"].steps, found["dtta"].alpha, found["dtta"].mode) == (5, 0.5, "image-specific")
    assert (found["rotta"].steps, found["rotta"].settings, found["rotta"].alpha) == (1, {"capacity": 4}, 1e-3)
    assert (found["tent"].steps, found["tent"].alpha, found["tent"].settings) == (1, 1e-3, {})
    with pytest.raises(SettingError, match=r"no key in \[recipes.dtta\] 'stepps'; did you mean 'steps'"):
        small(tmp_path, recipes={"dtta": {"stepps": 5}})


def test_all_trains_what_methods_of_the_task_need(tmp_path):
    every = small(tmp_path, methods=("all",))
    assert every.with_all_parts().training.with_ == ("ttt", "ttt++", "dtta", "atta")
    classes = replace(every, source=("phantom:histology:hospital_0:4",), targets=("phantom:histology:hospital_2:4",))
    assert classes.with_all_parts().training.with_ == ("ttt", "ttt++", "atta")


DIVERGING = "methods:Diverging"


@pytest.mark.long
def test_a_method_that_diverges_is_noted_and_the_others_have_their_numbers(finished, tmp_path):
    folder, _ = finished
    rates = ("fixed", "dynamic", "matched", "shuffled")
    experiment = small(tmp_path, work=str(folder), methods=("source", "tent", DIVERGING), rates=rates)
    again = []
    for _ in range(2):  # what diverged is not run again
        (found,) = run_sweep(experiment, {"": experiment.adaptation}, diverging="note").values()
        assert {(stream.method, stream.rate) for stream in found.streams if stream.target == "cirrus"} == {
            ("source", "none"), *(("tent", rate) for rate in rates)
        }  # fmt: skip
        assert [(each["method"], each["rate"], each["target"]) for each in found.config["diverged"]] == [
            (DIVERGING, rate, "cirrus") for rate in rates
        ]
        assert all("the loss is inf" in each["why"] for each in found.config["diverged"])
        assert f"{DIVERGING} + dynamic diverged at cirrus, so no number: " in (tmp_path / "table.md").read_text()
        again.append((tmp_path / "results.json").read_bytes())
    assert again[0] == again[1]


@pytest.mark.long
def test_an_experiment_that_may_not_diverge_says_so_and_writes_no_table(finished, tmp_path):
    folder, _ = finished
    experiment = small(tmp_path, work=str(folder), methods=("source", "tent", DIVERGING), rates=("fixed",))
    with pytest.raises(NonFiniteError, match="the loss is inf"):
        run_experiment(experiment)
    assert not (tmp_path / "results.json").exists()
