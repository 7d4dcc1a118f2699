"""2 networks. What a MONAI bundle's configuration builds, and what in it may run.

MONAI's parser evaluates every string that begins with `$`, wherever it stands in what is asked for (also in `_desc_`),
imports every `$import …` of the whole file as soon as anything is asked for, and calls whatever `_target_` names. A
configuration is therefore a program. Without leave to run it, only the parts that we use are handed to MONAI's
resolver, with all that they refer to, after each string and each target in them was looked at: no expressions, and
only networks and transforms of MONAI and layers of torch, as the very classes that were checked.

Two parts are never the bundle's own: images are given, not loaded (`FromImage`), and nothing is saved.
"""

import copy
import inspect
import pydoc
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from monai.bundle import ComponentLocator, ConfigComponent, ConfigItem, ConfigParser, ReferenceResolver
from monai.bundle.config_item import ConfigExpression
from monai.inferers import SimpleInferer, SlidingWindowInferer, SlidingWindowInfererAdapt
from monai.transforms import Transform
from torch import nn

from dltta.errors import SettingError, StateError
from dltta.models.io.bundle.images import FromImage, reason
from dltta.models.io.factories import importable_from

FILES = tuple(f"configs/{name}.{end}" for name in ("inference", "train") for end in ("json", "yaml", "yml"))
PARTS = ("network_def", "preprocessing", "inferer", "postprocessing")
LOADERS = ("LoadImaged", "LoadImageD", "LoadImageDict", "LoadImage")
SAVERS = ("SaveImage", "SaveClassification", "WriteFileMapping")  # and their dictionary forms
SPACES = ("monai.networks.", "monai.transforms.", "monai.inferers.", "torch.nn.")
FUNCTIONS = ("torch.nn.functional.interpolate", "torch.squeeze", "torch.unsqueeze")  # as arguments, not to be called
INFERERS = (SimpleInferer, SlidingWindowInferer, SlidingWindowInfererAdapt)
FOREIGN = (  # read files of any kind, download, or call other packages by name
    "CellSamWrapper", "MultiModal", "Transchex", "TextEncoder", "TorchVision", "TorchVisiond", "RandTorchVision",
    "RandTorchVisiond", "TorchIO", "TorchIOd", "RandTorchIO", "RandTorchIOd", "CuCIM", "CuCIMd", "RandCuCIM",
    "RandCuCIMd",
)  # fmt: skip
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError, ImportError)


class BundleConfig:
    """The configuration of the bundle in a folder; `build` makes one of its `PARTS`, and nothing else is made."""

    def __init__(self, folder: Path, *, run_expressions: bool = False) -> None:
        self.folder = folder.resolve()
        self.file = _config_file(folder)
        self.run_expressions = run_expressions
        self.metadata = _metadata(folder)
        self.content = _read(self.file)
        known = {"_meta_": self.metadata, "device": "cpu", "bundle_root": str(self.folder)}
        self._parser = ConfigParser(
            copy.deepcopy({**self.content, **known}), globals=None if run_expressions else False
        )
        self._expand()
        _replace(self._parser.get())
        self._checked = _Checked(self._parser, self.file)

    def has(self, part: str) -> bool:
        return self._id(part) in self._parser

    def build(self, part: str) -> Any:
        """The object that a part describes; the reason why not is one `SettingError`."""
        name = self._id(part)
        try:
            with warnings.catch_warnings(action="ignore"):  # MONAI's about its own defaults
                if not self.run_expressions:
                    return self._checked.build(name)
                with importable_from(self.folder):
                    return self._parser.get_parsed_content(name)
        except MALFORMED as error:
            if isinstance(error, SettingError):
                raise
            raise SettingError(f"{self.file}: {name} cannot be built: {reason(error)}") from error

    def _id(self, part: str) -> str:
        """Where a part stands: training configurations keep what inference needs under `validate`."""
        training = self.file.stem == "train" and part != "network_def"
        return f"validate::{part}" if training else part

    def _expand(self) -> None:
        """Replaces `%` macros by what they stand for; those in other files only if the files are in the bundle."""
        try:
            for _ in range(8):
                _confine(self._parser.get(), self.folder, self.file)
                self._parser.resolve_macro_and_relative_ids()
                if not any(text.startswith("%") for text in _texts(self._parser.get())):
                    return
        except MALFORMED as error:
            if isinstance(error, SettingError):
                raise
            raise SettingError(f"{self.file}: a macro cannot be resolved: {reason(error)}") from error
        raise SettingError(f"{self.file}: macros refer to macros without end")


