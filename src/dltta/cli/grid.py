"""Where trainings and streams run and who is told: options of `dltta bench`, `dltta reproduce`, `dltta calibrate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from dltta.cli.options import require_device, split_settings
from dltta.errors import SettingError

if TYPE_CHECKING:
    from dltta.evaluation.plan import Plan, Planned
    from dltta.evaluation.runners import Runner
    from dltta.evaluation.tracking import Tracker


class On(StrEnum):
    """Where tasks run."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


class Track(StrEnum):
    """Tools that show results."""

    TENSORBOARD = "tensorboard"
    MLFLOW = "mlflow"


@dataclass(frozen=True)
class Place:
    """Where it runs."""

    panel: ClassVar[str] = "Where it runs (docs/grid.md)"
    on: Annotated[
        On, typer.Option(metavar="PLACE", help="local (this machine), ray (a Ray cluster) or slurm (through submitit).")
    ] = On.LOCAL
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Processor threads of each task.", show_default="cores of this machine / jobs, at least 1"
        ),
    ] = None
    gpus: Annotated[
        float, typer.Option(metavar="N", help="ray, slurm: GPUs of each task; Ray also gives parts, such as 0.5.")
    ] = 0.0
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="ray: a running cluster, auto or HOST:PORT.",
            show_default="a Ray of this machine, for this command only",
        ),
    ] = None
    slurm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="slurm: an option of sbatch, such as partition=gpu or time=240 (minutes); cluster=local runs the jobs "
            "as processes of this machine. Repeat for several.",
            show_default="the cluster's",
        ),
    ] = None

    def runner(self, jobs: int, folder: Path) -> "Runner":
        """What runs so many tasks at the same time; `folder` is for its logs."""
        from dltta.evaluation.runners import Local, Ray, Slurm

        self._check()
        if self.on is On.RAY:
            return Ray(jobs, self.threads, self.gpus, self.address)
        if self.on is On.SLURM:
            options = split_settings(self.slurm)
            cluster = str(options.pop("cluster", "slurm"))
            return Slurm(folder, jobs, self.threads, int(self.gpus), cluster, options)
        return Local(jobs, self.threads)

    def _check(self) -> None:
        """Options of one place are not given for another."""
        if self.threads is not None and self.threads < 1:
            raise SettingError(f"--threads must be at least 1, got {self.threads}")
        if self.gpus < 0 or (self.on is On.SLURM and not self.gpus.is_integer()):
            raise SettingError(f"--gpus is {self.gpus:g}; give 0 or more, and whole ones on SLURM")
        if self.on is On.LOCAL and self.gpus:
            raise SettingError("--gpus is for --on ray and slurm; on this machine give --device cuda")
        if self.on is not On.RAY and self.address is not None:
            raise SettingError("--address is that of a Ray cluster; add --on ray")
        if self.on is not On.SLURM and self.slurm:
            raise SettingError("--slurm is for jobs of SLURM; add --on slurm")

    def device(self, name: str) -> str:
        """The device of the tasks; that of other machines cannot be tried here."""
        return require_device(name) if self.on is On.LOCAL else name


@dataclass(frozen=True)
class GridOptions(Place):
    """Where it runs, and who is told."""

    track: Annotated[
        Track | None,
        typer.Option(
            metavar="TOOL",
            help="Also write every stream for tensorboard or mlflow, into the folder tracking of the results.",
            show_default="none",
        ),
    ] = None

    def tracker(self, folder: Path) -> "Tracker | None":
        """What is told of every stream of the results in `folder`."""
        from dltta.evaluation.tracking import MLflow, TensorBoard

        if self.track is Track.TENSORBOARD:
            return TensorBoard(folder / "tracking" / "tensorboard")
        if self.track is Track.MLFLOW:
            return MLflow(folder / "tracking", folder.name)
        return None


def plan_lines(plan: "Plan", jobs: int) -> list[str]:
    """A plan as text: a line for each task, then what it comes to."""
    lines = [*map(_line, (*plan.trainings, *plan.streams)), ""]
    waiting = plan.waiting
    lines.append(f"{len(waiting)} of {len(plan.trainings) + len(plan.streams)} tasks to run")
    seconds = plan.seconds(jobs)
    if waiting and seconds is not None:
        lines.append(f"about {_time(seconds)} with -j {jobs}, by the seconds of finished ones")
    elif waiting:
        lines.append(f"at least {plan.passes} forward passes (a backward pass counts as two); no finished streams yet")
    return lines


def _line(task: "Planned") -> str:
    state = "done" if task.done else "to run"
    cost = [] if task.done or task.passes is None else [f"{task.passes} passes"]
    cost += [] if task.done or task.seconds is None else [f"about {_time(task.seconds)}"]
    return f"{state:6}  {task.name}" + (f"  ({', '.join(cost)})" if cost else "")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def plan_json(plan: "Plan", jobs: int) -> dict[str, object]:
    """The same for programs."""

    def rows(tasks: "Sequence[Planned]") -> list[dict[str, object]]:
        return [{"name": t.name, "done": t.done, "passes": t.passes, "seconds": t.seconds} for t in tasks]

    return {
        "trainings": rows(plan.trainings),
        "streams": rows(plan.streams),
        "passes": plan.passes,
        "seconds": plan.seconds(jobs),
    }
