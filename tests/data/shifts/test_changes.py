"""Each change by numbers that can be checked by hand, and what all have in common."""

import math

import numpy as np
import pytest
import torch

from dltta.data.shifts.bias import BiasField
from dltta.data.shifts.blur import Blur
from dltta.data.shifts.brightness import Brightness
from dltta.data.shifts.color import ColorMixing, Tint
from dltta.data.shifts.contrast import Contrast
from dltta.data.shifts.curve import Curve, piecewise
from dltta.data.shifts.gamma import Gamma
from dltta.data.shifts.harmful import Constant, Negative, OnlyNoise, Remapped, Shuffled
from dltta.data.shifts.jpeg import Jpeg
from dltta.data.shifts.kspace import Ghosting, Spikes
from dltta.data.shifts.magnification import Magnification
from dltta.data.shifts.noise import GaussianNoise, RicianNoise, Speckle
from dltta.data.shifts.resolution import Anisotropy, Resolution
from dltta.data.shifts.scale import span
from dltta.data.shifts.site import CHANGES
from dltta.data.shifts.stain import BLACK, DENSITY, Stain
from dltta.errors import InputError

approx = pytest.approx


def rng():
    return np.random.default_rng(0)


def row(*values):
    """One channel, one row."""
    return torch.tensor([[values]], dtype=torch.float32)


