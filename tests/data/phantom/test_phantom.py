"""What holds for the synthetic cases of every task and site."""

import pickle

import numpy as np
import pytest
import torch

from dltta.data.phantom import SITES, changing, phantom
from dltta.data.phantom.modality import Site, between
from dltta.data.phantom.oct import OctScanner
from dltta.errors import SettingError

EVERY_SITE = [(task, site) for task, sites in SITES.items() for site in sites]
FIRST = OctScanner(2.0, 0.1, 1.0, 0.0, 0.004, 0.01, 0.5, 1.0)
SECOND = OctScanner(6.0, 0.3, 3.0, 0.4, 0.008, 0.03, 1.5, 1.2)


@pytest.mark.parametrize(("task", "site"), EVERY_SITE)
def test_a_case_has_the_shapes_and_types_of_its_task(task, site):
    cases = phantom(task, site, 2)
    case = cases[1]
    spatial = {"oct": (128, 256), "histology": (64, 64), "prostate": (48, 48, 32)}[task]
    assert case.image.shape == (3 if task == "histology" else 1, *spatial)
    assert case.image.dtype == torch.float32
    assert case.label.shape == (() if task == "histology" else spatial)
    assert case.label.dtype == torch.int64
    assert int(case.label.max()) < len(cases.classes)
    assert len(case.spacing) == len(spatial)
    assert (cases.site, case.site, case.name) == (site, site, f"{site}_0001")
    assert len(cases) == len(list(cases)) == 2


@pytest.mark.parametrize(("task", "site"), EVERY_SITE)
def test_intensities_are_finite_and_in_range(task, site):
    image = phantom(task, site, 3)[2].image
    assert torch.isfinite(image).all()
    if task == "prostate":
        assert image.mean().abs() < 1e-4
        assert image.std() == pytest.approx(1, abs=1e-3)
    else:
        assert image.min() >= 0
        assert image.max() <= 1
        assert image.std() > 0.05  # a picture, not a wall


@pytest.mark.parametrize("task", SITES)
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(task):
    site = SITES[task][-1]
    first, again, other = (phantom(task, site, 4, seed=seed)[3] for seed in (5, 5, 6))
    assert torch.equal(first.image, again.image)
    assert torch.equal(first.label, again.label)
    assert not torch.equal(first.image, other.image)


@pytest.mark.parametrize("task", SITES)
def test_a_case_does_not_depend_on_how_many_are_asked(task):
    site = SITES[task][0]
    few, many = phantom(task, site, 3), phantom(task, site, 50)
    assert all(torch.equal(few[i].image, many[i].image) for i in range(3))


@pytest.mark.parametrize("task", SITES)
def test_sites_and_positions_show_different_patients(task):
    source, target = (phantom(task, site, 10) for site in SITES[task][:2])
    labels = [torch.stack([case.label for case in cases]) for cases in (source, target)]
    assert not torch.equal(labels[0], labels[1])  # other anatomy, not only another scanner
    assert not torch.equal(source[0].image, source[8].image)


def test_a_phantom_can_be_sent_to_another_process():
    cases = phantom("oct", "cirrus", 3, size=(96, 32))
    sent = pickle.loads(pickle.dumps(cases))
    assert sent == cases
    assert torch.equal(sent[-1].image, cases[2].image)


def test_positions_outside_end_the_iteration():
    cases = phantom("oct", "cirrus", 2, size=(96, 32))
    with pytest.raises(IndexError, match="case 2 of 2"):
        cases[2]


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (("otc", "cirrus", 1), {}, "no task 'otc'; did you mean 'oct'?"),
        (("oct", "cirus", 1), {}, "no oct site 'cirus'; did you mean 'cirrus'?"),
        (("prostate", "runmc", 1), {}, "no prostate site 'runmc'; did you mean 'RUNMC'?"),
        (("oct", "zzz", 1), {}, "choose from spectralis, cirrus"),
        (("oct", "cirrus", 0), {}, "count is 0"),
        (("oct", "cirrus", 1), {"seed": -1}, "seed is -1"),
        (("oct", "cirrus", 1), {"size": (64, 256)}, "give at least"),
        (("oct", "cirrus", 1), {"size": (128,)}, "give at least"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_right_one(arguments, settings, message):
    with pytest.raises(SettingError) as caught:
        phantom(*arguments, **settings)
    assert message in str(caught.value)


def test_an_unknown_change_or_no_site_is_refused():
    with pytest.raises(SettingError, match="did you mean 'gradual'"):
        changing("oct", ("spectralis", "cirrus"), 4, change="gradually")
    with pytest.raises(SettingError, match="no site given"):
        changing("oct", (), 4)


def test_settings_between_two_scanners_are_weighted_means():
    middle = between(FIRST, SECOND, 0.25)
    assert middle.looks == pytest.approx(3.0)
    assert middle.gamma == pytest.approx(0.75)
    assert between(FIRST, SECOND, 0.0) == FIRST
    assert between(FIRST, SECOND, 1.0) == SECOND


def test_a_site_draws_every_setting_between_its_extremes_and_independently():
    drawn = [Site(FIRST, SECOND).draw(np.random.default_rng(i)) for i in range(300)]
    looks, gamma = np.array([s.looks for s in drawn]), np.array([s.gamma for s in drawn])
    assert 2 <= looks.min() < 2.2
    assert 5.8 < looks.max() <= 6
    assert abs(np.corrcoef(looks, gamma)[0, 1]) < 0.2


def test_an_abrupt_stream_visits_the_sites_in_blocks_and_shows_their_own_cases():
    stream = changing("oct", ("spectralis", "cirrus", "spectralis"), 6, size=(96, 32))
    assert stream.site == "spectralis-cirrus-spectralis"
    assert [case.site for case in stream] == ["spectralis"] * 2 + ["cirrus"] * 2 + ["spectralis"] * 2
    assert torch.equal(stream[3].image, phantom("oct", "cirrus", 6, size=(96, 32))[3].image)


def test_a_gradual_stream_starts_at_the_first_site_and_ends_at_the_last():
    stream = changing("oct", ("spectralis", "cirrus"), 9, size=(96, 32), change="gradual")
    assert [case.site for case in stream] == ["spectralis"] * 4 + ["cirrus"] * 5
    source, target = (phantom("oct", site, 9, size=(96, 32)) for site in ("spectralis", "cirrus"))
    assert torch.equal(stream[0].image, source[0].image)
    assert torch.equal(stream[8].image, target[8].image)
    between_them = (stream[2], source[2])  # the same eye, the scanner a quarter of the way
    assert torch.equal(between_them[0].label, between_them[1].label)
    assert not torch.equal(between_them[0].image, between_them[1].image)


def test_a_gradual_stream_brightens_step_by_step():
    stream = changing("oct", ("spectralis", "cirrus"), 60, size=(96, 64), change="gradual")
    background = [float(case.image[0, :3].mean()) for case in stream]  # vitreous, above every layer
    thirds = np.array(background).reshape(3, 20).mean(axis=1)
    assert thirds[0] < thirds[1] < thirds[2]
