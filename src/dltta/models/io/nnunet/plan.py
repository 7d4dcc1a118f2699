"""2 networks. What nnU-Net planned, through its own managers: preprocessing, network, labels."""

import contextlib
import importlib
import inspect
import io
import os
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from dltta.errors import SettingError, StateError
from dltta.models.io.nnunet.folder import NNUNetFolder, read_json

# What plans.json may name: it is imported and called with what stands there.
BUILDERS = ("dynamic_network_architectures.", "nnunetv2.", "torch.nn.")


@dataclass(frozen=True)
class Plan:
    """One configuration of one data set, as nnU-Net's managers show it."""

    plans: Any  # PlansManager
    configuration: Any  # ConfigurationManager
    labels: Any  # LabelManager
    dataset: Mapping[str, Any]
    trainer: str
    mirroring: tuple[int, ...] | None  # spatial axes, as trained
    in_channels: int

    @property
    def patch(self) -> tuple[int, ...]:
        return tuple(int(edge) for edge in self.configuration.patch_size)

    @property
    def reader(self) -> str:
        """Which of nnU-Net's classes reads the images."""
        return str(self.plans.plans["image_reader_writer"])

    @property
    def classes(self) -> tuple[str, ...]:
        """By value; nnU-Net numbers them without gaps. A label to ignore is no class."""
        named = {name: value for name, value in self.dataset["labels"].items() if name != "ignore"}
        return tuple(sorted(named, key=lambda name: int(_single(named[name]))))

    def network(self) -> nn.Module:
        """As the trainer builds it, without weights and without deep supervision."""
        build = _trainer(self.trainer).build_network_architecture
        sizes = (self.in_channels, self.labels.num_segmentation_heads)
        with quiet(), _planned("the network"):
            if "plans_manager" in inspect.signature(build).parameters:
                found = build(self.plans, self.configuration, *sizes, enable_deep_supervision=False)
            else:  # trainers written for nnU-Net before 2.8
                architecture = self.configuration
                names = (architecture.network_arch_class_name, architecture.network_arch_init_kwargs)
                required = architecture.network_arch_init_kwargs_req_import
                found = build(*names, required, *sizes, enable_deep_supervision=False)
        if not isinstance(found, nn.Module):
            raise SettingError(f"{self.trainer} builds a {type(found).__name__}, not a torch.nn.Module")
        return found


def read_plan(folder: NNUNetFolder, checkpoint: Mapping[str, Any]) -> Plan:
    """What cannot be honored is one `SettingError`: a cascade, regions."""
    require_nnunet(folder.path)
    from nnunetv2.utilities.label_handling.label_handling import determine_num_input_channels
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    dataset = read_json(folder.path / "dataset.json")
    with quiet(), _planned(str(folder.path)):
        plans = PlansManager(read_json(folder.path / "plans.json"))
        configuration = plans.get_configuration(checkpoint["init_args"]["configuration"])
        labels = plans.get_label_manager(dataset)
        _require_known(folder.path, configuration)
        if configuration.previous_stage_name is not None:
            raise SettingError(
                f"{folder.path} is the second stage of a cascade, which needs the masks of "
                f"{configuration.previous_stage_name}; adapt that one, or 3d_fullres"
            )
        if labels.has_regions:
            raise SettingError(
                f"{folder.path} was trained on regions, classes that overlap, which have no softmax to adapt by; "
                "train it on labels that exclude each other"
            )
        mirroring = checkpoint.get("inference_allowed_mirroring_axes")
        axes = None if mirroring is None else tuple(int(axis) for axis in mirroring)
        channels = int(determine_num_input_channels(plans, configuration, dataset))
        return Plan(plans, configuration, labels, dataset, str(checkpoint["trainer_name"]), axes, channels)


def require_nnunet(path: Path) -> None:
    """Raise unless nnU-Net is installed."""
    try:
        with quiet():
            import nnunetv2.inference.predict_from_raw_data  # noqa: F401
    except ImportError as error:
        raise SettingError(
            f"{path} is an nnU-Net folder, which nnunetv2 reads ({error}); install it: pip install 'dltta[nnunet]'"
        ) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """nnU-Net talks on the standard output, where our commands print their results."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


@contextlib.contextmanager
def _planned(what: str) -> Iterator[None]:
    """Whatever nnU-Net raises for plans that do not fit is one sentence."""
    try:
        yield
    except (SettingError, StateError):
        raise
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, ImportError) as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise SettingError(f"{what}: nnU-Net cannot use its plans ({reason}); see that it is of nnU-Net 2") from error


def _require_known(path: Path, configuration: Any) -> None:
    """plans.json names classes that are imported and called: only those of networks."""
    values, kwargs = [configuration.network_arch_class_name], configuration.network_arch_init_kwargs
    values += [kwargs.get(name) for name in configuration.network_arch_init_kwargs_req_import]
    for name in values:
        plain = name is None or (isinstance(name, str) and name.startswith(BUILDERS))
        if not plain:
            raise SettingError(
                f"{path / 'plans.json'} names {name!r}, which is no layer or network of nnU-Net's own packages; give "
                "such a network as package.module:function --weights FILE"
            )


def _trainer(name: str) -> Any:
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name

    try:
        with quiet():
            return recursive_find_trainer_class_by_name(name)
    except (RuntimeError, ImportError, AssertionError) as error:
        if (found := _trainer_elsewhere(name)) is not None:
            return found
        reason = " ".join(str(error).split())[:120]
        raise SettingError(
            f"the trainer {name} cannot be imported ({reason}); install it, or name its folder in nnUNet_extTrainer"
        ) from error


def _trainer_elsewhere(name: str) -> Any:
    """nnU-Net's search ends at the first module that lacks a package (timm, torchvision); this one goes on."""
    from nnunetv2.paths import nnUNet_extTrainer
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
    from nnunetv2.utilities.find_class_by_name import recursive_find_python_class

    trainers = importlib.import_module("nnunetv2.training.nnUNetTrainer")
    for module in pkgutil.walk_packages(trainers.__path__, f"{trainers.__name__}.", onerror=lambda _: None):
        with quiet(), contextlib.suppress(ImportError, RuntimeError):
            found = getattr(importlib.import_module(module.name), name, None)
            if isinstance(found, type) and issubclass(found, nnUNetTrainer):
                return found
    own = nnUNet_extTrainer.get().split(os.pathsep) if nnUNet_extTrainer.is_set() else []
    for folder in filter(os.path.isdir, own):
        with quiet(), contextlib.suppress(ImportError, RuntimeError):
            found = recursive_find_python_class(folder, name, None, cleanup_imports_from_base_folder=True)
            if isinstance(found, type) and issubclass(found, nnUNetTrainer):
                return found
    return None


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value
