"""8 run over a stream. A model that came with its own preprocessing, on the images of a site as their files hold them.

Such a model prepares an image itself and brings its prediction back to the file's grid, where it is scored.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from dltta.core.step import Step
from dltta.data.case import Case, Dataset
from dltta.data.formats.format import Geometry, Image
from dltta.data.sites import SiteFolder
from dltta.data.streams import SiteStream
from dltta.errors import DataError, SettingError
from dltta.evaluation.run import CaseRecord, Collect, StreamRecord, record_case, stream_record
from dltta.evaluation.stacks import Stacks
from dltta.models.io.opened import OpenedModel
from dltta.predictor import Loaded, Predictor, load


def run_files(
    predictor: Predictor,
    dataset: Dataset,
    order: Sequence[int],
    *,
    batch_size: int = 1,
    collect: Collect | None = None,
) -> StreamRecord:
    """The record of a stream in this order; images of a batch must have one shape, as the network takes them."""
    require_site(predictor.opened, dataset)
    rows: list[CaseRecord] = []
    stacks = Stacks()
    for start in range(0, len(order), batch_size):
        read = [read_case(dataset, index) for index in order[start : start + batch_size]]
        cases, loaded = [case for case, _ in read], [load(predictor.opened, image, "") for _, image in read]
        started = time.perf_counter()
        predicted = _predict(predictor, cases, loaded)
        seconds = (time.perf_counter() - started) / len(cases)
        for position, (case, (prediction, step)) in enumerate(zip(cases, predicted, strict=True)):
            row = record_case(case, prediction, dataset, step, position, seconds)
            rows.append(row)
            if row.volume is not None:
                stacks.add(case, prediction)
            if collect is not None:
                collect(case, prediction, row)
    return stream_record(dataset, rows, stacks)


def _predict(predictor: Predictor, cases: Sequence[Case], loaded: Sequence[Loaded]) -> list[tuple[Tensor, Step]]:
    """Class values (*spatial) or class probabilities of every case, and the step that gave them."""
    names = [case.name for case in cases]
    if predictor.opened.task == "classification":
        return [(each.probabilities.double(), each.step) for each in predictor.classify(names, loaded)]
    if len(cases) > 1:
        raise SettingError(f"segmentations are adapted to one by one, got a batch size of {len(cases)}; use 1")
    prediction = predictor.segment(names[0], loaded[0])
    return [(prediction.labels(predictor.opened), prediction.step)]


def require_site(opened: OpenedModel, dataset: Dataset) -> None:
    """Raise unless the site has the task and the number of classes of the model."""
    if (opened.task, len(opened.classes)) != (dataset.task, len(dataset.classes)):
        raise DataError(
            f"{opened.name} gives a {opened.task} of {', '.join(opened.classes)}, {dataset.site} has a {dataset.task} "
            f"of {', '.join(dataset.classes)}; use the network that was trained for these classes"
        )


def read_case(dataset: Dataset, index: int) -> tuple[Case, Image]:
    """A case and its image: of a site folder as the file has it, else as far as the case knows where it lies."""
    if isinstance(dataset, SiteFolder):
        return dataset.read(index)
    if isinstance(dataset, SiteStream):
        part, position = dataset.places[index]
        case, image = read_case(dataset.parts[part], position)
        return replace(case, name=f"{part + 1}_{case.name}"), image
    case = dataset[index]
    shape, spacing = tuple(case.image.shape[1:]), case.spacing
    affine = np.diag([*(spacing or (1.0,) * 3), 1.0]) if len(shape) == 3 else None
    geometry = Geometry("memory", shape, len(case.image), case.limit, spacing, affine)
    return case, Image(np.ascontiguousarray(case.image.numpy(), dtype=np.float32), geometry)
