"""Source side. Trains the source model on labeled source images — Eq. (1) — and what TTT and ATTA need beside it.

Stages, in this order, each resumable: `task` trains the source model with the task loss alone; `ttt`, if asked for,
trains a second network from the same initial weights on the same batches, jointly with rotation; `atta`, if asked for,
trains auto-encoders on the source model. So the source model is the same bits whatever else is trained.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dltta.data.case import Dataset, Task
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError, SettingError, StateError
from dltta.models.encoder import encode, shared_parameters
from dltta.models.features import find_feature_layer
from dltta.models.io.checkpoint import (
    Checkpoint,
    Reconstructions,
    Rotation,
    load_checkpoint,
    save_checkpoint,
)
from dltta.models.io.fingerprint import fingerprint
from dltta.models.nets.architecture import Architecture
from dltta.models.normalization import kept_statistics
from dltta.models.parts.autoencoders import DENSENET_LEVELS, UNET_LEVELS, AutoEncoders, LevelOutputs
from dltta.models.parts.rotation import TURNS, RotationHead, rotation_loss
from dltta.training.calibration import MOST, calibrate
from dltta.training.examples import Examples, Pair, augmentation, gather, read_pairs, require_one_size, split_by_group
from dltta.training.fit import Plan, Ranks, Report, Row, TrainingState, learn, supervised
from dltta.training.pairs import COUNT, source_pairs
from dltta.training.settings import LEARNING_RATES, TrainingSettings
from dltta.training.task import TaskLoss, validation_score

LEVELS = {"unet": UNET_LEVELS, "densenet121": DENSENET_LEVELS, "densenet_small": DENSENET_LEVELS}
Stage = Literal["task", "ttt", "atta"]
STAGES = get_args(Stage)  # in order
LOSSES = {"task": ["task"], "ttt": ["task", "rotation"]}  # that each network is trained with, of equal weight
Log = Callable[[Row], None]


class TaskTraining(nn.Module):
    """The task loss and, with a rotation head, the rotation loss with equal weight (Sun et al. 2020).

    Rotated images never reach the stored statistics of normalization layers, which are for upright ones.
    """

    def __init__(self, model: nn.Module, loss: TaskLoss, rotation: Rotation | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.head = rotation.head if rotation is not None else None
        self.layer = rotation.layer if rotation is not None else ""

    def forward(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        losses = {"task": self.loss(self.model(images), labels)}
        if self.head is not None:
            turns = torch.randint(len(TURNS), (len(images),), generator=generator).to(images.device)
            with kept_statistics(self.model):
                losses["rotation"] = rotation_loss(self.model, self.head, self.layer, images, turns)
        return losses


class ReconstructionTraining(nn.Module):
    """The reconstruction errors of the auto-encoders; the task network is frozen and in evaluation mode (ATTA)."""

    def __init__(self, model: nn.Module, parts: Reconstructions) -> None:
        super().__init__()
        self.model, self.autoencoders = model.requires_grad_(False), parts.autoencoders
        self.watch = LevelOutputs(parts.levels)
        self.watch.attach(self.model)

    def forward(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        self.model.eval()
        with torch.enable_grad():  # the watch looks only then; nothing in the frozen network records a graph
            self.model(images)
        return self.autoencoders.errors({name: seen.detach() for name, seen in self.watch.take().items()})


@dataclass
class SourceTraining:
    """Everything one source training needs; `run` trains and leaves a checkpoint folder.

    The folder holds the best source model so far (by validation on source images; the last one without validation)
    and, in `last/`, the last; `ttt/` the same for the network of TTT. After every epoch `resume.pt` says where the
    training stands; it goes when all is done.
    """

    sites: Sequence[Dataset]
    architecture: Architecture
    preprocessing: Preprocessing
    settings: TrainingSettings
    folder: Path
    device: torch.device
    resume: bool = False
    report: Report = lambda *at: None
    log: Log = lambda row: None
    start: nn.Module | None = None  # the network to begin with; None begins with a new one

    def run(self) -> Checkpoint:
        interrupted = (self.folder / "resume.pt").is_file()
        if self.resume and not interrupted and (found := finished(self.folder, self._fingerprint())) is not None:
            return found
        self._read()
        self.ranks = Ranks.join(self.device)
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = TrainingState(self.folder / "resume.pt", self._fingerprint(), resume=self.resume)
        source = self._train_network("task", self.folder)
        joint = self._train_network("ttt", self.folder / "ttt") if "ttt" in self.settings.with_ else None
        parts = self._train_autoencoders(source) if "atta" in self.settings.with_ else None
        if self.ranks.first:
            measured = None if joint is None else self._measured(joint)
            source = self._measured(replace(source, reconstructions=parts, joint=measured))
            history = {**source.record, "history": self.journal.history}
            save_checkpoint(self.folder, replace(source, record=history))
            self.journal.close()
        self.ranks.wait()
        return load_checkpoint(self.folder)

    def _read(self) -> None:
        cases = gather(self.sites)
        pairs = read_pairs(cases, self.preprocessing)
        if self.settings.patch is None:
            require_one_size(cases, pairs)
        training, validation = split_by_group(cases, self.settings.validation, self.settings.seed)
        self.task: Task = self.sites[0].task
        self.classes = self.sites[0].classes
        augment = augmentation(
            self.settings.augmentation,
            self.architecture.spatial_dims,
            self.settings.patch,
            dense=self.task == "segmentation",
        )
        self.training = Examples([pairs[i] for i in training], augment, seed=self.settings.seed)
        self.validation: list[Pair] = [pairs[i] for i in validation]
        self.counts = {"cases": len(cases), "training": len(training), "validation": len(validation)}
        require_fit(self.architecture, channels=len(pairs[0][0]), classes=len(self.classes))

    def _fingerprint(self) -> dict[str, Any]:
        """What must be the same for a training to be continued; as JSON gives it back."""
        start = {} if self.start is None else {"start": fingerprint(self.start)}
        return {
            "sites": [[site.site, len(site)] for site in self.sites],
            "architecture": self.architecture.as_json(),
            "preprocessing": plain(self.preprocessing.as_json()),
            **plain(self.settings.as_json()),
            **start,
        }

    def _train_network(self, stage: Stage, folder: Path) -> Checkpoint:
        """The best network of a stage; a stage that an interrupted training had left behind is only read."""
        if STAGES.index(self.journal.stage or STAGES[0]) <= STAGES.index(stage):
            self._fit_network(stage, folder)
        return load_checkpoint(folder)

    def _fit_network(self, stage: Stage, folder: Path) -> None:
        new = self.architecture.build(seed=self.settings.seed) if self.start is None else copy.deepcopy(self.start)
        model = new.to(self.device)
        rotation = self._rotation(model, self._sample()) if stage == "ttt" else None
        module = TaskTraining(model, TaskLoss(self.settings.loss), rotation).to(self.device)
        best = max((row["score"] for row in self._history(stage) if row["score"] is not None), default=-math.inf)
        started = time.perf_counter()

        def finish(epoch: int, row: Row) -> None:
            nonlocal best
            row["score"] = self._score(model)
            row["seconds"] = time.perf_counter() - started
            self.log(row)
            record = self._record(stage, row)
            checkpoint = Checkpoint(
                model, self.architecture, self.task, self.classes, self.preprocessing, record, rotation
            )
            save_checkpoint(folder / "last", checkpoint)
            if row["score"] is None or row["score"] > best:
                best = -math.inf if row["score"] is None else row["score"]
                save_checkpoint(folder, checkpoint)

        rate = self.settings.learning_rate or LEARNING_RATES[self.task]
        plan = Plan(
            stage, self.settings.epochs, self.settings.batch_size, rate, self.settings.seed, self.settings.workers
        )
        self._fit(module, plan, finish)

    def _train_autoencoders(self, trained: Checkpoint) -> Reconstructions:
        parts = self._reconstructions(trained)
        module = ReconstructionTraining(copy.deepcopy(trained.model), parts).to(self.device)
        held_out = self._as_trained_on(self.validation or self.training.pairs)
        initial = _mean_error(module, held_out, self.device)
        started = time.perf_counter()

        def finish(epoch: int, row: Row) -> None:
            row["initial"] = initial if epoch == 1 else self.journal.history[-1]["initial"]
            row["validation"] = _mean_error(module, held_out, self.device)
            row["score"] = None
            row["seconds"] = time.perf_counter() - started
            self.log(row)

        settings = self.settings
        plan = Plan(
            "atta",
            settings.autoencoder_epochs,
            settings.autoencoder_batch * self.ranks.world,
            settings.autoencoder_rate,
            settings.seed,
            settings.workers,
        )
        self._fit(module, plan, finish)
        return parts

    def _fit(self, module: nn.Module, plan: Plan, finish: Callable[[int, Row], None]) -> None:
        learn(
            supervised(module, plan, self.ranks),
            self.training,
            plan,
            self.journal,
            device=self.device,
            ranks=self.ranks,
            report=self.report,
            finish=finish,
        )

    def _as_trained_on(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Whole images, or one crop of each where the network only ever sees crops; always the same ones."""
        dims, dense = self.architecture.spatial_dims, self.task == "segmentation"
        crops = Examples(pairs, augmentation("none", dims, self.settings.patch, dense=dense), seed=self.settings.seed)
        return [crops[index] for index in range(len(crops))]

    def _measured(self, trained: Checkpoint) -> Checkpoint:
        """With what source images look like to this network: its calibration and, if asked for, its pairs."""
        model = trained.model.to(self.device)
        pairs = source_pairs(model, self._source_images(COUNT)) if "memory" in self.settings.with_ else None
        plan = Plan("calibration", 1, 1, 0.0, 0)
        calibration = calibrate(
            model,
            self._source_images(MOST),
            progress=lambda done, total: self.report(plan, 1, done, total, math.nan),
        )
        return replace(trained, calibration=calibration, pairs=pairs, record={**trained.record, "finished": True})

    def _history(self, stage: Stage) -> list[Row]:
        return [row for row in self.journal.history if row["stage"] == stage]

    def _source_images(self, count: int) -> list[Tensor]:
        """So many source images as the network takes them, held-out ones first."""
        pairs = self._as_trained_on([*self.validation, *self.training.pairs[:count]][:count])
        return [image for image, _ in pairs]

    def _sample(self) -> Tensor:
        """One training image as the network gets it, (1, C, *spatial)."""
        self.training.epoch = 0
        return self.training[0][0][None].to(self.device)

    def _rotation(self, model: nn.Module, sample: Tensor) -> Rotation:
        layer = find_feature_layer(model.eval(), sample)
        shared = tuple(shared_parameters(model, layer, sample))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            with torch.no_grad():
                head = RotationHead(encode(model, layer, sample).shape[1], self.settings.rotation_hidden)
        return Rotation(head.to(self.device), layer, shared)

    def _reconstructions(self, trained: Checkpoint) -> Reconstructions:
        levels = LEVELS.get(self.architecture.name)
        if levels is None:
            raise SettingError(f"ATTA does not know the levels of {self.architecture.name!r}")
        probe = copy.deepcopy(trained.model).to(self.device).requires_grad_(False).eval()
        channels: list[int] = []
        for layer in levels.adapted:
            probe.get_submodule(layer).register_forward_hook(lambda m, i, output: channels.append(output.shape[1]))
        watch = LevelOutputs(levels)
        watch.attach(probe)
        with torch.enable_grad():
            probe(self._sample())
        shapes = {name: tuple(seen.shape[1:]) for name, seen in watch.take().items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            autoencoders = AutoEncoders(shapes, width=self.settings.autoencoder_width)
        return Reconstructions(autoencoders.to(self.device), levels, tuple(channels))

    def _score(self, model: nn.Module) -> float | None:
        if not self.validation:
            return None
        return validation_score(model, self.validation, self.task, len(self.classes), self.settings.patch)

    def _record(self, stage: Stage, row: Row) -> dict[str, Any]:
        """How the network of a stage was trained, up to the epoch of this row."""
        return {
            "losses": LOSSES[stage],
            "sites": [site.site for site in self.sites],
            **self.counts,
            "metric": "dice" if self.task == "segmentation" else "accuracy",
            "epoch": row["epoch"],
            "score": row["score"],
            "history": [*self._history(stage), row],
            "fingerprint": self._fingerprint(),
        }


@torch.no_grad()
def _mean_error(module: ReconstructionTraining, pairs: Sequence[Pair], device: torch.device) -> float:
    """Sum of the auto-encoders' errors, mean over the images."""
    module.eval()
    total = 0.0
    for image, label in pairs:
        errors = module(image[None].to(device), label, torch.Generator())
        total += sum(error.item() for error in errors.values())
    return total / len(pairs)


def finished(folder: Path, fingerprint: dict[str, Any]) -> Checkpoint | None:
    """The model that is already there, if its training came to its end."""
    if not (folder / "model.json").is_file():
        return None
    checkpoint = load_checkpoint(folder)
    if not checkpoint.record.get("finished"):
        return None
    if checkpoint.record.get("fingerprint") != fingerprint:
        raise StateError(f"{folder} holds a model trained with other settings; train into another folder")
    return checkpoint


def require_fit(architecture: Architecture, *, channels: int, classes: int) -> None:
    """Raise `DataError` unless the network takes and tells apart what the images have."""
    if (architecture.in_channels, architecture.classes) != (channels, classes):
        raise DataError(
            f"the network takes {architecture.in_channels} channels and knows {architecture.classes} classes, "
            f"the images have {channels} channels and {classes} classes"
        )


def plain(description: dict[str, Any]) -> dict[str, Any]:
    """As JSON gives it back: lists for tuples."""
    return {key: list(value) if isinstance(value, tuple) else value for key, value in description.items()}
