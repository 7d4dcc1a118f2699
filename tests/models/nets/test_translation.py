"""Generators and patch discriminators: published layers, any size; a translated network sees slices."""

import pytest
import torch
from torch import nn

from dltta.models.nets.architecture import Architecture
from dltta.models.nets.discriminators import PatchDiscriminator
from dltta.models.nets.translation import Block, Generator, Translated, as_slices, from_slices


@pytest.mark.parametrize("size", [(32, 32), (30, 33), (8, 8)])
def test_a_generator_keeps_the_size_and_the_range(size):
    images = torch.randn(2, 3, *size)
    translated = Generator(3, width=2, blocks=1)(images)
    assert translated.shape == images.shape
    assert translated.abs().max() <= 1


def test_the_published_generator():
    generator = Generator(3)
    assert sum(isinstance(layer, Block) for layer in generator.modules()) == 9
    count = sum(parameter.numel() for parameter in generator.parameters())
    assert count == 11_378_179  # the number of parameters of the published 9-block generator for three channels


def test_a_score_of_the_published_discriminator_is_of_70_pixels():
    judge = PatchDiscriminator(3, (256, 256))
    assert judge(torch.zeros(1, 3, 256, 256)).shape == (1, 1, 30, 30)
    assert sum(parameter.numel() for parameter in judge.parameters()) == 2_764_737
    convolutions = [layer for layer in judge.modules() if isinstance(layer, nn.Conv2d)]
    field = 1
    for layer in reversed(convolutions):
        field = (field - 1) * layer.stride[0] + layer.kernel_size[0]
    assert field == 70


@pytest.mark.parametrize("size", [(8, 8), (9, 40), (16, 16), (31, 64)])
def test_small_images_get_a_score(size):
    assert PatchDiscriminator(1, size, width=2)(torch.zeros(1, 1, *size)).numel() > 0


def test_slices_go_and_come_back_in_order():
    volume = torch.randn(2, 3, 4, 5, 6)
    slices = as_slices(volume)
    assert slices.shape == (12, 3, 4, 5)
    assert torch.equal(slices[7], volume[1, ..., 1])
    assert torch.equal(from_slices(slices, volume.shape), volume)


class Plus(nn.Module):
    """A generator that adds to what is in its range, by slice."""

    def forward(self, x):
        return x + 0.5


def test_intensities_are_brought_to_the_generators_range_and_back():
    seen = []
    network = nn.Conv2d(2, 2, 1)
    network.register_forward_hook(lambda m, inputs, out: seen.append(inputs[0]))
    model = Translated(Plus(), network, torch.tensor([10.0, 0.0]), torch.tensor([4.0, 1.0]))
    model(torch.tensor([8.0, 3.0]).view(1, 2, 1, 1))
    assert seen[0].flatten().tolist() == [10.0, 3.5]  # (8 - 10) / 4 + 0.5 = 0 and 3 + 0.5


def test_a_volume_is_translated_as_its_slices_are():
    generator = Generator(1, width=2, blocks=1)
    model = Translated(generator, nn.Identity(), torch.zeros(1), torch.ones(1))
    volume = torch.randn(2, 1, 12, 12, 3)
    translated = model(volume)
    for depth in range(3):
        assert torch.allclose(translated[..., depth], generator(volume[..., depth]), atol=1e-6)


def test_the_pair_is_built_from_its_description():
    options = {"network": {"name": "unet", "options": {"width": 2}}, "generator": {"width": 2, "blocks": 1}}
    architecture = Architecture("translated", 2, 1, 3, options)
    model = Architecture(**architecture.as_json()).build(seed=0)
    assert model(torch.randn(1, 1, 32, 32)).shape == (1, 3, 32, 32)
