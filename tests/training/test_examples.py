import pytest
import torch

from dltta.data.preprocessing import Preprocessing
from dltta.errors import DataError
from dltta.training.augmentation import Augmentation
from dltta.training.examples import Examples, gather, read_pairs, require_one_size, split_by_group
from sites import Blobs


def pairs(**options):
    return read_pairs(gather([Blobs(**options)]), Preprocessing())


def test_patients_are_never_split():
    cases = gather([Blobs(count=20)])
    training, validation = split_by_group(cases, 0.3, seed=0)
    assert sorted(training + validation) == list(range(20))
    assert {cases[i].group for i in training}.isdisjoint(cases[i].group for i in validation)
    assert len({cases[i].group for i in validation}) == 3
    assert split_by_group(cases, 0.3, seed=0) == (training, validation)
    assert split_by_group(cases, 0.3, seed=1) != (training, validation)


def test_patients_of_the_same_name_at_two_sites_are_two_patients():
    cases = gather([Blobs(count=4), Blobs(count=4, site="there")])
    _, validation = split_by_group(cases, 0.25, seed=0)
    assert len({(cases[i].site, cases[i].group) for i in validation}) == 1


def test_patients_may_be_named():
    cases = gather([Blobs(count=8)])
    named = (cases[0].group, cases[6].group, "nobody")
    training, validation = split_by_group(cases, named, seed=0)
    assert {cases[i].group for i in validation} == set(named[:2])
    assert sorted(training + validation) == list(range(8))
    assert training == sorted(training)
    everybody = tuple({case.group for case in cases})
    for wrong, words in ((("nobody",), "none of the 8 cases"), (everybody, "all of the 8 cases")):
        with pytest.raises(DataError, match=words):
            split_by_group(cases, wrong, seed=0)


def test_one_patient_cannot_be_validated():
    with pytest.raises(DataError, match="belong to one patient"):
        split_by_group(gather([Blobs(count=2)]), 0.2, seed=0)
    assert split_by_group(gather([Blobs(count=2)]), 0, seed=0) == ([0, 1], [])


def test_an_example_depends_on_seed_epoch_and_position_only():
    augment = Augmentation("light").compose(2, 1, dense=True)
    one, other = (Examples(pairs(), augment, seed=4) for _ in range(2))
    one.epoch = other.epoch = 2
    first = one[3]
    other[0], other[1]
    assert all(map(torch.equal, first, other[3]))
    other.epoch = 3
    assert not torch.equal(first[0], other[3][0])


def test_image_and_label_are_mirrored_together():
    examples = Examples(pairs(), Augmentation("light").compose(2, 1, dense=True))
    mirrored = 0
    for epoch in range(10):
        examples.epoch = epoch
        image, label = examples[0]
        assert image[0][label == 1].mean() > image[0][label == 0].mean() + 1
        mirrored += not torch.equal(label, examples.pairs[0][1])
    assert 0 < mirrored < 10


def test_crops_have_the_patch_size_and_volumes_smaller_than_it_are_padded():
    examples = Examples(pairs(axes=3, size=16), Augmentation("none", (8, 24, 8)).compose(3, 1, dense=True))
    image, label = examples[0]
    assert image.shape == (1, 8, 24, 8)
    assert label.shape == (8, 24, 8)
    assert label.dtype == torch.int64


def test_images_of_different_size_name_the_case():
    cases = gather([Blobs(count=2), Blobs(count=2, size=48, site="there")])
    with pytest.raises(DataError, match=r"there/case_0 is \(48, 48\) but case_0 is \(32, 32\); give --size"):
        require_one_size(cases, read_pairs(cases, Preprocessing()))


def test_sites_must_agree():
    with pytest.raises(DataError, match="there has classification"):
        gather([Blobs(), Blobs("classification", site="there")])
