import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, tensor

from dltta.core.step import Step, Update
from dltta.data.case import Case, Place
from dltta.errors import DataError, SettingError
from dltta.evaluation.examples import Keep, gather_examples
from dltta.evaluation.run import StreamRecord, run_stream
from dltta.quality.decision import Decision, Outcome, Reason, of_batch
from dltta.quality.guarded import GuardedStep


@dataclass
class Site:
    """Cases in memory."""

    cases: list[Case]
    classes: tuple[str, ...] = ("background", "thing")
    task: str = "segmentation"
    site: str = "B"

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> Case:
        return self.cases[index]


class Echo:
    """Gives the image itself as logits, and remembers what it was shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, str]] = []

    def step(self, x: Tensor, *, case: str) -> Step:
        self.shown.append((len(x), case))
        return Step(x, (Update(0.5, None if len(self.shown) == 1 else 0.25, 1e-3),))


def image(name: str, values: list[float], label: list[int] | None, spacing: tuple[float, ...] | None = None) -> Case:
    image = tensor(values).reshape(1, 1, -1)
    return Case(name, "B", name, image, None if label is None else tensor(label).reshape(1, -1), spacing)


def patch(name: str, logits: list[float], label: int | None) -> Case:
    return Case(name, "B", name, tensor(logits), None if label is None else tensor(label))


def patches(*cases: Case) -> Site:
    return Site(list(cases), ("normal", "tumor"), "classification")


def test_cases_come_in_the_given_order_and_batches_with_a_smaller_last_one():
    site = Site([image(f"c{i}", [1.0, -1.0], [1, 0]) for i in range(5)])
    echo = Echo()
    record = run_stream(echo, site, [4, 0, 3, 1, 2], batch_size=2)
    assert [row.case for row in record.cases] == ["c4", "c0", "c3", "c1", "c2"]
    assert echo.shown == [(2, "c4 and 1 more"), (2, "c3 and 1 more"), (1, "c2")]


def test_one_channel_is_foreground_above_zero():
    record = run_stream(Echo(), Site([image("c", [0.1, 0.0, -0.1], [1, 0, 0])]), [0])
    assert record.metrics["dice"] == 1


def test_channels_are_classes():
    image = tensor([[0.0, 2.0], [1.0, 1.0], [0.5, 0.0]]).reshape(3, 1, 2)
    site = Site([Case("c", "B", "c", image, tensor([[1, 0]]))], ("background", "one", "two"))
    assert run_stream(Echo(), site, [0]).cases[0].metrics["dice_one"] == 1


def test_stream_is_the_mean_over_the_cases_that_define_a_metric():
    empty = image("empty", [-1.0, -1.0], [0, 0])
    record = run_stream(Echo(), Site([image("a", [1, 1], [1, 0]), image("b", [1, -1], [1, 0]), empty]), range(3))
    assert record.metrics["dice"] == pytest.approx((2 / 3 + 1) / 2)
    assert math.isnan(record.cases[2].metrics["dice"])


def test_row_records_what_happened_in_its_batch():
    site = Site([image(name, [1.0], [1]) for name in "abc"])
    rows = run_stream(Echo(), site, range(3), batch_size=2).cases
    assert [row.discrepancy for row in rows] == [None, None, 0.25]
    assert [(row.loss, row.rate, row.site) for row in rows] == [(0.5, 1e-3, "B")] * 3


def test_time_of_a_batch_is_shared_by_its_cases(monkeypatch):
    clock = iter([10.0, 16.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    site = Site([image(name, [1.0], [1]) for name in "abc"])
    assert [row.seconds for row in run_stream(Echo(), site, range(3), batch_size=2).cases] == [3.0, 3.0, 1.0]


def test_number_that_is_not_finite_is_not_recorded():
    class Diverged(Echo):
        def step(self, x: Tensor, *, case: str) -> Step:
            return Step(x, (Update(math.inf, None, math.nan),))

    row = run_stream(Diverged(), Site([image("a", [1.0], [1])]), [0]).cases[0]
    assert (row.loss, row.rate) == (None, None)


def test_what_the_guard_decided_is_recorded_for_each_case():
    class Guarded(Echo):
        def step(self, x: Tensor, *, case: str) -> GuardedStep:
            accepted = Decision(Outcome.ACCEPTED)
            far = Decision(Outcome.KEPT, Reason.OOD_SCORE, "OOD score 9, limit 3")
            return GuardedStep(x, (), of_batch([accepted, far, accepted]))

    site = Site([image(name, [1.0], [1]) for name in "abc"])
    found = run_stream(Guarded(), site, range(3), batch_size=3).cases
    assert [row.decision for row in found] == ["accepted", "kept", "accepted"]
    assert [row.reason for row in found] == [None, "ood-score", None]
    assert run_stream(Echo(), site, range(3)).cases[0].decision is None


def test_unlabeled_case_gets_a_row_without_metrics():
    record = run_stream(Echo(), Site([image("a", [1.0], None), image("b", [1.0], [1])]), [0, 1])
    assert record.cases[0].metrics == {}
    assert record.metrics["dice"] == 1


def test_stream_without_labels_has_no_metrics():
    assert run_stream(Echo(), Site([image("a", [1.0], None)]), [0]).metrics == {}
    assert run_stream(Echo(), patches(patch("a", [1.0, 2.0], None)), [0]).metrics == {}


def test_missed_and_invented_structures_are_counted():
    site = Site([image("missed", [-1.0, -1.0], [1, 0]), image("invented", [1.0, 1.0], [0, 0])])
    record = run_stream(Echo(), site, [0, 1])
    assert (record.missed, record.invented) == (1, 1)
    assert record.metrics["dice"] == 0  # of the first; the second has none
    assert record.metrics["hd95"] == 1  # the width of the image


def test_rows_know_their_patient():
    rows = run_stream(Echo(), Site([image("a", [1.0], [1])]), [0]).cases
    assert rows[0].patient == ("B", "a")
    assert replace(rows[0], group="p").patient == ("B", "p")


def sliced(volume: str, predictions: list[list[float]], labels: list[list[int]], **options: object) -> list[Case]:
    """The slices of one volume of one row, cut across the last axis."""
    where = {"axis": 2, "thickness": 4.0, "count": len(predictions)} | options
    return [
        replace(
            image(f"{volume}_{position}", logits, label, (1.0, 2.0)),
            group=f"patient of {volume}",
            place=Place(volume, position, **where),
        )
        for position, (logits, label) in enumerate(zip(predictions, labels, strict=True))
    ]


# Dice of v: 3 of 4 positions predicted right and one beside: 2·3 / (4 + 4); its third slice is empty in label and
# prediction, its second has a position that the label lacks.
VOLUME = sliced("v", [[1, 1, -1], [1, -1, 1], [-1, -1, -1]], [[1, 1, 0], [1, 1, 0], [0, 0, 0]])
OTHER = sliced("w", [[-1, 1, -1], [-1, -1, -1]], [[0, 1, 0], [0, 0, 0]])


def test_slices_are_scored_as_the_volume_that_they_make_up():
    record = run_stream(Echo(), Site([*VOLUME, *OTHER]), range(5))
    assert [row.case for row in record.volumes] == ["v", "w"]
    assert [row.metrics["dice"] for row in record.volumes] == pytest.approx([6 / 8, 1])
    assert record.metrics["dice"] == pytest.approx((6 / 8 + 1) / 2)
    assert [(row.case, row.volume, row.metrics) for row in record.cases[2:4]] == [("v_2", "v", {}), ("w_0", "w", {})]
    assert [row.rate for row in record.cases] == [1e-3] * 5  # every slice is a step
    assert record.scored == record.volumes
    assert record.volumes[0].patient == ("B", "patient of v")


def test_volumes_do_not_depend_on_the_order_of_their_slices():
    site = Site([*VOLUME, *OTHER])
    mixed = run_stream(Echo(), site, [4, 1, 2, 3, 0], batch_size=2)
    straight = run_stream(Echo(), site, range(5))
    assert {row.case: row.metrics for row in mixed.volumes} == {row.case: row.metrics for row in straight.volumes}
    far = Site(sliced("v", [[1.0], [-1.0], [-1.0], [-1.0]], [[0], [0], [0], [1]]))
    assert run_stream(Echo(), far, [0, 3, 1, 2]).metrics["hd95"] == 3 * 4.0  # three slices, though they came in a row


@pytest.mark.parametrize(("axis", "spacing"), [(0, (4.0, 1.0, 2.0)), (1, (1.0, 4.0, 2.0)), (2, (1.0, 2.0, 4.0))])
def test_a_volume_has_the_distances_of_its_own_grid(axis, spacing):
    """One position three slices away from the label: 3 x 4 mm."""
    slices = sliced("v", [[1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]], [[0, 0], [0, 0], [0, 0], [1, 0]])
    slices = [replace(case, place=replace(case.place, axis=axis)) for case in slices]
    record = run_stream(Echo(), Site(slices), range(4))
    assert (record.metrics["hd95"], record.unit) == (12, "mm")


def test_volumes_without_a_thickness_are_measured_in_positions():
    record = run_stream(Echo(), Site(sliced("v", [[1.0], [-1.0]], [[0], [1]], thickness=None)), range(2))
    assert (record.metrics["hd95"], record.unit) == (1, "px")


def test_volumes_of_the_same_name_at_two_sites_are_two():
    here, there = sliced("v", [[1.0]], [[1]]), [replace(case, site="C") for case in sliced("v", [[-1.0]], [[1]])]
    assert [row.metrics["dice"] for row in run_stream(Echo(), Site([*here, *there]), range(2)).volumes] == [1, 0]


def test_a_volume_that_is_not_whole_is_not_scored():
    with pytest.raises(DataError, match="2 of the 3 labeled slices of v came"):
        run_stream(Echo(), Site(VOLUME), [0, 1])
    with pytest.raises(DataError, match="v_0 came twice"):
        run_stream(Echo(), Site(VOLUME), [0, 0])


def test_unlabeled_slices_have_no_scores():
    slices = [replace(case, label=None) for case in VOLUME]
    record = run_stream(Echo(), Site(slices), range(3))
    assert (record.volumes, record.metrics) == ((), {})


def test_slices_and_whole_images_may_share_a_stream():
    record = run_stream(Echo(), Site([*OTHER, image("c", [1.0, -1.0], [0, 1])]), range(3))
    assert [(row.case, row.metrics["dice"]) for row in record.scored] == [("c", 0), ("w", 1)]
    assert record.metrics["dice"] == 0.5


@pytest.mark.parametrize(
    ("first", "second", "unit"), [((1.0, 2.0), (1.0, 1.0), "mm"), (None, None, "px"), ((1.0, 1.0), None, "mixed")]
)
def test_unit_of_a_stream(first, second, unit):
    site = Site([image("a", [1.0], [1], first), image("b", [1.0], [1], second)])
    assert run_stream(Echo(), site, [0, 1]).unit == unit


def test_classification_rows_and_stream():
    site = patches(patch("a", [0.0, 0.0], 1), patch("b", [0.0, 3.0], 1), patch("c", [2.0, 0.0], 0))
    record = run_stream(Echo(), site, range(3), batch_size=3)
    assert [(row.label, row.prediction, row.metrics["accuracy"]) for row in record.cases] == [
        (1, 0, 0.0),
        (1, 1, 1.0),
        (0, 0, 1.0),
    ]
    assert record.cases[0].probabilities == (0.5, 0.5)
    assert record.metrics["accuracy"] == pytest.approx(2 / 3)
    assert record.metrics["auc"] == 1
    assert record.unit is None


def test_one_output_is_the_probability_of_the_last_class():
    row = run_stream(Echo(), patches(patch("a", [math.log(3)], 1)), [0]).cases[0]
    assert row.probabilities == pytest.approx((0.25, 0.75))


def test_confident_predictions_keep_their_order():
    # In float32 both would be exactly 1 and the AUC one half.
    site = patches(patch("a", [0.0, 30.0], 1), patch("b", [0.0, 25.0], 0))
    assert run_stream(Echo(), site, [0, 1]).metrics["auc"] == 1


def test_labels_never_reach_the_adapter():
    class Nosy(Echo):
        def step(self, x: Tensor, *, case: str) -> Step:
            assert isinstance(x, Tensor)
            assert isinstance(case, str)
            return super().step(x, case=case)

    run_stream(Nosy(), Site([image("a", [1.0], [1])]), [0])


def test_progress_counts_cases():
    seen: list[tuple[int, int]] = []
    site = Site([image(name, [1.0], [1]) for name in "abc"])
    run_stream(Echo(), site, range(3), batch_size=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("site", "message"),
    [
        (
            Site([image("a", [1.0], [1]), image("b", [1.0, 2.0], [1, 0])]),
            "differ in shape: .* in a, b; use batch_size=1",
        ),
        (Site([image("a", [1.0], [2])]), "case a: the label holds values from 2"),
        (
            Site([image("a", [1.0], [1])], ("background", "x", "y")),
            "predicts 2 classes, B has 3: background, x",
        ),
        (patches(patch("a", [1.0, 2.0], 5)), "case a: the label is 5; with 2 classes"),
    ],
)
def test_what_does_not_fit_says_so(site, message):
    with pytest.raises(DataError, match=message):
        run_stream(Echo(), site, range(len(site)), batch_size=2)


def test_batch_size_must_be_positive():
    with pytest.raises(SettingError, match="batch_size must be at least 1, found 0"):
        run_stream(Echo(), Site([]), [], batch_size=0)


def test_empty_stream_is_an_empty_record():
    assert run_stream(Echo(), Site([]), []) == StreamRecord("B", "segmentation", {}, ())


def test_kept_predictions_become_examples():
    site = Site([image("a", [1.0, -1.0], [1, 0]), image("b", [1.0, 1.0], [1, 0])])
    before, after = Keep(["b"]), Keep(["b"])
    run_stream(Echo(), site, [0, 1], collect=before)
    run_stream(Echo(), site, [1, 0], batch_size=2, collect=after)
    (example,) = gather_examples({"Source": before, "Tent": after}, site.classes)
    assert example.name == "b"
    assert example.predictions["Tent"].tolist() == [[1, 1]]
    assert example.scores == pytest.approx({"Source": 2 / 3, "Tent": 2 / 3})
    assert example.label is not None
    assert example.label.tolist() == [[1, 0]]


def test_examples_of_nothing_are_none():
    assert gather_examples({}, ("a", "b")) == []
    assert torch.is_grad_enabled()
