"""The guard: which images it does not let through, and what it objects to after an update."""

from dataclasses import replace

import pytest
import torch

from candidates import binary, candidate, image_signals, never, says, update_signals
from dltta import Limits, SourceGuard
from dltta.config import make_guard
from dltta.errors import SettingError
from dltta.models.calibration import Calibration
from dltta.quality.decision import Outcome, Reason
from dltta.quality.signals import Candidate, ImageSignals, UpdateSignals

SHARES = ((0.4, 0.9), (0.1, 0.6))


@pytest.mark.parametrize(
    ("found", "reason", "detail"),
    [
        (update_signals(binary(0.1, 0.9)), None, None),
        (update_signals(binary(0.1, 0.9), rate=2.0), Reason.RATE, "rate 2 above 1"),
        (update_signals(binary(0.1, 0.9), drift=0.6), Reason.DRIFT, "parameters moved by 0.6 of their length"),
        (
            update_signals(binary(0.1, 0.9), unadapted=binary(0.9, 0.9)),
            Reason.CHANGE,
            "0.5 of the prediction changed, limit 0.02",
        ),
        (update_signals(binary(0.1, 0.6), unadapted=binary(0.4, 0.9)), None, None),  # less certain, but the same
        (
            update_signals(torch.tensor([[0.4, 0.6]]), torch.tensor([[0.6, 0.4]])),
            Reason.CHANGE,
            "0.2 of the prediction changed, limit 0.1",
        ),
        (update_signals(torch.tensor([[0.45, 0.55]]), torch.tensor([[0.52, 0.48]])), None, None),
        (update_signals(binary(0.99, 0.98), source=binary(0.3, 0.2)), Reason.CLASS_SHARE, "a class takes a share"),
        (update_signals(binary(0.001, 0.002), source=binary(0.2, 0.4)), Reason.CLASS_SHARE, "a class takes a share"),
    ],
)
def test_objections(found, reason, detail):
    review = SourceGuard(Limits(shares=SHARES)).after(found)
    assert review.numbers == found.numbers(SHARES)
    if reason is None:
        assert review.objection is None
    else:
        assert review.objection.reason == reason
        assert review.objection.detail.startswith(detail)


def test_a_share_that_the_source_model_misses_even_more_is_not_objected_to():
    guard = SourceGuard(Limits(shares=SHARES))
    assert guard.after(update_signals(binary(0.02, 0.02), source=binary(1e-5, 1e-5))).objection is None


def test_collapse_is_seen_without_calibration():
    objection = SourceGuard().after(update_signals(binary(0.01, 0.01), source=binary(0.3, 0.4))).objection
    assert objection.reason == Reason.COLLAPSE
    assert objection.detail.startswith("entropy of the mean prediction 0.056, the source model's 0.647")


MEASURED = {
    "shares": [[0.5, 0.9], [0.1, 0.5]],
    "ood_score": {"first": 3.0, "usual": 2.0, "negative": 101.0, "noise": 51.0},
    "entropy": {"median": 0.5, "usual": 0.6, "shuffled": 0.9},
}


def test_limits_come_from_source_images():
    limits = Limits.calibrated(MEASURED)
    assert limits.shares == ((0.5, 0.9), (0.1, 0.5))
    assert limits.in_distribution == (1.5, 1.0)  # half of what 95 % stay below
    assert (limits.source_consistency, limits.consistency_override) == (0.7, 0.7)
    assert Limits.calibrated(MEASURED, consistency_override=1.0) == replace(limits, consistency_override=1.0)
    assert limits.ood_score == 51.0  # halfway from 1 to the negatives
    assert limits.entropy == pytest.approx(0.7)  # halfway to shuffled pixels
    noisy = MEASURED["ood_score"] | {"noise": 201.0}
    assert Limits.calibrated(MEASURED | {"ood_score": noisy}).ood_score == 101.0  # the farther of the two


def test_what_happens_on_source_images_is_never_out_of_distribution():
    tame = MEASURED | {"ood_score": {"first": 3.0, "usual": 2.0, "negative": 1.5, "noise": 1.0}}
    certain = MEASURED | {"entropy": {"median": 0.5, "usual": 0.6, "shuffled": 0.4}}
    assert Limits.calibrated(tame).ood_score == 4.0
    assert Limits.calibrated(certain).entropy == 0.6


