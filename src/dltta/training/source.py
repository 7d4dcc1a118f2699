"""Source side. Trains the source model on labeled source images — Eq. (1) — and what TTT, DTTA and ATTA need beside it.

Stages, in this order, each resumable: `task` trains the source model with the task loss alone; `ttt`, if asked for,
trains a second network from the same initial weights on the same batches, jointly with rotation; `ttt++`, if asked for,
another one jointly with contrast between views; `dtta`, if asked for, another one behind an image normalizer, and
`denoiser` what label maps look like; `atta`, if asked for, trains auto-encoders on the source model. So the source
model is the same bits whatever else is trained.
"""

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dltta.core.augmentation import contrast_view
from dltta.data.case import Dataset, Task
from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError, SettingError, StateError
from dltta.models.encoder import encode, shared_parameters
from dltta.models.features import find_feature_layer
from dltta.models.io.checkpoint import (
    Checkpoint,
    Contrast,
    Reconstructions,
    Rotation,
    load_checkpoint,
    save_checkpoint,
)
from dltta.models.io.fingerprint import fingerprint
from dltta.models.nets.architecture import Architecture
from dltta.models.normalization import kept_statistics, use_test_statistics
from dltta.models.parts.adaptors import insert_in_front
from dltta.models.parts.autoencoders import DENSENET_LEVELS, UNET_LEVELS, AutoEncoders, LevelOutputs
from dltta.models.parts.contrast import ProjectionHead, contrast_loss, feature_moments, pooled
from dltta.models.parts.denoiser import Denoiser, corrupted, soft_dice
from dltta.models.parts.normalizer import NAME, ImageNormalizer
from dltta.models.parts.rotation import TURNS, RotationHead, rotation_loss
from dltta.models.predictions import each_prediction
from dltta.training.augmentation import Augmentation, typical_spread
from dltta.training.calibration import MOST, calibrate
from dltta.training.examples import Examples, Pair, gather, read_pairs, require_one_size, split_by_group
from dltta.training.fit import Plan, Ranks, Report, Row, TrainingState, learn, supervised
from dltta.training.pairs import COUNT, source_pairs
from dltta.training.settings import AUXILIARIES, LEARNING_RATES, TrainingSettings
from dltta.training.task import TaskLoss, validation_score

if TYPE_CHECKING:
    from monai.transforms import Compose

LEVELS = {"unet": UNET_LEVELS, "densenet121": DENSENET_LEVELS, "densenet_small": DENSENET_LEVELS}
Stage = Literal["task", "ttt", "ttt++", "dtta", "denoiser", "atta"]
STAGES = get_args(Stage)  # in order
LOSSES = {  # that each network is trained with, of equal weight
    "task": ["task"],
    "ttt": ["task", "rotation"],
    "ttt++": ["task", "contrast"],
    "dtta": ["task"],
}
Log = Callable[[Row], None]


class TaskTraining(nn.Module):
    """The task loss and, with a head, the rotation loss (Sun et al. 2020) or contrast (TTT++) with equal weight.

    Rotated and cropped images never reach the stored statistics of normalization layers, which are for plain ones. With
    `mixed` convolutions are computed in bfloat16; weights, losses and updates stay in float32.
    """

    def __init__(
        self, model: nn.Module, loss: TaskLoss, part: Rotation | Contrast | None, *, mixed: bool = False
    ) -> None:
        super().__init__()
        self.model, self.loss, self.mixed = model, loss, mixed
        self.head = part.head if part is not None else None
        self.layer = part.layer if part is not None else ""

    def forward(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.mixed):
            losses = {"task": self.loss(self.model(images).float(), labels)}
            if isinstance(self.head, ProjectionHead):
                views = [contrast_view(images, generator) for _ in range(2)]
                with kept_statistics(self.model):
                    one, other = (self.head(pooled(encode(self.model, self.layer, view))) for view in views)
                losses["contrast"] = contrast_loss(one, other)
            elif self.head is not None:
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


