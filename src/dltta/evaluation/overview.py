"""What would each method do to a network? One step with each, on an image of noise."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from dltta.config import make_objective
from dltta.core.adapter import Adapter
from dltta.core.objectives import Objective
from dltta.core.rates import Fixed
from dltta.errors import DlttaError
from dltta.evaluation.card import missing_parts
from dltta.methods import METHODS, Method
from dltta.models.inspection import Layer, NetworkSummary, count, statistics_changed, summarize
from dltta.models.io.checkpoint import training_words
from dltta.models.io.opened import OpenedModel
from dltta.models.io.probing import SIZES, noise

_AT_ONCE = {str(method): {"every": 1} for method in (Method.NOTE, Method.ROTTA)}  # else the first step is no update
MEMORY = 20  # images in the memory of the paper's segmentations


@dataclass(frozen=True)
class MethodCheck:
    """One method on one network: whether it works and what it would move, or the reason that it does not."""

    method: str
    works: bool
    reason: str | None = None  # that it does not work
    tensors: int = 0  # that move
    parameters: int = 0  # numbers in them
    share: float = 0.0  # of the network's parameters
    added: int = 0  # of the parameters that move, those put into the network
    statistics: int = 0  # layers that normalize by the test batch instead of the training set
    changes: str = ""  # what it changes, in words
    losses: tuple[str, ...] | None = None  # that the network it starts from was trained with, where that is known


@dataclass(frozen=True)
class Overview:
    """A network and what can be done with it."""

    opened: OpenedModel
    size: tuple[int, ...]
    assumed: bool  # the size was not given, and the model does not say one
    network: NetworkSummary
    methods: tuple[MethodCheck, ...]

    def as_json(self) -> dict[str, Any]:
        opened, network = self.opened, self.network
        return {
            "model": opened.name,
            "kind": opened.kind,
            "fingerprint": opened.fingerprint,
            "task": opened.task,
            "classes": list(opened.classes),
            "activation": opened.activation,
            "window": None if opened.window is None else asdict(opened.window),
            "network": {**asdict(network), "memory": {"images": MEMORY, "bytes": MEMORY * network.bytes_per_image}},
            "missing": missing_parts(opened),
            "methods": {
                check.method: {k: v for k, v in asdict(check).items() if k != "method"} for check in self.methods
            },
        }

    def tables(self) -> RenderableType:
        """For a screen of 80 columns or more."""
        parts = (
            _heading(self),
            _layers(self.network),
            _normalizations(self.network),
            _methods(self),
            _memory(self),
            _missing(self),
        )
        return Group(*(line for part in parts for line in (part, Text(""))))


def overview(
    opened: OpenedModel,
    size: tuple[int, ...] | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Overview:
    """Summarizes the network and takes one step with every method, on an image of noise of this size."""
    known = size or opened.size
    chosen = known or (SIZES[opened.spatial_dims][0],) * opened.spatial_dims
    like = next(opened.model.parameters(), None)
    x = noise(opened.in_channels, chosen).to(like if like is not None else "cpu")
    network = summarize(opened.model, x)
    checks = []
    for number, method in enumerate(Method):
        progress(number, len(Method))
        checks.append(check_method(opened, method, x))
    progress(len(Method), len(Method))
    return Overview(opened, chosen, known is None, network, tuple(checks))


def check_method(opened: OpenedModel, method: str, x: Tensor) -> MethodCheck:
    """Whether a method works with a model, by one step on images x (B, C, *spatial)."""
    try:
        opened = opened.for_method(method)
        objective = make_objective(method, opened, settings=_AT_ONCE.get(method, {}))
        adapter = Adapter(opened.model, objective, Fixed(1e-3) if isinstance(objective, Objective) else None)
        adapter.step(x, case=f"an image of {_by(x.shape[2:])}")
    except DlttaError as error:
        return MethodCheck(method, False, " ".join(str(error).split()))
    moving = adapter.adapted_parameters()
    own = {name for name, _ in opened.model.named_parameters()}
    numbers = sum(parameter.numel() for parameter in moving.values())
    return MethodCheck(
        method,
        True,
        tensors=len(moving),
        parameters=numbers,
        share=numbers / count(opened.model),
        added=sum(parameter.numel() for name, parameter in moving.items() if name not in own),
        statistics=statistics_changed(opened.model, adapter.model),
        changes=METHODS[method].facts.moves,
        losses=_losses(opened),
    )


def _losses(opened: OpenedModel) -> tuple[str, ...] | None:
    found = None if opened.checkpoint is None else opened.checkpoint.record.get("losses")
    return None if found is None else tuple(found)


def _heading(seen: Overview) -> Text:
    opened, network = seen.opened, seen.network
    assumed = ", an assumed size: give --size" if seen.assumed else ""
    window = "" if opened.window is None else f", windows of {_by(opened.window.patch)}"
    return Text(
        f"{opened.name}: {network.kind} ({opened.kind}), {opened.task} of {', '.join(opened.classes)}{window}\n"
        f"{network.parameters:,} parameters; tried with {_by(network.input)}{assumed}, gives {_by(network.output)}"
    )


def _layers(network: NetworkSummary) -> RenderableType:
    table = _table("layer", "type", "output", "parameters")
    hidden: dict[str, int] = {}
    before: tuple[int, ...] | None = network.input
    for layer in network.layers:
        if layer.parameters == 0 and not layer.repeats and layer.output in (before, None):
            hidden[layer.kind] = hidden.get(layer.kind, 0) + 1
            continue
        before = layer.output
        kind = f"{layer.repeats} x {layer.kind}" if layer.repeats else layer.kind
        table.add_row(Text(layer.name), Text(kind), _output(layer), f"{layer.parameters:,}")
    if not hidden:
        return table
    kinds = ", ".join(f"{number} {kind}" for kind, number in hidden.items())
    return Group(table, Text(f"not shown, without parameters: {kinds}", style="dim"))


def _output(layer: Layer) -> str:
    return _by(layer.output) if layer.output is not None else "-"


def _normalizations(network: NetworkSummary) -> RenderableType:
    if not network.normalization:
        return Text("no normalization layers")
    table = _table("normalization", "layers", "scale and shift", "statistics of the training set")
    for found in network.normalization:
        table.add_row(Text(found.kind), str(found.layers), str(found.affine), str(found.stored))
    return table


def _methods(seen: Overview) -> RenderableType:
    table = _table("method", "tensors", "parameters", "share", "what it does, or why it does not work")
    for check in seen.methods:
        if not check.works:
            table.add_row(check.method, "-", "-", "-", Text(f"no: {check.reason}"))
        else:
            numbers = (
                (str(check.tensors), f"{check.parameters:,}", f"{check.share:.2%}") if check.tensors else ("0",) * 3
            )
            table.add_row(check.method, *numbers, _words(check))
    return Group(table, *_networks(seen))


def _networks(seen: Overview) -> Iterator[Text]:
    """Which methods start from which network, where training recorded it."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for check in seen.methods:
        if check.losses is not None:
            groups.setdefault(check.losses, []).append(check.method)
    for losses, methods in groups.items():
        verb = "starts" if len(methods) == 1 else "start"
        yield Text(f"{', '.join(methods)} {verb} from the network trained with {training_words(losses)}", style="dim")


def _words(check: MethodCheck) -> str:
    moved = check.parameters - check.added
    parts = [
        f"moves {check.tensors} tensors of the network" if moved and not check.added else "",
        f"moves added layers of {check.added:,} parameters" if check.added else "",
        f"test statistics in {check.statistics} normalization layers" if check.statistics else "",
    ]
    if (said := "; ".join(part for part in parts if part)) or check.method == Method.SOURCE:
        return said or "runs the source model"
    return f"changes {check.changes}"


def _memory(seen: Overview) -> Text:
    network = seen.network
    if network.feature_layer is None:
        return Text("no default feature layer found; name one to use a memory")
    return Text(
        f"default feature layer: {network.feature_layer}, keys of {_by(network.key)}; "
        f"a memory of {MEMORY} images takes {_bytes(MEMORY * network.bytes_per_image)}"
    )


def _missing(seen: Overview) -> Text:
    found = missing_parts(seen.opened)
    return Text("\n".join(["missing", *(f"  {part}" for part in found)]) if found else "nothing is missing")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        numeric = column in ("parameters", "layers", "tensors", "share", "output")
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric)
    return table


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"


def _bytes(number: int) -> str:
    size, units = float(number), ["bytes", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"