def test_what_nobody_measured_has_no_limit():
    limits = Limits.calibrated({"shares": [[0, 1]], "ood_score": None})
    measured = ("in_distribution", "ood_score", "entropy", "source_consistency", "consistency_override")
    assert [getattr(limits, name) for name in measured] == [None] * 5


def test_how_far_consistency_may_override_depends_on_the_method():
    calibration = replace(ONE_LAYER, predictions=MEASURED)
    assert make_guard(calibration, "atta").limits.consistency_override == 1.0
    assert make_guard(calibration, "tent").limits.consistency_override == 0.7
    assert make_guard(None, "tent").limits == Limits()


@pytest.mark.parametrize("name", ["rate", "drift", "max_change", "max_probability_shift"])
def test_limits_that_nothing_can_pass_are_refused(name):
    with pytest.raises(SettingError, match=f"{name} must be positive, got 0"):
        Limits(**{name: 0})


@pytest.mark.parametrize("values", [{"share_margin": 0.5}, {"collapse": -0.1}, {"collapse": 1.5}])
def test_impossible_factors_are_refused(values):
    with pytest.raises(SettingError, match="share_margin is at least 1 and collapse from 0 to 1"):
        Limits(**values)


# before the update

ONE_LAYER = Calibration({"n": (torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0]]))}, {"n": 0.0})
# source images: means 0 and 2, so 1 ± √2; the variance is always 1, and 2 would have an infinite score


def outcomes(decisions):
    return [None if decision is None else decision.outcome for decision in decisions]


def test_images_are_sorted_by_their_ood_score():
    guard = SourceGuard(Limits(in_distribution=(1.0, 1.0), ood_score=9.0), ONE_LAYER)
    assert outcomes(guard.before(image_signals(1.0))) == [Outcome.IN_DISTRIBUTION]
    (inside,) = guard.before(image_signals(2.9))  # (1.9 / √2)² / 2 = 0.9
    assert (inside.outcome, inside.reason) == (Outcome.IN_DISTRIBUTION, Reason.IN_DISTRIBUTION)
    assert inside.detail == "OOD score 0.903, as on source images"
    assert outcomes(guard.before(image_signals(3.1))) == [None]  # 1.1
    assert outcomes(guard.before(image_signals(6.9))) == [None]  # 8.7
    (outside,) = guard.before(image_signals(7.1))  # 9.3
    assert (outside.outcome, outside.reason) == (Outcome.KEPT, Reason.OOD_SCORE)
    assert outside.detail == "OOD score 9.3, limit 9"
    assert outside.signals["ood_score"] == pytest.approx(9.3025, rel=1e-3)


def test_a_batch_is_in_distribution_as_one_without_the_images_that_are_too_far_out():
    guard = SourceGuard(Limits(in_distribution=(1.0, 1.0), ood_score=9.0), ONE_LAYER)
    inside, kept = Outcome.IN_DISTRIBUTION, Outcome.KEPT
    assert outcomes(guard.before(image_signals(1.0, 3.4, 99.0))) == [inside, inside, kept]  # (0 + 1.44) / 2
    assert outcomes(guard.before(image_signals(1.0, 5.0, 99.0))) == [None, None, kept]  # (0 + 4) / 2


def test_a_shift_that_only_deeper_layers_see_is_not_in_distribution():
    thrice = Calibration(dict.fromkeys("abc", ONE_LAYER.layers["n"]), dict.fromkeys("abc", 0.0))
    one, images = torch.ones(1, 1), torch.rand(1, 1, 4)
    layers = {"a": (one, one), "b": (5 * one, one), "c": (5 * one, one)}
    found = ImageSignals(images, layers, *[Candidate(never, images)] * 3)
    loose, strict = (SourceGuard(Limits(in_distribution=(1.0, score)), thrice) for score in (4.5, 3.5))
    assert outcomes(loose.before(found)) == [Outcome.IN_DISTRIBUTION]  # the median is 4
    assert outcomes(strict.before(found)) == [None]


