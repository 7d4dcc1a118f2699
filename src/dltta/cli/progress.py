"""How far a command has come: bars on a terminal, now and then a line elsewhere. On standard error, always."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from dltta.evaluation.experiment import Job
from dltta.evaluation.listener import Listener
from dltta.quality.decision import Outcome
from dltta.training.fit import Plan, Report

EVER = math.inf  # the time left is estimated from the latest 1000 updates, however long ago
EVERY = 30.0  # seconds between two lines where there is no terminal
STAGES = {
    "task": "train model", "ttt": "train for TTT", "ttt++": "train for TTT++", "dtta": "train for DTTA",
    "denoiser": "denoiser", "atta": "auto-encoders", "style": "restyle images", "cyclegan": "translation",
    "udas": "align outputs", "swav": "clusters", "calibration": "calibrate",
}  # fmt: skip


class Bars(Listener):
    """One bar for each stage of training and one for the streams."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def say(self, sentence: str) -> None:
        """A line above the bars."""
        self.progress.console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def count(self, what: str) -> Callable[[int, int], None]:
        """A bar for anything that reports how much of how much is done."""
        bar = self._add(what, None)
        return lambda done, total: self.progress.update(bar, completed=done, total=total)

    def cases(self, total: int | None) -> Callable[[Mapping[str, Any]], None]:
        """A bar for a stream, with the rate and the discrepancy of the latest case."""
        bar = self._add("adapt", total)

        def tick(line: Mapping[str, Any]) -> None:
            parts = [f"{key} {line[key]:.2g}" for key in ("rate", "discrepancy") if line.get(key) is not None]
            parts += [str(line["decision"])] if line.get("decision") not in (None, Outcome.ACCEPTED) else []
            self.progress.update(bar, advance=1, note=" ".join(parts))

        return tick

    def parts(self) -> Callable[[int, int], None]:
        """A bar for the slices or windows of the case at work, where it has several; gone when it is done."""
        bar: list[TaskID] = []

        def tick(done: int, total: int) -> None:
            if total < 2:
                return
            if not bar:
                bar.append(self._add("  within the case", total))
            elif done == 0:
                self.progress.reset(bar[0], total=total)
            self.progress.update(bar[0], completed=done, total=total, visible=done < total)

        return tick

    def training(self, seed: int) -> Report:
        bars: dict[str, TaskID] = {}

        def report(plan: Plan, epoch: int, batch: int, batches: int, loss: float) -> None:
            if plan.stage not in bars:
                name = f"{STAGES.get(plan.stage, plan.stage)}{f' (seed {seed})' if seed else ''}"
                bars[plan.stage] = self._add(name, plan.epochs * batches)
            note = "" if math.isnan(loss) else f"epoch {epoch} loss {loss:.3f}"
            self.progress.update(bars[plan.stage], completed=(epoch - 1) * batches + batch, note=note)

        return report

    def rehearsal(self, seed: int) -> Callable[[int, int], None]:
        bars: list[TaskID] = []

        def report(done: int, total: int) -> None:
            if not bars:
                bars.append(self._add(f"rehearse{f' (seed {seed})' if seed else ''}", total))
            self.progress.update(bars[0], completed=done, note="simulated sites")

        return report

    def trainings(self, total: int) -> Callable[[str], None]:
        bar = self._add("train models", total)
        return lambda name: self.progress.update(bar, advance=1, note=name)

    def rehearsals(self, total: int) -> Callable[[str], None]:
        bar = self._add("rehearse models", total)
        return lambda name: self.progress.update(bar, advance=1, note=name)

    def lost(self, name: str) -> None:
        self.progress.console.print(f"lost a worker; running again: {name}", markup=False, highlight=False)

    def streams(self, total: int) -> Callable[[Job], None]:
        bar = self._add("adapt streams", total)

        def tick(job: Job) -> None:
            self.progress.update(bar, advance=1, note=f"{job.method} {job.rate if job.rate != 'none' else ''}".strip())

        return tick

    def _add(self, name: str, total: int | None) -> TaskID:
        return self.progress.add_task(name, total=total, note="")


@contextmanager
def bars(console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> Iterator[Bars]:
    """What a command reports its progress to."""
    console = console or Console(stderr=True)
    kind = Progress if console.is_terminal else _Lines
    with kind(*_columns(), console=console, get_time=clock, expand=True, speed_estimate_period=EVER) as progress:
        yield Bars(progress)


def _columns() -> tuple[ProgressColumn, ...]:
    """Names and notes are printed as they are; the bar gives way where the line is too long."""
    return (
        TextColumn("{task.description}", markup=False),
        BarColumn(None, table_column=Column(max_width=40, ratio=1)),
        _Times(),
        TextColumn("{task.fields[note]}", markup=False),
    )


class _Times(ProgressColumn):
    """`12/40 0:01:05, 0:02:32 left`."""

    def render(self, task: Task) -> Text:
        return Text(_sentence(task), no_wrap=True)


def _sentence(task: Task, after: str = "") -> str:
    """How much of how much is done, the time it took, and the time left where both are known."""
    total = "" if task.total is None else f"/{task.total:.0f}"
    left = "" if task.finished or task.time_remaining is None else f", {_time(task.time_remaining)} left"
    return f"{task.completed:.0f}{total} {after}{_time(task.elapsed or 0.0)}{left}"


def _time(seconds: float) -> str:
    days, rest = divmod(int(seconds), 86400)
    return f"{days} d {rest // 3600} h" if days else str(timedelta(seconds=rest))


class _Lines(Progress):
    """A line every so often and one at the end, for logs."""

    def __init__(self, *columns: ProgressColumn, **settings: Any) -> None:
        super().__init__(*columns, **settings, disable=True)  # nothing is drawn
        self._said: dict[TaskID, str] = {}
        self._latest = self.get_time()

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        if self.get_time() - self._latest >= EVERY:
            self._say(self._tasks[task_id])

    def stop(self) -> None:
        """Nothing was begun that would have to end; older versions of rich end with an empty line."""
        for task in self.tasks:
            if task.completed or task.total is not None:  # else it never began
                self._say(task)

    def _say(self, task: Task) -> None:
        text = " ".join(f"{task.description} {_sentence(task, 'after ')} {task.fields['note']}".split())
        if self._said.get(task.id) != text:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._said[task.id], self._latest = text, self.get_time()
