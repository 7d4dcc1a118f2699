import pytest
import torch
from monai.networks.nets import DenseNet121
from torch import nn

from dltta import Adapter, Fixed
from dltta.errors import SettingError, StateError
from dltta.models.encoder import encode
from dltta.models.nets.architecture import Architecture
from dltta.models.nets.densenet import load_torchvision_weights
from dltta.models.normalization import normalization_layers
from dltta.models.parts.autoencoders import DENSENET_LEVELS, UNET_LEVELS
from dltta.objectives import PTBN, Tent


@pytest.mark.parametrize(("axes", "size"), [(2, (32, 64)), (3, (32, 16, 16))])
def test_unet_is_the_papers(axes, size):
    model = Architecture("unet", axes, 1, 9).build()
    with torch.no_grad():
        assert model(torch.zeros(1, 1, *size)).shape == (1, 9, *size)
    widths = [model.get_submodule(name).out_channels for name in _last_convolutions()]
    assert widths == [16, 32, 64, 128, 256]
    assert isinstance(
        model.get_submodule("upcat_4.upsample.deconv"), torch.nn.ConvTranspose2d | torch.nn.ConvTranspose3d
    )
    convolution, batch_norm = {2: (nn.Conv2d, nn.BatchNorm2d), 3: (nn.Conv3d, nn.BatchNorm3d)}[axes]
    layers = list(model.modules())
    kernels = [layer.kernel_size for layer in layers if isinstance(layer, convolution)]
    assert kernels == [(3,) * axes] * 18 + [(1,) * axes]  # two in each of nine blocks, and the last
    kinds = [type(layer) for layer in layers if type(layer).__module__ == "torch.nn.modules.activation"]
    assert kinds == [nn.ReLU] * 18
    assert [type(layer) for _, layer in normalization_layers(model)] == [batch_norm] * 18


def _last_convolutions():
    return ["conv_0.conv_1.conv", *(f"down_{level}.convs.conv_1.conv" for level in (1, 2, 3, 4))]


def test_bottleneck_of_the_papers_images_has_the_stated_size():
    model = Architecture("unet", 2, 1, 9).build().eval()
    with torch.no_grad():
        assert encode(model, "down_4", torch.zeros(1, 1, 128, 1024)).shape == (1, 256, 8, 64)


def test_densenet121_is_monais():
    ours, theirs = Architecture("densenet121", 2, 3, 2).build(), DenseNet121(2, 3, 2)
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}


def test_small_densenet_is_of_the_same_family():
    small = Architecture("densenet_small", 2, 3, 2).build().eval()
    with torch.no_grad():
        assert small(torch.zeros(2, 3, 64, 64)).shape == (2, 2)
    names = {name for name, _ in small.named_children()}
    assert names == {name for name, _ in DenseNet121(2, 3, 2).named_children()}


def test_a_seed_repeats_the_initial_weights_and_leaves_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = Architecture("unet", 2, 1, 2, {"width": 4}).build(seed=1)
    assert torch.equal(torch.rand(3), expected)
    again, other = (Architecture("unet", 2, 1, 2, {"width": 4}).build(seed=seed) for seed in (1, 2))
    assert torch.equal(first.final_conv.weight, again.final_conv.weight)
    assert not torch.equal(first.final_conv.weight, other.final_conv.weight)


def test_misspelled_names_and_options_are_refused_with_the_right_spelling():
    with pytest.raises(SettingError, match="no architecture 'u-net'; did you mean 'unet'"):
        Architecture("u-net", 2, 1, 2).build()
    with pytest.raises(SettingError, match="widht"):
        Architecture("unet", 2, 1, 2, {"widht": 4}).build()


def test_a_unet_may_have_instance_normalization_with_scale_and_shift():
    model = Architecture("unet", 2, 1, 2, {"width": 4, "norm": "instance"}).build()
    kinds = {type(layer) for _, layer in normalization_layers(model)}
    assert kinds == {nn.InstanceNorm2d}
    assert all(layer.affine for _, layer in normalization_layers(model))
    with pytest.raises(SettingError, match="there is no norm 'instanze'; did you mean 'instance'"):
        Architecture("unet", 2, 1, 2, {"norm": "instanze"}).build()


def torchvision_names(state, style):
    """What torchvision calls the same tensors; `style` is its older or newer spelling."""
    renamed = {}
    for name, value in state.items():
        for part in ("norm1", "norm2", "conv1", "conv2"):
            theirs = part if style == "new" else f"{part[:4]}.{part[4]}"
            name = name.replace(f".layers.{part}.", f".{theirs}.")
        renamed[name] = value
    return renamed


@pytest.mark.parametrize("style", ["new", "old"])
def test_torchvision_weights_fill_the_feature_extractor(tmp_path, style):
    options = {"blocks": (2, 2), "growth": 4, "width": 8}
    source = Architecture("densenet121", 2, 3, 2, options).build(seed=1)
    features = {k: v + 1 for k, v in source.state_dict().items() if k.startswith("features.")}
    theirs = {**torchvision_names(features, style), "classifier.weight": torch.zeros(1000, 8)}
    torch.save(theirs, tmp_path / "weights.pth")
    model = Architecture("densenet121", 2, 3, 5, {**options, "weights": str(tmp_path / "weights.pth")}).build()
    filled = model.state_dict()
    assert all(torch.equal(filled[k], v) for k, v in features.items() if "num_batches" not in k)
    assert len(features) > 20


def test_weights_of_another_network_are_refused(tmp_path):
    torch.save({"features.conv0.weight": torch.zeros(1)}, tmp_path / "weights.pth")
    with pytest.raises(StateError, match=r"weights\.pth is not a state dict of this network"):
        load_torchvision_weights(Architecture("densenet_small", 2, 3, 2).build(), tmp_path / "weights.pth")


@pytest.mark.long
def test_full_densenet_adapts_a_small_batch_with_the_levels_that_atta_uses():
    model = Architecture("densenet121", 2, 3, 2).build(seed=0).eval()
    DENSENET_LEVELS.check(model)
    x = torch.randn(2, 3, 64, 64)
    step = Adapter(model, Tent(), Fixed(1e-3)).step(x)
    assert step.logits.shape == (2, 2)
    assert not torch.equal(step.logits, Adapter(model, PTBN())(x))


@pytest.mark.parametrize("axes", [2, 3])
def test_unet_has_the_levels_that_atta_uses(axes):
    UNET_LEVELS.check(Architecture("unet", axes, 1, 2, {"width": 4}).build())
