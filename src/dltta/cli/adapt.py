"""`dltta adapt`: the main job, predictions for images as they arrive."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from dltta.cli.messages import Messages
from dltta.cli.options import (
    FLAG,
    MODEL_HELP,
    Device,
    Json,
    Order,
    OwnModel,
    StreamMode,
    require_device,
    split_settings,
    split_size,
)
from dltta.errors import SettingError
from dltta.machine import parse_bytes
from dltta.methods import PAPER_METHODS, Method, Mode, Optimizer
from dltta.recipes import RECOMMENDED, Effort, Recipe, Statistics, check_name, recipe_for, split_rate
from dltta.serving.settings import Deployment, OnError, StreamSettings

if TYPE_CHECKING:
    from dltta.data.inbox import Ignored
    from dltta.serving.summary import Summary


@dataclass(frozen=True)
class Adapting:
    """How the model adapts. None stands for what the recipe of the method says."""

    panel: ClassVar[str] = "How the model adapts (docs/methods.md)"
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="recommended; source (no adaptation); ptbn (normalization statistics only); tent, ttt or atta (a "
            "gradient step per image, as in the paper); "
            f"{', '.join(name for name in Method if name not in PAPER_METHODS)} (as their authors run them); or "
            "package.module:Class, an objective of your own.",
        ),
    ] = RECOMMENDED
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="RULE",
            help="How large each step is. dynamic (Eq. 6 of the paper), exponential and relative (to what is usual) "
            "follow the discrepancy to similar earlier predictions; aligned the agreement of two losses' "
            "gradients; law and palm give every layer its own; fixed is the same for all; or "
            "package.module:Class. recommended brings its own.",
            show_default="dynamic; of methods newer than the paper fixed",
        ),
    ] = None
    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="RATE",
            help="The learning rate that the rule scales.",
            show_default="the paper's: 1e-3 for segmentation, 3e-4 for classification; of newer methods their authors'",
        ),
    ] = None
    mode: Annotated[
        StreamMode,
        typer.Option(
            metavar="MODE",
            help="continual: go on from image to image. image-specific: begin again with the source model for each. "
            "shadow: adapt, but write the source model's predictions and record the difference. frozen: do not adapt.",
        ),
    ] = StreamMode.CONTINUAL
    guard: Annotated[
        bool | None,
        typer.Option(
            "--guard/--no-guard",
            metavar=FLAG,
            help="Whether updates that would do harm are undone (docs/guard.md). Not for recommended.",
            show_default="no guard, as in the paper",
        ),
    ] = None
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Gradient steps per image.", show_default="1; dtta: 500")
    ] = None
    optimizer: Annotated[
        Optimizer | None,
        typer.Option(
            metavar="NAME",
            help="What takes the step: sgd (Eq. 2 of the paper) or adam.",
            show_default="sgd; of newer methods their authors'",
        ),
    ] = None
    statistics: Annotated[
        Statistics | None,
        typer.Option(
            metavar="NAME",
            help="What batch normalization uses: batch (of the test images), shrinkage (between those and the "
            "source's, by how far they differ), blended (half of each), running (a moving average).",
            show_default="batch; recommended chooses",
        ),
    ] = None
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Images per step. Only classification takes more than 1.", show_default="200, or 1"
        ),
    ] = None
    patch: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Predict large images in overlapping windows of this size, such as 96x96x96.",
            show_default="the model's windows, else whole images",
        ),
    ] = None

    pool: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Average the memory's features to N positions per axis, for images of different sizes.",
            show_default="no",
        ),
    ] = None
    effort: Annotated[
        Effort | None,
        typer.Option(
            metavar="HOW",
            help="recommended: default (up to 5 passes of the network per image) or low (up to 2).",
            show_default="default",
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="A setting of the method, such as capacity=16. Repeat for several.",
            show_default="the method's",
        ),
    ] = None
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Predict images in windows, or refuse them, if they would take more memory than this, such as 8GB.",
            show_default="half of the machine's; resumed: as begun",
        ),
    ] = None
    prefill: Annotated[
        bool,
        typer.Option(
            "--prefill",
            metavar=FLAG,
            help="Begin with the source images' features and predictions in the memory (dltta train --with memory).",
        ),
    ] = False

    def __post_init__(self) -> None:
        check_name("method", self.method, (RECOMMENDED, *Method))
        if self.rate is not None:
            split_rate(self.rate)

    def recipe(self) -> Recipe:
        """What the stream is run with."""
        mode = Mode.IMAGE_SPECIFIC if self.mode == StreamMode.IMAGE_SPECIFIC else None
        return recipe_for(
            self.method,
            self.rate,
            alpha=self.alpha,
            mode=mode,
            guard=self.guard,
            steps=self.steps,
            optimizer=self.optimizer,
            statistics=self.statistics,
            batch_size=self.batch_size,
            pool=self.pool,
            prefill=self.prefill or None,
            settings=split_settings(self.settings) or None,
            effort=self.effort,
        )

    @property
    def deployment(self) -> Deployment:
        known = {StreamMode.SHADOW: Deployment.SHADOW, StreamMode.FROZEN: Deployment.FROZEN}
        return known.get(self.mode, Deployment.LIVE)


@dataclass(frozen=True)
class Arriving:
    """Which images, in which order."""

    panel: ClassVar[str] = "Which images, in which order"
    order: Annotated[
        Order, typer.Option(metavar="BY", help="Which image comes first: by name, or by time of last change.")
    ] = Order.NAME
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            metavar=FLAG,
            help="Wait for more images to arrive in the folder, until Ctrl-C or until a file named STOP is put there.",
        ),
    ] = False
    idle: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="With --watch: end when no new image has arrived for this long.",
            show_default="never",
        ),
    ] = None
    settle: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="With --watch: how long nothing must change before a DICOM series, or a file whose format cannot tell "
            "that it is complete, is taken.",
            show_default="10",
        ),
    ] = None
    on_error: Annotated[
        OnError | None,
        typer.Option(
            metavar="WHAT",
            help="A case that cannot be used: stop there, or skip it and go on (exit code 1 at the end).",
            show_default="stop; with --watch skip, so that one bad file does not end the watch",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.idle is not None and not self.watch:
            raise SettingError("--idle ends a watch; add --watch, or leave it out")
        if self.settle is not None and not self.watch:
            raise SettingError("--settle is how long a watch waits; add --watch, or leave it out")

    @property
    def after_errors(self) -> OnError:
        return self.on_error or (OnError.SKIP if self.watch else OnError.STOP)

    def cases(self, images: Path, seen: Collection[str]) -> Any:
        """Those that wait, or those that will arrive and are not in `seen`."""
        from dltta.data.inbox import find_incoming
        from dltta.data.watch import SETTLE, watch_incoming

        order: Any = self.order.value
        if self.watch:
            settle = SETTLE if self.settle is None else self.settle
            return watch_incoming(images, order=order, idle=self.idle, seen=seen, settle=settle)
        return find_incoming(images, order=order)


@dataclass(frozen=True)
class Writing:
    """What is written."""

    panel: ClassVar[str] = "What is written"
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            metavar=FLAG,
            help="Continue the stream in the output folder; images that have a prediction are not predicted again.",
        ),
    ] = False
    save_probabilities: Annotated[
        bool,
        typer.Option(
            "--save-probabilities",
            metavar=FLAG,
            help="Segmentation: also write the probability of every class at every position.",
        ),
    ] = False
    anonymize: Annotated[
        bool,
        typer.Option(
            "--anonymize",
            metavar=FLAG,
            help="Name predictions and log lines by a hash of the image instead of its file name.",
        ),
    ] = False
    messages: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write what is said (warnings, skipped cases, the end) into this file, which is rotated.",
            show_default="none",
        ),
    ] = None
    new_uids: Annotated[
        bool,
        typer.Option(
            "--new-uids",
            metavar=FLAG,
            help="With --anonymize: DICOM segmentations get new identifiers, which do not lead back to the images.",
        ),
    ] = False
    sign: Annotated[
        Path | None,
        typer.Option(
            metavar="KEYFILE",
            help="Sign every line of the log with the key in this file; dltta state verify --sign checks it.",
            show_default="not signed",
        ),
    ] = None


def adapt(
    model: Annotated[str, typer.Option("-m", "--model", metavar="MODEL", help=MODEL_HELP)],
    images: Annotated[
        Path,
        typer.Option(
            "-i", "--input", metavar="PATH", help="Folder of images (PNG, TIFF, NIfTI, DICOM series), or one image."
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FOLDER", help="Where predictions, log and state are written.")
    ],
    adapting: Adapting,
    arriving: Arriving,
    writing: Writing,
    own: OwnModel,
    device: Device = "cpu",
    fail_on_review: Annotated[
        bool,
        typer.Option("--fail-on-review", metavar=FLAG, help="Exit code 3 if any prediction should be reviewed."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Adapt a model to unlabeled images one after the other, and write a prediction for each.

    Masks have the format, size and orientation of their images; a classification writes predictions.csv. The log
    stream.jsonl has a line per case. Stop at any moment: with `--resume` it continues as if it had never stopped.

    Examples:
        dltta adapt -m models/a -i incoming -o predictions
        dltta adapt -m bundles/spleen -i scans -o predictions --on-error skip
        dltta adapt -m models/a -i incoming -o predictions --watch --resume
        dltta adapt -m models/a -i scans -o out --method tent --rate dynamic
    """
    from dltta.cli.progress import bars
    from dltta.serving.folder import Stream
    from dltta.serving.maintenance import predicted_names
    from dltta.serving.record import require_apart, require_folder_name

    require_folder_name(output)
    messages = Messages(writing.messages)
    if writing.messages is not None and writing.messages.resolve().is_relative_to(output.resolve()):
        raise SettingError(
            f"--messages {writing.messages} lies in {output}, whose files are all in the log; put it elsewhere"
        )
    source = own.source(model, patch=split_size(adapting.patch))
    cases = arriving.cases(images, predicted_names(output) if writing.resume and arriving.watch else ())
    require_apart(images, output)
    opened = source.open()
    opened.model.to(require_device(device))
    settings = StreamSettings(
        adapting.recipe(),
        adapting.deployment,
        arriving.after_errors,
        writing.save_probabilities,
        writing.anonymize,
        writing.sign,
        None if adapting.max_memory is None else parse_bytes(adapting.max_memory),
        "new" if writing.new_uids else "keep",
    )
    with Stream(opened, output, settings, resume=writing.resume) as stream, bars() as listener:
        _warn(stream.notices(() if arriving.watch else cases), messages)
        bar = listener.cases(None if arriving.watch else len(cases))

        def tick(line: Mapping[str, Any]) -> None:
            sentence = messages.skipped(line)
            if sentence is not None and arriving.watch:  # else it is said at the end
                listener.say(sentence)
            bar(line)

        summary = stream.run(cases, tick, listener.parts())
    _tell(summary, output, as_json, cases.ignored, messages)
    if fail_on_review and summary.to_review:
        raise typer.Exit(3)
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)


