import pytest
import torch

from dltta.data.case import Mapped
from dltta.data.preprocessing import IMAGENET_MEAN, IMAGENET_SD, Preprocessing
from dltta.errors import SettingError
from sites import Blobs


def test_zscore_per_channel_by_hand():
    image = torch.tensor([[[1.0, 3.0]], [[10.0, 10.0]]])  # two channels, the second constant
    assert Preprocessing("zscore").image(image).tolist() == [[[-1.0, 1.0]], [[0.0, 0.0]]]


def test_scale_divides_by_the_maximum():
    assert Preprocessing("scale", 255.0).image(torch.tensor([[[51.0]]])).tolist() == [[[pytest.approx(0.2)]]]


def test_imagenet_by_hand():
    image = torch.full((3, 1, 1), 255.0)
    expected = [(1 - mean) / sd for mean, sd in zip(IMAGENET_MEAN, IMAGENET_SD, strict=True)]
    assert Preprocessing("imagenet", 255.0).image(image).flatten().tolist() == pytest.approx(expected)
    with pytest.raises(SettingError, match="3 channels, the image has 1"):
        Preprocessing("imagenet", 255.0).image(torch.zeros(1, 4, 4))


def test_labels_keep_their_values_when_resized():
    label = torch.tensor([[0, 3], [7, 0]])
    assert Preprocessing(size=(4, 4)).label(label).unique().tolist() == [0, 3, 7]
    assert Preprocessing(size=(4, 4)).label(torch.tensor(2)) == 2


def test_a_preprocessed_site_resizes_image_label_and_spacing():
    class Spaced(Blobs):
        def __getitem__(self, index):
            from dataclasses import replace

            return replace(super().__getitem__(index), spacing=(1.0, 2.0))

    case = Mapped(Spaced(), Preprocessing("zscore", size=(16, 64)).case)[0]
    assert case.image.shape == (1, 16, 64)
    assert case.label.shape == (16, 64)
    assert case.spacing == (2.0, 1.0)


def test_json_round_trip():
    for preprocessing in (Preprocessing(), Preprocessing("scale", 255.0, (8, 8))):
        assert Preprocessing.from_json(preprocessing.as_json()) == preprocessing


@pytest.mark.parametrize("options", [{"intensity": "minmax"}, {"maximum": 0.0}])
def test_impossible_settings(options):
    with pytest.raises(SettingError, match=next(iter(options))):
        Preprocessing(**options)
