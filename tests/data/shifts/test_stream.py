"""Streams of simulated sites: one that stays, several in blocks, labels that move along."""

import pytest
import torch

from dltta.data.case import Case, Cases
from dltta.data.shifts import SOURCE_SITE, SimulatedSite, SimulatedStream
from dltta.data.shifts.gamma import Gamma
from dltta.data.shifts.magnification import Magnification
from dltta.errors import SettingError

DARK = SimulatedSite("dark", (Gamma(2.0),), severity=0.5)


def dataset(count=6, labeled=True):
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 1, 12, 12, generator=generator)
    cases = (Case(f"c{i}", "home", "p", x, (x[0] > 0.5).long() if labeled else None) for i, x in enumerate(images))
    return Cases(tuple(cases), "home", "segmentation", ("background", "blob"))


def test_a_stream_may_change_half_way():
    home = dataset()
    stream = SimulatedStream(home, (SOURCE_SITE, DARK))
    assert [case.site for case in stream] == ["source"] * 3 + ["dark"] * 3
    assert [case.name for case in stream] == [case.name for case in home]
    assert torch.equal(stream[2].image, home[2].image)
    assert torch.equal(stream[4].image, DARK.image(home[4].image, case=4))
    assert (stream.site, stream.task, stream.classes, len(stream)) == ("source+dark", home.task, home.classes, 6)


def test_labels_move_along():
    zoom = SimulatedSite("near", (Magnification(1.6),))
    stream, home = SimulatedStream(dataset(), (zoom,)), dataset()
    assert torch.equal(stream[1].label, zoom.pair(home[1].image, home[1].label, case=1)[1])
    assert not torch.equal(stream[1].label, home[1].label)


def test_unlabeled_cases_stay_unlabeled():
    stream = SimulatedStream(dataset(labeled=False), (DARK,))
    assert stream[0].label is None
    assert not torch.equal(stream[0].image, dataset()[0].image)


@pytest.mark.parametrize("sites", [(), (DARK,) * 7])
def test_every_site_needs_a_case(sites):
    with pytest.raises(SettingError, match="each needs a case"):
        SimulatedStream(dataset(), sites)
