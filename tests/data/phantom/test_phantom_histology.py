import numpy as np
import pytest

from dltta.data.phantom import phantom
from dltta.data.phantom.histology import Microscope, Tissue, anatomy

SIZE, SPACING = (64, 64), (0.001, 0.001)


@pytest.fixture(scope="module")
def tissues():
    drawn = [anatomy(np.random.default_rng(i), SIZE, SPACING) for i in range(120)]
    return [[tissue for tissue in drawn if tissue.label == label] for label in (0, 1)]


def test_normal_and_tumor_are_about_equally_frequent(tissues):
    assert 0.35 < len(tissues[1]) / 120 < 0.65


def test_tumor_has_more_nuclear_area(tissues):
    normal, tumor = ([tissue.nuclei.mean() for tissue in group] for group in tissues)
    assert np.mean(tumor) > 1.5 * np.mean(normal)


def test_nuclei_hold_the_hematoxylin(tissues):
    for tissue in tissues[0] + tissues[1]:
        assert tissue.hematoxylin[tissue.nuclei].mean() > 3 * tissue.hematoxylin[~tissue.nuclei].mean()
        assert tissue.eosin[tissue.nuclei].mean() < tissue.eosin[~tissue.nuclei].mean()


def test_nuclei_are_darker_than_what_surrounds_them_in_every_hospital():
    for hospital in range(5):
        cases = phantom("histology", f"hospital_{hospital}", 8)
        for case in cases:
            red = case.image[0]  # hematoxylin absorbs red, eosin hardly
            assert float(red.quantile(0.05)) < 0.8 * float(red.quantile(0.9))


def test_optical_densities_add_as_beer_and_lambert_say():
    flat = np.ones((8, 8), dtype=np.float32)
    tissue = Tissue(np.array(0), nuclei=flat > 0, hematoxylin=flat, eosin=2 * flat)
    dyes = (0.5, 1.0, 0.2), (0.1, 0.3, 0.0)
    scope = Microscope(*dyes, 1.0, 0.5, (1.0, 0.9, 0.8), blur=0, fringe=0, shading=0, noise=0)
    picture = scope.acquire(tissue, np.random.default_rng(0))
    by_hand = [np.exp(-0.6), 0.9 * np.exp(-1.3), 0.8 * np.exp(-0.2)]
    np.testing.assert_allclose(picture.mean(axis=(1, 2)), by_hand, rtol=1e-5)


def test_red_and_blue_are_displaced_against_each_other_along_the_rows():
    flat, edge = np.ones((8, 8), dtype=np.float32), np.zeros((8, 8), dtype=np.float32)
    edge[4:] = 1.0
    tissue = Tissue(np.array(0), nuclei=edge > 0, hematoxylin=edge, eosin=0 * flat)
    scope = Microscope((1.0, 1.0, 1.0), (0, 0, 0), 1.0, 1.0, (1.0, 1.0, 1.0), blur=0, fringe=2, shading=0, noise=0)
    dark = (scope.acquire(tissue, np.random.default_rng(0)) < 0.5).all(axis=2)  # (3, rows)
    assert [int(rows.argmax()) for rows in dark] == [5, 4, 3]


def test_patches_of_one_patient_share_the_stain_and_patients_differ():
    cases = phantom("histology", "hospital_4", 48)
    groups = [case.group for case in cases]
    assert groups[0] == groups[7] != groups[8]
    assert len(set(groups)) == 6
    darkest = np.array([float(case.image[1].quantile(0.01)) for case in cases]).reshape(6, 8)
    assert darkest.mean(axis=1).std() > darkest.std(axis=1).mean()


def test_another_size_shows_more_of_the_tissue():
    assert phantom("histology", "hospital_0", 1, size=(96, 96))[0].image.shape == (3, 96, 96)
