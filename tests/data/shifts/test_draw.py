"""Which sites are drawn: stable, spread from mild to strong, and such as the images can have."""

from itertools import pairwise

import pytest
import torch

from dltta.data.shifts import HARMFUL, SOURCE_SITE, draw_sites
from dltta.data.shifts.blur import Blur
from dltta.data.shifts.contrast import Contrast
from dltta.data.shifts.draw import related_sites
from dltta.data.shifts.gamma import Gamma
from dltta.data.shifts.site import SimulatedSite
from dltta.errors import SettingError


def kinds(spatial_dims, channels, count=200):
    sites = draw_sites(count, spatial_dims=spatial_dims, channels=channels)
    return {change.name for site in sites for change in site.changes}


def test_a_longer_draw_begins_with_the_shorter():
    for dims, channels in ((2, 1), (2, 3), (3, 1)):
        long = draw_sites(20, seed=4, spatial_dims=dims, channels=channels)
        assert long[:7] == draw_sites(7, seed=4, spatial_dims=dims, channels=channels)


def test_another_seed_draws_other_sites():
    first, second = draw_sites(10, seed=0), draw_sites(10, seed=1)
    assert not set(first) & set(second)
    assert not {site.seed for site in first} & {site.seed for site in second}


def test_severities_are_spread_evenly_however_few_are_drawn():
    for seed in range(5):
        severities = sorted(site.severity for site in draw_sites(8, seed=seed))
        assert severities[0] < 0.35
        assert severities[-1] > 0.8
        gaps = [b - a for a, b in pairwise(severities)]
        assert max(gaps) < 0.25


def test_severe_sites_change_an_image_more():
    image = torch.rand(1, 48, 48, generator=torch.Generator().manual_seed(0))
    image = torch.nn.functional.avg_pool2d(image, 5, 1, 2)
    sites = sorted(draw_sites(60), key=lambda site: site.severity)
    changes = torch.tensor([float((site.image(image, case=0) - image).abs().mean()) for site in sites])
    assert changes[40:].mean() > 1.7 * changes[:20].mean()


def test_colors_are_changed_only_where_there_are_colors():
    colors = {"stain", "color mixing", "tint"}
    assert colors <= kinds(2, 3)
    for dims, channels in ((2, 1), (2, 4), (3, 1), (3, 3)):
        assert not colors & kinds(dims, channels)


def test_volumes_get_thick_slices_and_no_jpeg_and_grey_images_what_mri_does():
    assert "anisotropy" in kinds(3, 1)
    assert "JPEG" not in kinds(3, 1)
    assert "JPEG" in kinds(2, 1)
    assert {"ghosting", "spikes", "Rician noise", "speckle"} <= kinds(3, 1)
    assert not {"ghosting", "spikes", "Rician noise", "speckle", "anisotropy"} & kinds(2, 3)


def test_every_site_changes_tones_and_something_else_and_nothing_twice():
    tones = {"gamma", "curve", "contrast", "brightness", "stain", "color mixing", "tint"}
    for channels in (1, 3):
        for site in draw_sites(50, channels=channels):
            names = [change.name for change in site.changes]
            assert len(set(names)) == len(names) >= 2
            assert set(names) & tones


def test_strong_sites_are_strong():
    gammas = [c.exponent for site in draw_sites(300) for c in site.changes if c.name == "gamma"]
    assert max(gammas) > 2.5
    assert min(gammas) < 0.4


def test_harmful_sites_are_named_and_worse_than_any_drawn():
    assert [site.name for site in HARMFUL] == ["noise", "negative", "other modality", "shuffled", "constant"]
    assert min(site.severity for site in HARMFUL) > max(site.severity for site in draw_sites(50))
    assert SOURCE_SITE.severity < min(site.severity for site in draw_sites(50))


@pytest.mark.parametrize("wrong", [{"count": -1}, {"seed": -1}, {"spatial_dims": 1}, {"channels": 0}])
def test_impossible_draws_are_refused(wrong):
    with pytest.raises(SettingError, match="choose"):
        draw_sites(**{"count": 1, **wrong})


def test_sites_are_related_that_change_tones_alike():
    gamma, contrast, both = (
        SimulatedSite("x", changes)
        for changes in ((Gamma(2.0), Blur(1.0)), (Contrast(2.0),), (Gamma(1.5), Contrast(1.2)))
    )
    found = related_sites({"a": [gamma], "b": [contrast], "c": [both], "d": [SimulatedSite("x", (Blur(1.0),))]})
    assert found == {"a": {"a", "c"}, "b": {"b", "c"}, "c": {"a", "b", "c"}, "d": {"d"}}  # blur is no tone
