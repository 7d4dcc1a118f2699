"""The guard: what it objects to, and what the adapter then does."""

import copy
import math
from dataclasses import replace

import pytest
import torch

import networks
from dltta import Adapter, Fixed, Limits, MemoryBank, Proportional, SourceGuard
from dltta.config import make_guard
from dltta.errors import InputError, NonFiniteError, SettingError
from dltta.models.calibration import Calibration
from dltta.models.normalization import BATCH_STATISTICS
from dltta.models.statistics import Running
from dltta.objectives import PTBN, Tent
from dltta.quality.guard import Evidence, Look, Ruling, beyond, changed, entropy, marginal, together, unsteadiness
from dltta.training.calibration import calibrate
from networks import stream, trained

IMAGES = stream((1, 1, 8, 8), 6)


def binary(*foreground):
    """A prediction (1, 2, N) with these probabilities of class 1."""
    values = torch.tensor(foreground)
    return torch.stack([1 - values, values])[None]


def evidence(answer, unmoved=None, source=None, drift=0.0, rate=1e-3, adapted=None, still=None):
    answers = answer, answer if unmoved is None else unmoved, answer if source is None else source
    return Evidence(*answers, drift, rate, torch.rand(len(answer), 1, *answer.shape[2:]), adapted, still)


def test_marginal_and_entropy_by_hand():
    prediction = torch.cat([binary(0.2, 0.4), binary(0.6, 0.8)])
    assert marginal(prediction).tolist() == pytest.approx([0.5, 0.5])
    assert entropy(torch.tensor([0.5, 0.5])) == pytest.approx(math.log(2))
    assert entropy(torch.tensor([1.0, 0.0])) == 0


def test_beyond_is_the_distance_in_log_odds_of_the_worst_class():
    shares = [(0.5, 0.9), (0.1, 0.5)]
    assert beyond(torch.tensor([0.7, 0.3]), shares) == 0
    assert beyond(torch.tensor([0.95, 0.05]), shares) == pytest.approx(math.log(19) - math.log(9), rel=1e-5)
    assert beyond(torch.tensor([0.95, 0.05]), None) == 0


def test_changed_is_the_share_of_the_marked_positions_that_are_marked_otherwise():
    answer, other = binary(0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1), binary(0.6, 0.6, 0.4, 0.6, 0.1, 0.1, 0.1, 0.2)
    assert changed(answer, other) == 2 / 4  # four positions are marked by either, two of them by one alone
    assert changed(answer, answer) == 0
    assert changed(binary(0.1, 0.2), binary(0.3, 0.4)) == 0  # nothing is marked


def test_changed_counts_another_class_as_a_change():
    answer = torch.tensor([[[0.1, 0.1], [0.8, 0.8], [0.1, 0.1]]])  # class 1 twice
    other = torch.tensor([[[0.1, 0.1], [0.8, 0.2], [0.1, 0.7]]])  # class 1, class 2
    assert changed(answer, other) == 1 / 2


def test_changed_is_the_probability_that_changed_hands_for_whole_images():
    answer, other = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    assert changed(answer, other) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (evidence(binary(0.1, 0.9)), None),
        (evidence(binary(0.1, 0.9), rate=2.0), "rate 2 above 1"),
        (evidence(binary(0.1, 0.9), drift=0.6), "parameters moved by 0.6 of their length"),
        (evidence(binary(0.1, 0.9), unmoved=binary(0.9, 0.9)), "0.5 of the answer changed, limit 0.02"),
        (evidence(binary(0.1, 0.6), unmoved=binary(0.4, 0.9)), None),  # less sure, but the same
        (evidence(torch.tensor([[0.4, 0.6]]), torch.tensor([[0.6, 0.4]])), "0.2 of the answer changed, limit 0.1"),
        (evidence(torch.tensor([[0.45, 0.55]]), torch.tensor([[0.52, 0.48]])), None),
        (evidence(binary(0.99, 0.98), source=binary(0.3, 0.2)), "a class takes a share"),
        (evidence(binary(0.001, 0.002), source=binary(0.2, 0.4)), "a class takes a share"),
    ],
)
def test_objections(found, reason):
    guard = SourceGuard(Limits(shares=((0.4, 0.9), (0.1, 0.6))))
    answer = guard.object(found)
    assert answer is None if reason is None else answer.startswith(reason)


