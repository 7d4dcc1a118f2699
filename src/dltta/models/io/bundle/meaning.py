"""2 networks. What a bundle says of its network's prediction: which classes, by which activation, brought back how."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from monai.transforms import Activationsd, AsDiscreted, Compose, Invertd

from dltta.errors import SettingError
from dltta.models.io.opened import Activation
from dltta.models.io.probing import Probe, class_names

PREDICTION = "pred"  # the key that MONAI's evaluator puts the network's prediction under
FORMATS = ("segmentation", "labels", "label", "classes", "classification", "probabilities")
WITHOUT_EFFECT = ("EnsureTyped", "CastToTyped", "ToTensord", "ToNumpyd", "ToDeviced", "Identityd", "CopyItemsd")


@dataclass(frozen=True)
class Described:
    """What `metadata.json` says of the one image that goes in and the one prediction that comes out."""

    image: str | None = None
    in_channels: int | None = None
    size: tuple[int, ...] | None = None
    names: tuple[str, ...] = ()  # of the prediction's channels
    format: str | None = None

    @classmethod
    def read(cls, metadata: Mapping[str, Any], where: str) -> "Described":
        formats = _table(metadata.get("network_data_format"))
        inputs, outputs = _table(formats.get("inputs")), _table(formats.get("outputs"))
        if len(inputs) > 1 or len(outputs) > 1:
            raise SettingError(
                f"{where}: the network has {len(inputs)} inputs and {len(outputs)} outputs; "
                "one image in and one prediction out are supported"
            )
        image, prediction = _table(next(iter(inputs.values()), None)), _table(next(iter(outputs.values()), None))
        channels = image.get("num_channels")
        return cls(
            next(iter(inputs), None),
            channels if isinstance(channels, int) and channels > 0 else None,
            _size(image.get("spatial_shape")),
            _names(prediction.get("channel_def")),
            str(prediction["format"]).lower() if prediction.get("format") else None,
        )

    def classes(self, seen: Probe, where: str) -> tuple[str, ...]:
        """A name for each class that the network tells apart."""
        if self.format not in (None, *FORMATS):
            raise SettingError(f"{where}: the network gives {self.format!r}, not classes; if it does, give --classes")
        if len(self.names) == 1 == seen.channels:
            return ("background", *self.names)
        if self.names and len(self.names) != max(seen.channels, 2):
            raise SettingError(
                f"{where}: {len(self.names)} channels are named, the network gives {seen.channels}; give --classes"
            )
        return self.names or class_names(seen.task, seen.channels)


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _size(shape: Any) -> tuple[int, ...] | None:
    """A size in numbers; metadata may also hold rules such as `16*n`."""
    whole = isinstance(shape, list) and shape and all(isinstance(edge, int) and edge > 0 for edge in shape)
    return tuple(shape) if whole else None


def _names(definition: Any) -> tuple[str, ...]:
    """The classes in the order of their channels; none unless all are named, and differently."""
    if not isinstance(definition, dict) or not all(str(key).isdigit() for key in definition):
        return ()
    names = [str(definition[key]).strip() for key in sorted(definition, key=int)]
    return tuple(names) if all(names) and len(set(names)) == len(names) else ()


@dataclass
class Postprocessing:
    """What the bundle's postprocessing makes of the network's output."""

    activation: Activation | None = None
    argmax: bool = False
    threshold: float | None = None
    traced: str | None = None  # key of the image whose preprocessing is inverted
    nearest: bool = False

    @classmethod
    def read(cls, postprocessing: Any, channels: int, where: str) -> "Postprocessing":
        """Raises unless it amounts to the likeliest class, or to a threshold on the one sigmoid channel."""
        found = cls()
        steps = postprocessing.flatten().transforms if isinstance(postprocessing, Compose) else [postprocessing]
        for step in steps:
            written = [getattr(step, name, None) for name in ("output_key", "names", "name")]
            if any(each == PREDICTION or PREDICTION in (each or ()) for each in written):
                _refuse(step, where)
            if PREDICTION in getattr(step, "keys", ()):
                found._take(step, list(step.keys).index(PREDICTION), where)
        found._require_sense(channels, where)
        return found

    def _take(self, step: Any, at: int, where: str) -> None:
        """Adds what one step does to the prediction, which stands at position `at` of its keys."""
        if isinstance(step, Activationsd) and step.other[at] is None:
            self.activation = "sigmoid" if step.sigmoid[at] else "softmax" if step.softmax[at] else self.activation
        elif isinstance(step, AsDiscreted):
            self.argmax = self.argmax or bool(step.argmax[at])
            rounded = 0.5 if step.rounding[at] else None
            self.threshold = rounded if step.threshold[at] is None else float(step.threshold[at])
        elif isinstance(step, Invertd):
            self.traced, self.nearest = str(step.orig_keys[at]), bool(step.nearest_interp[at])
        elif type(step).__name__ not in WITHOUT_EFFECT:
            _refuse(step, where)

    def _require_sense(self, channels: int, where: str) -> None:
        if channels > 1 and (self.activation == "sigmoid" or (self.threshold is not None and not self.argmax)):
            raise SettingError(
                f"{where}: each of {channels} channels is thresholded on its own, so classes may overlap; "
                "classes that exclude each other (softmax) are supported"
            )
        if channels == 1 and (self.activation == "softmax" or self.argmax):
            raise SettingError(f"{where}: softmax or argmax of a single channel is always the same; use sigmoid")
        if channels == 1 and self.activation is None and self.threshold is not None:
            raise SettingError(f"{where}: the threshold {self.threshold} is on raw output; put a sigmoid before it")


def _refuse(step: Any, where: str) -> NoReturn:
    name = type(step).__name__
    raise SettingError(f"{where}: {name} changes the prediction in a way that is not supported; take it out")