def _tell(summary: "Summary", output: Path, as_json: bool, ignored: "Ignored", messages: Messages) -> None:
    messages(
        f"{output}: {summary.predicted} predicted, {len(summary.failed)} skipped; the log ends with {summary.head}"
    )
    if as_json:
        typer.echo(json.dumps({"output": str(output), **asdict(summary), "ignored": dict(ignored.kinds)}))
        return
    for sentence in summary.failed:
        typer.secho("skipped: ", fg="yellow", nl=False, err=True)
        typer.echo(sentence, err=True)
    _warn(summary.warnings, messages)
    parts = [f"{summary.predicted} predicted"]
    parts += [f"{summary.repeated} the same as an earlier image"] if summary.repeated else []
    parts += [f"{summary.already_predicted} had a prediction"] if summary.already_predicted else []
    parts += [f"{len(summary.failed)} skipped"] if summary.failed else []
    typer.echo(f"{output}: {', '.join(parts)}")
    if summary.decisions:
        decided = ", ".join(f"{count} {outcome}" for outcome, count in summary.decisions.items() if count)
        listed = f"{summary.to_review} to review (dltta state cases {output} --review)"
        review = listed if summary.to_review else "none to review"
        typer.echo(f"decisions since the stream began: {decided}; {review}")
    if ignored:
        typer.echo(str(ignored))
    typer.echo(
        f"the log ends with {summary.head[:32]} (dltta state verify --expect finds a log that was cut back)", err=True
    )


def _warn(sentences: Iterable[str], messages: Messages) -> None:
    for sentence in sentences:
        messages(f"warning: {sentence}")
        typer.secho("warning: ", fg="yellow", nl=False, err=True)
        typer.echo(sentence, err=True)
