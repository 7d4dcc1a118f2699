"""9 examples. Which images does the report show, and what did each method predict for them?"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dltta.data.case import Case
from dltta.evaluation.run import CaseRecord

Array = NDArray[Any]


@dataclass(frozen=True)
class Example:
    """One image with the predictions of several methods, by label (see `method_label`).

    Segmentation: `label` and predictions are (*spatial) class values, `scores` the Dice of each prediction.
    Classification: `label` is () and predictions are (classes,) probabilities.
    """

    name: str
    image: Array  # (C, *spatial)
    label: Array | None
    predictions: Mapping[str, Array]
    scores: Mapping[str, float] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    axis: int = -1  # spatial axis along which a volume (x, y, z) is sliced


class Keep:
    """Collects the predictions for chosen cases while a stream runs: `run_stream(..., collect=kept)`."""

    def __init__(self, cases: Iterable[str]) -> None:
        self.names = frozenset(cases)
        self.cases: dict[str, Case] = {}
        self.predictions: dict[str, Array] = {}
        self.rows: dict[str, CaseRecord] = {}

    def __call__(self, case: Case, prediction: Tensor, row: CaseRecord) -> None:
        if case.name in self.names:
            self.cases[case.name] = case
            self.predictions[case.name] = np.array(prediction)
            self.rows[case.name] = row


def gather_examples(kept: Mapping[str, Keep], classes: Sequence[str], *, axis: int = -1) -> list[Example]:
    """One example per case of the first `Keep`, with the predictions of every method; `kept` goes by method label."""
    first = next(iter(kept.values()), None)
    cases = first.cases.values() if first else ()
    return [_example(case, kept, tuple(classes), axis) for case in cases]


def _example(case: Case, kept: Mapping[str, Keep], classes: tuple[str, ...], axis: int) -> Example:
    with_it = {label: keep for label, keep in kept.items() if case.name in keep.predictions}
    metrics = {label: keep.rows[case.name].metrics for label, keep in with_it.items()}
    return Example(
        name=case.name,
        image=np.array(case.image),
        label=None if case.label is None else np.array(case.label),
        predictions={label: keep.predictions[case.name] for label, keep in with_it.items()},
        scores={label: values["dice"] for label, values in metrics.items() if "dice" in values},
        classes=classes,
        axis=axis,
    )