def test_a_share_that_the_source_network_misses_even_more_is_not_objected_to():
    guard = SourceGuard(Limits(shares=((0.4, 0.9), (0.1, 0.6))))
    assert guard.object(evidence(binary(0.02, 0.02), source=binary(1e-5, 1e-5))) is None


def test_collapse_is_seen_without_calibration():
    reason = SourceGuard().object(evidence(binary(0.01, 0.01), source=binary(0.3, 0.4)))
    assert reason.startswith("entropy of the mean answer")


MEASURED = {
    "shares": [[0.5, 0.9], [0.1, 0.5]],
    "ood_score": {"first": 3.0, "usual": 2.0, "negative": 101.0, "noise": 51.0},
    "entropy": {"median": 0.5, "usual": 0.6, "shuffled": 0.9},
}


def test_limits_come_from_source_images():
    limits = Limits.calibrated(MEASURED)
    assert limits.shares == ((0.5, 0.9), (0.1, 0.5))
    assert limits.home == (1.5, 1.0)  # half of what 95 % stay below
    assert (limits.steadier, limits.overrule) == (0.7, 0.7)
    assert Limits.calibrated(MEASURED, overrule=1.0) == replace(limits, overrule=1.0)
    assert limits.far == 51.0  # halfway from 1 to the negatives
    assert limits.entropy == pytest.approx(0.7)  # halfway to shuffled pixels
    noisy = MEASURED["ood_score"] | {"noise": 201.0}
    assert Limits.calibrated(MEASURED | {"ood_score": noisy}).far == 101.0  # the farther of the two


def test_what_happens_at_home_is_never_too_far():
    tame = MEASURED | {"ood_score": {"first": 3.0, "usual": 2.0, "negative": 1.5, "noise": 1.0}}
    sure = MEASURED | {"entropy": {"median": 0.5, "usual": 0.6, "shuffled": 0.4}}
    assert Limits.calibrated(tame).far == 4.0
    assert Limits.calibrated(sure).entropy == 0.6


def test_what_nobody_measured_has_no_limit():
    limits = Limits.calibrated({"shares": [[0, 1]], "ood_score": None})
    assert (limits.home, limits.far, limits.entropy, limits.steadier, limits.overrule) == (None,) * 5


def test_impossible_limits_are_refused():
    with pytest.raises(SettingError, match="drift must be positive"):
        Limits(drift=0)
    with pytest.raises(SettingError, match="changed must be positive"):
        Limits(changed=0)


# first sight

ONE_LAYER = Calibration({"n": (torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0], [1.0]]))}, {"n": 0.0})
# source images: means 0 and 2, so 1 ± √2; the variance is always 1, and 2 would be infinitely strange


def never(images):
    raise AssertionError("a pass that nobody needs")


def look(*means, images=None, source=None, trained=never, alone=never, prepared=never):
    """Images whose mean at the only layer is this, as strange as ((mean − 1) / √2)² / 2."""
    count = len(means)
    images = torch.rand(count, 1, 4) if images is None else images
    layers = {"n": (torch.tensor(means, dtype=torch.float32)[:, None], torch.ones(count, 1))}
    return Look(images, layers, source, trained, alone, prepared)


def verdicts(rulings):
    return [None if ruling is None else ruling.verdict for ruling in rulings]


