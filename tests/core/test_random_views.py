"""The random views of CoTTA: each change by hand or against a loop, and the same view from the same generator."""

import colorsys
import math

import numpy as np
import pytest
import torch

from dltta.core.augmentation import blurred, brightness, contrast, gamma, hue, jittered, random_view, saturation, turned
from dltta.errors import InputError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def color(*values):
    return torch.tensor(values).view(1, 3, 1, 1)


# color


def test_brightness_contrast_gamma_and_saturation_by_hand():
    x = torch.tensor([[[[0.2, 0.6]]]])
    torch.testing.assert_close(brightness(x, 0.5), torch.tensor([[[[0.1, 0.3]]]]))
    torch.testing.assert_close(contrast(x, 0.5), torch.tensor([[[[0.3, 0.5]]]]))  # towards 0.4
    torch.testing.assert_close(gamma(x, 2.0), torch.tensor([[[[0.04, 0.36]]]]))
    red = color(1.0, 0.0, 0.0)  # of brightness 0.299
    torch.testing.assert_close(saturation(red, 0.5), color(0.299 + 0.3505, 0.1495, 0.1495))
    torch.testing.assert_close(saturation(red, 0.0), color(0.299, 0.299, 0.299))


@pytest.mark.parametrize("turn", [-0.06, 0.0, 0.05, 1 / 3])
def test_hue_equals_the_standard_librarys(turn):
    values = torch.rand(20, 3, generator=generator(3))
    values[0] = 0.5  # gray stays gray
    values[1] = torch.tensor([1.0, 0.0, 0.0])
    found = hue(values.view(20, 3, 1, 1), turn).view(20, 3)
    for given, turned_to in zip(values.tolist(), found.tolist(), strict=True):
        h, s, v = colorsys.rgb_to_hsv(*given)
        assert turned_to == pytest.approx(colorsys.hsv_to_rgb((h + turn) % 1, s, v), abs=1e-5)


def test_only_three_channels_have_colors():
    gray = torch.rand(1, 1, 4, 4, generator=generator(1))
    alike = gray.expand(1, 2, 4, 4)
    found = jittered(alike, generator(2))
    assert torch.equal(found[:, 0], found[:, 1])
    colored = jittered(torch.rand(1, 3, 4, 4, generator=generator(1)), generator(2))
    assert 0 <= colored.min() <= colored.max() <= 1


# place


def test_a_shift_is_a_part_of_the_side_and_the_edge_goes_on():
    x = torch.arange(8.0).expand(1, 1, 4, 8)
    right = turned(x, 0.0, (0.25, 0.0), 1.0)
    torch.testing.assert_close(right[0, 0, 0], torch.tensor([0.0, 0, 0, 1, 2, 3, 4, 5]))
    rows = x.transpose(2, 3)
    down = turned(rows, 0.0, (0.0, 0.25), 1.0)
    torch.testing.assert_close(down[0, 0, :, 0], torch.tensor([0.0, 0, 0, 1, 2, 3, 4, 5]))


def test_a_larger_scale_enlarges():
    x = torch.arange(8.0).expand(1, 1, 8, 8)
    found = turned(x, 0.0, (0.0, 0.0), 2.0)[0, 0, 0]
    torch.testing.assert_close(found, torch.tensor([1.75, 2.25, 2.75, 3.25, 3.75, 4.25, 4.75, 5.25]))


@pytest.mark.parametrize("shape", [(1, 1, 6, 6), (1, 1, 3, 6, 6)])
def test_a_quarter_turn_is_a_quarter_turn(shape):
    x = torch.randn(shape, generator=generator())
    found = turned(x, 90.0, (0.0, 0.0), 1.0)
    turns = [torch.rot90(x, k, (-2, -1)) for k in (1, -1)]
    assert any(torch.allclose(found, each, atol=1e-5) for each in turns)


def test_turning_keeps_distances_in_images_that_are_not_square():
    """A dot stays as far from the center, wherever it goes."""
    y, x = torch.meshgrid(torch.arange(31.0) - 15, torch.arange(61.0) - 30, indexing="ij")
    dot = torch.exp(-((x - 12) ** 2 + y**2) / 4)[None, None]
    found = turned(dot, 40.0, (0.0, 0.0), 1.0)[0, 0]
    center = float((found * x).sum() / found.sum()), float((found * y).sum() / found.sum())
    assert math.hypot(*center) == pytest.approx(12, abs=0.1)
    assert abs(math.degrees(math.atan2(center[1], center[0]))) == pytest.approx(40, abs=0.5)


# sharpness


def test_blur_equals_a_loop():
    x = torch.randn(1, 2, 5, 6, generator=generator())
    kernel = np.exp(-(np.arange(-2, 3) ** 2) / (2 * 0.5**2))
    kernel /= kernel.sum()
    padded = np.pad(x.numpy(), ((0, 0), (0, 0), (2, 2), (2, 2)), mode="edge")
    expected = np.zeros(x.shape)
    for i in range(5):
        for j in range(6):
            for c in range(2):
                expected[0, c, i, j] = (padded[0, c, i : i + 5, j : j + 5] * np.outer(kernel, kernel)).sum()
    np.testing.assert_allclose(blurred(x, 0.5).numpy(), expected, atol=1e-6)
    torch.testing.assert_close(blurred(x, 0.001), x)
    volume = torch.zeros(1, 1, 5, 5, 5)
    volume[..., 2, 2, 2] = 1
    assert blurred(volume, 0.5)[0, 0, 2, 2, 2].item() == pytest.approx(kernel[2] ** 3, abs=1e-6)


# all together


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (2, 3, 8, 12), (1, 2, 4, 8, 8)])
def test_a_view_is_another_image_of_the_same_shape_and_range_and_repeatable(shape):
    x = 40 * torch.randn(shape, generator=generator()) + 100
    before = x.clone()
    first, again, other = random_view(x, generator(1)), random_view(x, generator(1)), random_view(x, generator(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.allclose(first, x)
    assert torch.equal(x, before)
    for image, view in zip(x, first, strict=True):
        assert image.min() - 1e-3 <= view.min() <= view.max() <= image.max() + 1e-3


def test_views_do_not_depend_on_the_range_of_the_image():
    x = torch.rand(1, 1, 8, 8, generator=generator()).double()
    torch.testing.assert_close(random_view(1000 * x - 300, generator(5)), 1000 * random_view(x, generator(5)) - 300)


def test_flips_and_noise_happen():
    even = torch.linspace(0, 1, 16).expand(1, 1, 16, 16)
    rising = [bool(random_view(even, generator(seed))[..., -1].mean() > 0.5) for seed in range(40)]
    assert 8 < sum(rising) < 32
    black = torch.zeros(1, 1, 8, 8)
    assert 0 < random_view(black, generator()).std() < 0.01


def test_what_is_no_image_is_refused():
    with pytest.raises(InputError, match=r"2-D images and volumes, got images of shape \(3,\)"):
        random_view(torch.randn(2, 3), generator())
