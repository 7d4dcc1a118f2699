"""2 networks. Networks that were turned into programs: there are no layers to exchange, so nothing can adapt."""

import zipfile
from pathlib import Path

from torch import nn

from dltta.errors import SettingError

INSTEAD = "give the network that it was made from"


def require_layers(model: object) -> None:
    """Raise for what torch.compile, TorchScript and torch.export make of a network."""
    kinds = {base.__name__ for base in type(model).__mro__}
    if "OptimizedModule" in kinds:
        raise SettingError(
            "the network is compiled by torch.compile for layers as they were, but adapting exchanges and moves them; "
            f"{INSTEAD}: model._orig_mod"
        )
    if "ScriptModule" in kinds:
        raise SettingError(
            f"the network is TorchScript, whose layers cannot be exchanged and may have no gradient; {INSTEAD}"
        )
    exported = "GraphModule" in kinds and isinstance(model, nn.Module) and not _has_layers(model)
    if exported or "ExportedProgram" in kinds:
        raise SettingError(f"the network was exported by torch.export, which leaves no layers to adapt; {INSTEAD}")


def program_kind(path: Path) -> str | None:
    """What a file holds if it is such a program: TorchScript or torch.export."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        inside = {name.partition("/")[2] for name in archive.namelist()}
    if path.suffix == ".pt2" or "archive_format" in inside:
        return "a program of torch.export"
    return "TorchScript" if any(name.startswith("code/") for name in inside) else None


def _has_layers(model: nn.Module) -> bool:
    """Whether a traced graph still calls layers; torch.export turns all of them into functions."""
    graph = getattr(model, "graph", None)
    return graph is None or any(
        node.op == "call_module" and not str(node.target).startswith("_guards") for node in graph.nodes
    )