def test_images_are_sorted_by_how_strange_they_are_to_the_first_layer():
    guard = SourceGuard(Limits(home=(1.0, 1.0), far=9.0), ONE_LAYER)
    assert verdicts(guard.triage(look(1.0))) == ["at home"]
    assert verdicts(guard.triage(look(2.9))) == ["at home"]  # (1.9 / √2)² / 2 = 0.9
    assert verdicts(guard.triage(look(3.1))) == [None]  # 1.1
    assert verdicts(guard.triage(look(6.9))) == [None]  # 8.7
    (far,) = guard.triage(look(7.1))  # 9.3
    assert far.verdict == "skipped"
    assert far.reason == "ood_score 9.3, limit 9: no image of this kind"
    assert far.signals["ood_score"] == pytest.approx(9.3025, rel=1e-3)


def test_a_batch_is_at_home_as_one_without_the_images_that_are_too_strange():
    guard = SourceGuard(Limits(home=(1.0, 1.0), far=9.0), ONE_LAYER)
    assert verdicts(guard.triage(look(1.0, 3.4, 99.0))) == ["at home", "at home", "skipped"]  # (0 + 1.44) / 2
    assert verdicts(guard.triage(look(1.0, 5.0, 99.0))) == [None, None, "skipped"]  # (0 + 4) / 2


def test_a_shift_that_only_deeper_layers_see_is_not_at_home():
    twice = Calibration(dict.fromkeys("abc", ONE_LAYER.layers["n"]), dict.fromkeys("abc", 0.0))
    one = torch.ones(1, 1)
    layers = {"a": (one, one), "b": (5 * one, one), "c": (5 * one, one)}
    found = Look(torch.rand(1, 1, 4), layers, one, never, never, never)
    assert verdicts(SourceGuard(Limits(home=(1.0, 4.5)), twice).triage(found)) == ["at home"]  # the median is 4
    assert verdicts(SourceGuard(Limits(home=(1.0, 3.5)), twice).triage(found)) == [None]


def test_doubt_is_the_mean_entropy_of_the_answer_alone():
    guard = SourceGuard(Limits(entropy=0.5))
    even, sure = torch.full((2, 4), 0.5), torch.tensor([[1.0] * 4, [0.0] * 4])  # entropies log 2 and 0
    half = torch.cat([even[:, :2], sure[:, :2]], 1)
    rulings = guard.triage(look(1.0, 1.0, 1.0, alone=lambda images: torch.stack([even, half, sure])))
    assert verdicts(rulings) == ["skipped", None, None]
    assert rulings[0].reason == "entropy 0.693, limit 0.5: nothing to be seen"


def test_images_at_home_are_not_looked_at_again():
    guard = SourceGuard(Limits(home=(1.0, 1.0), entropy=0.5, steadier=0.7), ONE_LAYER)
    assert verdicts(guard.triage(look(1.0))) == ["at home"]


def seeing(*marks):
    """A network that marks these positions whatever it sees, so that in the mirror others are marked."""
    return lambda images: binary(*[0.9 if mark else 0.1 for mark in marks]).expand(len(images), -1, -1)


@pytest.mark.parametrize(
    ("trained", "prepared", "verdict"),
    [
        (seeing(1, 0, 0, 1), seeing(1, 1, 0, 1), "source"),  # 0 against 2 of 4
        (seeing(1, 1, 0, 1), seeing(1, 0, 0, 1), None),
        (seeing(1, 1, 0, 1), seeing(1, 1, 0, 0), "source"),  # 2 of 4 against 4 of 4
        (seeing(1, 1, 0, 0, 0, 1), seeing(1, 1, 0, 1, 0, 1), None),  # 2 of 4 against 4 of 6: not clearly
        (seeing(1, 0, 0, 0), seeing(1, 1, 0, 0), None),  # both change all
        (seeing(0, 0, 0, 0), seeing(1, 1, 0, 1), None),  # steady, but it sees less than there ever was
    ],
)
def test_the_steadier_answer_in_the_mirror_wins_if_it_is_plausible(trained, prepared, verdict):
    limits = Limits(steadier=0.7, shares=((0.3, 0.7), (0.3, 0.7)), margin=2.0)
    images = torch.rand(1, 1, 4)
    found = look(1.0, images=images, source=trained(images), trained=trained, prepared=prepared)
    assert verdicts(SourceGuard(limits).triage(found)) == [verdict]


