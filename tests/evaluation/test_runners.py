"""A grid of tasks, wherever it runs: the same bytes, also when workers are killed."""

import os
import pickle
import platform
import resource
import socket
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dltta.errors import DataError, SettingError, WorkerLostError
from dltta.evaluation.bench import run_experiment
from dltta.evaluation.experiment import Experiment
from dltta.evaluation.listener import Listener
from dltta.evaluation.runners import ATTEMPTS, Local, Lost, Ray, Slurm, Task, Work, supervise, threads_each
from dltta.recipes import Recipe
from dltta.training import TrainingSettings
from dying import DEATHS

METHOD = "dying:Dying"
FILES = ("results.json", "table.md", "table.tex", "table.csv")


def small(folder, **options):
    settings = {
        "source": ("phantom:oct:spectralis:4",), "targets": ("phantom:oct:cirrus:3:1",), "output": str(folder),
        "network_options": {"width": 2}, "methods": ("source", METHOD), "rates": ("dynamic", "matched"), "examples": 1,
        "in_domain": "none", "training": TrainingSettings(epochs=1, batch_size=2, validation=0.25),
        "adaptation": Recipe(batches_kept=2, neighbors=1), **options,
    }  # fmt: skip
    return Experiment(**settings)


class Losses(Listener):
    def __init__(self):
        self.names = []

    def lost(self, name):
        self.names.append(name)


