"""2 networks. A network from somebody's own Python code: `package.module:function` or `path/to/file.py:function`."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from dltta.errors import DlttaError, SettingError
from dltta.models.compiled import require_layers


def is_factory(spec: str) -> bool:
    """Whether a model is named by code rather than by a folder."""
    place, _, name = spec.rpartition(":")
    return bool(place) and name.isidentifier()


def import_object(spec: str) -> Callable[..., Any]:
    """The function or class of that name. This runs the code of its module."""
    place, _, name = spec.rpartition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise SettingError(f"{place} has no function or class {name!r}; there are {', '.join(there[:8]) or 'none'}")
    return found


def call_factory(spec: str) -> nn.Module:
    """The network that the function (or class) gives when called without arguments. This runs its code."""
    factory = import_object(spec)
    required = required_arguments(factory)
    if required:
        raise SettingError(
            f"{spec} needs the arguments {', '.join(required)}; name a function that builds the network without any"
        )
    with _OwnCode(spec):
        model = factory()
    require_layers(model)
    if not isinstance(model, nn.Module):
        raise SettingError(f"{spec} returns a {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise SettingError(f"there is no file {path}; write path/to/file.py:function")
    described = importlib.util.spec_from_file_location(path.stem, path)
    if described is None or described.loader is None:
        raise SettingError(f"{path} cannot be imported; write path/to/file.py:function")
    module = importlib.util.module_from_spec(described)
    with _OwnCode(str(path)):
        described.loader.exec_module(module)
    return module


def _from_package(name: str) -> ModuleType:
    with importable_from(Path.cwd()), _OwnCode(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # the module is there, something that it imports is not
            raise SettingError(
                f"there is no module {error.name!r}; write package.module:function, importable or in this folder"
            ) from error


class _OwnCode:
    """Whatever somebody's own code raises is one sentence: what, with which message, in which line."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, Exception) or isinstance(error, DlttaError):
            return
        frames = [
            frame for frame in traceback.extract_tb(trace) if frame.filename not in (__file__, importlib.__file__)
        ]
        theirs = [frame for frame in frames if not frame.filename.startswith("<frozen")]
        place = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
        what = ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))
        raise SettingError(
            f"{self.name} raised {what}{place}; correct it, dltta --debug shows the traceback"
        ) from error


@contextmanager
def importable_from(folder: Path) -> Iterator[None]:
    """While the context lasts, modules in the folder can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def required_arguments(factory: Callable[..., Any]) -> list[str]:
    """The arguments without which a function or class cannot be called."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in arguments(factory).values() if p.default is inspect.Parameter.empty and p.kind in plain]


def arguments(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """What a function or class can be called with."""
    try:
        return inspect.signature(factory).parameters
    except ValueError:  # some classes written in C do not tell
        return {}
