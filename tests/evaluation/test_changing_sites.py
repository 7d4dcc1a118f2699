"""A stream that goes from site to site, as one target of an experiment."""

import json

import pytest

import dltta.evaluation.outputs
from commands import typed
from dltta.errors import DataError
from dltta.evaluation.bench import run_experiment
from dltta.evaluation.experiment import Experiment, Job
from dltta.evaluation.results import Results
from dltta.recipes import Recipe
from dltta.training import TrainingSettings

TARGET = "sequence:phantom:oct:cirrus:3:1,phantom:oct:spectralis:1:2,phantom:oct:cirrus:3:1"


def test_every_method_meets_the_sites_in_the_same_order(tmp_path, monkeypatch):
    monkeypatch.setattr(dltta.evaluation.outputs, "write_report", lambda *_, **__: None)
    results = run_experiment(
        Experiment(
            source=("phantom:oct:spectralis:4",),
            targets=(TARGET,),
            in_domain="none",
            output=str(tmp_path),
            network_options={"width": 2},
            methods=("source", "tent"),
            rates=("dynamic",),
            orders=2,
            training=TrainingSettings(epochs=1, batch_size=2, validation=0.25, with_=("memory",)),
            adaptation=Recipe(batches_kept=2, neighbors=2, prefill=True),
        )
    )
    assert {stream.target for stream in results.streams} == {"cirrus+spectralis+cirrus"}
    for stream in results.streams:
        assert [case.site for case in stream.cases] == ["cirrus"] * 3 + ["spectralis"] + ["cirrus"] * 3
    named = {(s.method, s.rate, s.order): [case.case for case in s.cases] for s in results.streams}
    assert named["source", "none", 0] == named["tent", "dynamic", 0]
    assert named["source", "none", 0] != named["source", "none", 1]
    dynamic = next(s for s in results.streams if (s.method, s.rate) == ("tent", "dynamic"))
    assert dynamic.cases[0].discrepancy is not None  # compared with source images, from the first image on


def test_a_stream_of_many_sites_has_a_file_name_that_can_be_written(tmp_path):
    many = [",".join(f"phantom:oct:cirrus:1:{seed}" for seed in range(start, start + 20)) for start in (100, 101)]
    names = {Job(f"sequence:{sites}", "udas", "none", 0, 0).model for sites in many}
    assert len(names) == 2
    for name in names:
        (tmp_path / f"{name}.json").write_text("")
    assert Job("sequence:a/b,c/d", "udas", "none", 0, 0).model == "udas_b-d_seed_0"


def test_folders_below_the_data_folder_can_be_parts(tmp_path):
    experiment = Experiment(("a",), ("sequence:a,b",), "out", root=str(tmp_path), in_domain="none")
    with pytest.raises(DataError, match=f"no folder {tmp_path / 'b'}"):
        experiment.open("sequence:phantom:oct:cirrus:2,b")


def test_the_command_takes_a_stream_of_several_sites(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dltta.evaluation.outputs, "write_report", lambda *_, **__: None)
    config = (
        'methods = ["tent"]\nrates = ["dynamic"]\nin_domain = "none"\nnetwork_options = { width = 2 }\n'
        "[training]\nvalidation = 0.25\n[adaptation]\nbatches_kept = 4\nneighbors = 2\n"
    )
    (tmp_path / "small.toml").write_text(config)
    code, _, err = typed(
        monkeypatch, capsys, "bench", "small.toml", "--source", "phantom:oct:spectralis:4", "--epochs", "1",
        "--target", TARGET.replace("sequence", "interleave"), "-o", "out", "--prefill",
    )  # fmt: skip
    assert code == 0, err
    stream = Results.load(tmp_path / "out" / "results.json").streams[0]
    assert [case.site for case in stream.cases[:3]] == ["cirrus", "spectralis", "cirrus"]
    assert stream.cases[0].discrepancy is not None  # the four source images fill the memory
    assert json.loads((tmp_path / "out" / "results.json").read_text())["config"]["targets"][0].startswith("interleave:")
