"""What an experiment tells a tracking tool: the settings, scores and curves of every stream, each once.

A stream is known by its key, which carries a checksum of all that decides it; one that the tool has is left alone.
"""

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from dltta.errors import SettingError
from dltta.evaluation.results import StreamResult
from dltta.recipes import Recipe

TAG = "dltta.stream"  # of a run in MLflow: the key of its stream
NEEDS_EXTRA = "{} is not installed; pip install 'dltta[{}]'"


class Tracker(Protocol):
    """Is told of every stream that is finished."""

    def stream(self, key: str, recipe: Recipe, stream: StreamResult) -> None: ...


class NoTracker:
    """Nobody."""

    def stream(self, key: str, recipe: Recipe, stream: StreamResult) -> None:
        """Forget it."""


class TensorBoard:
    """A folder for each stream below `folder`: scores as hyperparameter metrics, curves over the cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer = tensorboard_writer()

    def stream(self, key: str, recipe: Recipe, stream: StreamResult) -> None:
        place = self.folder / key
        if place.is_dir():
            return
        beside = self.folder / f".{key}.part"  # whole or not there, as every file of ours
        shutil.rmtree(beside, ignore_errors=True)
        with self._writer(str(beside)) as writer:
            for step, name, value in curves(stream):
                writer.add_scalar(f"case/{name}", value, step)
            scored = {f"stream/{name}": value for name, value in scores(stream).items()}
            writer.add_hparams(settings(recipe, stream), scored, run_name=".")
        beside.rename(place)


class MLflow:
    """A run for each stream, in the experiment `name`, at MLflow's own tracking address or else in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
        try:
            import mlflow
        except ImportError as error:
            raise SettingError(NEEDS_EXTRA.format("MLflow", "mlflow")) from error
        self._mlflow: Any = mlflow
        if not mlflow.is_tracking_uri_set():
            folder.mkdir(parents=True, exist_ok=True)
            mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').absolute()}")
        mlflow.set_experiment(name)

    def stream(self, key: str, recipe: Recipe, stream: StreamResult) -> None:
        if self._mlflow.search_runs(filter_string=f"tags.`{TAG}` = '{key}'", output_format="list"):
            return
        with self._mlflow.start_run(run_name=key):
            self._mlflow.log_params(settings(recipe, stream))
            self._mlflow.log_metrics(scores(stream))
            for step, points in groupby(curves(stream), itemgetter(0)):  # one transaction for each case
                self._mlflow.log_metrics({f"case_{name}": value for _, name, value in points}, step=step)
            self._mlflow.set_tag(TAG, key)  # last: a run without it was interrupted and is not counted


def tensorboard_writer() -> Any:
    """The class that writes TensorBoard's files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SettingError(NEEDS_EXTRA.format("TensorBoard", "tracking")) from error
    return SummaryWriter


def settings(recipe: Recipe, stream: StreamResult) -> dict[str, Any]:
    """Which stream it is and what it was run with; what was left to the method's usual value is not there."""
    place = {name: getattr(stream, name) for name in ("source", "target", "method", "rate", "seed", "order")}
    given = {key: value for key, value in recipe.deciding().items() if isinstance(value, str | int | float)}
    return {**given, **place}


def scores(stream: StreamResult) -> dict[str, float]:
    """The metrics of the whole stream that have a value."""
    return _defined(stream.metrics)


def curves(stream: StreamResult) -> Iterator[tuple[int, str, float]]:
    """Position in the stream, name and value: scores, rate, discrepancy and loss of each case."""
    for step, case in enumerate(stream.cases):
        numbers = {"rate": case.rate, "discrepancy": case.discrepancy, "loss": case.loss}
        for name, value in _defined({**case.metrics, **numbers}).items():
            yield step, name, value


def _defined(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
