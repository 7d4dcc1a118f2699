"""Source and target together. The common frame: what every method is given, how it resumes and what it leaves.

A method is a frozen dataclass of its settings whose `train` turns the frame into a checkpoint. The frame reads the
images, keeps a journal for every stage, writes the record and the model.

MODEL/
  model.json …            the checkpoint, as any other; its record names method, targets and settings
  resume-STAGE.pt         where each stage stands; they go when all is done
  source/ …               source trainings that the method asked for, each a checkpoint folder
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from dltta.core.objectives.objective import Stateful
from dltta.data.case import Dataset, Mapped, Task, without_label
from dltta.data.preprocessing import Preprocessing
from dltta.errors import SettingError
from dltta.models.io.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dltta.models.io.fingerprint import fingerprint
from dltta.models.nets.architecture import Architecture
from dltta.training import SourceTraining, TrainingSettings
from dltta.training.fit import Learner, Plan, Ranks, Repeatable, Report, Row, TrainingState, learn
from dltta.training.source import Log, finished, plain, require_fit
from dltta.training.task import validation_score
from dltta.training.uda.domains import Domains, read_domains


class UDAMethod(Protocol):
    """A way to learn from labeled source and unlabeled target images: a frozen dataclass of its settings."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    name: ClassVar[str]  # as on the command line

    def train(self, training: "UDATraining", /) -> Checkpoint:
        """The adapted model; what its record says is kept beside what the frame records."""
        ...