def test_entropy_is_that_of_the_prediction_with_instance_statistics():
    guard = SourceGuard(Limits(entropy=0.5))
    even, certain = torch.zeros(2, 4), torch.tensor([[50.0] * 4, [-50.0] * 4])  # entropies log 2 and 0
    half = torch.cat([even[:, :2], certain[:, :2]], 1)
    instance = torch.stack([even, half, certain])
    decisions = guard.before(image_signals(1.0, 1.0, 1.0, instance=lambda images: instance))
    assert outcomes(decisions) == [Outcome.KEPT, None, None]
    assert (decisions[0].reason, decisions[0].detail) == (Reason.ENTROPY, "predictive entropy 0.693, limit 0.5")


def test_images_in_distribution_cost_no_further_pass():
    guard = SourceGuard(Limits(in_distribution=(1.0, 1.0), entropy=0.5, source_consistency=0.7), ONE_LAYER)
    assert outcomes(guard.before(image_signals(1.0))) == [Outcome.IN_DISTRIBUTION]


@pytest.mark.parametrize(
    ("source", "unadapted", "outcome"),
    [
        (says(1, 0, 0, 1), says(1, 1, 0, 1), Outcome.SOURCE),  # 0 against 2 of 4
        (says(1, 1, 0, 1), says(1, 0, 0, 1), None),
        (says(1, 1, 0, 1), says(1, 1, 0, 0), Outcome.SOURCE),  # 2 of 4 against 4 of 4
        (says(1, 1, 0, 0, 0, 1), says(1, 1, 0, 1, 0, 1), None),  # 2 of 4 against 4 of 6: not clearly
        (says(1, 0, 0, 0), says(1, 1, 0, 0), None),  # both change all
        (says(0, 0, 0, 0), says(1, 1, 0, 1), None),  # consistent, but it sees less than there ever was
    ],
)
def test_the_source_model_predicts_if_it_is_clearly_more_consistent_and_plausible(source, unadapted, outcome):
    limits = Limits(source_consistency=0.7, shares=((0.3, 0.7), (0.3, 0.7)), share_margin=2.0)
    found = image_signals(1.0, source=source, unadapted=unadapted)
    assert outcomes(SourceGuard(limits).before(found)) == [outcome]


@pytest.mark.parametrize(
    ("unadapted", "margin", "outcome"),
    [
        (says(1, 1, 1, 1, 0, 0, 0, 0), 2.0, None),  # a share as source images have it
        (says(1, 1, 1, 1, 1, 1, 1, 0), 2.0, Outcome.SOURCE),  # even farther from it than the source model's
        (says(1, 1, 1, 1, 1, 1, 1, 0), 1.5, None),  # but both are too far: odds of 7 : 3 where 9 : 4 may be
    ],
)
def test_the_more_consistent_prediction_does_not_win_if_the_other_is_more_plausible(unadapted, margin, outcome):
    limits = Limits(source_consistency=0.7, shares=((0.4, 0.6), (0.4, 0.6)), share_margin=margin)
    source = says(1, 1, 1, 0, 0, 1, 1, 1)  # a share of 0.7, beyond all source images
    found = image_signals(1.0, images=torch.rand(1, 1, 8), source=source, unadapted=unadapted)
    assert outcomes(SourceGuard(limits).before(found)) == [outcome]


@pytest.mark.parametrize("blind", [says(0, 0, 0, 0), says(1, 1, 1, 1)])
def test_one_class_everywhere_does_not_count_as_consistent(blind):
    anything = Limits(source_consistency=0.7, shares=((0.0, 1.0), (0.0, 1.0)))
    found = image_signals(1.0, source=blind, unadapted=says(1, 1, 0, 1))
    assert outcomes(SourceGuard(anything).before(found)) == [None]


def classifying(prediction, flipped):
    """A network of whole images that says something else of what begins with the darker half."""
    return lambda images: torch.stack([prediction if x[0, 0] > x[0, -1] else flipped for x in images]).log()