@pytest.mark.parametrize(
    ("prepared", "margin", "verdict"),
    [
        (seeing(1, 1, 1, 1, 0, 0, 0, 0), 2.0, None),  # a share as source images have it
        (seeing(1, 1, 1, 1, 1, 1, 1, 0), 2.0, "source"),  # even farther from it than the source network's
        (seeing(1, 1, 1, 1, 1, 1, 1, 0), 1.5, None),  # but both are too far: odds of 7 : 3 where 9 : 4 may be
    ],
)
def test_the_steadier_answer_does_not_win_if_the_other_is_more_plausible(prepared, margin, verdict):
    limits = Limits(steadier=0.7, shares=((0.4, 0.6), (0.4, 0.6)), margin=margin)
    images, trained = torch.rand(1, 1, 8), seeing(1, 1, 1, 0, 0, 1, 1, 1)  # a share of 0.7, beyond all source images
    found = look(1.0, images=images, source=trained(images), trained=trained, prepared=prepared)
    assert verdicts(SourceGuard(limits).triage(found)) == [verdict]


@pytest.mark.parametrize("blind", [seeing(0, 0, 0, 0), seeing(1, 1, 1, 1)])
def test_who_says_the_same_everywhere_is_not_steadier_for_that(blind):
    images, prepared = torch.rand(1, 1, 4), seeing(1, 1, 0, 1)
    found = look(1.0, images=images, source=blind(images), trained=blind, prepared=prepared)
    anything = Limits(steadier=0.7, shares=((0.0, 1.0), (0.0, 1.0)))
    assert verdicts(SourceGuard(anything).triage(found)) == [None]


def classifying(answer, mirrored):
    """A network of whole images that says something else of what begins with the darker half."""
    return lambda images: torch.stack([answer if x[0, 0] > x[0, -1] else mirrored for x in images])


def test_a_class_of_one_image_may_be_steadier_but_not_one_that_all_images_of_a_batch_get():
    sure, unsure, other = torch.tensor([0.9, 0.1]), torch.tensor([0.6, 0.4]), torch.tensor([0.1, 0.9])
    trained, prepared = classifying(sure, sure), classifying(sure, unsure)
    limits, one = Limits(steadier=0.7), torch.tensor([[[1.0, 0.5, 0.0]]])
    found = look(1.0, images=one, source=trained(one), trained=trained, prepared=prepared)
    assert verdicts(SourceGuard(limits).triage(found)) == ["source"]
    two = one.repeat(2, 1, 1)
    found = look(1.0, 1.0, images=two, source=trained(two), trained=trained, prepared=prepared)
    assert verdicts(SourceGuard(limits).triage(found)) == [None, None]
    both = torch.stack([sure, other])
    found = look(1.0, 1.0, images=two, source=both, trained=lambda images: both, prepared=prepared)
    assert verdicts(SourceGuard(limits).triage(found)) == ["source", "source"]


@pytest.mark.parametrize(
    ("adapted", "still", "overrule", "objects"),
    [
        (seeing(1, 0, 0, 1), seeing(1, 1, 0, 1), 0.7, False),  # 0 against 2 of 4
        (seeing(1, 0, 0, 1), seeing(1, 1, 0, 1), None, True),  # nobody measured it
        (seeing(1, 1, 0, 1), seeing(1, 1, 0, 0), 0.7, False),  # 2 of 4 against 4 of 4
        (seeing(1, 1, 0, 1), seeing(1, 1, 0, 0), 0.4, True),
        (seeing(1, 1, 0, 1), seeing(1, 0, 1, 1), 1.0, True),  # other, and no steadier
        (seeing(1, 1, 0, 1), seeing(1, 0, 0, 1), 0.7, True),
        (seeing(1, 1, 1, 1), seeing(1, 1, 0, 1), 0.7, True),  # a collapse is steady
    ],
)
def test_an_answer_may_change_more_if_it_becomes_clearly_steadier_in_the_mirror(adapted, still, overrule, objects):
    images = torch.rand(1, 1, 4)
    found = evidence(adapted(images), still(images), adapted=adapted, still=still)
    assert (SourceGuard(Limits(overrule=overrule)).object(found) is not None) == objects


