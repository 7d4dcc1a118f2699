"""Progress bars on standard error; results go to standard output."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from dltta.evaluation.experiment import Job, Listener
from dltta.training.fit import Plan, Report

screen = Console(stderr=True)


class Bars(Listener):
    """One bar for each stage of training and one for the streams."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def count(self, what: str) -> Callable[[int, int], None]:
        """A bar for anything that reports how much of how much is done."""
        bar = self.progress.add_task(what, total=None)
        return lambda done, total: self.progress.update(bar, completed=done, total=total)

    def cases(self, total: int | None) -> Callable[[Mapping[str, Any]], None]:
        """A bar for a stream, with the rate and the discrepancy of the latest case."""
        bar = self.progress.add_task("adapt", total=total)

        def tick(line: Mapping[str, Any]) -> None:
            parts = [f"{key} {line[key]:.2g}" for key in ("rate", "discrepancy") if line.get(key) is not None]
            parts += [str(line["guard"])] if line.get("guard") not in (None, "accepted") else []
            self.progress.update(bar, advance=1, note=" ".join(parts))

        return tick

    def training(self, seed: int) -> Report:
        bars: dict[str, TaskID] = {}
        names = {
            "task": "train source model", "atta": "train auto-encoders", "style": "restyle source images",
            "cyclegan": "train translation", "udas": "align outputs", "swav": "learn clusters of both sites",
        }  # fmt: skip

        def report(plan: Plan, epoch: int, batch: int, batches: int, loss: float) -> None:
            if plan.stage not in bars:
                name = f"{names.get(plan.stage, plan.stage)}{f' (seed {seed})' if seed else ''}"
                bars[plan.stage] = self.progress.add_task(name, total=plan.epochs * batches)
            self.progress.update(
                bars[plan.stage], completed=(epoch - 1) * batches + batch, note=f"epoch {epoch} loss {loss:.3f}"
            )

        return report

    def streams(self, total: int) -> Callable[[Job], None]:
        bar = self.progress.add_task("adapt streams", total=total)

        def tick(job: Job) -> None:
            self.progress.update(bar, advance=1, note=f"{job.method} {job.rate if job.rate != 'none' else ''}".strip())

        return tick


@contextmanager
def bars() -> Iterator[Bars]:
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    with _NotedProgress(*columns, console=screen) as progress:
        yield Bars(progress)


class _NotedProgress(Progress):
    """A progress whose tasks have a note from the start."""

    def add_task(self, description: str, *args: Any, **kwargs: Any) -> TaskID:
        return super().add_task(description, *args, **{"note": "", **kwargs})