def test_the_class_of_one_image_may_be_more_consistent_but_not_one_that_all_images_of_a_batch_get():
    certain, uncertain, other = torch.tensor([0.9, 0.1]), torch.tensor([0.6, 0.4]), torch.tensor([0.1, 0.9])
    networks = {"source": classifying(certain, certain), "unadapted": classifying(certain, uncertain)}
    guard, one = SourceGuard(Limits(source_consistency=0.7)), torch.tensor([[[1.0, 0.5, 0.0]]])
    assert outcomes(guard.before(image_signals(1.0, images=one, **networks))) == [Outcome.SOURCE]
    two = one.repeat(2, 1, 1)
    assert outcomes(guard.before(image_signals(1.0, 1.0, images=two, **networks))) == [None, None]
    networks["source"] = lambda images: torch.stack([certain, other]).log()
    assert outcomes(guard.before(image_signals(1.0, 1.0, images=two, **networks))) == [Outcome.SOURCE] * 2


def test_images_too_far_out_are_looked_at_by_flips_too():
    guard = SourceGuard(Limits(in_distribution=(1.0, 1.0), ood_score=9.0, source_consistency=0.7), ONE_LAYER)
    consistent, inconsistent = says(1, 0, 0, 1), says(1, 1, 0, 1)
    found = image_signals(7.1, 5.0, source=consistent, unadapted=inconsistent)
    assert outcomes(guard.before(found)) == [Outcome.SOURCE, Outcome.SOURCE]
    found = image_signals(7.1, 5.0, source=inconsistent, unadapted=consistent)
    assert outcomes(guard.before(found)) == [Outcome.KEPT, None]


def test_a_decision_by_flip_consistency_says_what_changed():
    found = image_signals(1.0, source=says(1, 0, 0, 1), unadapted=says(1, 1, 0, 1))
    (decision,) = SourceGuard(Limits(source_consistency=0.7)).before(found)
    assert decision.reason == Reason.FLIP_CONSISTENCY
    assert decision.detail == "flips change 0.5 of the prediction, of the source model's 0"
    assert decision.signals == {"flip_inconsistency": 0.5, "source_flip_inconsistency": 0.0}


def test_constant_images_teach_nothing_without_any_calibration():
    images = torch.rand(3, 2, 4)
    images[1] = torch.tensor([[0.3], [0.7]])  # both channels
    images[2, 0] = 0.5  # one of two
    decisions = SourceGuard().before(image_signals(1.0, 1.0, 1.0, images=images))
    assert outcomes(decisions) == [None, Outcome.SOURCE, None]
    assert (decisions[1].reason, decisions[1].detail) == (Reason.CONSTANT_IMAGE, "the image is constant")


# after the update


@pytest.mark.parametrize(
    ("adapted", "unadapted", "override", "objects"),
    [
        (says(1, 0, 0, 1), says(1, 1, 0, 1), 0.7, False),  # 0 against 2 of 4
        (says(1, 0, 0, 1), says(1, 1, 0, 1), None, True),  # nobody measured it
        (says(1, 1, 0, 1), says(1, 1, 0, 0), 0.7, False),  # 2 of 4 against 4 of 4
        (says(1, 1, 0, 1), says(1, 1, 0, 0), 0.4, True),
        (says(1, 1, 0, 1), says(1, 0, 1, 1), 1.0, True),  # other, and no more consistent
        (says(1, 1, 0, 1), says(1, 0, 0, 1), 0.7, True),
        (says(1, 1, 1, 1), says(1, 1, 0, 1), 0.7, True),  # a collapse is consistent
    ],
)
def test_a_prediction_may_change_more_if_it_becomes_clearly_more_consistent(adapted, unadapted, override, objects):
    images = torch.rand(1, 1, 4)
    ours, theirs = Candidate(adapted, images), Candidate(unadapted, images)
    found = UpdateSignals(ours, theirs, source=ours, drift=0.0, rate=1e-3)
    objection = SourceGuard(Limits(consistency_override=override)).after(found).objection
    assert (objection is not None) == objects
    assert not objects or objection.reason == Reason.CHANGE


def test_a_prediction_that_changed_little_costs_no_further_pass():
    found = update_signals(binary(0.1, 0.9))
    assert SourceGuard(Limits(consistency_override=0.7)).after(found).objection is None
    with pytest.raises(AssertionError, match="nobody needs"):
        candidate(binary(0.1, 0.9)).flip_inconsistency  # noqa: B018  # it would have been seen