class _Checked:
    """MONAI's resolver, given only items that were looked at."""

    def __init__(self, parser: ConfigParser, file: Path) -> None:
        self._parser, self._file = parser, file
        self._resolver = ReferenceResolver()
        self._locator = ComponentLocator()

    def build(self, name: str) -> Any:
        self._visit(name)
        return self._resolver.get_resolved_content(name)

    def _visit(self, name: str) -> None:
        if ReferenceResolver.normalize_id(name) not in self._resolver.items:
            self._add(name, self._parser[name])

    def _add(self, name: str, content: Any) -> None:
        """Looks at an item and all within it and that it refers to, and hands it to the resolver."""
        if isinstance(content, str):
            if ConfigExpression.is_expression(content):
                self._refuse(f"{name} runs Python: {content[:60]!r}")
            self._resolver.add_item(ConfigItem(content, name))
            for other in ReferenceResolver.match_refs_pattern(content):
                self._visit(other)
        elif ConfigComponent.is_instantiable(content):
            checked = self._component(name, content)
            self._resolver.add_item(ConfigComponent(checked, name, self._locator))
            self._add_within(name, {key: value for key, value in checked.items() if key != "_target_"})
        else:
            self._resolver.add_item(ConfigItem(content, name))
            if isinstance(content, dict | list):
                self._add_within(name, content)

    def _add_within(self, name: str, content: dict[str, Any] | list[Any]) -> None:
        for _, inner, value in ReferenceResolver.iter_subconfigs(name, content):
            self._add(inner, value)

    def _component(self, name: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """The component with the checked class itself as its target; weights to start from are left out."""
        function = content["_target_"] in FUNCTIONS and content.get("_mode_") == "callable"
        special = {key for key in content if key.startswith("_")} - {"_target_", "_desc_", "_disabled_"}
        if special - ({"_mode_"} if function else set()):
            self._refuse(f"{name} has {min(special)!r}, which makes more run than a constructor")
        if function:
            return {**content, "_target_": pydoc.locate(content["_target_"])}
        target = self._locate(name, content["_target_"])
        plain = {key: False if key == "pretrained" else value for key, value in content.items()}
        if "pretrained" in inspect.signature(target).parameters:
            plain["pretrained"] = False
        return {**{key: value for key, value in plain.items() if not key.startswith("pretrained_")}, "_target_": target}

    def _locate(self, name: str, target: Any) -> type:
        if target in (FromImage, _Saved):
            return target  # type: ignore[no-any-return]  # put there by us: a configuration file holds no classes
        path = self._full_path(target) if isinstance(target, str) else ""
        found = pydoc.locate(path) if path.startswith(SPACES) else None
        if not (inspect.isclass(found) and _is_harmless(found)):
            self._refuse(f"{name} calls {str(target)!r}, which is no network, transform or window of MONAI or torch.nn")
        return found

    def _full_path(self, target: str) -> str:
        """As MONAI finds it: a bare name is looked for in MONAI's modules."""
        module = self._locator.get_component_module_name(target)
        module = module[0] if isinstance(module, list) else module
        return target if module is None else f"{module}.{target}"

    def _refuse(self, what: str) -> NoReturn:
        raise SettingError(f"{self._file}: {what}; if you trust this bundle to run code, add --run-expressions")


class _Saved(Transform):  # type: ignore[misc]  # MONAI has no types
    """Takes the place of what would save the prediction: disabled, so that it is never made."""

    def __call__(self, data: Any) -> Any:
        return data


def _is_harmless(found: type) -> bool:
    """Whether making one does no more than that: MONAI's own or torch's, and none that loads, saves or calls."""
    if not found.__module__.startswith(SPACES) or found.__module__.startswith("monai.transforms.io."):
        return False
    if found.__name__ in FOREIGN:
        return False
    return issubclass(found, nn.Module | Transform) or found in INFERERS


def _replace(content: Any) -> None:
    """Puts our own classes in the place of what loads and saves, everywhere in a configuration."""
    if isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            _replace(value)
    if isinstance(content, dict) and isinstance(content.get("_target_"), str):
        name = content["_target_"].rpartition(".")[2]
        if name in LOADERS:
            content["_target_"] = FromImage
            content["reader"] = _plain_reader(content.get("reader"))
        elif name.startswith(SAVERS):
            content.clear()
            content.update({"_target_": _Saved, "_disabled_": True})


def _plain_reader(reader: Any) -> Any:
    """A reader as data: a component's target becomes its name, so that nothing is made of it."""
    if isinstance(reader, list):
        return [_plain_reader(each) for each in reader]
    if isinstance(reader, dict):
        return {"name" if key == "_target_" else key: value for key, value in reader.items()}
    return reader


def _confine(content: Any, folder: Path, file: Path) -> None:
    """Lets macros that name a file begin in the bundle's folder, and refuses those that lead out of it."""
    for key, value in list(content.items() if isinstance(content, dict) else enumerate(content)):
        if isinstance(value, dict | list):
            _confine(value, folder, file)
        elif isinstance(value, str) and value.startswith("%"):
            path, inner = ConfigParser.split_path_id(value[1:])
            if path:
                content[key] = f"%{_within(folder, path, file)}" + (f"::{inner}" if inner else "")


def _within(folder: Path, path: str, file: Path) -> Path:
    for base in (folder, folder / "configs"):
        found = (base / path).resolve()
        if found.is_relative_to(folder) and found.is_file():
            _require_yaml(found)
            return found
    raise SettingError(f"{file}: the macro {path!r} names no file in the bundle; put it there")


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for value in content.values() if isinstance(content, dict) else content:
            yield from _texts(value)


def _config_file(folder: Path) -> Path:
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    raise SettingError(f"{folder} is not a MONAI bundle: it has no {FILES[0]}; give the folder that holds configs")


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / "configs" / "metadata.json"
    return _read(path) if path.is_file() else {}


def _read(path: Path) -> dict[str, Any]:
    _require_yaml(path)
    try:
        content = ConfigParser.load_config_file(path)
    except (ValueError, OSError, RecursionError) as error:
        raise StateError(f"{path} cannot be read: {reason(error)}") from error
    if not isinstance(content, dict):
        raise StateError(f"{path} holds a {type(content).__name__} instead of named parts; it is no configuration")
    return content


def _require_yaml(path: Path) -> None:
    if path.suffix.lower() != ".json" and find_spec("yaml") is None:
        raise SettingError(f"{path} is YAML, which needs another package; pip install pyyaml, or convert it to JSON")
