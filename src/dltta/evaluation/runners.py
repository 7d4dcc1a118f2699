"""Where do the tasks of an experiment run? In this process, in others of this machine, on Ray, or on SLURM.

A task is one training or one stream. It reads and writes files only and finds out itself whether it is done already,
so it may run anywhere, and again: a task whose worker was lost or preempted is given to another one.
"""

import os
import pickle
import shutil
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import torch

from dltta.errors import DlttaError, SettingError, WorkerLostError
from dltta.models.allocator import keep_freed_memory

ATTEMPTS = 5  # a task that takes its worker down so often is not run again
NEEDS_GRID = "--on {} needs {}; install it: pip install 'dltta[grid]'"
NO_CLUSTER = "no Ray cluster answers at {} ({}); start one, or leave --address out for a Ray of this machine"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # read when torch is imported
Handle = TypeVar("Handle")


@dataclass(frozen=True)
class Task:
    """One training or one stream: a name for people, and a call of a module's function that can be pickled."""

    name: str
    call: Callable[[], object]


Tell = Callable[[Task], None]


class Runner(Protocol):
    """Runs tasks, `jobs` at the same time, each with so many threads; returns when all are done."""

    jobs: int
    threads: int | None  # of each task; None shares this machine's cores among the jobs

    def here(self, count: int) -> bool:
        """Whether so many tasks run one after another in this process."""
        ...

    def run(self, tasks: Sequence[Task], *, threads: int, done: Tell, lost: Tell) -> None:
        """Tell of each task that is done, and of each that runs again because its worker was lost."""
        ...


def threads_each(runner: Runner, count: int) -> int:
    """Threads of each of so many tasks: two teams of threads on the same cores would wait for each other."""
    return runner.threads or max(1, torch.get_num_threads() // max(1, min(runner.jobs, count)))


# what a worker does


class Lost(Enum):
    """In the place of an outcome: the worker is gone, and nobody knows how far the task came."""

    WORKER = "worker"


Outcome = DlttaError | Lost | None


@dataclass(frozen=True)
class Work:
    """A task on its way to a worker: pickled, with the folder, the module path and the threads it is run with."""

    call: bytes
    threads: int
    folder: str = field(default_factory=os.getcwd)
    path: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))

    def __call__(self) -> DlttaError | None:
        """Run it; an error on purpose is the outcome, any other one is a bug and is raised."""
        if not Path(self.folder).is_dir():
            return SettingError(f"this worker does not see {self.folder}; use a file system that all machines share")
        os.chdir(self.folder)
        sys.path += [entry for entry in self.path if entry not in sys.path]
        torch.set_num_threads(self.threads)
        keep_freed_memory()  # as the command does for tasks in its own process
        try:
            pickle.loads(self.call)()
        except DlttaError as error:
            return error
        return None

    def checkpoint(self) -> Any:
        """What SLURM runs after a preemption or when the time is up: the same again, which finds what is done."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def do(work: Work) -> DlttaError | None:
    return work()


def supervise(
    tasks: Sequence[Task],
    jobs: int,
    start: Callable[[Task], Handle],
    ended: Callable[[Sequence[Handle]], Iterable[tuple[Handle, Outcome]]],
    *,
    done: Tell,
    lost: Tell,
) -> None:
    """Keep `jobs` tasks under way until all are done; `ended` waits for some of the handles and says how they ended."""
    waiting = deque((task, 1) for task in tasks)
    running: list[tuple[Handle, Task, int]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            task, attempt = waiting.popleft()
            running.append((start(task), task, attempt))
        for handle, outcome in ended([each for each, _, _ in running]):
            (entry,) = [each for each in running if each[0] is handle]
            running.remove(entry)
            _, task, attempt = entry
            if outcome is Lost.WORKER:
                _require_attempt(task, attempt)
                lost(task)
                waiting.appendleft((task, attempt + 1))
            elif outcome is not None:
                raise outcome
            else:
                done(task)


def _require_attempt(task: Task, attempt: int) -> None:
    if attempt >= ATTEMPTS:
        raise WorkerLostError(
            f"{task.name} lost its worker {attempt} times; look for memory that ran out, and use fewer jobs"
        )


@contextmanager
def using_threads(threads: int) -> Iterator[None]:
    """In this process, while the context lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def variables(threads: int) -> dict[str, str]:
    """The environment of a worker that is still to start."""
    return dict.fromkeys(THREADS, str(threads))


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Processes that start while the context lasts have these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# the three places


