"""A simulated site: the same image for the same case, labels that move along, a description that comes back."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from dltta.data.preprocessing import Preprocessing
from dltta.data.shifts import HARMFUL, SOURCE_SITE, SimulatedSite, draw_sites
from dltta.data.shifts.blur import Blur
from dltta.data.shifts.gamma import Gamma
from dltta.data.shifts.magnification import Magnification
from dltta.data.shifts.noise import GaussianNoise
from dltta.errors import InputError, SettingError

SHAPES = [(1, 20, 24), (3, 20, 24), (4, 20, 24), (1, 10, 12, 14), (4, 10, 12, 14)]


def picture(shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def every_site(shape, count=12):
    drawn = draw_sites(count, seed=3, spatial_dims=len(shape) - 1, channels=shape[0])
    return (*drawn, *HARMFUL, SOURCE_SITE)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_site_gives_a_finite_image_of_the_same_kind(shape):
    image = picture(shape)
    for site in every_site(shape):
        changed = site.image(image, case=2)
        assert (changed.shape, changed.dtype, changed.device) == (image.shape, image.dtype, image.device), site
        assert changed.isfinite().all(), site


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_type_stays(dtype):
    for site in every_site((3, 16, 16), count=6):
        changed = site.image(picture((3, 16, 16)).to(dtype), case=1)
        assert changed.dtype == dtype
        assert changed.isfinite().all()


def test_a_case_does_not_depend_on_what_was_drawn_before():
    image = picture((1, 20, 20))
    for site in every_site((1, 20, 20), count=8):
        alone = site.image(image, case=5)
        np.random.seed(1)
        torch.manual_seed(1)
        for case in range(3):
            site.image(image, case=case)
        assert torch.equal(site.image(image, case=5), alone), site


def test_cases_of_a_site_differ_a_little():
    image = picture((1, 32, 32))
    site = SimulatedSite("x", (Gamma(2.0),), seed=1)
    first, second = site.image(image, case=0), site.image(image, case=1)
    assert 0 < (first - second).abs().mean() < 0.5 * (first - image).abs().mean()
    still = replace(site, variation=0.0)
    assert torch.allclose(still.image(image, case=0), image**2, atol=0.01)  # the extremes of 1024 values are about 0, 1
    assert torch.equal(still.image(image, case=0), still.image(image, case=1))


def test_noise_differs_from_case_to_case_even_without_variation():
    site = SimulatedSite("x", (GaussianNoise(0.1),), variation=0.0)
    image = picture((1, 16, 16))
    assert not torch.equal(site.image(image, case=0), site.image(image, case=1))


def test_no_case_varies_without_limit():
    site = SimulatedSite("x", (Blur(1.0),), variation=50.0)
    of_case = [site._of_case(site.changes[0], site._rng(site.changes[0], case)).sigma for case in range(20)]
    assert set(of_case) == {0.5, 2.0}


def test_the_source_site_is_the_image_itself():
    image, label = picture((3, 8, 8)), torch.zeros(8, 8, dtype=torch.long)
    assert SOURCE_SITE.image(image, case=0) is image
    assert SOURCE_SITE.pair(image, label, case=4) == (image, label)
    assert (SOURCE_SITE.severity, SOURCE_SITE.describe()) == (0, "unchanged")


@pytest.mark.parametrize("dims", [2, 3])
def test_the_label_moves_with_the_magnified_image(dims):
    label = torch.zeros([48] * dims, dtype=torch.long)
    label[(slice(17, 31),) * dims] = 1
    site = SimulatedSite("x", (Magnification(1.5), Gamma(1.3)), seed=2)
    sizes = set()
    for case in range(4):
        image, moved = site.pair(label[None].float(), label, case=case)
        assert moved.dtype == torch.long
        assert moved.sum() > 1.5 * label.sum()
        assert ((image[0] > 0.5 ** Gamma(1.3).exponent) == moved.bool()).float().mean() > 0.97
        sizes.add(int(moved.sum()))
    assert len(sizes) > 1  # the magnification itself varies


def test_a_label_stays_where_nothing_moves_and_a_class_always():
    label = torch.randint(0, 3, (12, 12), generator=torch.Generator().manual_seed(0))
    image = picture((1, 12, 12))
    assert torch.equal(SimulatedSite("x", (Gamma(2.0), Blur(1.0))).pair(image, label, case=1)[1], label)
    class_label = torch.tensor(2)
    assert torch.equal(SimulatedSite("x", (Magnification(1.5),)).pair(image, class_label, case=1)[1], class_label)


def test_a_pair_has_the_image_that_the_site_gives_alone():
    image, label = picture((1, 20, 20)), torch.zeros(20, 20, dtype=torch.long)
    for site in every_site((1, 20, 20)):
        assert torch.equal(site.pair(image, label, case=7)[0], site.image(image, case=7)), site


@pytest.mark.parametrize("shape", [(3, 24, 24), (1, 12, 12, 12)], ids=str)
def test_a_standardized_image_gets_what_standardizing_after_the_change_gives(shape):
    """At the other site images are standardized too, so shifts that this undoes must not reach the network."""
    raw = 200 * picture(shape) + 20
    standardize = Preprocessing("zscore")
    for site in draw_sites(12, seed=1, spatial_dims=len(shape) - 1, channels=shape[0]):
        expected = standardize.image(site.image(raw, case=1))
        found = site.image(standardize.image(raw), case=1)
        assert (found - expected).abs().mean() < 2e-3, site.describe()  # JPEG rounds


def test_a_standardized_image_with_an_empty_channel_stays_so():
    image = Preprocessing("zscore").image(torch.stack([picture((16, 16)), torch.zeros(16, 16)]))
    for site in every_site((2, 16, 16)):
        changed = site.image(image, case=0)
        assert not changed[1].any()
        assert changed[0].mean().abs() < 1e-4


def test_a_site_comes_back_from_its_json():
    for site in (*every_site((3, 8, 8)), *every_site((1, 8, 8, 8))):
        again = SimulatedSite.from_json(json.loads(json.dumps(site.as_json())))
        assert again == site


def test_a_site_says_what_it_does():
    site = SimulatedSite("x", (Blur(0.8), Gamma(1.4), GaussianNoise(0.03)))
    assert site.describe() == "blur 0.8 px, gamma 1.4, noise 0.03"


def test_unknown_changes_are_answered_with_the_nearest():
    description = SimulatedSite("x", (Gamma(1.4),)).as_json()
    description["changes"][0]["change"] = "gama"
    with pytest.raises(SettingError, match="did you mean 'gamma'"):
        SimulatedSite.from_json(description)


@pytest.mark.parametrize(
    "image", [torch.zeros(4, 4), torch.zeros(1, 4, 4, dtype=torch.long), torch.zeros(1, 2, 2, 2, 2)]
)
def test_what_is_no_image_is_refused(image):
    with pytest.raises(InputError, match="cannot be changed"):
        draw_sites(1)[0].image(image, case=0)


def test_values_that_are_not_numbers_are_refused():
    with pytest.raises(InputError, match="not numbers"):
        draw_sites(1)[0].image(torch.full((1, 4, 4), torch.nan), case=0)


def test_a_negative_case_is_refused():
    with pytest.raises(SettingError, match="case is -1"):
        draw_sites(1)[0].image(picture((1, 4, 4)), case=-1)
