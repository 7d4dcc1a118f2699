"""What `dltta demo` runs, without running it (slow: tests/cli/test_cli.py)."""

import pytest

from dltta.evaluation.demo import CHANGING, TASKS, changing_experiment, demo_experiment


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
