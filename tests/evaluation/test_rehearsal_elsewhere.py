"""A rehearsal whose streams run in other processes: the same bytes, also when workers are killed."""

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from dltta.config import open_dataset, open_target
from dltta.errors import StateError
from dltta.evaluation.home import calibrate_model, checkpoint_setup, rehearse_checkpoint, site_setup, streams_on
from dltta.evaluation.runners import Local, Ray, Slurm, using_threads
from dltta.models.io.opening import ModelSource
from dltta.training import TrainingSettings
from dying import DEATHS, DyingSource
from streams import save_model, write_site

pytestmark = pytest.mark.usefixtures("short_rehearsal", "no_power_cut")


def ignore(*at):
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder, with labeled images beside it."""
    folder = tmp_path_factory.mktemp("source")
    write_site(folder / "site")
    return save_model(folder / "model")


@pytest.fixture
def deaths(tmp_path, monkeypatch):
    folder = tmp_path / "deaths"
    folder.mkdir()
    monkeypatch.setenv(DEATHS, str(folder))
    return folder


def rehearsed(model, folder, runner=None, lost=ignore, done=ignore):
    """The bytes of what was learned."""
    site = str(model.parent / "site")
    prepare = partial(site_setup, DyingSource(str(model)), site, 0, "cpu")
    elsewhere = None if runner is None else streams_on(runner, prepare, folder, done=done, lost=lost)
    with using_threads(1):
        calibrate_model(ModelSource(str(model)).open(), open_target(site), folder, elsewhere=elsewhere)
    assert not (folder / "rehearsal.parts").exists()
    return (folder / "rehearsal.json").read_bytes()


class Here:
    """Runs every task in this process, the last one first."""

    jobs, threads = 2, 1

    def __init__(self):
        self.names = []

    def here(self, count):
        return False

    def run(self, tasks, *, threads, done, lost):
        for task in reversed(tasks):
            task.call()
            self.names.append(task.name)
            done(task)


@pytest.mark.long
def test_streams_in_another_order_and_place_give_the_same_bytes(model, tmp_path, deaths):
    runner, seen = Here(), []
    found = rehearsed(model, tmp_path / "there", runner, done=lambda *at: seen.append(at))
    assert found == rehearsed(model, tmp_path / "here")
    assert len(set(runner.names)) == len(runner.names) == 9  # the source, two sites, one that changes, five harmful
    assert seen == [(number, 9) for number in range(1, 10)]


@pytest.mark.long
def test_a_trained_model_rehearses_elsewhere_with_the_cases_that_training_kept(model, tmp_path):
    sites, settings = [open_dataset(str(model.parent / "site"))], TrainingSettings(validation=0.5)
    found, runner = [], Here()
    for name in ("here", "there"):
        folder = Path(shutil.copytree(model, tmp_path / name))
        prepare = partial(checkpoint_setup, folder, sites, settings, "cpu")
        elsewhere = streams_on(runner, prepare, folder, done=ignore, lost=ignore) if name == "there" else None
        with using_threads(1):
            rehearse_checkpoint(folder, sites, settings, device=torch.device("cpu"), elsewhere=elsewhere)
        found.append((folder / "rehearsal.json").read_bytes())
    assert found[0] == found[1]
    assert len(runner.names) == 9


@pytest.mark.long
def test_what_is_there_is_not_run_again_and_what_is_missing_is_said(model, tmp_path, deaths):
    class Forgetful(Here):
        def run(self, tasks, **told):
            super().run(tasks[1:], **told)

    with pytest.raises(StateError, match="was rehearsed by a worker, but is not here"):
        rehearsed(model, tmp_path / "out", Forgetful())
    runner = Here()
    rehearsed(model, tmp_path / "out", runner)
    assert len(runner.names) == 1


@pytest.mark.long
@pytest.mark.parametrize("place", ["local", "ray", "slurm"])
def test_killed_workers_leave_no_trace(model, tmp_path, deaths, place):
    for package in {"ray": ["ray"], "slurm": ["submitit"]}.get(place, []):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'dltta[grid]'")
    runner = {
        "local": Local(2, threads=1),
        "ray": Ray(2, threads=1),
        "slurm": Slurm(tmp_path / "jobs", 2, threads=1, cluster="local"),
    }[place]
    expected = rehearsed(model, tmp_path / "here")
    (deaths / "one").touch()
    lost = []
    assert rehearsed(model, tmp_path / "there", runner, lost.append) == expected
    assert not list(deaths.iterdir())
    assert lost
