import numpy as np
import pytest
from scipy.ndimage import label as connected

from dltta.data.phantom import SITES, phantom
from dltta.data.phantom.prostate import MriScanner, Pelvis, Tissue, anatomy

VOXEL = (2.0, 2.0, 3.0)


def milliliters(case):
    return float(case.label.sum()) * np.prod(case.spacing) / 1000


@pytest.mark.parametrize("center", SITES["prostate"])
def test_glands_have_plausible_volumes_whatever_the_voxels(center):
    volumes = [milliliters(case) for case in phantom("prostate", center, 6)]
    assert min(volumes) > 15
    assert max(volumes) < 110
    assert np.std(volumes) > 3


def test_glands_are_as_large_as_prostates_and_wider_than_deep():
    cases = list(phantom("prostate", "RUNMC", 20))
    extents = [
        [np.ptp(np.nonzero(case.label.numpy())[axis]) * case.spacing[axis] for axis in range(3)] for case in cases
    ]
    width, depth, height = np.mean(extents, axis=0)  # mm
    assert 45 < width < 60
    assert 30 < depth < 45
    assert 35 < height < 55
    assert 30 < np.mean([milliliters(case) for case in cases]) < 55


def test_the_gland_is_one_piece_inside_the_volume():
    for case in phantom("prostate", "UCL", 10):
        gland = case.label.numpy()
        sizes = np.bincount(connected(gland)[0].ravel())[1:]
        assert sizes.max() / sizes.sum() > 0.99
        for axis in range(3):
            ends = gland.take([0, -1], axis=axis)
            assert ends.sum() == 0


def test_the_peripheral_zone_outshines_the_central_gland_and_muscle():
    pelvis = anatomy(np.random.default_rng(0), (48, 48, 32), VOXEL)
    signal = pelvis.density * np.exp(-100 / pelvis.t2)
    case = phantom("prostate", "RUNMC", 1)[0]
    gland = case.image[0][case.label == 1]
    assert float(gland.quantile(0.9) - gland.quantile(0.1)) > 0.5  # zones can be told apart
    assert signal[pelvis.label == 1].mean() > signal[~pelvis.fat & (pelvis.label == 0) & (pelvis.t2 < 50)].mean()


def test_the_rectum_lies_behind_and_outside_the_gland():
    pelvis = anatomy(np.random.default_rng(1), (48, 48, 32), VOXEL)
    nearest = np.unravel_index(pelvis.to_rectum.argmin(), pelvis.to_rectum.shape)
    rows = np.flatnonzero(pelvis.label.any(axis=(0, 2)))
    assert nearest[1] > rows.max()


def test_spacing_varies_between_and_within_centers():
    spacings = {case.spacing for center in ("RUNMC", "UCL") for case in phantom("prostate", center, 3)}
    assert len(spacings) == 6


def two_halves(left_t2, right_t2):
    """Left half fat near the rectum, right half something else far from it."""
    right = np.zeros((16, 16, 16), dtype=bool)
    right[8:] = True
    flat = np.ones(right.shape, dtype=np.float32)
    t2 = np.where(right, right_t2, left_t2).astype(np.float32)
    return right, Pelvis(right.astype(np.int64), flat, t2, ~right, np.where(right, 80, 10).astype(np.float32), VOXEL)


def test_signal_follows_echo_time_and_t2():
    right, pelvis = two_halves(40, 150)
    scanner = MriScanner(VOXEL, 100, fat_signal=1, bias=0, endorectal=0, blur=0, noise=0.001)
    image = scanner.acquire(pelvis, np.random.default_rng(0))[0]
    assert image[right].mean() == pytest.approx(1, abs=0.02)  # two levels, half each: standardized to -1 and 1
    assert image[~right].mean() == pytest.approx(-1, abs=0.02)


def test_a_coil_in_the_rectum_brightens_what_is_near_and_fat_suppression_darkens_fat():
    right, pelvis = two_halves(100, 100)
    coil = MriScanner(VOXEL, 100, fat_signal=1, bias=0, endorectal=4, blur=0, noise=0.001)
    near = coil.acquire(pelvis, np.random.default_rng(0))[0]
    assert near[~right].mean() > near[right].mean() + 1
    suppressed = MriScanner(VOXEL, 100, fat_signal=0.2, bias=0, endorectal=0, blur=0, noise=0.001)
    dark = suppressed.acquire(pelvis, np.random.default_rng(0))[0]
    assert dark[~right].mean() < dark[right].mean() - 1


def test_noise_is_rician():
    """Where there is no signal the magnitude is Rayleigh distributed: skewed, with mean / sd = sqrt(pi / (4 - pi))."""
    flat = np.ones((32, 32, 32), dtype=np.float32)
    empty = Pelvis(flat.astype(np.int64), 0 * flat, 50 * flat, flat < 0, 50 * flat, VOXEL)
    scanner = MriScanner(VOXEL, 100, fat_signal=1, bias=0, endorectal=0, blur=0, noise=0.05)
    image = scanner.acquire(empty, np.random.default_rng(0))
    assert (image**3).mean() == pytest.approx(0.631, abs=0.05)  # skewness of a Rayleigh distribution
    assert image.min() == pytest.approx(-np.sqrt(np.pi / (4 - np.pi)), abs=0.05)  # where the magnitude is 0


def test_zones_are_painted_inside_the_gland_only():
    assert Tissue.CAPSULE < Tissue.PERIPHERAL < Tissue.CENTRAL  # the label counts on it
    assert max(Tissue) == Tissue.CENTRAL