class DenoiserTraining(nn.Module):
    """One minus soft Dice between label maps and what the denoiser makes of corrupted ones (Karani et al. 2021)."""

    def __init__(self, denoiser: Denoiser) -> None:
        super().__init__()
        self.denoiser = denoiser

    def forward(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        noisy = self._one_hot(corrupted(labels.cpu(), generator).to(labels.device))
        denoised = self.denoiser(noisy).softmax(dim=1)
        return {"denoiser": 1 - soft_dice(denoised, self._one_hot(labels))}

    def _one_hot(self, labels: Tensor) -> Tensor:
        """(B, classes, *spatial)."""
        return F.one_hot(labels, self.denoiser.classes).movedim(-1, 1).float()


@dataclass
class SourceTraining:
    """Everything one source training needs; `run` trains and leaves a checkpoint folder.

    The folder holds the best source model so far (by validation on source images; the last one without validation, or
    if the settings say so) and, in `last/`, the last; `ttt/`, `ttt++/` and `dtta/` the same for the networks of these
    methods. After every epoch
    `resume.pt` says where the training stands; it goes when all is done.
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

    def found(self) -> Checkpoint | None:
        """The model with all that is asked for, if it is there already."""
        found = finished(self.folder, self._fingerprint(), but="with_") if self.resume else None
        if found is None or (self.folder / "resume.pt").is_file():
            return None
        return found if set(self.settings.with_) <= set(found.record["fingerprint"]["with_"]) else None

    def run(self) -> Checkpoint:
        if (there := self.found()) is not None:
            return there
        interrupted = (self.folder / "resume.pt").is_file()
        found = finished(self.folder, self._fingerprint(), but="with_") if self.resume else None
        self.before = found.record["fingerprint"]["with_"] if found is not None else None  # what is trained already
        self._read()
        self.ranks = Ranks.join(self.device)
        if self.ranks.first:
            self.folder.mkdir(parents=True, exist_ok=True)
        self.journal = TrainingState(self.folder / "resume.pt", self._fingerprint(), resume=self.resume)
        if found is not None and not interrupted:
            self.journal.history = list(found.record["history"])
        source = self._train_network("task", self.folder)
        with_ = self.settings.with_
        joint = self._train_network("ttt", self.folder / "ttt") if "ttt" in with_ else source.joint
        contrastive = self._train_network("ttt++", self.folder / "ttt++") if "ttt++" in with_ else source.contrastive
        normalized = self._train_normalized() if "dtta" in with_ else source.normalized
        parts = self._autoencoders(source)
        if self.ranks.first:
            source = self._measured(
                replace(
                    source,
                    reconstructions=parts,
                    joint=None if joint is None else self._measured(joint),
                    contrastive=None if contrastive is None else self._measured(self._with_moments(contrastive)),
                    normalized=None if normalized is None else self._measured(normalized),
                )
            )
            history = {**source.record, "history": self.journal.history, "fingerprint": self._with_all()}
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
        self.spread = typical_spread([pairs[i][0] for i in training])
        self.training = Examples(
            [pairs[i] for i in training],
            self._augment(self.settings.changes),
            seed=self.settings.seed,
            repeats=self.settings.repeats,
        )
        self.validation: list[Pair] = [pairs[i] for i in validation]
        self.counts = {"cases": len(cases), "training": len(training), "validation": len(validation)}
        if "dtta" in self.settings.with_ and self.task != "segmentation":
            raise SettingError("dtta denoises segmentations, a classification has none; leave it out of --with")
        require_fit(self.architecture, channels=len(pairs[0][0]), classes=len(self.classes))

    def _augment(self, changes: Augmentation) -> "Compose | None":
        dims, channels = self.architecture.spatial_dims, self.architecture.in_channels
        return changes.compose(dims, channels, dense=self.task == "segmentation", spread=self.spread)

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
        """The best network of a stage; one that an earlier or interrupted training had left behind is only read."""
        if self._is_trained(stage):
            return load_checkpoint(folder)
        if STAGES.index(self.journal.stage or STAGES[0]) <= STAGES.index(stage):
            changes = self.settings.changes
            self.training.augment = self._augment(changes.upright() if stage == "ttt" else changes)
            self._fit_network(stage, folder)
        return load_checkpoint(folder)

    def _fit_network(self, stage: Stage, folder: Path) -> None:
        new = self.architecture.build(seed=self.settings.seed) if self.start is None else copy.deepcopy(self.start)
        if stage == "dtta":
            insert_in_front(new, NAME, self._normalizer())
        model = new.to(self.device)
        rotation = self._rotation(model, self._sample()) if stage == "ttt" else None
        contrast = self._contrast(model, self._sample()) if stage == "ttt++" else None
        mixed = self.settings.precision == "bfloat16"
        module = TaskTraining(model, TaskLoss(self.settings.loss), rotation or contrast, mixed=mixed).to(self.device)
        best = max((row["score"] for row in self._history(stage) if row["score"] is not None), default=-math.inf)
        started = time.perf_counter()

        def finish(epoch: int, row: Row) -> None:
            nonlocal best
            row["score"] = self._score(model)
            row["seconds"] = time.perf_counter() - started
            self.log(row)
            record = self._record(stage, row)
            checkpoint = Checkpoint(
                model, self.architecture, self.task, self.classes, self.preprocessing, record, rotation,
                contrast=contrast,
            )  # fmt: skip
            save_checkpoint(folder / "last", checkpoint)
            if row["score"] is None or row["score"] > best or self.settings.keep == "last":
                best = -math.inf if row["score"] is None else row["score"]
                save_checkpoint(folder, checkpoint)

        rate = self.settings.learning_rate or LEARNING_RATES[self.task]
        plan = Plan(
            stage,
            self.settings.epochs,
            self.settings.batch_size,
            rate,
            self.settings.seed,
            self.settings.workers,
            self.settings.schedule,
        )
        self._fit(module, plan, finish)

    def _is_trained(self, stage: Stage) -> bool:
        return self.before is not None and (stage == "task" or stage in self.before)

    def _with_all(self) -> dict[str, Any]:
        """The fingerprint, with what was trained beside the network before too."""
        auxiliaries = {*self.settings.with_, *(self.before or ())}
        return {**self._fingerprint(), "with_": [name for name in AUXILIARIES if name in auxiliaries]}

    def _autoencoders(self, trained: Checkpoint) -> Reconstructions | None:
        wanted = "atta" in self.settings.with_ and not self._is_trained("atta")
        return self._train_autoencoders(trained) if wanted else trained.reconstructions

    def _train_normalized(self) -> Checkpoint:
        """The network behind an image normalizer, with its denoiser; a denoiser that is trained is only read."""
        trained = self._train_network("dtta", self.folder / "dtta")
        if self._is_trained("dtta") or STAGES.index(self.journal.stage or STAGES[0]) > STAGES.index("denoiser"):
            return trained
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            denoiser = Denoiser(self.architecture.spatial_dims, len(self.classes), self.settings.denoiser_widths)
        module = DenoiserTraining(denoiser).to(self.device)
        held_out = self._as_trained_on(self.validation or self.training.pairs)
        settings = self.settings
        plan = Plan(
            "denoiser",
            settings.denoiser_epochs,
            settings.denoiser_batch * self.ranks.world,
            settings.denoiser_rate,
            settings.seed,
            settings.workers,
        )
        self._fit(module, plan, self._following(module, held_out))
        trained = replace(trained, denoiser=denoiser.eval())
        if self.ranks.first:
            save_checkpoint(self.folder / "dtta", trained)
        self.ranks.wait()
        return trained

    def _normalizer(self) -> ImageNormalizer:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            return ImageNormalizer(self.architecture.spatial_dims, self.architecture.in_channels)

    def _train_autoencoders(self, trained: Checkpoint) -> Reconstructions:
        whole = replace(self.settings.changes, crop=self.settings.patch)  # auto-encoders have the size of their images
        self.training.augment = self._augment(whole)
        parts = self._reconstructions(trained)
        module = ReconstructionTraining(copy.deepcopy(trained.model), parts).to(self.device)
        held_out = self._as_trained_on(self.validation or self.training.pairs)
        settings = self.settings
        plan = Plan(
            "atta",
            settings.autoencoder_epochs,
            settings.autoencoder_batch * self.ranks.world,
            settings.autoencoder_rate,
            settings.seed,
            settings.workers,
        )
        self._fit(module, plan, self._following(module, held_out))
        return parts

    def _following(self, module: nn.Module, held_out: Sequence[Pair]) -> Callable[[int, Row], None]:
        """After each epoch: the error on held-out images beside the one that training began with."""
        initial = _mean_error(module, held_out, self.device)
        started = time.perf_counter()

        def finish(epoch: int, row: Row) -> None:
            row["initial"] = initial if epoch == 1 else self.journal.history[-1]["initial"]
            row["validation"] = _mean_error(module, held_out, self.device)
            row["score"] = None
            row["seconds"] = time.perf_counter() - started
            self.log(row)

        return finish

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
        crops = Examples(pairs, self._augment(Augmentation("none", self.settings.patch)), seed=self.settings.seed)
        return [crops[index] for index in range(len(crops))]

    def _measured(self, trained: Checkpoint) -> Checkpoint:
        """With what source images look like to this network: its calibration and, if asked for, its pairs."""
        model = trained.model.to(self.device)
        pairs = trained.pairs
        if "memory" in self.settings.with_:
            pairs = source_pairs(model, self._source_images(COUNT))
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

    def _contrast(self, model: nn.Module, sample: Tensor) -> Contrast:
        layer = find_feature_layer(model.eval(), sample)
        shared = tuple(shared_parameters(model, layer, sample))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.settings.seed)
            with torch.no_grad():
                head = ProjectionHead(encode(model, layer, sample).shape[1], self.settings.projection)
        return Contrast(head.to(self.device), layer, shared)

    @torch.no_grad()
    def _with_moments(self, trained: Checkpoint) -> Checkpoint:
        """With the moments of source features, normalized by the batch as at test time; TTT++ holds them."""
        contrast = trained.contrast
        if contrast is None:
            raise StateError(f"{self.folder / 'ttt++'} has no projection head; train it again")
        model = copy.deepcopy(trained.model).to(self.device).eval()
        use_test_statistics(model)
        images = self._source_images(MOST)
        size = 1 if self.task == "segmentation" else max(2, len(images) // 8)
        rows, projected = [], []
        for start in range(0, len(images), size):
            maps = encode(model, contrast.layer, torch.stack(images[start : start + size]).to(self.device))
            rows.append((each_prediction(maps) if self.task == "segmentation" else pooled(maps)).cpu())
            projected.append(contrast.head.to(self.device)(pooled(maps)).cpu())
        moments = replace(contrast, features=feature_moments(rows), projections=feature_moments(projected))
        return replace(trained, contrast=moments)

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
def _mean_error(module: nn.Module, pairs: Sequence[Pair], device: torch.device) -> float:
    """Sum of the module's losses, mean over the images."""
    module.eval()
    total, generator = 0.0, torch.Generator().manual_seed(0)
    for image, label in pairs:
        errors = module(image[None].to(device), label[None].to(device), generator)
        total += sum(error.item() for error in errors.values())
    return total / len(pairs)


def finished(folder: Path, fingerprint: dict[str, Any], *, but: str | None = None) -> Checkpoint | None:
    """The model that is already there, if its training came to its end; its settings may differ in `but`."""
    if not (folder / "model.json").is_file():
        return None
    checkpoint = load_checkpoint(folder)
    if not checkpoint.record.get("finished"):
        return None
    known = checkpoint.record.get("fingerprint", {})
    differing = {key for key in known.keys() | fingerprint.keys() if known.get(key) != fingerprint.get(key)} - {but}
    if but == "with_":  # the settings of a denoiser are only there where one is trained
        differing = {key for key in differing if not key.startswith("denoiser_") or key in known.keys() & fingerprint}
    if differing:
        first = min(differing)
        was, now = (str(settings.get(first))[:60] for settings in (known, fingerprint))
        raise StateError(
            f"{folder} holds a model trained with other settings: {first.rstrip('_')} {was} instead of {now}; "
            "train into another folder"
        )
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
