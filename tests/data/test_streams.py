"""Streams of several sites: in which order, under which names, and shuffled without leaving their place."""

from dataclasses import replace

import numpy as np
import pytest

from dltta.config import default_preprocessing, open_dataset
from dltta.data.case import Cases, Place
from dltta.data.streams import SiteStream, split_stream, stream_order
from dltta.errors import DataError, SettingError
from sites import Blobs

A, B = Blobs(count=3, site="a"), Blobs(count=2, site="b")


def seen(stream):
    return [(case.site, case.name) for case in (stream[i] for i in range(len(stream)))]


def names(site):
    return [site[i].name for i in range(len(site))]


def test_a_sequence_is_one_site_after_another_and_a_site_may_come_back():
    stream = SiteStream((A, B, A))
    assert stream.site == "a+b+a"
    blocks = [("a", 1, A), ("b", 2, B), ("a", 3, A)]
    assert seen(stream) == [(site, f"{part}_{name}") for site, part, cases in blocks for name in names(cases)]
    assert len({name for _, name in seen(stream)}) == len(stream) == 8


def test_slices_of_a_volume_that_comes_back_belong_to_two_volumes():
    cases = tuple(replace(case, place=Place("v", i, 3, 2, None)) for i, case in enumerate(A[n] for n in range(3)))
    sliced = Cases(cases, "a", "segmentation", A.classes)
    stream = SiteStream((sliced, B, sliced))
    places = [stream[i].place for i in range(len(stream))]
    assert [place and (place.volume, place.position) for place in places] == [
        *(("1_v", i) for i in range(3)), None, None, *(("3_v", i) for i in range(3)),
    ]  # fmt: skip


def test_interleaved_sites_take_turns_and_the_longer_one_ends():
    stream = SiteStream((A, B), "interleave")
    assert stream.site == "a/b"
    assert [site for site, _ in seen(stream)] == ["a", "b", "a", "b", "a"]
    assert [name[2:] for site, name in seen(stream) if site == "b"] == names(B)


def test_a_drift_has_ever_fewer_of_the_first_site_and_ever_more_of_the_second():
    stream = SiteStream((Blobs(count=40, site="a"), Blobs(count=40, site="b")), "drift")
    assert stream.site == "a>b"
    at = [part for part, _ in stream.places]
    assert [sum(at[i : i + 20]) for i in range(0, 80, 20)] == [2, 8, 12, 18]  # even: 2.5, 7.5, 12.5 and 17.5
    assert [place for part, place in stream.places if part == 0] == list(range(40))
    with pytest.raises(SettingError, match="from one site to another, found 3; write drift:SITE,SITE"):
        SiteStream((A, B, A), "drift")


def test_the_images_are_those_of_the_sites():
    case = SiteStream((A, B))[4]
    assert (case.image == B[1].image).all()
    assert (case.label == B[1].label).all()
    assert case.group == B[1].group


@pytest.mark.parametrize("turns", ["sequence", "interleave", "drift"])
def test_shuffling_changes_places_within_each_site_only(turns):
    parts = (Blobs(count=9, site="a"), Blobs(count=7, site="b"), Blobs(count=9, site="a"))
    stream = SiteStream(parts[: 2 if turns == "drift" else 3], turns)
    order = stream_order(stream, np.random.default_rng(0))
    assert sorted(order) == list(range(len(stream)))
    assert order != sorted(order)
    assert [stream.places[i][0] for i in order] == [part for part, _ in stream.places]
    assert order == stream_order(stream, np.random.default_rng(0)) != stream_order(stream, np.random.default_rng(1))


def test_one_site_is_shuffled_as_ever():
    assert stream_order(A, np.random.default_rng([3, 1])) == np.random.default_rng([3, 1]).permutation(3).tolist()


def test_sites_of_one_stream_must_agree():
    with pytest.raises(DataError, match="hospital_1 has classification of .* sites of one stream must agree"):
        open_dataset("sequence:phantom:oct:cirrus:2,phantom:histology:hospital_1:2")


def test_streams_are_named_by_their_sites():
    stream = open_dataset("interleave:phantom:oct:cirrus:2:1, phantom:oct:spectralis:1")
    assert (stream.site, stream.task, len(stream), len(stream.classes)) == ("cirrus/spectralis", "segmentation", 3, 9)
    assert default_preprocessing(stream) == default_preprocessing(stream.parts[0])
    assert split_stream("slices:data/a,b") is None
    assert split_stream("data/sequence") is None
    for wrong in ("sequence:data/a", "sequence:data/a,"):
        with pytest.raises(SettingError, match="does not name several sites; write sequence:SITE,SITE"):
            open_dataset(wrong)