def test_an_answer_that_changed_little_is_not_looked_at_again():
    found = evidence(binary(0.1, 0.9), adapted=never, still=never)
    assert SourceGuard(Limits(overrule=0.7)).object(found) is None


def test_strange_images_are_shown_to_the_mirror_too():
    images, trained, prepared = torch.rand(2, 1, 4), seeing(1, 0, 0, 1), seeing(1, 1, 0, 1)
    guard = SourceGuard(Limits(home=(1.0, 1.0), far=9.0, steadier=0.7), ONE_LAYER)
    networks = {"trained": trained, "prepared": prepared}
    found = look(7.1, 5.0, images=images, source=trained(images), **networks)
    assert verdicts(guard.triage(found)) == ["source", "source"]
    networks = {"trained": prepared, "prepared": trained}
    found = look(7.1, 5.0, images=images, source=prepared(images), **networks)
    assert verdicts(guard.triage(found)) == ["skipped", None]


def test_a_strange_image_is_answered_by_the_prepared_network_and_teaches_nothing():
    model = trained(networks.Segmenter())
    home = [x[0] for x in stream((1, 1, 8, 8), 24, seed=3)]
    calibration = calibrate(model, home)
    guard = SourceGuard(Limits(far=10.0), calibration)
    guarded = Adapter(model, Tent(), Fixed(0.1), memory=MemoryBank(neighbors=1, ready="neighbors"), guard=guard)
    guarded.step(IMAGES[0])
    before, held = copy.deepcopy(guarded.model.state_dict()), len(guarded.memory)
    step = guarded.step(IMAGES[1] + 100)
    assert step.ruling.verdict == "skipped"
    assert step.updates == ()
    assert len(guarded.memory) == held == 1
    assert all(torch.equal(value, before[name]) for name, value in guarded.model.state_dict().items())
    expected = Adapter(model, PTBN()).step(IMAGES[1] + 100).logits
    torch.testing.assert_close(step.logits, expected)


def test_strange_images_of_a_batch_are_normalized_with_the_others_and_the_others_without_them():
    model = trained(networks.Segmenter())
    calibration = calibrate(model, [x[0] for x in stream((1, 1, 8, 8), 24, seed=3)])
    batch = torch.cat(IMAGES[:3])
    batch[1] += 100
    step = Adapter(model, PTBN(), guard=SourceGuard(Limits(far=10.0), calibration)).step(batch)
    assert [step.ruling.of(i).verdict for i in range(3)] == ["accepted", "skipped", "accepted"]
    torch.testing.assert_close(step.logits[1], Adapter(model, PTBN()).step(batch).logits[1])
    torch.testing.assert_close(step.logits[[0, 2]], Adapter(model, PTBN()).step(batch[[0, 2]]).logits)


def test_the_mirrors_ruling_says_what_changed():
    images, trained, prepared = torch.rand(1, 1, 4), seeing(1, 0, 0, 1), seeing(1, 1, 0, 1)
    found = look(1.0, images=images, source=trained(images), trained=trained, prepared=prepared)
    (ruling,) = SourceGuard(Limits(steadier=0.7)).triage(found)
    assert ruling.reason == "0.5 of the answer changes in mirrors, of the source network's 0"
    assert ruling.signals == {"unsteady": 0.5, "source_unsteady": 0.0}


