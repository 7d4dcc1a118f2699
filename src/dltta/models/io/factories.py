"""2 networks. A network from somebody's own Python code: `package.module:function` or `path/to/file.py:function`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from dltta.errors import SettingError


def is_factory(spec: str) -> bool:
    """Whether a model is named by code rather than by a folder."""
    place, _, name = spec.rpartition(":")
    return bool(place) and name.isidentifier()


def import_object(spec: str) -> Callable[..., Any]:
    """The function or class of that name. This runs the code of its module."""
    place, _, name = spec.rpartition(":")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
    found = getattr(module, name, None)
    if not callable(found):
        there = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise SettingError(f"{place} has no function {name!r}; there are {', '.join(there[:8]) or 'none'}")
    return found  # type: ignore[no-any-return]


def call_factory(spec: str) -> nn.Module:
    """The network that the function (or class) gives when called without arguments. This runs its code."""
    factory = import_object(spec)
    _require_no_arguments(spec, factory)
    model = factory()
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
    described.loader.exec_module(module)
    return module


def _from_package(name: str) -> ModuleType:
    try:
        with importable_from(Path.cwd()):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise SettingError(
            f"there is no module {error.name!r}; write package.module:function, importable or in this folder"
        ) from error


@contextmanager
def importable_from(folder: Path) -> Iterator[None]:
    """While the context lasts, modules in the folder can be imported."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _require_no_arguments(spec: str, factory: Any) -> None:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some classes written in C do not tell
        return
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind in plain]
    if required:
        raise SettingError(
            f"{spec} needs the arguments {', '.join(required)}; name a function that builds the network without any"
        )
