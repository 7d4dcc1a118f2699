"""Whole, in windows or not at all: what a case needs is estimated before the first pass."""

import math

import pytest
import torch

from dltta.config import make_adapter
from dltta.errors import InputError
from dltta.fitting import MARGIN, SURELY, Cost, Extent, Fitting, default_limit
from dltta.models.io.opened import Window
from dltta.recipes import Recipe
from streams import classifier, segmenter

TENT = Recipe(method="tent", rate="dynamic", neighbors=2, batches_kept=3).resolved("segmentation", calibrated=False)


class Known(Fitting):
    """A network of which a step costs 1 MB and 1000 bytes per position; a case of n x n holds `held` beside it."""

    cost = Cost(1e6, 1000.0)

    def __init__(self, limit, opened=None, available=lambda: None):
        super().__init__(opened or segmenter(), lambda: None, limit, available)


def square(side, count=1):
    return Extent((side, side), count, side * side * count, 1)


def held(side):
    """One channel as read, prepared, and of the next image: 5 x 4 bytes; 3 classes, 4 x 4 bytes; two masks of 8."""
    return side * side * (5 * 4 + 3 * 4 * 4 + 2 * 8)


def whole(side):
    return held(side) + MARGIN * (1e6 + 1000 * side * side)


def test_an_image_that_fits_goes_whole():
    assert Known(int(whole(512)) + 1).window(square(512)) is None


def test_a_larger_one_goes_in_the_largest_windows_that_fit():
    """Blending takes 4 x 4 bytes at each of 600 x 600 positions; windows of 512 then do not fit, those of 256 do."""
    limit = int(whole(600)) - 1
    window = Known(limit).window(square(600))
    assert window == Window((512, 512))
    room = limit - held(600) - 16 * 600 * 600
    assert room >= MARGIN * (1e6 + 1000 * 512**2)
    less = int(held(600) + 16 * 600 * 600 + MARGIN * (1e6 + 1000 * 512**2)) - 1
    assert Known(less).window(square(600)) == Window((256, 256))


def test_a_window_is_not_longer_than_the_image():
    extent = Extent((2000, 300), 1, 600_000, 1)
    limit = int(600_000 * (84 + 16) + MARGIN * (1e6 + 1000 * 512**2)) + 1
    assert Known(limit).window(extent) == Window((512, 300))


def test_what_does_not_fit_even_in_windows_is_one_line():
    with pytest.raises(InputError, match=r"9000 x 9000 needs about 8\.\d GB, more than the 1\.0 GB of --max-memory"):
        Known(10**9).window(square(9000))


def test_windows_of_the_model_are_not_cut_again():
    opened = segmenter(window=Window((512, 512)))
    assert Known(10**9, opened).window(square(600)) == opened.window
    with pytest.raises(InputError, match="in windows of 512 x 512; give a smaller --patch"):
        Known(int(3e8), opened).window(square(600))


def test_memory_that_is_allowed_must_also_be_there():
    with pytest.raises(InputError, match="100 MB are free at the moment"):
        Known(10**10, available=lambda: 10**8).window(square(512))


def test_slices_are_held_together_and_predicted_one_by_one():
    many = square(64, 400)
    assert many.positions == 64 * 64
    limit = int(400 * held(64) + MARGIN * (1e6 + 1000 * 64 * 64))
    assert Known(limit + 1).window(many) is None
    with pytest.raises(InputError, match="even in windows"):
        Known(limit // 2).window(many)


def test_a_batch_to_classify_cannot_be_cut():
    opened = classifier()
    Known(10**9, opened).require(square(64, 4))
    with pytest.raises(InputError, match="200 images of 64 x 64 .* smaller --batch-size"):
        Known(10**9, opened).require(square(64, 200))
    with pytest.raises(InputError, match="--resize"):
        Known(10**8, opened).require(square(2000))


def test_small_images_are_not_estimated():
    fitting = Fitting(segmenter(), lambda: pytest.fail("counted"), 10**9, lambda: None)
    assert SURELY * 64 * 64 < 10**9
    assert fitting.window(square(64)) is None


def test_files_that_would_not_fit_are_not_read(tmp_path):
    fitting = Known(10**6)
    geometry = type("G", (), {"channels": 3, "shape": (200, 200)})
    with pytest.raises(InputError, match="200 x 200 needs about 2 MB, more than the 1 MB of --max-memory, to be read"):
        fitting.require_readable(geometry)


@pytest.mark.parametrize("method", ["source", "tent"])
def test_the_cost_grows_with_the_positions_as_a_step_of_that_size_does(method):
    """Counted on 64 x 64 and 128 x 128, right for 96 x 160."""
    opened = segmenter()
    recipe = Recipe(method=method, rate="fixed").resolved("segmentation", calibrated=False)
    fitting = Fitting(opened, lambda: make_adapter(opened, recipe), 1)
    direct = fitting._counted((96, 160))
    assert fitting.cost.at(96 * 160) == pytest.approx(MARGIN * direct, rel=0.02)


def test_the_memory_bank_counts():
    """Three pairs of predictions, 3 classes x 4 bytes at each position, beside what a step with a fixed rate needs."""
    opened = segmenter()
    recipes = [TENT, Recipe(method="tent", rate="fixed").resolved("segmentation", calibrated=False)]
    dynamic, fixed = (Fitting(opened, lambda r=r: make_adapter(opened, r), 1).cost for r in recipes)
    assert dynamic.per_position - fixed.per_position >= 3 * 3 * 4


def test_estimating_draws_no_random_numbers():
    opened = segmenter()
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    assert Fitting(opened, lambda: make_adapter(opened, TENT), 1).cost is not None
    assert torch.equal(torch.rand(2), wanted)


def test_a_network_of_one_size_is_not_estimated():
    class OneSize(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Conv2d(1, 3, 1)

        def forward(self, x):
            if x.shape[-1] != 7:
                raise ValueError("7 only")
            return self.head(x)

    opened = segmenter(model=OneSize().eval())
    recipe = Recipe(method="source").resolved("segmentation", calibrated=False)
    fitting = Fitting(opened, lambda: make_adapter(opened, recipe), 10**6, lambda: None)
    assert fitting.cost is None
    assert fitting.window(square(7)) is None


def test_the_default_is_half_of_the_machine(monkeypatch):
    monkeypatch.setattr("dltta.fitting.total_memory", lambda: 1001)
    assert default_limit(torch.device("cpu")) == 500
    monkeypatch.setattr("dltta.fitting.total_memory", lambda: None)
    assert default_limit(torch.device("cpu")) > math.pow(2, 60)
