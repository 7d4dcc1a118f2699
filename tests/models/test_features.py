import pytest
import torch
from monai.networks import nets
from torch import nn

import networks
from dltta.errors import LayerNotFoundError, SettingError
from dltta.models.features import find_feature_layer, find_layer, forward_with_features

FOUND = {
    "BasicUNet 2-D": (lambda: nets.BasicUNet(2, 1, 3, (4, 4, 8, 8, 16, 4), norm="batch"), (1, 1, 32, 32), "down_4"),
    "BasicUNet 3-D": (lambda: nets.BasicUNet(3, 1, 3, (4, 4, 8, 8, 16, 4), norm="batch"), (1, 1, 32, 32, 32), "down_4"),
    "DynUNet": (lambda: nets.DynUNet(2, 1, 3, [3] * 3, [1, 2, 2], [2, 2]), (1, 1, 16, 16), "bottleneck"),
    "SegResNet": (lambda: nets.SegResNet(2, 8, 1, 2), (1, 1, 32, 32), "down_layers.3"),
    "SwinUNETR": (lambda: nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2), (1, 1, 64, 64), "encoder10"),
    "DenseNet121": (lambda: nets.DenseNet121(2, 3, 2), (2, 3, 64, 64), "features"),
    "by hand, segmentation": (networks.Segmenter, (1, 1, 8, 8), "bottleneck"),
    "by hand, classification": (networks.Classifier, (1, 1, 8, 8), "dropout"),
    "without pooling": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), (1, 1, 8, 8), "1"),
    "in a wrapper": (lambda: nn.Sequential(networks.Classifier()), (1, 1, 8, 8), "0.dropout"),
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), (2, 3), "1"),
}


@pytest.mark.parametrize("name", FOUND)
def test_default_layer_ends_the_feature_extractor(name):
    make, shape, layer = FOUND[name]
    assert find_feature_layer(make().eval(), torch.randn(shape)) == layer


def test_features_and_logits_come_from_one_pass_and_no_hook_stays():
    model, x = networks.Segmenter().eval(), torch.randn(2, 1, 8, 8)
    seen = forward_with_features(model, "encoder", x)
    assert torch.equal(seen.features, model.encoder(x))
    assert torch.equal(seen.logits, model(x))
    assert not seen.features.requires_grad
    assert not any(module._forward_hooks for module in model.modules())


def test_hooks_are_removed_when_the_network_fails():
    model = networks.Segmenter()
    with pytest.raises(RuntimeError):
        forward_with_features(model, "encoder", torch.randn(1, 5, 8, 8))
    assert not any(module._forward_hooks for module in model.modules())


def test_squeezed_vectors_are_not_feature_maps():
    class Squeezed(networks.Segmenter):
        def __init__(self):
            super().__init__()
            self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 6, 1))

        def forward(self, x):
            features = self.bottleneck(self.encoder(x))
            return self.head(self.up(features * self.squeeze(features).sigmoid()))

    assert find_feature_layer(Squeezed(), torch.randn(1, 1, 8, 8)) == "bottleneck"


def test_nearest_layer_names_are_offered():
    with pytest.raises(LayerNotFoundError, match=r"BasicUNet has no layer 'down4'; did you mean 'down_4'"):
        find_layer(nets.BasicUNet(2, 1, 3), "down4")


def test_a_network_of_one_layer_has_no_features():
    with pytest.raises(SettingError, match="name one"):
        find_feature_layer(nn.Sequential(nn.Linear(3, 2)), torch.randn(2, 3))


class Overwriting(nn.Module):
    """An activation in place behind the features, as in MONAI's DenseNet."""

    def __init__(self):
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3)
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.head(self.features(x))


@pytest.mark.parametrize(("layer", "passes"), [("features", 1), (None, 2)])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_features_are_what_the_layer_gave_even_if_it_is_overwritten(layer, passes, context):
    model, x = Overwriting(), torch.randn(3, 1, 8, 8)
    with context():
        seen = forward_with_features(model, layer, x)
    assert seen.layer == "features"
    assert torch.equal(seen.features, model.features(x))
    assert (seen.features < 0).any()
    assert torch.equal(seen.logits, model.head(model.features(x)))
    assert model.passes == passes  # a search runs the network again only because it was overwritten