@dataclass
class Local:
    """One job runs in this process, several in others of this machine.

    As a context it keeps these processes until the context ends: every one of them takes seconds to start.
    """

    jobs: int = 1
    threads: int | None = None
    _pools: list[ProcessPoolExecutor] = field(default_factory=list, init=False, repr=False, compare=False)
    _kept: int = field(default=0, init=False, repr=False, compare=False)  # contexts that have not ended

    def __enter__(self) -> Self:
        self._kept += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._kept -= 1
        self._end_processes()

    def here(self, count: int) -> bool:
        return min(self.jobs, count) <= 1

    def run(self, tasks: Sequence[Task], *, threads: int, done: Tell, lost: Tell) -> None:
        if not self.here(len(tasks)):
            self._run_in_processes(tasks, threads, done, lost)
            return
        with using_threads(threads):
            for task in tasks:
                task.call()
                done(task)

    def _run_in_processes(self, tasks: Sequence[Task], threads: int, done: Tell, lost: Tell) -> None:
        def start(task: Task) -> "Future[DlttaError | None]":
            work = Work(pickle.dumps(task.call), threads)
            with _environment(variables(threads)):
                if not self._pools:
                    self._pools.append(self._pool())
                try:
                    return self._pools[-1].submit(do, work)
                except BrokenProcessPool:  # one of its processes died, and with it the pool
                    self._pools.append(self._pool())
                    return self._pools[-1].submit(do, work)

        with self:
            supervise(tasks, self.jobs, start, _ended_futures, done=done, lost=lost)

    def _end_processes(self) -> None:
        if self._kept:
            return
        while self._pools:
            self._pools.pop().shutdown(cancel_futures=True)

    def _pool(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(self.jobs, get_context("spawn"))


def _ended_futures(
    futures: "Sequence[Future[DlttaError | None]]",
) -> "Iterator[tuple[Future[DlttaError | None], Outcome]]":
    for future in wait(futures, return_when=FIRST_COMPLETED).done:
        try:
            yield future, future.result()
        except BrokenProcessPool:
            yield future, Lost.WORKER


@dataclass
class Ray:
    """Tasks of a Ray cluster: the one at `address`, or one of this machine that ends with the experiment."""

    jobs: int = 1
    threads: int | None = None
    gpus: float = 0.0  # of each task
    address: str | None = None

    def here(self, count: int) -> bool:
        return False

    def run(self, tasks: Sequence[Task], *, threads: int, done: Tell, lost: Tell) -> None:
        ray = _import("ray", "ray")
        ours = not ray.is_initialized()
        if ours:
            self._join(ray, threads)
        try:
            self._require_room(ray, threads)
            remote = ray.remote(do).options(
                num_cpus=threads, num_gpus=self.gpus, max_retries=0, runtime_env={"env_vars": variables(threads)}
            )

            def start(task: Task) -> Any:
                return remote.remote(Work(pickle.dumps(task.call), threads))

            supervise(tasks, self.jobs, start, lambda handles: _ended_on_ray(ray, handles), done=done, lost=lost)
        finally:
            if ours:
                ray.shutdown()

    def _join(self, ray: Any, threads: int) -> None:
        """A cluster of this machine is reachable from this machine only."""
        if self.address is not None:
            _require_cluster(self.address)
            try:
                ray.init(self.address, log_to_driver=False, logging_level="error")
            except ConnectionError as error:
                raise SettingError(NO_CLUSTER.format(self.address, "none was found")) from error
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(
            "local",
            num_cpus=self.jobs * threads,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            log_to_driver=False,
            logging_level="error",
        )

    def _require_room(self, ray: Any, threads: int) -> None:
        """A task that no machine has room for would wait for ever."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        for resource, wanted, option in (("CPU", threads, "--threads"), ("GPU", self.gpus, "--gpus")):
            most = max((node.get(resource, 0.0) for node in nodes), default=0.0)
            if most < wanted:
                raise SettingError(
                    f"a task wants {wanted:g} {resource}s, the largest machine of this Ray cluster has {most:g}; "
                    f"give {option}"
                )


def _require_cluster(address: str) -> None:
    """Ray itself would try for minutes to reach a machine that does not answer."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        return  # such as auto
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise SettingError(NO_CLUSTER.format(address, error)) from error


def _ended_on_ray(ray: Any, handles: Sequence[Any]) -> Iterator[tuple[Any, Outcome]]:
    errors = ray.exceptions
    gone = (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError, errors.ObjectLostError)
    ready, _ = ray.wait(list(handles), num_returns=1)
    for found in ready:
        (handle,) = [each for each in handles if each == found]
        try:
            yield handle, ray.get(handle)
        except gone:
            yield handle, Lost.WORKER


@dataclass
class Slurm:
    """Jobs of a SLURM cluster through `submitit`; `cluster="local"` runs the same jobs as processes of this machine.

    Jobs that SLURM preempts, or whose time is up, are requeued by submitit and go on; their logs are in `folder`.
    """

    folder: Path
    jobs: int = 1
    threads: int | None = None
    gpus: int = 0  # of each task
    cluster: str = "slurm"
    options: Mapping[str, Any] = field(default_factory=dict)  # of sbatch: partition, account, time, mem, …
    every: float = 0.5  # seconds between two looks at the jobs

    def __post_init__(self) -> None:
        if self.cluster not in ("slurm", "local"):
            raise SettingError(f"cluster of --on slurm must be slurm or local, got {self.cluster!r}")
        if self.cluster == "slurm" and shutil.which("sbatch") is None:
            raise SettingError(
                "there is no sbatch on this machine; run this where SLURM is, or add --slurm cluster=local to run the "
                "jobs as processes here"
            )

    def here(self, count: int) -> bool:
        return False

    def run(self, tasks: Sequence[Task], *, threads: int, done: Tell, lost: Tell) -> None:
        submitit = _import("submitit", "slurm")
        executor = self._executor(submitit, threads)
        started: list[Any] = []

        def start(task: Task) -> Any:
            with _environment(variables(threads)):  # sbatch hands the environment on
                started.append(executor.submit(Work(pickle.dumps(task.call), threads)))
            return started[-1]

        try:
            supervise(tasks, self.jobs, start, lambda jobs: self._ended(submitit, jobs), done=done, lost=lost)
        finally:
            for job in started:
                if not job.done():
                    job.cancel()

    def _executor(self, submitit: Any, threads: int) -> Any:
        executor = submitit.AutoExecutor(self.folder, cluster=self.cluster)
        options = {f"slurm_{name}": value for name, value in self.options.items()}
        shared = {"name": "dltta", "cpus_per_task": threads, "gpus_per_node": self.gpus, "timeout_min": 24 * 60}
        if "time" in self.options:
            del shared["timeout_min"]
        try:
            executor.update_parameters(**shared, **options)
        except (NameError, AssertionError, TypeError, ValueError) as error:
            raise SettingError(
                f"--slurm has a setting that submitit refuses: {' '.join(str(error).split())}"
            ) from error
        return executor

    def _ended(self, submitit: Any, jobs: Sequence[Any]) -> list[tuple[Any, Outcome]]:
        while not (ready := [job for job in jobs if job.done()]):
            time.sleep(self.every)
        return [(job, _slurm_outcome(submitit, job)) for job in ready]


def _slurm_outcome(submitit: Any, job: Any) -> Outcome:
    """A job without a result lost its worker; a failed one is a bug and is raised."""
    error = job.exception()
    if error is None:
        outcome: DlttaError | None = job.result()
        return outcome
    if isinstance(error, submitit.core.utils.FailedJobError):
        raise error
    return Lost.WORKER


def _import(name: str, place: str) -> Any:
    """A package of the extra `grid`."""
    try:
        return __import__(name)
    except ImportError as error:
        raise SettingError(NEEDS_GRID.format(place, name)) from error