def halves(size=256):
    """Left half 0, right half 1: its span is 1."""
    image = torch.zeros(1, size, size)
    image[..., size // 2 :] = 1
    return image


def smooth(channels, size=(24, 24), seed=0):
    """Waves with a range of their own in each channel."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, channels, *[6] * len(size), generator=generator)
    mode = "bicubic" if len(size) == 2 else "trilinear"
    return torch.nn.functional.interpolate(coarse, size=size, mode=mode, align_corners=True)[0]


def test_gamma_raises_to_a_power_between_the_extremes():
    assert Gamma(2.0).image(row(0, 0.5, 1), rng()).flatten().tolist() == approx([0, 0.25, 1], abs=1e-6)
    assert Gamma(2.0).image(row(10, 15, 20), rng()).flatten().tolist() == approx([10, 12.5, 20], abs=1e-4)


def test_each_channel_has_its_own_extremes():
    image = torch.cat([row(0, 0.5, 1), row(0, 50, 100)])
    assert Gamma(2.0).image(image, rng())[1].flatten().tolist() == approx([0, 25, 100], abs=1e-3)


def test_contrast_spreads_around_the_mean_and_saturates():
    image = row(0, 1, 2, 5)  # mean 2
    assert Contrast(0.5).image(image, rng()).flatten().tolist() == approx([1, 1.5, 2, 3.5])
    assert Contrast(2.0).image(image, rng()).flatten().tolist() == approx([0, 0, 2, 5])  # -2 and 8 leave the range


def test_brightness_is_a_share_of_the_span_and_saturates():
    image = torch.linspace(0, 1, 1001).view(1, 7, 143)  # 0.5 % and 99.5 % quantiles: 0.005 and 0.995
    changed = Brightness(0.25).image(image, rng()).flatten()
    assert changed[500].item() == approx(0.5 + 0.25 * 0.99, abs=1e-5)
    assert changed[900].item() == 1


def test_a_hot_pixel_does_not_stretch_the_span():
    image = torch.linspace(0, 1, 10_000).view(1, 100, 100).clone()
    image[0, 0, 0] = 1000
    assert span(image).item() == approx(0.99, abs=1e-3)


def test_a_small_object_on_a_constant_background_has_a_span():
    image = torch.zeros(1, 100, 100)
    image[0, 50, 50] = 3
    assert span(image).item() == 3


def test_a_curve_is_the_line_through_its_pieces():
    slopes = [2.0, 0.5, 1.0, 0.25, 1.25]  # at 0.2: 0.4, at 0.4: 0.5, at 0.6: 0.7, at 0.8: 0.75, at 1: 1
    unit = torch.tensor([0, 0.1, 0.2, 0.3, 0.5, 0.8, 1])
    assert piecewise(unit, slopes).tolist() == approx([0, 0.2, 0.4, 0.45, 0.6, 0.75, 1])


def test_a_curve_rises_and_keeps_the_extremes():
    image = torch.linspace(-2, 3, 400).view(1, 20, 20)
    changed = Curve(1.5, seed=4).image(image, rng()).flatten()
    assert (changed.diff() > 0).all()
    assert changed[[0, -1]].tolist() == approx([-2, 3], abs=1e-5)
    assert (changed - image.flatten()).abs().max() > 0.3


def test_color_mixing_multiplies_by_its_matrix_and_keeps_grey():
    mixing = ColorMixing(0.3, seed=1)
    matrix = mixing.matrix(3)
    assert matrix.sum(dim=1).tolist() == approx([1, 1, 1])
    image = torch.tensor([[0, 1, 0.5, 0.4], [0, 1, 0.5, 0.5], [0, 1, 0.5, 0.6]]).view(3, 1, 4)
    changed = mixing.image(image, rng())
    assert changed[:, 0, 2].tolist() == approx([0.5] * 3)
    by_hand = [sum(float(matrix[i, j]) * (0.4, 0.5, 0.6)[j] for j in range(3)) for i in range(3)]
    assert changed[:, 0, 3].tolist() == approx(by_hand, abs=1e-6)


def test_a_tint_takes_its_amount_from_one_channel_and_nothing_from_another():
    gains = Tint(0.4, seed=2).gains(3)
    assert (gains.min().item(), gains.max().item()) == approx((0.6, 1))
    image = torch.linspace(0, 1, 5).view(1, 1, 5).repeat(3, 1, 1)
    assert Tint(0.4, seed=2).image(image, rng())[:, 0, 4].tolist() == approx(gains.tolist(), abs=1e-6)


def test_a_dye_of_twice_the_amount_has_twice_the_optical_density():
    density = np.array(DENSITY[0]) * 0.5  # a pixel of hematoxylin alone, beside white and the darkest
    pixel = (1 + BLACK) * np.exp(-density) - BLACK
    image = torch.tensor(np.stack([np.ones(3), np.zeros(3), pixel], axis=1)[:, None, :], dtype=torch.float32)
    changed = Stain(2.0, 1.0).image(image, rng())
    assert changed[:, 0, 2].tolist() == approx(((1 + BLACK) * np.exp(-2 * density) - BLACK).tolist(), abs=1e-5)
    assert changed[:, 0, 0].tolist() == approx([1, 1, 1], abs=1e-6)  # white has no dye
    only_eosin = Stain(1.0, 2.0).image(image, rng())
    assert only_eosin[:, 0, 2].tolist() == approx(pixel.tolist(), abs=1e-5)


@pytest.mark.parametrize("size", [(16, 20), (8, 10, 12)])
def test_a_bias_field_is_smooth_and_as_strong_as_told(size):
    field = BiasField(0.7, seed=3).field(size)
    assert field.shape == size
    assert (field.max().log().item(), field.min().log().item()) == approx((0.7, -0.7), abs=1e-4)
    assert field.log().diff(dim=0).abs().max() < 0.7
    image = torch.zeros(1, *size)
    image[0, :3] = 2
    changed = BiasField(0.7, seed=3).image(image, rng())
    assert torch.allclose(changed[0, :3], 2 * field[:3], atol=1e-5)
    assert not changed[0, 3:].any()  # no signal, nothing to multiply


@pytest.mark.parametrize("size", [(33, 33), (21, 21, 21)])
def test_blur_has_the_variance_of_its_sigma(size):
    image = torch.zeros(1, *size)
    center = tuple(n // 2 for n in size)
    image[(0, *center)] = 1
    changed = Blur(1.5).image(image, rng())[0]
    line = changed.sum(dim=tuple(range(1, len(size)))).double()
    offsets = torch.arange(size[0]).double() - center[0]
    assert line.sum().item() == approx(1, abs=1e-3)
    assert (line * offsets**2).sum().item() == approx(1.5**2, rel=0.06)  # MONAI integrates over pixels: + 1/12


def test_blur_does_not_darken_the_border():
    image = torch.full((1, 12, 12), 5.0)
    image[0, 6, 6] = 6
    assert Blur(1.0).image(image, rng())[0, 0].tolist() == approx([5.0] * 12, abs=1e-4)


def test_resolution_averages_neighbors_and_interpolates_back():
    image = torch.tensor([0.0, 2, 4, 6]).repeat(4, 1)[None]  # pairs: 1 and 5; back between them
    assert Resolution(2.0).image(image, rng())[0, 1].tolist() == approx([1, 2, 4, 5])


def test_anisotropy_widens_one_axis_only():
    along = torch.tensor([0.0, 2, 4, 6]).view(1, 4, 1, 1).expand(1, 4, 3, 5).contiguous()
    assert Anisotropy(2.0, turn=0).image(along, rng())[0, :, 0, 0].tolist() == approx([1, 2, 4, 5])
    assert Anisotropy(2.0, turn=1).image(along, rng())[0, :, 0, 0].tolist() == approx([0, 2, 4, 6], abs=1e-6)


@pytest.mark.parametrize("dims", [2, 3])
def test_magnification_enlarges_objects_and_labels_alike(dims):
    image = torch.zeros(1, *[16] * dims)
    image[(0, *[slice(6, 10)] * dims)] = 1
    label = image[0].long() * 3
    changed = Magnification(2.0).label(label)
    assert changed.dtype == label.dtype
    assert set(changed.unique().tolist()) == {0, 3}
    expected = torch.zeros_like(label)
    expected[(slice(4, 12),) * dims] = 3
    assert torch.equal(changed, expected)
    inside = Magnification(2.0).image(image, rng())[0][(slice(5, 11),) * dims]
    assert inside.min().item() == approx(1, abs=1e-5)
    assert Magnification(2.0).image(image, rng())[0].sum() == approx(8**dims, rel=0.02)


def test_gaussian_noise_has_its_standard_deviation():
    added = GaussianNoise(0.1).image(halves() * 50, rng()) - halves() * 50
    assert added.std().item() == approx(5, rel=0.02)
    assert added.mean().item() == approx(0, abs=0.1)


def test_rician_noise_has_the_mean_of_a_magnitude():
    changed = RicianNoise(0.1).image(halves() - 3, rng()) + 3
    dark, bright = changed[..., :128], changed[..., 128:]
    assert dark.mean().item() == approx(0.1 * math.sqrt(math.pi / 2), rel=0.02)  # Rayleigh
    assert bright.mean().item() == approx(1 + 0.1**2 / 2, abs=2e-3)
    assert dark.min() >= 0


def test_speckle_grows_with_the_signal():
    changed = Speckle(0.2).image(halves(), rng())
    assert not changed[..., :128].any()
    assert changed[..., 128:].std().item() == approx(0.2, rel=0.02)


def test_a_ghost_lies_half_the_image_away():
    image = torch.zeros(1, 8, 4)
    image[0, 2, 1] = 1
    changed = Ghosting(0.4, copies=1, turn=0).image(image, rng())
    expected = image.clone()
    expected[0, 6, 1] = 0.4
    assert torch.allclose(changed, expected)
    three = Ghosting(0.3, copies=3, turn=0).image(image, rng())[0, :, 1]
    assert three.tolist() == approx([0.1, 0, 1, 0, 0.1, 0, 0.1, 0])


@pytest.mark.parametrize("size", [(64, 64), (16, 16, 16)])
def test_spikes_add_one_wave_of_their_amount(size):
    image = torch.zeros(1, *size)
    image[0, : size[0] // 2] = 2
    added = (Spikes(0.3).image(image, rng()) - image)[0]
    assert added.abs().max().item() == approx(0.6, rel=0.02)
    assert added.square().mean().sqrt().item() == approx(0.6 / math.sqrt(2), rel=0.05)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_jpeg_loses_more_at_lower_quality(channels):
    image = smooth(channels, (40, 40)) + 0.05 * torch.rand(channels, 40, 40, generator=torch.Generator().manual_seed(1))
    losses = [(Jpeg(quality).image(image, rng()) - image).abs().mean().item() for quality in (98, 50, 5)]
    assert losses[0] < losses[1] < losses[2]
    assert losses[0] < 0.02


def test_jpeg_refuses_volumes():
    with pytest.raises(InputError, match="2-D"):
        Jpeg(50).image(torch.rand(1, 4, 4, 4), rng())


def test_a_negative_exchanges_the_extremes():
    assert Negative().image(row(2, 3, 6), rng()).flatten().tolist() == approx([6, 5, 2])


def test_another_modality_makes_dark_and_bright_alike():
    changed = Remapped(0.5).image(row(0, 0.25, 0.5, 0.75, 1), rng()).flatten().tolist()
    assert changed == approx([1, math.sqrt(0.5), 0, math.sqrt(0.5), 1])


def test_only_noise_keeps_mean_and_deviation_and_nothing_else():
    image = halves() * 4 + 10
    changed = OnlyNoise().image(image, rng())
    assert (changed.mean().item(), changed.std().item()) == approx((12, 2), rel=0.02)
    assert abs(torch.corrcoef(torch.stack([changed.flatten(), image.flatten()]))[0, 1].item()) < 0.02


def test_shuffling_keeps_the_values_in_other_places():
    image = torch.arange(100.0).view(1, 10, 10)
    changed = Shuffled(5).image(image, rng())
    assert not torch.equal(changed, image)
    assert changed.flatten().sort().values.tolist() == image.flatten().tolist()


def test_a_constant_image_is_its_mean():
    assert Constant().image(row(0, 1, 5), rng()).flatten().tolist() == [2, 2, 2]


@pytest.fixture(params=CHANGES, ids=lambda kind: kind.name)
def change(request):
    return request.param.draw(np.random.default_rng(1), 0.8)


def channels_of(change):
    return 3 if isinstance(change, Stain) else 4


def test_a_change_is_relative_to_the_range_of_the_image(change):
    image = smooth(channels_of(change)).double()
    plain = change.image(image, rng())
    moved = change.image(3 * image + 7, rng())
    assert torch.allclose((moved - 7) / 3, plain, atol=1e-5)
    assert not torch.allclose(plain, image, atol=1e-3)


def test_a_constant_channel_stays(change):
    image = smooth(channels_of(change))
    image[1] = 0.4
    changed = change.image(image, rng())
    assert changed.isfinite().all()
    assert torch.allclose(changed[1], torch.tensor(0.4), atol=1e-6)


def test_a_change_keeps_shape_type_and_its_input(change):
    image = smooth(channels_of(change))
    before = image.clone()
    changed = change.image(image, rng())
    assert (changed.shape, changed.dtype) == (image.shape, image.dtype)
    assert type(changed) is torch.Tensor
    assert torch.equal(image, before)


@pytest.mark.parametrize("kind", CHANGES[: CHANGES.index(OnlyNoise)], ids=lambda kind: kind.name)
def test_a_weaker_change_moves_the_image_less(kind):
    change = kind.draw(np.random.default_rng(1), 0.8)
    image = smooth(channels_of(change))
    full, third = (float((c.image(image, rng()) - image).abs().mean()) for c in (change, change.scaled(0.3)))
    assert third < 0.7 * full
