"""Source side. One loop for every kind of training: epochs, resume, several processes.

`learn` repeats a learner's steps and knows nothing else about it. `supervised` gives the usual learner: a module whose
call on (images, labels, random generator) gives a dictionary of losses, whose sum is minimized with Adam.
"""

import io
import os
import pickle
import struct
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dltta.errors import SettingError, StateError
from dltta.files import write_atomically
from dltta.models.fast import speed_up
from dltta.training.examples import derived_seed
from dltta.training.schedules import Schedule, share_of_rate

Batch = Sequence[Tensor]
Losses = dict[str, float]
Row = dict[str, Any]  # one epoch of the history: stage, epoch, mean losses, scores
DAMAGED = (pickle.UnpicklingError, struct.error, RuntimeError, EOFError, ValueError, LookupError)  # altered bytes


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is (`torchrun` says so in the environment)."""

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, device: torch.device) -> "Ranks":
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(hours=2))
        return cls(dist.get_rank(), world)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


@dataclass(frozen=True)
class Plan:
    """What one stage of training does."""

    stage: str
    epochs: int
    batch_size: int  # over all processes together
    learning_rate: float
    seed: int
    workers: int = 0
    schedule: Schedule = "constant"


class TrainingState:
    """Where a training stands, on disk, so that it can stop at any moment; written after every epoch."""

    def __init__(self, path: Path, fingerprint: dict[str, Any], *, resume: bool) -> None:
        self.path, self.fingerprint = path, fingerprint
        self.history: list[Row] = []
        self._saved: dict[str, Any] | None = None
        if resume and path.is_file():
            self._saved = self._read()
            self.history = list(self._saved["history"])

    @property
    def stage(self) -> str | None:
        """The stage that was interrupted, None at the start."""
        return None if self._saved is None else str(self._saved["stage"])

    def restore(self, stage: str, learner: "Learner") -> int:
        """Put the saved state back if it is of this stage; how many epochs of it are done."""
        if self._saved is None or self._saved["stage"] != stage:
            return 0
        learner.load_state_dict(self._saved["learner"])
        return int(self._saved["epoch"])

    def write(self, stage: str, epoch: int, learner: "Learner") -> None:
        state = {
            "fingerprint": self.fingerprint,
            "stage": stage,
            "epoch": epoch,
            "history": self.history,
            "learner": learner.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomically(self.path, buffer.getvalue())

    def close(self) -> None:
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        try:
            saved: dict[str, Any] = torch.load(self.path, map_location="cpu", weights_only=True)
        except OSError as error:
            raise StateError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except DAMAGED as error:
            raise StateError(f"{self.path} is damaged; remove it to start again") from error
        if not isinstance(saved, dict) or set(saved) != {"fingerprint", "stage", "epoch", "history", "learner"}:
            raise StateError(f"{self.path} was written by another version; remove it to start again")
        old, new = saved["fingerprint"], self.fingerprint
        changed = sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))
        if changed:
            key = changed[0]
            raise StateError(
                f"{self.path} is of a training with {key} = {old.get(key)!r}, now {new.get(key)!r}; "
                "resume with the same settings or train into another folder"
            )
        return saved


class Learner(Protocol):
    """What one stage trains. Its state is all that a resumed training needs besides seed and epoch."""

    def train(self) -> object:
        """Before each epoch: layers that behave differently in training do so now."""
        ...

    def step(self, batch: Batch, generator: torch.Generator, progress: float, /) -> Losses:
        """Learn from one batch; `progress` is the share of the stage that is done, from 0 to below 1."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...


class Repeatable(Sized, Protocol):
    """Examples whose random numbers are chosen by the epoch."""

    epoch: int

    def __getitem__(self, index: int, /) -> Any: ...


Report = Callable[[Plan, int, int, int, float], None]  # plan, epoch, batch, batches, running loss
Finish = Callable[[int, Row], None]  # after each epoch: may add to the row and save