def test_unsteadiness_is_the_mean_over_the_axes_of_what_changes():
    images = torch.tensor([[0.0, 0.0], [1.0, 1.0]])[None, None].repeat(2, 1, 1, 1)
    answer = seeing2d(images)
    assert unsteadiness(seeing2d, images, answer) == [0.5, 0.5]  # left and right are alike to it, above and below not

    def bright(x):
        return torch.cat([1 - x, x], 1)

    assert unsteadiness(bright, images, bright(images)) == [0, 0]  # what turns with the image is steady


def seeing2d(images):
    """Marks the upper half whatever it sees."""
    marks = torch.tensor([[0.9, 0.9], [0.1, 0.1]]).expand(len(images), 1, 2, 2)
    return torch.cat([1 - marks, marks], 1)


def test_constant_images_teach_nothing_without_any_calibration():
    images = torch.rand(3, 2, 4)
    images[1] = torch.tensor([[0.3], [0.7]])  # both channels
    images[2, 0] = 0.5  # one of two
    rulings = SourceGuard().triage(look(1.0, 1.0, 1.0, images=images))
    assert verdicts(rulings) == [None, "source", None]
    assert rulings[1].reason == "the image is constant"


def test_one_ruling_on_a_batch_says_what_became_of_its_parts():
    at_home, strange, done = Ruling("at home", "as ever"), Ruling("source", "odd"), Ruling("skipped", "too much")
    assert together([None, None], done) is done
    assert together([strange], None) is strange
    both = together([at_home, strange, at_home], None)
    assert (both.verdict, both.reason) == ("source", "1 of 3 images: odd")
    assert [both.of(i) for i in range(3)] == [at_home, strange, at_home]
    mixed = together([None, strange, None], done)
    assert (mixed.verdict, mixed.reason) == ("skipped", "too much; 1 of 3 images: odd")
    assert (mixed.of(0).verdict, mixed.of(1)) == ("skipped", strange)
    assert together([strange, None], Ruling("accepted")).reason == "1 of 2 images: odd"


# the ladder


LOOSE = SourceGuard(Limits(rate=1e9, drift=1e9, changed=1e9, collapse=0))


def adapter(guard, rate=0.1, **options):
    return Adapter(trained(networks.Segmenter()), Tent(), Fixed(rate), guard=guard, **options)


def test_an_accepted_update_is_the_unguarded_one():
    guarded, plain = adapter(LOOSE), adapter(None)
    for x in IMAGES:
        step = guarded.step(x)
        assert step.ruling.verdict == "accepted"
        assert torch.equal(step.logits, plain(x))


def test_statistics_that_go_on_do_not_notice_the_guard():
    model = trained(networks.Segmenter())
    guarded, plain = (Adapter(model, Tent(Running(0.5)), Fixed(0.5), guard=guard) for guard in (LOOSE, None))
    for x in IMAGES:
        assert torch.equal(guarded(x), plain(x))


class Curious(SourceGuard):
    """Looks again through both networks."""

    def object(self, evidence):
        assert torch.equal(evidence.adapted(evidence.images), evidence.answer)
        assert torch.equal(evidence.still(evidence.images), evidence.unmoved)
        assert not torch.equal(evidence.answer, evidence.unmoved)
        assert evidence.adapted(evidence.images.flip(2)).grad_fn is None


@pytest.mark.parametrize("statistics", [BATCH_STATISTICS, Running(0.5)])
def test_the_networks_that_the_guard_may_ask_again_are_those_of_the_answers_and_notice_nothing(statistics):
    model = trained(networks.Segmenter())
    guarded, plain = (Adapter(model, Tent(statistics), Fixed(0.5), guard=guard) for guard in (Curious(), None))
    for x in IMAGES:
        step = guarded.step(x)
        assert step.ruling.verdict == "accepted"
        assert torch.equal(step.logits, plain(x))


@pytest.mark.parametrize("rate", [1e-5, 0.5])
def test_every_move_is_compared_with_the_unmoved_answer_that_the_mirrors_needed(rate):
    """However small: of a network whose layers amplify, a hundred-thousandth of its length can be points."""
    passes = []

    class Counting(SourceGuard):
        def triage(self, look):
            passes.append(look.prepared(look.images))
            return super().triage(look)

        def object(self, evidence):
            assert evidence.unmoved is passes[-1]
            assert evidence.drift > 0.001 or rate < 0.5

    guarded = adapter(Counting(), rate=rate)
    for x in IMAGES:
        guarded.step(x)
    assert len(passes) == len(IMAGES)


