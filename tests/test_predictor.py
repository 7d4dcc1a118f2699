"""Adaptation window by window: the same numbers as by hand, in the order of the axes."""

import pytest
import torch

from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.core.step import Step, Update
from dltta.errors import InputError, SettingError
from dltta.models.io.opened import Window
from dltta.objectives import PTBN, Tent
from dltta.predictor import Windowed
from networks import Segmenter, stream, trained


class Scripted:
    """Gives for window n the constant n and the updates it is given; remembers what it saw."""

    def __init__(self, *updates):
        self.updates, self.seen, self.names = updates, [], []

    def step(self, x, *, case=None):
        self.seen.append(x.clone())
        self.names.append(case)
        number = len(self.seen)
        updates = (self.updates[number - 1],) if self.updates else ()
        return Step(torch.full((1, 2, *x.shape[2:]), float(number)), updates)


def dynamic():
    return Adapter(trained(Segmenter()), Tent(), Proportional(1e-2), memory=MemoryBank(capacity=2, neighbors=1))


def test_one_window_over_the_whole_image_is_the_plain_adapter():
    plain, windows = dynamic(), Windowed(dynamic(), Window((8, 12)))
    for x in stream((1, 1, 8, 12), 4):
        expected, found = plain.step(x), windows.step(x, case="a")
        assert torch.equal(found.logits, expected.logits)
        assert (found.loss, found.discrepancy, found.rate) == (expected.loss, expected.discrepancy, expected.rate)
    assert found.discrepancy is not None


def test_every_window_is_one_step_of_the_stream():
    by_hand = dynamic()
    image = stream((1, 1, 8, 16), 1)[0]
    expected = [by_hand.step(image[..., :8]), by_hand.step(image[..., 8:])]
    adapter = dynamic()
    found = Windowed(adapter, Window((8, 8), overlap=0)).step(image, case="a")
    assert torch.allclose(found.logits, torch.cat([step.logits for step in expected], dim=-1))
    assert found.loss == pytest.approx((expected[0].loss + expected[1].loss) / 2)
    assert adapter.batches_seen == 2


def test_windows_come_in_the_order_of_the_axes():
    adapter = Scripted()
    image = torch.arange(16.0).view(1, 1, 4, 4)
    Windowed(adapter, Window((2, 2), overlap=0)).step(image, case="scan")
    assert [window[0, 0, 0, 0].item() for window in adapter.seen] == [0, 2, 8, 10]
    assert adapter.names == [f"scan, window {n}" for n in (1, 2, 3, 4)]


def test_overlapping_predictions_are_averaged():
    found = Windowed(Scripted(), Window((4, 4), overlap=0.5)).step(torch.zeros(1, 1, 4, 8), case="scan").logits
    assert found.shape == (1, 2, 4, 8)
    assert found[0, 0, 0].tolist() == [1, 1, 1.5, 1.5, 2.5, 2.5, 3, 3]


def test_loss_discrepancy_and_rate_are_means_over_the_windows_that_have_them():
    script = Scripted(Update(1.0, None, 0.1), Update(2.0, 0.4, 0.2), Update(6.0, 0.6, 0.6))
    found = Windowed(script, Window((2, 2), overlap=0)).step(torch.zeros(1, 1, 2, 6), case="scan")
    assert (found.loss, found.discrepancy, found.rate) == pytest.approx((3.0, 0.5, 0.3))
    none = Windowed(Scripted(Update(1.0, None, 0.1)), Window((2, 2))).step(torch.zeros(1, 1, 2, 2), case="scan")
    assert none.discrepancy is None


def test_methods_without_a_loss_have_nothing_to_report():
    windows = Windowed(Adapter(trained(Segmenter(axes=3)), PTBN()), Window((8, 8, 8)))
    found = windows.step(torch.randn(1, 1, 8, 12, 8), case="scan")
    assert found.logits.shape == (1, 3, 8, 12, 8)
    assert (found.loss, found.discrepancy, found.rate) == (None, None, None)


def test_a_small_image_is_padded_with_zeros_and_cut_back():
    adapter = Scripted()
    found = Windowed(adapter, Window((4, 4))).step(torch.ones(1, 1, 4, 2), case="scan")
    assert found.logits.shape == (1, 2, 4, 2)
    assert adapter.seen[0][0, 0, 0].tolist() == [0, 1, 1, 0]


def test_mistakes_say_what_was_found_and_in_which_window():
    adapter = Adapter(trained(Segmenter()), Tent(), Fixed(1e-3))
    with pytest.raises(SettingError, match="overlap must be a fraction"):
        Window((4, 4), overlap=1)
    with pytest.raises(SettingError, match="a window has a size along each axis"):
        Window((4, -1))
    windows = Windowed(adapter, Window((4, 4), overlap=0))
    with pytest.raises(InputError, match=r"scan: windows of \(4, 4\) do not fit images of \(4, 4, 4\)"):
        windows.step(torch.zeros(1, 1, 4, 4, 4), case="scan")
    image = torch.randn(1, 1, 4, 8)
    image[..., 6] = torch.nan
    with pytest.raises(InputError, match="scan, window 2: "):
        windows.step(image, case="scan")
