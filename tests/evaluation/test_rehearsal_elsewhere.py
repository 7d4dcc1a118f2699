"""A rehearsal whose streams run in other processes: the same bytes, also when workers are killed."""

import pytest

from dltta.config import open_target
from dltta.errors import StateError
from dltta.evaluation.home import Rehearsing, calibrate_model
from dltta.evaluation.runners import Local, Ray, Slurm, using_threads
from dltta.models.io.opening import ModelSource
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
    rehearsing = Rehearsing(DyingSource(str(model)), site, folder, 0, "cpu")
    elsewhere = None if runner is None else rehearsing.on(runner, done, lost)
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
    assert len(set(runner.names)) == len(runner.names) == 7  # the source, two sites, one that changes, harmful ones
    assert seen == [(number, 7) for number in range(1, 8)]


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