def test_an_update_that_is_objected_to_leaves_no_trace():
    strict = SourceGuard(Limits(changed=1e-9))
    guarded = adapter(strict, rate=1.0, optimizer=lambda p: torch.optim.SGD(p, momentum=0.9))
    before = copy.deepcopy(guarded.state_dict())
    unmoved = adapter(None, rate=0.0)
    for x in IMAGES[:2]:
        step = guarded.step(x)
        assert step.ruling.verdict == "skipped"
        assert "of the answer changed, limit 1e-09" in step.ruling.reason
        assert torch.equal(step.logits, unmoved(x))
    after = guarded.state_dict()
    parameters = [name for name in before if name.startswith("model.")]
    assert parameters
    assert all(torch.equal(before[name], after[name]) for name in parameters)
    assert after["_extra_state"]["optimizer"]["state"] == {}


def test_a_loss_that_is_no_number_is_skipped_and_answered():
    class Broken(Tent):
        def __call__(self, model, x, logits):
            return super().__call__(model, x, logits) * math.nan

    guarded = Adapter(trained(networks.Segmenter()), Broken(), Fixed(0.1), guard=SourceGuard())
    step = guarded.step(IMAGES[0])
    assert step.ruling.verdict == "skipped"
    assert "loss is nan" in step.ruling.reason
    assert step.logits.isfinite().all()


def test_a_constant_image_is_answered_by_the_source_and_not_remembered():
    model = trained(networks.Segmenter())
    memory = MemoryBank(capacity=4, neighbors=2)
    guarded = Adapter(model, Tent(), Proportional(0.1), memory=memory, guard=SourceGuard())
    before = guarded.state_dict()
    x = torch.full((1, 1, 8, 8), 0.7)
    step = guarded.step(x)
    assert (step.ruling.verdict, step.ruling.reason) == ("source", "the image is constant")
    assert step.updates == ()
    assert len(guarded.memory) == 0
    assert all(torch.equal(v, before[k]) for k, v in guarded.state_dict().items() if k != "_extra_state")
    with torch.no_grad():
        torch.testing.assert_close(step.logits, model(x))


def test_the_others_of_a_batch_are_adapted_to_as_if_a_refused_image_were_not_there():
    model = trained(networks.Classifier())
    images = stream((4, 1, 8, 8), 1)[0]
    images[2] = 0.7
    others = images[[0, 1, 3]]
    memory = MemoryBank(capacity=8, neighbors=2)
    guarded = Adapter(model, Tent(), Fixed(0.1), memory=memory, guard=LOOSE)
    step = guarded.step(images)
    torch.testing.assert_close(step.logits[[0, 1, 3]], Adapter(model, Tent(), Fixed(0.1))(others))
    with torch.no_grad():
        torch.testing.assert_close(step.logits[2], model(images)[2])
    assert step.ruling.reason == "1 of 4 images: the image is constant"
    assert [step.ruling.of(i).verdict for i in range(4)] == ["accepted", "accepted", "source", "accepted"]
    assert len(guarded.memory) == 3


def test_a_batch_that_ends_at_the_source_is_answered_by_it_whole():
    model = trained(networks.Classifier())
    images = stream((4, 1, 8, 8), 1)[0]
    images[2] = 0.7
    step = Adapter(model, Tent(), Fixed(0.1), guard=Objector(to_all=True)).step(images)
    assert [step.ruling.of(i).verdict for i in range(4)] == ["source"] * 4
    with torch.no_grad():
        torch.testing.assert_close(step.logits, model(images))


