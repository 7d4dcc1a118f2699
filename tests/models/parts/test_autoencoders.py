import pytest
import torch

import networks
from dltta.errors import LayerNotFoundError
from dltta.models.nets.architecture import Architecture
from dltta.models.parts.adaptors import FeatureAdaptor, InputAdaptor
from dltta.models.parts.autoencoders import DENSENET_LEVELS, UNET_LEVELS, AutoEncoders, LevelOutputs, Levels

LEVELS = Levels(watched=(("encoder", "bottleneck"),), adapted=("encoder",))


@pytest.mark.parametrize("shape", [(1, 16, 24), (3, 7, 9), (4, 3, 3), (2, 5, 6, 7)])
def test_reconstruction_has_the_shape_of_its_input(shape):
    model = AutoEncoders({"level_0": shape}, width=8)
    x = torch.randn(2, *shape)
    assert model.parts["level_0"](x).shape == x.shape


def test_widths_are_the_published_fractions():
    model = AutoEncoders({"image": (1, 32, 32), "level_0": (8, 32, 32)}, width=64)
    widths = [
        [c.out_channels for c in part.modules() if isinstance(c, torch.nn.Conv2d)][:3] for part in model.parts.values()
    ]
    assert widths == [[32, 16, 8], [64, 32, 16]]


def test_what_has_one_position_gets_no_autoencoder():
    assert set(AutoEncoders({"image": (1, 8, 8), "level_0": (4, 1, 1)}).shapes) == {"image"}


def test_error_is_the_mean_squared_difference_by_hand():
    model = AutoEncoders({"image": (1, 8, 8)}, width=8)
    model.parts["image"] = torch.nn.Identity()
    assert model.errors({"image": torch.ones(1, 1, 8, 8)})["image"] == 0
    model.parts["image"].forward = lambda x: x + 2
    assert model.errors({"image": torch.ones(1, 1, 8, 8)})["image"] == 4


def test_watch_takes_image_features_and_probabilities_of_one_pass_and_forgets_them():
    model = networks.Segmenter(kind="group")
    model.encoder.register_forward_hook(lambda m, i, o: None)
    watch = LevelOutputs(Levels(watched=(("encoder",), ("encoder", "bottleneck")), adapted=()))
    watch.attach(model)
    x = torch.randn(2, 1, 8, 8)
    logits = model(x)
    seen = watch.take()
    assert torch.equal(seen["image"], x)
    assert torch.equal(seen["level_0"], model.encoder(x))
    assert seen["level_1"].shape == (2, 4 + 6, 4, 4)
    torch.testing.assert_close(seen["output"], logits.softmax(1))
    watch._seen.clear()
    with torch.no_grad():
        model(x)
    assert not watch._seen  # nothing is kept from passes without a graph


@pytest.mark.parametrize(
    ("name", "channels", "levels", "seen", "adapted"),
    [
        (  # the encoder's levels with the decoder's of the same size, and the bottleneck alone; the prediction too
            "unet", 1, UNET_LEVELS,
            {"image": (1, 32, 32), "level_0": (16, 16, 16), "level_1": (32, 8, 8), "level_2": (64, 4, 4),
             "level_3": (64, 2, 2), "output": (2, 32, 32)},
            [(4, 32, 32), (8, 16, 16), (16, 8, 8)],
        ),
        (  # behind each of the four blocks; two numbers have no shape to learn
            "densenet_small", 3, DENSENET_LEVELS,
            {"image": (3, 64, 64), "level_0": (16, 8, 8), "level_1": (12, 4, 4), "level_2": (10, 2, 2),
             "level_3": (18, 2, 2)},
            [(24, 16, 16), (16, 8, 8), (12, 4, 4)],
        ),
    ],
)  # fmt: skip
def test_where_atta_looks_and_where_its_adaptors_stand(name, channels, levels, seen, adapted):
    options = {"width": 4} if name == "unet" else {"width": 24, "growth": 4}
    size = next(iter(seen.values()))[1:]
    model = Architecture(name, 2, channels, 2, options).build(seed=0)
    found = []
    for layer in levels.adapted:
        model.get_submodule(layer).register_forward_hook(lambda module, x, output: found.append(output.shape[1:]))
    watch = LevelOutputs(levels)
    watch.attach(model)
    model(torch.rand(2, channels, *size))
    assert {part: tuple(value.shape[1:]) for part, value in watch.take().items()} == seen
    assert found == adapted


def test_levels_name_a_layer_that_is_not_there():
    with pytest.raises(LayerNotFoundError, match="did you mean 'encoder"):
        Levels(watched=(("encodr",),), adapted=()).check(networks.Segmenter())


@pytest.mark.parametrize("axes", [2, 3])
def test_adaptors_start_as_the_identity(axes):
    x = torch.randn(2, 3, *[5] * axes)
    assert torch.equal(InputAdaptor(axes, 3)(x), x)
    torch.testing.assert_close(FeatureAdaptor(axes, 3)(x), x)


def test_orthogonality_by_hand():
    adaptor = FeatureAdaptor(2, 2)
    assert adaptor.orthogonality() == 0
    with torch.no_grad():
        adaptor.convolution.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 1.0]]).view(2, 2, 1, 1))
    assert adaptor.orthogonality().item() == pytest.approx(9.0)  # WᵀW − I = diag(3, 0), spectral norm 3
    with torch.no_grad():
        adaptor.convolution.weight.copy_(torch.tensor([[0.0, -1.0], [1.0, 0.0]]).view(2, 2, 1, 1))
    assert adaptor.orthogonality() == 0  # a rotation


def test_orthogonality_is_at_most_the_squared_spectral_norm():
    adaptor = FeatureAdaptor(2, 6)
    weight = torch.randn(6, 6)
    with torch.no_grad():
        adaptor.convolution.weight.copy_(weight.view(6, 6, 1, 1))
    exact = torch.linalg.matrix_norm(weight.T @ weight - torch.eye(6), 2).square().item()
    assert 0.2 * exact < adaptor.orthogonality().item() <= exact * (1 + 1e-5)
