"""What `dltta demo` runs, without running it (slow: tests/cli/test_cli.py)."""

from dataclasses import replace
from pathlib import Path

import pytest

import dltta.evaluation.outputs
from dltta.evaluation.bench import run_experiment
from dltta.evaluation.demo import CHANGING, TASKS, changing_experiment, demo_experiment
from dltta.models.io.checkpoint import load_checkpoint
from dltta.models.io.fingerprint import fingerprint


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("quick", [True, False])
def test_the_scanner_changes_half_way_from_the_sources_to_the_first_target(task, quick):
    experiment = demo_experiment(task, "out", seed=0, quick=quick)
    changing = changing_experiment(experiment, quick=quick)
    stream = changing.open(changing.targets[0])
    sites = [experiment.open(spec).site for spec in (experiment.in_domain, experiment.targets[0])]
    count = CHANGING[task][quick]
    assert [stream[i].site for i in range(0, len(stream), count)] == sites
    assert len(stream) == 2 * count
    assert changing.work_folder == experiment.folder
    assert changing.folder != experiment.folder
    assert {job.rate for job in changing.jobs()} == {"none", "dynamic"}


def test_a_full_demo_has_what_the_story_tells_and_a_quick_one_only_the_papers_methods():
    full, quick = (demo_experiment("oct", "out", seed=0, quick=quick) for quick in (False, True))
    assert set(full.rates) == {"fixed", "dynamic", "matched"}
    assert "recommended" in full.methods
    assert "recommended" in changing_experiment(full, quick=False).methods
    assert "recommended" not in (*quick.methods, *changing_experiment(quick, quick=True).methods)


def made_tiny(experiment, **training):
    """With a few cases, one epoch and the narrowest networks; what else is trained stays the demo's."""

    def few(spec, count):
        phantom, task, site, _, seed = spec.split(":")
        return ":".join((phantom, task, site, str(count), seed, *(["128x48"] if task == "oct" else [])))

    small = replace(experiment.training, epochs=1, autoencoder_epochs=1, autoencoder_width=8, batch_size=4)
    width = {"width": 2} if experiment.network is None else {"width": 4, "growth": 4}
    return replace(
        experiment,
        source=tuple(few(spec, 6 if experiment.network is None else 20) for spec in experiment.source),
        targets=(few(experiment.targets[0], 3),),
        in_domain=few(experiment.in_domain, 2),
        methods=("source", "ptbn", "tent"),
        rates=("fixed",),
        examples=0,
        network_options=width,
        training=replace(small, **training),
        adaptation=replace(experiment.adaptation, batch_size=3 if experiment.network else 1),
    )


@pytest.mark.long
@pytest.mark.parametrize("task", ["oct", "histology"])
def test_the_source_row_is_that_of_a_network_trained_without_any_auxiliary_task(task, tmp_path, monkeypatch):
    """Weights bit for bit, and the scores of every image, also of the methods that start from the source model."""
    monkeypatch.setattr(dltta.evaluation.outputs, "write_report", lambda *_, **__: None)
    found = {}
    for name, changed in (("demo", {}), ("alone", {"with_": ()})):
        experiment = made_tiny(demo_experiment(task, str(tmp_path / name), seed=0, quick=True), **changed)
        streams = run_experiment(experiment).streams
        (model,) = Path(experiment.folder, "models").glob("*/model.json")
        network = load_checkpoint(model.parent)
        scores = [[dict(case.metrics) for case in stream.cases] for stream in streams]
        assert (network.joint is None) == (name == "alone")
        found[name] = (fingerprint(network.model), [stream.method for stream in streams], scores)
    assert found["alone"] == found["demo"]
    assert found["demo"][1] == ["source", "source", "ptbn", "tent"]
