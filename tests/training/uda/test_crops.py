"""Views of an image: the right part, mirrored or not, in other colors, blurred; always the same from the same seed."""

import colorsys
import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from dltta.training.uda import crops
from dltta.training.uda.crops import Crops, blur, grey, jitter, random_part, turn_hue, views


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def ramp(size=32, count=200):
    """Two channels that tell each pixel's column and row, from 0 to 1."""
    steps = (torch.arange(size) + 0.5) / size
    image = torch.stack([steps.expand(size, size), steps[:, None].expand(size, size)])
    return image.repeat(count, 1, 1, 1)


def test_parts_lie_in_the_image_and_have_the_area_and_the_sides_that_were_asked_for():
    size = 64
    part = random_part(ramp(size), (size, size), (0.2, 0.3), seeded())
    low, high = part.amin(dim=(2, 3)), part.amax(dim=(2, 3))
    assert part.min() >= 0.5 / size
    assert part.max() <= 1 - 0.5 / size + 1e-6
    width, height = ((high - low) * size / (size - 1)).T
    inner = (low.amin(1) > 1 / size) & (high.amax(1) < 1 - 1 / size)  # the border repeats itself
    area, ratio = (width * height)[inner], (width / height)[inner]
    assert 0.195 < area.min() < 0.22
    assert 0.28 < area.max() < 0.305
    assert 3 / 4 - 0.02 < ratio.min() < 0.8
    assert 1.25 < ratio.max() < 4 / 3 + 0.02


def test_parts_are_everywhere_and_half_of_them_are_mirrored():
    part = random_part(ramp(), (8, 8), (0.05, 0.14), seeded())
    centers = part.mean(dim=(2, 3))
    assert (centers.amin(0) < 0.25).all()
    assert (centers.amax(0) > 0.75).all()
    mirrored = (part[:, 0, 0, 0] > part[:, 0, 0, -1]).float().mean()
    assert 0.4 < mirrored < 0.6
    assert (part[:, 1, 0, 0] < part[:, 1, -1, 0]).all()  # never upside down


def test_a_part_that_is_the_whole_image_is_itself_or_its_mirror_image(monkeypatch):
    monkeypatch.setattr(crops, "RATIO", (1.0, 1.0))
    images = torch.rand(20, 3, 16, 16)
    whole = random_part(images, (16, 16), (1.0, 1.0), seeded())
    kept = [torch.allclose(one, other, atol=1e-5) for one, other in zip(whole, images, strict=True)]
    turned = [torch.allclose(one, other.flip(2), atol=1e-5) for one, other in zip(whole, images, strict=True)]
    assert [one != other for one, other in zip(kept, turned, strict=True)] == [True] * 20
    assert any(kept)
    assert any(turned)


def test_hue_turns_as_the_color_wheel_does():
    red, angle = torch.tensor([1.0, 0.0, 0.0]).view(1, 3, 1, 1), torch.tensor(2 * math.pi / 3).view(1, 1, 1, 1)
    assert torch.allclose(turn_hue(red, angle).flatten(), torch.tensor([0.0, 1.0, 0.0]), atol=1e-6)  # to green
    grey_, any_angle = torch.full((1, 3, 2, 2), 0.4), torch.tensor(1.1).view(1, 1, 1, 1)
    assert torch.allclose(turn_hue(grey_, any_angle), grey_, atol=1e-6)
    color = torch.tensor([0.5, 0.45, 0.4])
    turned = turn_hue(color.view(1, 3, 1, 1), torch.tensor(math.pi / 3).view(1, 1, 1, 1)).flatten()
    before, after = (colorsys.rgb_to_hsv(*c.tolist())[0] for c in (color, turned))
    assert after - before == pytest.approx(1 / 6, abs=0.02)


def test_jitter_changes_every_image_by_its_own_factors(monkeypatch):
    images = torch.rand(2, 1, 4, 4) + 0.5
    draws = iter([torch.tensor([2.0, 1.0]), torch.tensor([0.5, 1.0])])  # brightness, contrast
    monkeypatch.setattr(crops, "_uniform", lambda *_: next(draws).view(2, 1, 1, 1))
    first, second = jitter(images, 1.0, seeded())
    brighter = 2 * images[0]
    assert torch.allclose(first, brighter.mean() + 0.5 * (brighter - brighter.mean()))
    assert torch.allclose(second, images[1])


def test_jitter_has_a_strength():
    images = torch.rand(200, 3, 4, 4)
    means = {strength: jitter(images, strength, seeded()).mean(dim=(1, 2, 3)) for strength in (0.0, 0.5, 1.0)}
    changed = {strength: (mean / images.mean(dim=(1, 2, 3)) - 1).abs().max() for strength, mean in means.items()}
    assert torch.allclose(jitter(images, 0.0, seeded()), images, atol=1e-6)
    assert 0.35 < changed[0.5] < 0.45  # half of 0.8
    assert 0.7 < changed[1.0] < 0.85


def test_light_of_colors_is_weighted():
    assert grey(torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)).item() == pytest.approx(0.299 + 2 * 0.587 + 3 * 0.114)


def test_blur_agrees_with_scipy_for_each_images_own_width():
    images, sds = torch.rand(2, 3, 15, 17), (0.7, 1.6)
    blurred = blur(images, torch.tensor(sds).view(2, 1, 1, 1))
    for image, sd, ours in zip(images.numpy(), sds, blurred.numpy(), strict=True):
        expected = gaussian_filter(image, (0, sd, sd), mode="nearest", radius=(0, 5, 5))
        np.testing.assert_allclose(ours, expected, atol=2e-4)


def test_views_come_one_after_another_and_differ_and_repeat_with_the_seed():
    images = torch.rand(4, 3, 16, 16)
    kind = Crops(3, (8, 6), (0.2, 0.8))
    drawn = views(images, kind, seeded())
    assert drawn.shape == (12, 3, 8, 6)
    assert torch.equal(drawn, views(images, kind, seeded()))
    assert not torch.equal(drawn, views(images, kind, seeded(1)))
    assert not torch.equal(drawn[:4], drawn[4:8])
    constant = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 16, 16).clone()
    means = views(constant, kind, seeded()).mean(dim=(1, 2, 3))
    assert (means[[0, 4, 8]] == 0).all()  # image 0 is black in every view, whatever its brightness is multiplied by
    assert (means[[1, 2, 3, 5, 6, 7, 9, 10, 11]] > 0).all()


def test_a_fifth_of_colored_views_is_grey():
    images = torch.rand(300, 3, 8, 8)
    drawn = views(images, Crops(1, (8, 8), (0.5, 1.0)), seeded())
    share = ((drawn[:, 0] - drawn[:, 1]).abs().amax(dim=(1, 2)) < 1e-6).float().mean()
    assert 0.14 < share < 0.26
