"""What training changes in an image: repeatably, image and label together, no quarter turn hidden from TTT."""

import math

import numpy as np
import pytest
import torch

from dltta.training.augmentation import GRAY, Augmentation, foreground_crop, turned_colors, typical_spread
from dltta.training.examples import Examples

KINDS = ("light", "field")


def square(channels=1, size=48):
    """A bright square with its label; darker towards the bottom, so that up and down differ."""
    label = torch.zeros(size, size, dtype=torch.long)
    label[12:28, 20:36] = 1
    image = (label + torch.linspace(0.3, 0, size)[:, None]).expand(channels, size, size).clone()
    return image, label


def names(compose):
    return [type(step).__name__ for step in compose.transforms]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_an_example_is_decided_by_seed_epoch_and_position(kind, channels):
    pairs = [square(channels) for _ in range(4)]
    changes = Augmentation(kind, (32, 32), 0.5, mirror=(0, 1), rotation=180.0)
    one, other = (Examples(pairs, changes.compose(2, channels, dense=True), seed=3) for _ in range(2))
    for epoch in range(6):
        one.epoch = epoch
        for index in (2, 0, 1):
            one[index]  # what is drawn before must not matter
        other.epoch = epoch
        assert all(map(torch.equal, one[3], other[3]))
    other.epoch = 7
    assert not torch.equal(one[3][0], other[3][0])


@pytest.mark.parametrize(("dims", "size"), [(2, (48, 48)), (3, (32, 32, 8))])
def test_the_label_goes_with_the_image(dims, size):
    label = torch.zeros(size, dtype=torch.long)
    label[tuple(slice(n // 4, 3 * n // 4) for n in size)] = 2  # a blend of labels would be 1
    examples = Examples([(label[None] / 2, label)], Augmentation("field").compose(dims, 1, dense=True))
    for epoch in range(30):
        examples.epoch = epoch
        image, changed = examples[0]
        assert image.shape == (1, *size)
        assert changed.shape == size
        assert changed.dtype == torch.int64
        assert set(changed.unique().tolist()) == {0, 2}
        # soft edges, blur and noise leave half a voxel's doubt, no more
        assert image[0][changed == 2].median() > image[0][changed == 0].median() + 0.4


def test_field_turns_and_scales_but_light_does_not():
    """The labeled area is kept by mirroring; scaling changes it."""
    areas = {}
    for kind in KINDS:
        examples = Examples([square()], Augmentation(kind).compose(2, 1, dense=True))
        found = set()
        for epoch in range(20):
            examples.epoch = epoch
            found.add(int(examples[0][1].sum()))
        areas[kind] = found
    assert areas["light"] == {16 * 16}
    assert len(areas["field"]) > 3


def test_what_hides_a_quarter_turn_is_left_out_for_the_rotation_head():
    changes = Augmentation("field", (32, 32), 0.3, mirror=(0, 1), rotation=180.0)
    upright = changes.upright()
    assert (upright.rotation, upright.mirror) == (0.0, (0,))
    assert (upright.kind, upright.crop, upright.foreground) == ("field", (32, 32), 0.3)
    affine = upright.compose(2, 1, dense=True).transforms[0]
    assert affine.rand_affine.rand_affine_grid.rotate_range == (0.0,)
    image, label = square()
    examples = Examples(
        [(image, label)], Augmentation("field", rotation=180.0, mirror=(1,)).upright().compose(2, 1, dense=True)
    )
    for epoch in range(20):  # the gradient from top to bottom survives
        examples.epoch = epoch
        background = examples[0][0][0, :, :8].mean(1)
        assert background[:16].mean() > background[-16:].mean()


def test_light_without_a_rotation_stays_as_it_is_for_the_rotation_head():
    assert names(Augmentation("light").upright().compose(2, 1, dense=True)) == names(
        Augmentation("light").compose(2, 1, dense=True)
    )


def test_colors_change_in_rgb_images_only():
    assert "ColorJitterd" in names(Augmentation("field").compose(2, 3, dense=True))
    assert "ColorJitterd" not in names(Augmentation("field").compose(2, 1, dense=True))
    assert "ColorJitterd" not in names(Augmentation("light").compose(2, 3, dense=True))


def test_a_third_of_a_turn_of_hue_moves_each_color_to_the_next():
    turned = turned_colors(2 * math.pi / 3, 1.0, (1, 1, 1))
    to_next = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])  # red to green to blue to red
    torch.testing.assert_close(turned, to_next, atol=1e-6, rtol=0)
    torch.testing.assert_close(turned.sum(1), torch.ones(3))  # gray stays gray


def test_no_saturation_leaves_the_luminance_and_gains_scale_channels():
    red = torch.tensor([1.0, 0.0, 0.0])
    torch.testing.assert_close(turned_colors(0.0, 0.0, (1, 1, 1)) @ red, GRAY[0].expand(3))
    torch.testing.assert_close(turned_colors(0.0, 1.0, (2, 1, 0.5)), torch.diag(torch.tensor([2.0, 1.0, 0.5])))


def test_crops_are_around_labeled_positions_as_often_as_asked():
    label = torch.zeros(1, 60, 60, dtype=torch.long)
    label[0, 30, 40] = 1
    data = {"image": torch.arange(3600.0).view(1, 60, 60), "label": label}
    crop = foreground_crop()(["image", "label"], (9, 9), 1.0)
    crop.set_random_state(0)
    for _ in range(5):
        cut = crop(data)
        assert cut["label"][0, 4, 4] == 1
        assert cut["image"][0, 4, 4] == 30 * 60 + 40
    crop = foreground_crop()(["image", "label"], (9, 9), 0.5)
    crop.set_random_state(0)
    hits = np.mean([crop(data)["label"].sum().item() for _ in range(300)])
    assert 0.5 + 0.03 / 2 - 0.09 < hits < 0.5 + 0.03 / 2 + 0.09  # 81 of 52 × 52 random places see it too


def test_crops_at_the_border_stay_inside_and_images_without_labels_are_cropped_anywhere():
    label = torch.zeros(1, 20, 20, dtype=torch.long)
    label[0, 0, 19] = 1
    crop = foreground_crop()(["image", "label"], (8, 8), 1.0)
    crop.set_random_state(0)
    assert crop({"image": label.float(), "label": label})["label"][0, 0, 7] == 1
    empty = {"image": torch.arange(400.0).view(1, 20, 20), "label": torch.zeros(1, 20, 20, dtype=torch.long)}
    assert len({crop(empty)["image"][0, 0, 0].item() for _ in range(20)}) > 10


def test_an_epoch_sees_each_image_as_often_as_asked_and_differently():
    examples = Examples([square(), square()], Augmentation("field").compose(2, 1, dense=True), repeats=3)
    assert len(examples) == 6
    assert len({examples[index][0].sum().item() for index in (0, 2, 4)}) == 3


def test_the_noise_goes_with_the_usual_spread():
    images = [torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 20.0]]), torch.tensor([[0.0, 4.0]])]
    assert typical_spread(images) == pytest.approx(4 / math.sqrt(2))
    noise = Augmentation("field").compose(2, 1, dense=True, spread=10.0)
    assert (
        next(step for step in noise.transforms if type(step).__name__ == "RandGaussianNoised").rand_gaussian_noise.std
        == 3.0
    )