class Parts:
    """Several things with a state, saved and restored together; a learner is its parts and a `step`."""

    def __init__(self, **parts: Stateful) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])

    def train(self) -> None:
        for part in self.parts.values():
            if isinstance(part, nn.Module):
                part.train()


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """Gradients pass through these modules while the context lasts, but leave nothing in them."""
    for module in modules:
        module.requires_grad_(False)
    try:
        yield
    finally:
        for module in modules:
            module.requires_grad_(True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


@dataclass
class UDATraining:
    """Everything one training with source and target needs; `run` trains and leaves a checkpoint folder.

    Stopped at any moment, `resume` continues after the last whole epoch to the same bits. Nothing is chosen by the
    target: validation is on source cases.
    """

    method: UDAMethod
    sites: Sequence[Dataset]
    targets: Sequence[Dataset]
    architecture: Architecture
    preprocessing: Preprocessing
    settings: TrainingSettings
    folder: Path
    device: torch.device
    resume: bool = False
    report: Report = lambda *at: None
    log: Log = lambda row: None
    source_model: Checkpoint | None = None  # trained on the sites; None trains one if the method needs it
    history: list[Row] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if not self.sites or not self.targets:
            raise SettingError(f"{self.method.name} learns with source and target; give --source and --target sites")
        self._require_own_source_model()
        self.targets = [Mapped(site, without_label) for site in self.targets]
        self.settings = replace(self.settings, with_=())

    def found(self) -> Checkpoint | None:
        """The model, if it is there already."""
        return finished(self.folder, self.fingerprint) if self.resume else None

    def run(self) -> Checkpoint:
        if (found := self.found()) is not None:
            return found
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise SettingError(f"{self.method.name} trains in one process; start it without torchrun")
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.resume:
            self._forget()
        self.domains: Domains = read_domains(self.sites, self.targets, self.preprocessing, self.settings)
        require_fit(self.architecture, channels=len(self.domains.target.images[0]), classes=len(self.classes))
        trained = self.method.train(self)
        save_checkpoint(self.folder, replace(trained, record={**trained.record, **self._record(trained)}))
        self._forget()
        return load_checkpoint(self.folder)

    # ---- what methods use

    @property
    def task(self) -> Task:
        return self.sites[0].task

    @property
    def classes(self) -> tuple[str, ...]:
        return self.sites[0].classes

    @property
    def spatial_dims(self) -> int:
        return self.architecture.spatial_dims

    def network(self) -> nn.Module:
        """A new task network on the device."""
        return self.architecture.build(seed=self.settings.seed).to(self.device)

    def checkpoint(self, model: nn.Module, architecture: Architecture | None = None, **record: Any) -> Checkpoint:
        """A model as `train` returns it; `record` is what is worth knowing beyond the settings."""
        built = architecture or self.architecture
        return Checkpoint(model, built, self.task, self.classes, self.preprocessing, record)

    def source(self) -> Checkpoint:
        """The source model, in evaluation mode: the one given, or trained in `source/`."""
        if self.source_model is not None:
            return self.source_model
        return self.train_source(self.sites, "source")

    def train_source(self, sites: Sequence[Dataset], name: str, start: nn.Module | None = None) -> Checkpoint:
        """A plain source training in the folder `name`, on these sites, from these weights; resumable like any."""
        training = SourceTraining(
            sites,
            self.architecture,
            self.preprocessing,
            self.settings,
            self.folder / name,
            self.device,
            self.resume,
            self.report,
            self.log,
            start,
        )
        return training.run()

    def learn(
        self, learner: Learner, examples: Repeatable, plan: Plan, *, score: Callable[[], float | None] = lambda: None
    ) -> None:
        """One stage: fills the learner; a stage that was finished before an interruption is only restored.

        `score` is called after each epoch; with a network that already does the task it is `training.score(network)`.
        """
        journal = TrainingState(self.folder / f"resume-{plan.stage}.pt", self.fingerprint, resume=self.resume)
        before = journal.history[-1]["seconds"] if journal.history else 0.0
        started = time.perf_counter()

        def finish(epoch: int, row: Row) -> None:
            row["score"] = score()
            row["seconds"] = before + time.perf_counter() - started
            self.log(row)

        learn(
            learner, examples, plan, journal, device=self.device, ranks=Ranks(), report=self.report, finish=finish
        )  # fmt: skip
        self.history += journal.history

    def score(self, model: nn.Module) -> float | None:
        """Mean foreground Dice or accuracy on the source cases kept for validation, None without any."""
        pairs = self.domains.validation
        if not pairs:
            return None
        return validation_score(model, pairs, self.task, len(self.classes), self.settings.patch)

    # ---- what is written

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What must be the same for a training to be continued; as JSON gives it back."""
        source = {} if self.source_model is None else {"source": fingerprint(self.source_model.model)}
        return {
            "uda": self.described,
            "sites": [[site.site, len(site)] for site in self.sites],
            "targets": [[site.site, len(site)] for site in self.targets],
            "architecture": self.architecture.as_json(),
            "preprocessing": plain(self.preprocessing.as_json()),
            **plain(self.settings.as_json()),
            **source,
        }

    @property
    def described(self) -> dict[str, Any]:
        """The method and its settings."""
        return {"method": self.method.name, **plain(asdict(self.method))}

    def _record(self, trained: Checkpoint) -> dict[str, Any]:
        inner = list(trained.record.get("history", []))
        history = [*self.history, *inner]
        return {
            "sites": [site.site for site in self.sites],
            "uda": {
                **self.described,
                "targets": [site.site for site in self.targets],
                "target_images": len(self.domains.target),
            },
            **self.domains.counts,
            "metric": "dice" if self.task == "segmentation" else "accuracy",
            "epoch": history[-1]["epoch"] if history else 0,
            "score": self.score(trained.model.to(self.device)),
            "history": history,
            "fingerprint": self.fingerprint,
            "finished": True,
        }

    def _require_own_source_model(self) -> None:
        given = self.source_model
        if given is not None and given.architecture.as_json() != self.architecture.as_json():
            raise SettingError(f"the source model is {given.architecture}, not {self.architecture}; train another")
        if given is not None and given.preprocessing != self.preprocessing:
            raise SettingError(f"the source model is for {given.preprocessing}, not {self.preprocessing}")

    def _forget(self) -> None:
        for file in self.folder.glob("resume-*.pt"):
            file.unlink()