@dataclass(frozen=True)
class Supervised:
    """Minimizes the sum of a module's losses; `wrapped` is the module as several processes share it."""

    module: nn.Module
    wrapped: nn.Module
    optimizer: torch.optim.Optimizer
    rate: Callable[[float], float]  # learning rate by progress

    def train(self) -> None:
        self.module.train()

    def step(self, batch: Batch, generator: torch.Generator, progress: float, /) -> Losses:
        images, labels = batch
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(progress)
        losses: dict[str, Tensor] = self.wrapped(images, labels, generator)
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(list(losses.values())).sum().backward()
        self.optimizer.step()
        return {name: loss.item() for name, loss in losses.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])


def supervised(module: nn.Module, plan: Plan, ranks: Ranks) -> Supervised:
    """A learner of the module's parameters that require gradients, with Adam."""
    speed_up(module)
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=plan.learning_rate)
    wrapped = DistributedDataParallel(module, find_unused_parameters=True) if ranks.world > 1 else module
    return Supervised(
        module, wrapped, optimizer, lambda progress: plan.learning_rate * share_of_rate(plan.schedule, progress)
    )


def learn(
    learner: Learner,
    examples: Repeatable,
    plan: Plan,
    journal: TrainingState,
    *,
    device: torch.device,
    ranks: Ranks,
    report: Report,
    finish: Finish,
) -> None:
    """One stage of training; continues where the journal stands."""
    if plan.batch_size % ranks.world:
        raise SettingError(f"batch_size {plan.batch_size} cannot be shared by {ranks.world} processes evenly")
    done = journal.restore(plan.stage, learner)
    for epoch in range(done + 1, plan.epochs + 1):
        examples.epoch = epoch
        generator = torch.Generator().manual_seed(derived_seed(plan.seed, epoch, ranks.rank))
        loader = _loader(examples, plan, epoch, ranks)
        torch.manual_seed(derived_seed(plan.seed, epoch, ranks.rank))  # dropout
        learner.train()
        row: Row = {"stage": plan.stage, "epoch": epoch}
        row.update(_epoch(learner, loader, plan, epoch, generator, device, partial(report, plan, epoch)))
        if ranks.first:
            finish(epoch, row)
            journal.history.append(row)
            journal.write(plan.stage, epoch, learner)
        ranks.wait()


def _epoch(
    learner: Learner,
    loader: DataLoader[Batch],
    plan: Plan,
    epoch: int,
    generator: torch.Generator,
    device: torch.device,
    report: Callable[[int, int, float], None],
) -> Losses:
    """One pass over the examples; the mean of each loss."""
    sums: Losses = {}
    for number, batch in enumerate(loader, start=1):
        progress = (epoch - 1 + (number - 1) / len(loader)) / plan.epochs
        for name, loss in learner.step([part.to(device) for part in batch], generator, progress).items():
            sums[name] = sums.get(name, 0.0) + loss
        report(number, len(loader), sum(sums.values()) / number)
    return {name: total / len(loader) for name, total in sums.items()}


def _loader(examples: Repeatable, plan: Plan, epoch: int, ranks: Ranks) -> DataLoader[Batch]:
    batches = list(_batches(len(examples), plan, epoch, ranks))
    return DataLoader(examples, batch_sampler=batches, num_workers=plan.workers)  # type: ignore[arg-type]  # duck-typed


def _batches(count: int, plan: Plan, epoch: int, ranks: Ranks) -> Iterator[list[int]]:
    """The share that this process has of every batch, in an order that only seed and epoch decide."""
    order = np.random.default_rng([plan.seed, 2, epoch]).permutation(count).tolist()
    order = order[: max(ranks.world, count - count % ranks.world)]  # every process takes part in every batch
    for start in range(0, len(order), plan.batch_size):
        if share := order[start : start + plan.batch_size][ranks.rank :: ranks.world]:
            yield share
