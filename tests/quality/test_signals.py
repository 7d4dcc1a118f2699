"""What can be known about a prediction without a label, by hand."""

import math

import pytest
import torch

from candidates import binary, says, update_signals
from dltta.quality.signals import Candidate, change, marginal, share_excess, total_entropy


def test_marginal_and_entropy_by_hand():
    prediction = torch.cat([binary(0.2, 0.4), binary(0.6, 0.8)])
    assert marginal(prediction).tolist() == pytest.approx([0.5, 0.5])
    assert total_entropy(torch.tensor([0.5, 0.5])) == pytest.approx(math.log(2))
    assert total_entropy(torch.tensor([1.0, 0.0])) == 0


def test_share_excess_is_the_distance_in_log_odds_of_the_worst_class():
    shares = [(0.5, 0.9), (0.1, 0.5)]
    assert share_excess(torch.tensor([0.7, 0.3]), shares) == 0
    assert share_excess(torch.tensor([0.95, 0.05]), shares) == pytest.approx(math.log(19) - math.log(9), rel=1e-5)
    assert share_excess(torch.tensor([0.95, 0.05]), None) == 0


def test_change_is_the_share_of_the_foreground_that_differs():
    prediction = binary(0.9, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1)
    other = binary(0.6, 0.6, 0.4, 0.6, 0.1, 0.1, 0.1, 0.2)
    assert change(prediction, other) == 2 / 4  # four positions are foreground in either, two of them in one alone
    assert change(prediction, prediction) == 0
    assert change(binary(0.1, 0.2), binary(0.3, 0.4)) == 0  # no foreground


def test_another_class_is_a_change():
    prediction = torch.tensor([[[0.1, 0.1], [0.8, 0.8], [0.1, 0.1]]])  # class 1 twice
    other = torch.tensor([[[0.1, 0.1], [0.8, 0.2], [0.1, 0.7]]])  # class 1, class 2
    assert change(prediction, other) == 1 / 2


def test_change_of_whole_images_is_the_probability_given_to_another_class():
    prediction, other = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([[0.7, 0.3], [0.5, 0.5]])
    assert change(prediction, other) == pytest.approx(0.1)


def upper_half(images):
    """Class 1 in the upper half whatever it sees."""
    marks = torch.tensor([[0.9, 0.9], [0.1, 0.1]]).expand(len(images), 1, 2, 2)
    return torch.cat([1 - marks, marks], 1).log()


def bright(images):
    return torch.cat([-images, images], 1)


def test_flip_inconsistency_is_the_mean_over_the_axes_of_what_flips_change():
    images = torch.tensor([[-1.0, -1.0], [1.0, 1.0]])[None, None].repeat(2, 1, 1, 1)
    assert Candidate(upper_half, images).flip_inconsistency == [0.5, 0.5]  # left and right are alike to it
    assert Candidate(bright, images).flip_inconsistency == [0, 0]  # what is flipped with the image is consistent


def test_one_class_is_said_of_many_positions_or_of_many_images():
    images = torch.rand(2, 1, 4)
    assert Candidate(says(1, 1, 1, 1), images).one_class()
    assert Candidate(says(0, 0, 0, 0), images).one_class(1)
    assert not Candidate(says(1, 0, 0, 0), images).one_class()
    alike = torch.tensor([[2.0, 0.0], [1.0, 0.0]])
    assert Candidate(lambda x: alike, images).one_class()
    assert not Candidate(lambda x: alike[:1], images[:1]).one_class()  # a single image has a single class
    mixed = torch.stack([says(1, 1, 1, 1)(images)[0], says(1, 0, 0, 0)(images)[0]])
    assert Candidate(lambda x: mixed, images).one_class(0)
    assert not Candidate(lambda x: mixed, images).one_class(1)


def test_a_candidate_computes_each_number_once_and_nothing_that_nobody_asks_for():
    passes = []

    def network(images):
        passes.append(images)
        return bright(images)

    images = torch.rand(1, 1, 4, 4)
    asked = Candidate(network, images)
    assert passes == []
    for _ in range(3):
        assert asked.prediction.shape == (1, 2, 4, 4)
        assert asked.flip_inconsistency == [0.0]
        assert asked.marginal.shape == (2,)
        assert not asked.one_class() or asked.one_class(0)
    assert len(passes) == 3  # itself and two axes
    assert passes[0] is images
    given = Candidate(network, images, bright(images))
    assert torch.equal(given.prediction, asked.prediction)
    assert len(passes) == 3


def test_the_numbers_of_an_update_by_hand():
    signals = update_signals(binary(0.9, 0.3), unadapted=binary(0.9, 0.7), source=binary(0.2, 0.2), drift=0.25)
    found = signals.numbers([(0.7, 0.9), (0.1, 0.3)])
    kl = 0.25 * ((0.9 - 0.2) * math.log(0.9 * 0.8 / (0.2 * 0.1)) + (0.3 - 0.2) * math.log(0.3 * 0.8 / (0.2 * 0.7)))
    assert found == {
        "drift": 0.25,
        "change": 1 / 2,
        "from_source": pytest.approx(kl, rel=1e-5),
        "marginal_entropy": pytest.approx(-(0.6 * math.log(0.6) + 0.4 * math.log(0.4)), rel=1e-5),
        "source_marginal_entropy": pytest.approx(-(0.2 * math.log(0.2) + 0.8 * math.log(0.8)), rel=1e-5),
        "share_excess": pytest.approx(math.log(1.5) - math.log(3 / 7), rel=1e-5),
        "source_share_excess": 0,
    }
