import json

import numpy as np
import pytest
import tifffile
import torch

from dltta.data.case import Mapped
from dltta.data.inbox import find_incoming, read_incoming
from dltta.data.preprocessing import IMAGENET_MEAN, IMAGENET_SD, Preprocessing
from dltta.data.sites import open_site
from dltta.errors import InputError, SettingError
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


# depths


def test_a_deeper_image_is_scaled_by_its_own_depth_to_what_the_network_was_trained_on():
    eight = torch.tensor([[[0.0, 51.0, 255.0]]])
    for intensity, channels in (("scale", 1), ("imagenet", 3)):
        trained = Preprocessing(intensity, 255.0)
        shallow = trained.image(eight.expand(channels, -1, -1), 255)
        for limit in (1023, 4095, 65535):
            deep = trained.image(eight.expand(channels, -1, -1) / 255 * limit, limit)
            assert torch.allclose(deep, shallow, atol=1e-6)
    assert torch.equal(Preprocessing("scale", 65535.0).image(eight, 255), eight / 255)


def test_bits_that_are_not_used_are_refused_rather_than_seen_too_dark():
    twelve_in_sixteen = torch.tensor([[[0.0, 4095.0]]])
    with pytest.raises(InputError, match="values up to 4095 of 65535, the network was trained on 0..255; stretch"):
        Preprocessing("scale", 255.0).image(twelve_in_sixteen, 65535)
    with pytest.raises(InputError, match="values up to 4095 of 65535"):
        Preprocessing("imagenet", 255.0).image(twelve_in_sixteen.expand(3, -1, -1), 65535)
    assert Preprocessing("scale", 65535.0).image(twelve_in_sixteen, 65535).max() == pytest.approx(4095 / 65535)
    assert Preprocessing("scale", 255.0).image(torch.zeros(1, 2, 2), 65535).max() == 0  # nothing to be mistaken


def test_floats_of_another_range_are_refused():
    trained = Preprocessing("scale", 255.0)
    for brightest in (0.9, 1.0, 256.0, 1e4):
        with pytest.raises(InputError, match="the network was trained on 0..255; save the image"):
            trained.image(torch.tensor([[[0.0, brightest]]]))
    for brightest in (0.0, 1.5, 255.0):
        assert trained.image(torch.tensor([[[0.0, brightest]]])).max() == brightest / 255


def test_a_maximum_that_is_no_depth_and_other_intensities_divide_as_they_say():
    values = torch.tensor([[[0.0, 500.0, 2000.0]]])
    assert torch.equal(Preprocessing("scale", 1000.0).image(values, 65535), values / 1000)
    assert torch.equal(Preprocessing("scale", 1.0).image(values, 65535), values)
    assert torch.equal(Preprocessing().image(values, 65535), values)
    assert Preprocessing("zscore").image(values, 65535).mean() == pytest.approx(0, abs=1e-6)


def test_a_site_of_sixteen_bit_color_is_seen_as_its_eight_bit_copy(tmp_path):
    rgb = np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    rgb[0, 0] = 255
    content = {"channel_names": {"0": "R", "1": "G", "2": "B"}, "labels": {"background": 0, "cell": 1}}
    for site, values, ending in (("eight", rgb, ".tif"), ("sixteen", rgb.astype(np.uint16) * 257, ".tif")):
        (tmp_path / site / "imagesTr").mkdir(parents=True)
        (tmp_path / site / "labelsTr").mkdir()
        tifffile.imwrite(tmp_path / site / "imagesTr" / f"a_0000{ending}", values, photometric="rgb")
        tifffile.imwrite(tmp_path / site / "labelsTr" / f"a{ending}", rgb[..., 0] // 128)
        (tmp_path / site / "dataset.json").write_text(json.dumps(content | {"file_ending": ending}))
    trained = Preprocessing("scale", 255.0)
    [eight] = Mapped(open_site(tmp_path / "eight"), trained.case)
    [sixteen] = Mapped(open_site(tmp_path / "sixteen"), trained.case)
    assert torch.allclose(sixteen.image, eight.image, atol=1e-6)
    assert eight.limit is None


def test_channels_of_different_depths_have_no_common_one(tmp_path):
    tifffile.imwrite(tmp_path / "a_0000.tif", np.full((3, 4), 9, np.uint8))
    tifffile.imwrite(tmp_path / "a_0001.tif", np.full((3, 4), 900, np.uint16))
    tifffile.imwrite(tmp_path / "b_0000.tif", np.full((3, 4), 900, np.uint16))
    a, b = (read_incoming(case).geometry.limit for case in find_incoming(tmp_path))
    assert (a, b) == (None, 65535)