@pytest.fixture
def deaths(tmp_path, monkeypatch):
    """How many processes die is how many files are in it."""
    folder = tmp_path / "deaths"
    folder.mkdir()
    monkeypatch.setenv(DEATHS, str(folder))
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What one process gives, one stream after another, with one thread."""
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DEATHS, str(tmp_path_factory.mktemp("no_deaths")))
        run_experiment(small(folder), runner=Local(threads=1))
    return folder


def written(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def check_grid(runner, reference, folder, deaths, count):
    """So many workers die as a stream begins; the results do not show it."""
    for number in range(count):
        (deaths / str(number)).touch()
    told = Losses()
    run_experiment(small(folder), runner=runner, listener=told)
    assert not list(deaths.iterdir())
    assert len(told.names) >= count  # with a process of this machine its pool is lost
    assert written(folder) == written(reference)


# whole grids


@pytest.mark.long
def test_processes_of_this_machine_give_the_same_bytes_though_one_is_killed(reference, tmp_path, deaths):
    check_grid(Local(2, threads=1), reference, tmp_path / "out", deaths, 1)


@pytest.mark.long
def test_ray_gives_the_same_bytes_though_two_workers_are_killed(reference, tmp_path, deaths):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'dltta[grid]'")
    check_grid(Ray(2, threads=1), reference, tmp_path / "out", deaths, 2)


@pytest.mark.long
def test_submitit_gives_the_same_bytes_though_a_job_is_killed(reference, tmp_path, deaths):
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'dltta[grid]'")
    check_grid(Slurm(tmp_path / "jobs", 2, threads=1, cluster="local"), reference, tmp_path / "out", deaths, 1)


# tasks by hand


def leave(folder, name, text="done"):
    (Path(folder) / name).write_text(text)


def leave_threads(folder, name):
    leave(folder, name, f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']}")


def leave_faults(folder, name):
    """How many pages the system gives out for a block that was used and freed before."""

    def used():
        block = bytearray(64 << 20)  # 16,384 pages, all written
        block[::4096] = bytes([1]) * len(block[::4096])

    used()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    used()
    leave(folder, name, str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before))


def refuse():
    raise DataError("no such site")


def ignore(task):
    pass


def test_threads_are_shared_by_the_tasks_that_run_at_the_same_time(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert threads_each(Local(2), 5) == 4
    assert threads_each(Local(4), 1) == 8
    assert threads_each(Local(20), 20) == 1
    assert threads_each(Local(4, threads=3), 5) == 3


def test_one_job_runs_here_in_order_with_its_threads_and_leaves_ours(tmp_path):
    before, seen = torch.get_num_threads(), []
    tasks = [Task(str(n), partial(lambda n: seen.append((n, torch.get_num_threads())), n)) for n in range(3)]
    done = []
    Local().run(tasks, threads=before + 1, done=done.append, lost=ignore)
    assert seen == [(0, before + 1), (1, before + 1), (2, before + 1)]
    assert done == tasks
    assert torch.get_num_threads() == before


@pytest.mark.long
def test_processes_have_their_threads_from_the_start_and_errors_come_back(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    tasks = [Task(name, partial(leave_threads, tmp_path, name)) for name in ("a", "b")]
    Local(2).run(tasks, threads=1, done=ignore, lost=ignore)
    assert [(tmp_path / name).read_text() for name in ("a", "b")] == ["1 1", "1 1"]
    assert os.environ["OMP_NUM_THREADS"] == "7"
    with pytest.raises(DataError, match="no such site"):
        Local(2).run([Task("x", refuse), Task("y", refuse)], threads=1, done=ignore, lost=ignore)


def leave_process(folder, name):
    leave(folder, name, str(os.getpid()))


@pytest.mark.long
def test_processes_are_kept_as_long_as_the_context_lasts(tmp_path):
    def processes(runner, *names):
        runner.run(
            [Task(name, partial(leave_process, tmp_path, name)) for name in names], threads=1, done=ignore, lost=ignore
        )
        return {int((tmp_path / name).read_text()) for name in names}

    with Local(2) as runner:
        first = processes(runner, "a", "b", "c", "d")
        assert processes(runner, "e", "f", "g", "h") <= first
        assert len(first) <= 2
    for process in first:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert not processes(runner, "i", "j") & first


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc")
def test_processes_keep_freed_memory_as_the_command_does(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    tasks = [Task(name, partial(leave_faults, tmp_path, name)) for name in ("a", "b")]
    Local(2).run(tasks, threads=1, done=ignore, lost=ignore)
    assert all(int((tmp_path / name).read_text()) < 1000 for name in ("a", "b"))


def test_a_worker_goes_to_the_folder_and_finds_the_modules_of_the_task(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = Work(pickle.dumps(partial(leave, ".", "here")), torch.get_num_threads())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert work() is None
    assert (tmp_path / "here").read_text() == "done"
    gone = Work(work.call, 1, folder=str(tmp_path / "gone"))
    assert isinstance(gone(), SettingError)


def test_a_preempted_job_is_the_same_again():
    pytest.importorskip("submitit", reason="submitit is not installed: pip install 'dltta[grid]'")
    work = Work(pickle.dumps(ignore), 1)
    again = work.checkpoint()
    assert (again.function, again.args) == (work, ())


class Workers:
    """Handles that end in the order of starting, with what is on the list."""

    def __init__(self, *outcomes):
        self.outcomes, self.most, self.started = list(outcomes), 0, []

    def start(self, task):
        self.started.append(task.name)
        return [task.name]

    def ended(self, handles):
        self.most = max(self.most, len(handles))
        yield handles[0], self.outcomes.pop(0)


def test_lost_tasks_are_started_again_and_never_more_than_the_jobs_are_under_way():
    workers, done, lost = Workers(None, Lost.WORKER, None, None), [], []
    tasks = [Task(name, ignore) for name in "abc"]
    supervise(tasks, 2, workers.start, workers.ended, done=done.append, lost=lost.append)
    assert workers.started == ["a", "b", "c", "b"]
    assert [task.name for task in done] == ["a", "c", "b"]
    assert [task.name for task in lost] == ["b"]
    assert workers.most == 2


def test_a_task_that_always_takes_its_worker_down_ends_the_grid():
    workers, lost = Workers(*[Lost.WORKER] * ATTEMPTS), []
    with pytest.raises(WorkerLostError, match=f"a lost its worker {ATTEMPTS} times"):
        supervise([Task("a", ignore)], 2, workers.start, workers.ended, done=ignore, lost=lost.append)
    assert len(workers.started) == ATTEMPTS
    assert len(lost) == ATTEMPTS - 1


def test_an_error_on_purpose_ends_the_grid_at_once():
    workers = Workers(DataError("broken"), None)
    with pytest.raises(DataError, match="broken"):
        supervise([Task(n, ignore) for n in "ab"], 1, workers.start, workers.ended, done=ignore, lost=ignore)
    assert workers.started == ["a"]


def test_what_is_not_installed_or_not_here_is_one_sentence(tmp_path, monkeypatch):
    with pytest.raises(SettingError, match="slurm or local, got 'pbs'"):
        Slurm(tmp_path, cluster="pbs")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingError, match=r"--on ray needs ray; install it: pip install 'dltta\[grid\]'"):
        Ray().run([Task("a", ignore)], threads=1, done=ignore, lost=ignore)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingError, match="there is no sbatch on this machine"):
        Slurm(tmp_path / "jobs")


def unreachable(*args, **options):
    raise ConnectionError("could not find any running Ray instance")


@pytest.mark.parametrize(("scheme", "known"), [("", False), ("ray://", False), ("auto", True)])
def test_a_ray_cluster_that_does_not_answer_is_one_sentence_at_once(monkeypatch, scheme, known):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        address = scheme if known else f"{scheme}127.0.0.1:{taken.getsockname()[1]}"
        start = unreachable if known else lambda *args, **options: pytest.fail("it would try for minutes")
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=start))
        with pytest.raises(SettingError, match=f"no Ray cluster answers at {address} .*leave --address out"):
            Ray(address=address).run([Task("a", ignore)], threads=1, done=ignore, lost=ignore)
