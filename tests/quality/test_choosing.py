"""Choosing among candidates: smoothing, margins, mixtures, what is given; state, rollback and hard checks."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from dltta.core.adapter import Adapter
from dltta.core.objectives import PTBN, Source, Tent
from dltta.core.rates import Fixed
from dltta.errors import InputError
from dltta.models.calibration import Calibration
from dltta.models.predictions import probabilities
from dltta.quality.candidates import EFFORTS, Arms, Plan, mixture_weights, possible_arms, possible_plans
from dltta.quality.choosing import (
    ChoosingAdapter,
    Policy,
    Recollection,
    Rehearsed,
    StreamMean,
    Yardstick,
    as_logits,
    assemble,
    look,
)
from dltta.quality.decision import Outcome, Reason
from dltta.quality.estimate import QualityModel
from dltta.quality.measures import (
    CANDIDATE_SIGNALS,
    SIGNALS,
    Usual,
    agreements,
    candidate_signals,
    coarse,
    measure,
    products_of,
)
from dltta.quality.refusal import Refusal
from dltta.training.calibration import calibrate
from networks import Classifier, Segmenter, trained

IMAGES = torch.rand(6, 1, 1, 8, 12, generator=torch.Generator().manual_seed(0))
USUAL = Usual((0.0,) * 3, (1.0,) * 3, (-1.0,) * 3, (1.0,) * 3)


THREE = Plan(("source", "batch", "running"))


def rehearsed(plan=THREE, favorite="running", weight=0.0, slope=0.0, **policy):
    """Expects 0.5 of every candidate and 0.2 more of the favorite, less with its entropy by `slope`."""
    count, names = len(SIGNALS), plan.candidates
    own = len(CANDIDATE_SIGNALS)
    weights = np.zeros(1 + count + own + len(names) + 5 * len(names))
    weights[0] = 0.5
    weights[1 + count] = -slope
    weights[1 + count + own + names.index(favorite)] = 0.2
    model = QualityModel(np.zeros(count), np.ones(count), np.full(count, -9.0), np.full(count, 9.0), weights, 1.0)
    return Rehearsed(plan, Policy("batch", weight, **policy), model, radius=0.1, review_below=0.6)


def choosing(found=None, **settings):
    return ChoosingAdapter(trained(Segmenter()), found or rehearsed(), Yardstick(USUAL), **settings)


# what is computed


def test_a_plan_costs_a_pass_for_each_arm_and_another_for_its_flip():
    assert Plan(("source", "batch")).passes == 2
    assert Plan(("source", "batch", "running"), flip=1).passes == 6
    assert Plan(("source", "batch", "tent:0.03", "tent:0.1")).passes == 5  # one gradient for both
    assert Plan(("source",)).candidates == ("source",)
    assert Plan(("source", "batch")).candidates == ("source", "batch", "mean", "entropy")
    assert Plan(("source", "batch")).full_names == (
        "source", "batch", "mean of source+batch", "entropy of source+batch",
    )  # fmt: skip
    assert Plan(("source", "batch"), flip=1).full_names[1:3] == ("batch, flip 1", "mean of source+batch, flip 1")


@pytest.mark.parametrize("effort", EFFORTS)
def test_plans_keep_to_their_cost_and_always_hold_source_and_batch(effort):
    arms = ("source", "batch", "blended", "shrinkage", "running", "tent:0.03", "tent:0.1")
    plans = possible_plans(arms, 1, EFFORTS[effort])
    assert max(plan.passes for plan in plans) == EFFORTS[effort]
    assert all(plan.arms[:2] == ("source", "batch") for plan in plans)
    assert len(plans) == {"default": 8 + 1 + 1, "low": 1}[effort]  # statistics alone, with the flip, with steps
    assert len(set(plans)) == len(plans)


def test_arms_are_those_that_make_a_difference():
    instance = nn.Sequential(nn.Conv2d(1, 2, 1), nn.InstanceNorm2d(2))
    assert possible_arms(instance, None) == ("source",)  # no step: nothing affine
    affine = nn.Sequential(nn.Conv2d(1, 2, 1), nn.InstanceNorm2d(2, affine=True))
    assert possible_arms(affine, None) == ("source", "tent:0.03", "tent:0.1")
    normalized = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
    assert possible_arms(normalized, None) == (
        "source", "batch", "blended", "running", "pooled", "tent:0.03", "tent:0.1",
    )  # fmt: skip
    layer = {"1": (torch.rand(4, 2), torch.rand(4, 2))}
    assert "shrinkage" in possible_arms(normalized, Calibration(layer, {"1": 1e-5}))
    assert possible_plans(("source",), 1, 6) == [Plan(("source",)), Plan(("source",), 1)]


def test_mixture_weights_by_hand():
    entropies = torch.tensor([0.1, 0.2])
    assert mixture_weights(entropies, "mean").tolist() == [0.5, 0.5]
    first = 1 / (1 + math.exp(-1))  # softmax of −1 and −2
    assert mixture_weights(entropies, "entropy").tolist() == pytest.approx([first, 1 - first])


def test_arms_give_what_the_methods_of_the_same_name_give():
    model = trained(Segmenter())
    arms = Arms(model, ("source", "batch"))
    for name, method in (("source", Source()), ("batch", PTBN())):
        assert torch.allclose(arms.logits(name, IMAGES[0]), Adapter(model, method).step(IMAGES[0]).logits, atol=1e-6)


# by what it is chosen


def test_the_mean_along_the_stream_by_hand():
    mean = StreamMean(1, window=3)
    assert [mean.add(np.array([[value]])).item() for value in (3.0, 6.0, 0.0)] == [3.0, 4.5, 3.0]
    assert mean.add(np.array([[9.0]])).item() == pytest.approx((2 * 3 + 9) / 3)  # a third of it is new
    batch = StreamMean(2, window=3)
    assert batch.add(np.array([[1.0, 0], [3, 0], [5, 0], [7, 4]])).tolist() == [4, 1]  # more than the window
    again = StreamMean(2, window=3)
    again.load_state_dict(json.loads(json.dumps(batch.state_dict())))
    assert again.add(np.array([[0.0, 1]])).tolist() == batch.add(np.array([[0.0, 1]])).tolist()


def test_margins_prefer_the_default_and_the_source_model():
    names = ("source", "batch", "mean")
    now, along = np.array([0.50, 0.49, 0.52]), np.array([0.60, 0.59, 0.50])
    assert Policy("batch").values(now, along, names).tolist() == along.tolist()
    assert Policy("batch", weight=1.0).values(now, along, names).argmax() == 2
    assert Policy("batch", weight=1.0, default_margin=0.04).values(now, along, names).argmax() == 1
    assert Policy("batch", weight=1.0, source_margin=0.03).values(now, along, names).argmax() == 0
    both = Policy("source", weight=0.5, default_margin=0.01, source_margin=0.02).values(now, along, names)
    assert both == pytest.approx([0.58, 0.54, 0.51])


def test_similar_images_before_are_recalled_once_there_are_enough():
    model = trained(Segmenter())
    arms, recollection = Arms(model, ("source", "batch")), Recollection()
    for number, x in enumerate([*IMAGES, *IMAGES[:3]]):
        views = look(arms, ("source", "batch"), None, x, Yardstick(USUAL), recollection)
        assert (views.reference is None) == (number < 8)
        recollection.add(views)
    every = [look(arms, ("source", "batch"), None, x, Yardstick(USUAL)) for x in [*IMAGES, *IMAGES[:2]]]
    means = [coarse((views.plain["source"] + views.plain["batch"]) / 2) for views in every]
    assert torch.allclose(views.reference, torch.cat(means).mean(0), atol=1e-6)  # eight neighbors of eight
    assert not np.isnan(
        assemble(Plan(("source", "batch")), views, USUAL).signals[..., SIGNALS.index("discrepancy")]
    ).any()


def test_mixtures_have_the_signals_of_the_mixed_predictions():
    plan = Plan(("source", "batch", "running"))
    views = look(Arms(trained(Segmenter()), plan.arms), plan.arms, None, IMAGES[0], Yardstick(USUAL))
    made = assemble(plan, views, USUAL)
    whole = torch.stack([made.of(0, place) for place in range(5)])
    assert torch.allclose(whole[3], whole[:3].mean(0), atol=1e-6)
    agreed = agreements(products_of(whole))
    slow = candidate_signals(measure(whole, USUAL, [0.0] * 5), agreed, 3, views.image[0])
    np.testing.assert_allclose(made.signals[0], slow, atol=1e-6)


# what is given


def test_the_favorite_is_given_with_its_expected_quality():
    found = rehearsed()
    adapter, source = choosing(found), Adapter(trained(Segmenter()), Source())
    step = adapter.step(IMAGES[0])
    assert (step.decision.candidate, step.decision.outcome) == ("running", Outcome.ACCEPTED)
    expected = step.decision.expected
    assert (expected.score, expected.low, expected.high) == pytest.approx((0.7, 0.6, 0.8))
    assert expected.review is False
    assert json.loads(json.dumps(vars(expected))) == vars(expected)  # goes into log and results
    assert not torch.equal(step.logits, source.step(IMAGES[0]).logits)


def test_the_source_model_is_given_bit_for_bit_and_said_so():
    adapter = choosing(rehearsed(favorite="source"))
    step = adapter.step(IMAGES[0])
    assert torch.equal(step.logits, Adapter(trained(Segmenter()), Source()).step(IMAGES[0]).logits)
    assert (step.decision.outcome, step.decision.reason) == (Outcome.SOURCE, Reason.QUALITY)


def test_a_flip_is_averaged_in():
    plan = Plan(("source", "batch"), flip=1)
    step = choosing(rehearsed(plan, "source")).step(IMAGES[0])
    model = Adapter(trained(Segmenter()), Source())
    plain, flipped = (probabilities(model.step(x).logits) for x in (IMAGES[0], IMAGES[0].flip(3)))
    assert torch.allclose(probabilities(step.logits), (plain + flipped.flip(3)) / 2, atol=1e-6)


def test_a_step_that_is_taken_is_told_with_its_size_and_loss():
    plan = Plan(("source", "batch", "tent:0.03", "tent:0.1"))
    step = choosing(rehearsed(plan, "tent:0.1")).step(IMAGES[0])
    assert (step.decision.candidate, step.rate) == ("tent:0.1", 0.1)
    before = Adapter(trained(Segmenter()), PTBN()).step(IMAGES[0]).logits
    assert step.loss == pytest.approx(-(before.softmax(1) * before.log_softmax(1)).sum(1).mean().item(), abs=1e-5)
    adam = Adapter(trained(Segmenter()), Tent(), Fixed(0.1), optimizer=torch.optim.Adam)
    assert torch.allclose(step.logits, adam.step(IMAGES[0]).logits, atol=1e-5)
    assert choosing(rehearsed(plan, "batch")).step(IMAGES[0]).updates == ()


@pytest.mark.parametrize("favorite", ["source", "batch", "mean"])
def test_another_view_of_an_image_is_predicted_by_the_candidate_that_it_got(favorite):
    adapter = choosing(rehearsed(favorite=favorite))
    step, view = adapter.step(IMAGES[0]), IMAGES[1]
    before = states(adapter)
    found = probabilities(adapter.again(view, step))
    assert same(states(adapter), before)
    arms = Arms(trained(Segmenter()), THREE.arms)
    given = {name: probabilities(arms.logits(name, view)) for name in ("source", "batch")}
    given["mean"] = (given["source"] + given["batch"] + probabilities(adapter._arms.logits("running", view))) / 3
    assert step.decision.candidate == favorite
    assert torch.allclose(found, given[favorite], atol=1e-6)
    assert not torch.allclose(found, given["source" if favorite != "source" else "batch"], atol=1e-3)


def test_another_view_of_a_constant_image_is_left_to_the_source_model():
    adapter = choosing()
    step = adapter.step(torch.ones(1, 1, 8, 12))
    assert torch.equal(adapter.again(IMAGES[0], step), adapter._arms.logits("source", IMAGES[0]))


def test_an_unlikely_good_prediction_is_to_be_reviewed():
    low = rehearsed()
    low = Rehearsed(low.plan, low.policy, low.quality, low.radius, review_below=0.71)
    assert choosing(low).step(IMAGES[0]).decision.expected.review


@pytest.mark.parametrize(("above", "review"), [(0.9, True), (1.1, False)])
def test_a_prediction_that_looks_like_one_of_a_harmful_image_is_to_be_reviewed_however_good(above, review):
    count = len(SIGNALS)
    refusal = Refusal(np.zeros(count), np.ones(count), np.r_[1.0, np.zeros(2 * count)], above)  # all alike: 1
    found = replace(rehearsed(), refusal=refusal, review_below=0.0)
    assert choosing(found).step(IMAGES[0]).decision.expected.review is review
    saved = json.loads(json.dumps(found.as_json()))
    assert choosing(Rehearsed.from_json(saved)).step(IMAGES[0]).decision.expected.review is review
    del saved["refusal"]  # of a version that had none
    assert choosing(Rehearsed.from_json(saved)).step(IMAGES[0]).decision.expected.review is False


def test_without_a_rehearsal_the_entropy_weighted_mixture_is_given():
    model = trained(Segmenter())
    step = ChoosingAdapter(model).step(IMAGES[0])
    arms = Arms(model, ("source", "batch", "blended"))
    each = torch.cat([probabilities(arms.logits(name, IMAGES[0])) for name in arms.networks])
    entropy = -(each * each.log()).sum(1).mean((1, 2))
    mixed = ((-entropy / 0.1).softmax(0)[:, None, None, None] * each).sum(0)
    assert torch.allclose(probabilities(step.logits)[0], mixed, atol=1e-6)
    assert (step.decision.candidate, step.decision.expected) == ("entropy", None)


def test_a_calibrated_model_says_how_far_an_image_is_from_the_sources():
    model = trained(Segmenter())
    calibration = calibrate(model, IMAGES.flatten(0, 1))
    adapter = ChoosingAdapter(model, None, Yardstick(calibration=calibration))
    near, far = adapter.step(IMAGES[0]).decision, adapter.step(IMAGES[0] + 100).decision
    assert near.ood_score < 10 < far.ood_score  # source images have about 1
    assert ChoosingAdapter(model).step(IMAGES[0]).decision.ood_score is None


def test_logits_stand_for_the_probabilities_of_one_channel_too():
    prediction = torch.tensor([[0.2, 0.5], [0.8, 0.5]])
    assert torch.sigmoid(as_logits(prediction, 1)[0]).tolist() == pytest.approx([0.8, 0.5])
    assert torch.allclose(as_logits(prediction, 2).softmax(0), prediction)


def test_images_of_a_batch_get_their_own_candidates():
    plan = Plan(("source", "batch"))
    found = rehearsed(plan, "source", weight=1.0, slope=2.0)
    adapter = ChoosingAdapter(trained(Classifier()), found, Yardstick(USUAL), batch_size=4)
    step = adapter.step(torch.rand(4, 1, 8, 12, generator=torch.Generator().manual_seed(3)))
    assert len(step.decision.images) == 4
    assert step.logits.shape == (4, 3)


# hard checks, state


def test_constant_images_are_left_to_the_source_model():
    x = torch.full((1, 1, 8, 12), 0.3)
    step = choosing().step(x)
    assert (step.decision.outcome, step.decision.reason) == (Outcome.SOURCE, Reason.CONSTANT_IMAGE)
    assert torch.equal(step.logits, Adapter(trained(Segmenter()), Source()).step(x).logits)


def test_a_prediction_that_is_not_finite_is_replaced_by_the_source_models():
    adapter = choosing()
    next(iter(adapter._arms.stateful["running"])).test_mean.fill_(math.inf)
    step = adapter.step(IMAGES[0])
    assert (step.decision.outcome, step.decision.reason) == (Outcome.SOURCE, Reason.NON_FINITE)
    assert step.logits.isfinite().all()


def states(adapter):
    return json.dumps(adapter.get_extra_state()["stream"]), [
        value.clone() for layer in adapter._arms.buffered() for value in layer._buffers.values() if value is not None
    ]


def same(first, second):
    return first[0] == second[0] and all(torch.equal(one, two) for one, two in zip(first[1], second[1], strict=True))


def test_a_step_that_fails_leaves_everything_as_it_was():
    adapter = choosing()
    adapter.step(IMAGES[0])
    before = states(adapter)
    with pytest.raises(InputError):
        adapter.step(torch.full((1, 1, 8, 12), math.nan))
    adapter.predict(IMAGES[1])
    assert same(states(adapter), before)
    adapter.step(IMAGES[1])
    assert not same(states(adapter), before)


def test_a_saved_stream_goes_on_bit_for_bit_and_reset_is_exact():
    whole, first, second = choosing(), choosing(), choosing()
    expected = [whole.step(x).logits for x in IMAGES]
    fresh = states(choosing())
    for x in IMAGES[:3]:
        first.step(x)
    second.load_state_dict(first.state_dict())
    assert all(torch.equal(second.step(x).logits, logits) for x, logits in zip(IMAGES[3:], expected[3:], strict=True))
    whole.reset()
    assert same(states(whole), fresh)
    assert torch.equal(whole.step(IMAGES[0]).logits, expected[0])


def test_what_was_predicted_is_remembered_saved_and_forgotten():
    adapter, again = choosing(), choosing()
    for x in IMAGES[:3]:
        adapter.step(x)
    adapter.predict(IMAGES[3])
    assert len(adapter._recollection.bank) == 3
    again.load_state_dict(adapter.state_dict())
    kept, loaded = (each._recollection.bank.state_dict() for each in (adapter, again))
    assert torch.equal(loaded["keys"], kept["keys"])
    assert all(torch.equal(one, two) for one, two in zip(loaded["values"], kept["values"], strict=True))
    adapter.reset()
    assert len(adapter._recollection.bank) == 0


def test_image_specific_streams_begin_again_with_each_image():
    adapter, fresh = choosing(mode="image-specific"), choosing()
    adapter.step(IMAGES[0])
    assert torch.equal(adapter.step(IMAGES[1]).logits, fresh.step(IMAGES[1]).logits)


def test_the_callers_model_is_not_changed():
    model = trained(Segmenter())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = ChoosingAdapter(model, rehearsed(), Yardstick(USUAL))
    for x in IMAGES:
        adapter.step(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_was_rehearsed_survives_json():
    found = rehearsed(Plan(("source", "batch"), flip=0), "mean", weight=0.5, source_margin=0.02)
    again = Rehearsed.from_json(json.loads(json.dumps(found.as_json())))
    assert (again.plan, again.policy, again.radius, again.review_below) == (
        found.plan, found.policy, found.radius, found.review_below,
    )  # fmt: skip