def test_images_of_the_source_are_left_to_the_source_network():
    model = trained(networks.Segmenter())
    home = [x[0] for x in stream((1, 1, 8, 8), 24, seed=3)]
    calibration = calibrate(model, home)
    assert make_guard(calibration, "atta").limits.overrule == 1.0
    guard = make_guard(calibration, "tent")
    assert guard.limits.overrule == 0.7
    step = Adapter(model, Tent(), Fixed(0.1), guard=guard).step(home[12][None])
    assert step.ruling.verdict == "at home"
    with torch.no_grad():
        torch.testing.assert_close(step.logits, model(home[12][None]))


def test_methods_without_a_loss_are_guarded_too():
    model = trained(networks.Segmenter())
    step = Adapter(model, PTBN(), guard=SourceGuard()).step(torch.full((1, 1, 8, 8), 0.7))
    assert step.ruling.verdict == "source"
    assert Adapter(model, PTBN(), guard=LOOSE).step(IMAGES[0]).ruling.verdict == "accepted"


class Objector:
    """Objects to every state but the one whose parameters are the source's, or to all."""

    def __init__(self, to_all=False):
        self.to_all = to_all

    def triage(self, look):
        return SourceGuard().triage(look)

    def object(self, evidence):
        return "no" if self.to_all or evidence.drift > 0 else None

    def signals(self, evidence):
        return {"drift": evidence.drift}


def test_a_state_that_became_bad_is_rolled_back():
    guarded = adapter(LOOSE)
    guarded.step(IMAGES[0])
    guarded.guard = Objector()
    step = guarded.step(IMAGES[1])
    assert step.ruling.verdict == "rolled back"
    assert step.ruling.signals["drift"] > 0
    assert torch.equal(step.logits, adapter(None, rate=0.0)(IMAGES[1]))


def test_at_last_the_source_network_answers():
    model = trained(networks.Segmenter())
    step = adapter(Objector(to_all=True)).step(IMAGES[0])
    assert step.ruling.verdict == "source"
    with torch.no_grad():
        torch.testing.assert_close(step.logits, model(IMAGES[0]))


def test_a_guarded_stream_resumes_bit_for_bit_through_a_rollback():
    def make():
        return adapter(SourceGuard(Limits(changed=0.05)), optimizer=lambda p: torch.optim.SGD(p, momentum=0.9))

    whole = make()
    expected = [whole.step(x) for x in IMAGES]
    verdicts = {step.ruling.verdict for step in expected}
    assert len(verdicts) > 1, verdicts
    for stop in range(1, len(IMAGES)):
        first = make()
        for x in IMAGES[:stop]:
            first.step(x)
        second = make()
        second.load_state_dict(first.state_dict())
        found = [second.step(x) for x in IMAGES[stop:]]
        assert all(torch.equal(a.logits, b.logits) for a, b in zip(found, expected[stop:], strict=True))
        assert [a.ruling for a in found] == [b.ruling for b in expected[stop:]]


def test_reading_an_answer_changes_nothing():
    guarded = adapter(None)
    guarded.step(IMAGES[0])
    before = guarded.state_dict()
    first = guarded.answer(IMAGES[1])
    assert torch.equal(first, guarded.answer(IMAGES[1]))
    after = guarded.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "_extra_state")


def test_an_image_that_the_source_network_cannot_take_is_an_input_error():
    adapter = Adapter(trained(networks.Segmenter()), Tent(), Fixed(1e-3), guard=SourceGuard())
    with pytest.raises(InputError, match=r"scan: the network cannot take images of shape \(2, 8, 8\)"):
        adapter.step(torch.rand(1, 2, 8, 8), case="scan")


def test_a_source_answer_that_is_not_a_number_is_never_given():
    model = trained(networks.Segmenter())
    model.head.weight.data[0] = torch.inf
    adapter = Adapter(model, Tent(), Fixed(1e-3), guard=SourceGuard())
    with pytest.raises(NonFiniteError, match="scan: the prediction has NaN"):
        adapter.step(IMAGES[0], case="scan")
