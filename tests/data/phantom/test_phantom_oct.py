import numpy as np
import pytest

from dltta.data.phantom import phantom
from dltta.data.phantom.oct import OctScanner, Retina

PLAIN = OctScanner(
    looks=1e6, floor=0.0, attenuation=0.0, shading=0.0, blur_axial=0.0, blur_lateral=0.0, gamma=1.0, gain=0.5
)


def uniform_retina(shape=(200, 200)):
    ones = np.ones(shape, dtype=np.float32)
    return Retina(ones.astype(np.int64), ones, depth=0.1 * ones, transmission=ones, spacing=(0.004, 0.02))


def with_settings(**settings):
    return OctScanner(**{**vars(PLAIN), **settings}).acquire(uniform_retina(), np.random.default_rng(0))


@pytest.mark.parametrize("size", [(128, 256), (128, 1024), (96, 32)])
def test_every_column_crosses_the_eight_layers_from_top_to_bottom(size):
    for case in phantom("oct", "cirrus", 12, seed=1, size=size):
        for column in case.label.numpy().T:
            met = column[np.flatnonzero(np.diff(column, prepend=-1))].tolist()  # values without repetition
            assert met == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0]


def test_layers_are_at_least_two_pixels_thick():
    cases = phantom("oct", "spectralis", 146)
    for case in (*(cases[i] for i in range(20)), cases[145]):  # the last is a deep and narrow pit
        assert min(int((case.label == layer).sum(dim=0).min()) for layer in range(1, 9)) >= 2


def test_the_retina_is_as_thick_as_retinas_are():
    cases = phantom("oct", "spectralis", 40)
    thickness = [float((case.label > 0).sum(dim=0).float().mean()) * case.spacing[0] for case in cases]
    assert 0.27 < np.mean(thickness) < 0.36  # mm
    assert np.std(thickness) > 0.005


def test_a_slice_through_the_fovea_has_a_pit():
    thinnest = []
    for case in phantom("oct", "spectralis", 40):
        inner = ((case.label == 1) | (case.label == 2)).sum(dim=0).float()
        thinnest.append(float(inner.min() / inner.max()))
    assert min(thinnest) < 0.35
    assert max(thinnest) > 0.6  # others pass beside it


def test_bright_layers_are_brighter_than_dark_ones_at_both_sites():
    for site in ("spectralis", "cirrus"):
        for case in phantom("oct", site, 10):
            mean = [float(case.image[0][case.label == layer].mean()) for layer in range(9)]
            assert mean[1] > mean[2] > mean[3]  # RNFL, GCIP, INL
            assert mean[8] > mean[5]  # RPE, ONL


def test_the_target_scanner_has_the_brighter_vitreous():
    source, target = ([float(c.image[0, :3].mean()) for c in phantom("oct", s, 20)] for s in ("spectralis", "cirrus"))
    assert max(source) < min(target)


def test_averaging_looks_makes_speckle_quieter():
    for looks in (16, 64):
        image = with_settings(looks=looks)
        assert image.std() / image.mean() == pytest.approx(1 / np.sqrt(looks), rel=0.02)


def test_light_attenuates_with_depth_before_the_contrast_curve():
    assert with_settings().mean() == pytest.approx(0.5, abs=1e-3)
    assert with_settings(attenuation=2.0).mean() == pytest.approx(0.5 * np.exp(-0.2), abs=1e-3)
    assert with_settings(attenuation=2.0, gamma=0.5).mean() == pytest.approx(0.5 * np.exp(-0.1), abs=1e-3)


def test_the_floor_lifts_what_is_dark_and_shading_darkens_one_side():
    dark = Retina(**{**vars(uniform_retina()), "reflectivity": np.zeros((200, 200), dtype=np.float32)})
    lifted = OctScanner(**{**vars(PLAIN), "floor": 0.25}).acquire(dark, np.random.default_rng(0))
    assert lifted.mean() == pytest.approx(0.5 * 0.25 / 1.25, abs=1e-3)
    columns = with_settings(shading=0.5)[0].mean(axis=0)
    assert columns.max() > 0.45
    assert columns.min() < 0.4
