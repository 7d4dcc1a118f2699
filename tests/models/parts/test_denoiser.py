"""The denoiser of label maps, the noise it learns from, and the image normalizer."""

import numpy as np
import pytest
import torch

from dltta.models.parts.denoiser import Denoiser, corrupted, soft_dice
from dltta.models.parts.normalizer import Bell, ImageNormalizer


@pytest.mark.parametrize("shape", [(2, 3, 16, 16), (1, 3, 9, 13), (1, 3, 8, 8, 5)])
def test_the_denoiser_gives_logits_of_the_same_size(shape):
    denoiser = Denoiser(len(shape) - 2, 3, (4, 8, 8)).eval()
    assert denoiser(torch.rand(shape)).shape == shape


def test_details_do_not_pass_the_finest_level_by_a_skip_connection():
    denoiser = Denoiser(2, 3)
    assert [block[0].in_channels for block in denoiser.up] == [32, 64 + 32, 128 + 64]  # 16 of the finest are missing
    assert [block[0].out_channels for block in denoiser.down] == [16, 32, 64, 128]


def test_soft_dice_by_hand():
    one = torch.tensor([[[0.8, 0.4], [0.2, 0.6]]])
    other = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    expected = (2 * 0.8 / (1.2 + 1) + 2 * 0.6 / (0.8 + 1)) / 2
    assert soft_dice(one, other).item() == pytest.approx(expected, abs=1e-6)
    assert soft_dice(other, other).item() == pytest.approx(1.0)
    both = torch.tensor([[[1.0, 1.0], [0.0, 0.0]]])
    assert soft_dice(both, both).item() == pytest.approx(1.0)  # a class that both lack


def slow_corruption(label, generator, cubes, half_side):
    """One map in numpy; the same draws in the same order."""

    def draw(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    noisy, left = label.copy(), 0.5 * label.size
    for _ in range(draw(1, cubes)):
        half = draw(1, max(1, min(half_side, min(label.shape) // 4)))
        sides = [min(2 * half, n) for n in label.shape]
        left -= np.prod(sides)
        if left < 0:
            break
        source = [draw(0, n - side) for n, side in zip(label.shape, sides, strict=True)]
        target = [draw(0, n - side) for n, side in zip(label.shape, sides, strict=True)]
        for offset in np.ndindex(*sides):
            noisy[tuple(np.add(target, offset))] = label[tuple(np.add(source, offset))]
    return noisy


@pytest.mark.parametrize("shape", [(2, 16, 24), (1, 12, 12, 8), (2, 40, 4)])
def test_corruption_agrees_with_a_slow_one(shape):
    labels = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    kept = labels.clone()
    for _ in range(3):
        noisy = corrupted(labels, ours, cubes=9, half_side=3)
        wanted = np.stack([slow_corruption(label.numpy(), theirs, 9, 3) for label in labels])
        assert np.array_equal(noisy.numpy(), wanted)
        assert torch.equal(labels, kept)
    assert not torch.equal(noisy, labels)


def test_corruption_of_small_maps_leaves_half_of_them():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(1024).view(1, 32, 32)
    kept = [(corrupted(labels, generator) == labels).float().mean().item() for _ in range(20)]
    assert min(kept) >= 0.5
    assert min(kept) < 0.8


def test_the_normalizer_by_hand():
    normalizer = ImageNormalizer(2, 1, width=2, kernel=1)
    with torch.no_grad():
        for layer, weight in ((0, 1.0), (2, 0.5), (4, 3.0)):
            normalizer.layers[layer].weight.fill_(weight)
            normalizer.layers[layer].bias.zero_()
        for layer in (1, 3):
            normalizer.layers[layer].scale.fill_(2.0)
    x = torch.tensor([[[[1.0, -2.0]]]])
    first = np.exp(-np.array([1.0, 4.0]) / 4)
    second = np.exp(-((0.5 * (first + first)) ** 2) / 4)
    expected = np.array([1.0, -2.0]) + 3 * (second + second)
    torch.testing.assert_close(normalizer(x).flatten(), torch.from_numpy(expected).float())


def test_scales_start_around_a_fifth():
    torch.manual_seed(0)
    scale = Bell(4000).scale
    assert (scale.mean().item(), scale.std().item()) == pytest.approx((0.2, 0.05), abs=0.003)
