"""Views of an image: what is done is undone, means by hand, appearance against numpy."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dltta.models.views import (
    Appearance,
    View,
    blurred,
    cross_entropy,
    draw_appearance,
    flips,
    flips_and_turns,
    mean_prediction,
    strong_view,
    with_appearance,
)

SHAPES = [(2, 1, 4, 4), (2, 1, 4, 6), (1, 2, 4, 4, 3), (1, 1, 5), (3, 2)]


@pytest.mark.parametrize("shape", SHAPES)
def test_views_are_different_and_can_be_undone(shape):
    x = torch.randn(shape)
    views = flips_and_turns(x)
    seen = [view.of(x) for view in views]
    for view, image in zip(views, seen, strict=True):
        assert torch.equal(view.undone(image), x)
    unique = {(tuple(image.shape), tuple(image.flatten().tolist())) for image in seen}
    assert len(unique) == len(views) == {(4, 4): 6, (4, 6): 4, (5,): 2, (): 1}[tuple(shape[2:4])]


def test_a_flip_and_a_turn_by_hand():
    x = torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    assert View(flip=0).of(x).flatten().tolist() == [3, 4, 1, 2]
    assert View(flip=1).of(x).flatten().tolist() == [2, 1, 4, 3]
    assert View(turns=1).of(x).flatten().tolist() == [2, 4, 1, 3]
    assert [view.flip for view in flips(x)] == [None, 0, 1]


def test_mean_prediction_by_hand():
    def network(x):  # the foreground is where the image is bright, but only in the left half
        logits = x.clone()
        logits[..., 1] = 0
        return logits

    x = torch.tensor([[[[2.0, -1.0]]]])
    s = lambda z: 1 / (1 + math.exp(-z))  # noqa: E731
    p = mean_prediction(network, x, [View(), View(flip=1)])
    expected = [(s(2) + 0.5) / 2, (0.5 + s(-1)) / 2]
    torch.testing.assert_close(p[0, 1, 0], torch.tensor(expected))
    torch.testing.assert_close(p.sum(1), torch.ones(1, 1, 2))


def test_the_prediction_for_a_whole_image_is_not_turned_back():
    x = torch.rand(2, 1, 4, 4)
    p = mean_prediction(lambda images: images[:, 0, 0, :3], x, flips_and_turns(x))
    wanted = torch.stack([view.of(x)[:, 0, 0, :3].softmax(1) for view in flips_and_turns(x)]).mean(0)
    torch.testing.assert_close(p, wanted)


def test_cross_entropy_is_torchs():
    logits, target = torch.randn(2, 3, 4, 4), torch.rand(2, 3, 4, 4).softmax(1)
    torch.testing.assert_close(cross_entropy(logits, target), F.cross_entropy(logits, target))
    logits, p = torch.randn(2, 1, 4, 4), torch.rand(2, 1, 4, 4)
    wanted = F.binary_cross_entropy_with_logits(logits, p)
    torch.testing.assert_close(cross_entropy(logits, torch.cat([1 - p, p], 1)), wanted)


def slow_blur(channel, deviation):
    radius = math.ceil(4 * deviation)
    weights = np.array([math.exp(-0.5 * (d / deviation) ** 2) for d in range(-radius, radius + 1)])
    weights /= weights.sum()
    for axis in range(channel.ndim):
        moved = np.moveaxis(channel, axis, 0)
        result = np.zeros_like(moved)
        for i in range(len(moved)):
            for d, w in zip(range(-radius, radius + 1), weights, strict=True):
                result[i] += w * moved[min(max(i + d, 0), len(moved) - 1)]
        channel = np.moveaxis(result, 0, axis)
    return channel


@pytest.mark.parametrize("shape", [(6, 9), (4, 5, 6)])
def test_blur_agrees_with_a_slow_one(shape):
    channel = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(blurred(channel, 0.8), torch.from_numpy(slow_blur(channel.numpy(), 0.8)))


def slow_appearance(image, look, noise):
    low, high = image.min(), image.max()
    image = (image - low) / (high - low)
    result = []
    for number, c in enumerate(image):
        if look.brightness:
            c = c * look.brightness[number]
        if look.contrast:
            c = (c - c.mean()) * look.contrast[number] + c.mean()
        if look.gamma:  # inverted: dark and bright change places
            c = -c
            bottom, span = c.min(), c.max() - c.min()
            c = -(((c - bottom) / span) ** look.gamma[number] * span + bottom)
        if look.noise:
            c = c + look.noise * noise[number]
        if look.blur and look.blur[number]:
            c = slow_blur(c, look.blur[number])
        result.append(c)
    image = np.stack(result)
    return (image - image.min()) / (image.max() - image.min()) * (high - low) + low


def test_appearance_agrees_with_numpy():
    look = Appearance((0.6, 1.4), (1.3, 0.7), (0.6, 1.9), 0.1, (None, 0.9))
    image = torch.randn(2, 6, 7, dtype=torch.float64) * 3 - 5
    noise = torch.randn_like(image)
    ours = with_appearance(image, look, noise)
    torch.testing.assert_close(ours, torch.from_numpy(slow_appearance(image.numpy(), look, noise.numpy())))
    assert (ours.min().item(), ours.max().item()) == pytest.approx((image.min().item(), image.max().item()))
    same = with_appearance(image, Appearance(None, None, None, None, None), None)
    torch.testing.assert_close(same, image)


def test_gamma_of_the_inverted_intensities_by_hand():
    image = torch.tensor([[0.0, 0.5, 1.0]])
    changed = with_appearance(image, Appearance(None, None, (2.0,), None, None), None)
    torch.testing.assert_close(changed, torch.tensor([[0.0, 0.75, 1.0]]))


def test_a_constant_image_stays():
    assert torch.equal(strong_view(torch.full((2, 1, 4, 4), 3.0), torch.Generator()), torch.full((2, 1, 4, 4), 3.0))


def test_draws_have_the_published_probabilities_and_ranges():
    generator = torch.Generator().manual_seed(0)
    drawn = [draw_appearance(2, generator) for _ in range(2000)]
    shares = {"brightness": 0.75, "contrast": 0.75, "gamma": 0.75, "noise": 0.5, "blur": 0.5}
    for name, share in shares.items():
        assert np.mean([getattr(look, name) is not None for look in drawn]) == pytest.approx(share, abs=0.04)
    ranges = {"brightness": (0.5, 1.5), "contrast": (0.5, 1.5), "gamma": (0.5, 2.0), "blur": (0.5, 1.5)}
    for name, (low, high) in ranges.items():
        values = [v for look in drawn for v in (getattr(look, name) or ()) if v is not None]
        assert (min(values), max(values)) == pytest.approx((low, high), abs=0.01)
    variances = [look.noise**2 for look in drawn if look.noise is not None]
    assert np.mean(variances) == pytest.approx(0.025, abs=0.002)
    sharp = [v is None for look in drawn for v in (look.blur or ())]
    assert np.mean(sharp) == pytest.approx(0.5, abs=0.04)


def test_a_strong_view_is_repeatable_and_each_image_has_its_own():
    x = torch.rand(1, 1, 8, 8).expand(2, 1, 8, 8).clone()
    kept = x.clone()
    one, two = (strong_view(x, torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(one, two)
    assert not torch.allclose(one[0], one[1])
    assert torch.equal(x, kept)
