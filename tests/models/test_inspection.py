import torch
from monai.networks.nets import BasicUNet
from torch import nn

from dltta.core.memory import MemoryBank
from dltta.models.inspection import statistics_changed, summarize
from dltta.models.normalization import use_test_statistics
from dltta.models.predictions import probabilities
from networks import Classifier, Segmenter


def test_layers_with_shapes_and_parameters():
    """Counted by hand: a 3x3 convolution of 1 to 4 channels has 36 weights and 4 biases."""
    seen = summarize(Segmenter(classes=3).eval(), torch.rand(1, 1, 16, 16))
    found = {layer.name: (layer.kind, layer.output, layer.parameters) for layer in seen.layers}
    assert found["encoder.0"] == ("Conv2d", (4, 16, 16), 40)
    assert found["encoder.1"] == ("BatchNorm2d", (4, 16, 16), 8)
    assert found["encoder.3"] == ("AvgPool2d", (4, 8, 8), 0)
    assert found["head"] == ("Conv2d", (3, 16, 16), 21)
    assert next(iter(found)) == "encoder.0"
    assert seen.parameters == 40 + 8 + 4 * 6 * 9 + 6 + 12 + 21 == sum(layer.parameters for layer in seen.layers)
    assert (seen.input, seen.output) == ((1, 16, 16), (3, 16, 16))


def test_the_feature_layer_and_what_a_memory_of_it_takes():
    model, x = Segmenter(classes=3).eval(), torch.rand(1, 1, 16, 16)
    seen = summarize(model, x)
    assert (seen.feature_layer, seen.key) == ("bottleneck", (6, 8, 8))
    bank = MemoryBank(capacity=20, neighbors=1)
    with torch.no_grad():
        for _ in range(20):
            bank.push(model.bottleneck(model.encoder(x)), probabilities(model(x)))
    assert 20 * seen.bytes_per_image == bank.nbytes


def test_a_sigmoid_channel_is_remembered_as_two():
    seen = summarize(Segmenter(classes=1).eval(), torch.rand(1, 1, 16, 16))
    assert seen.bytes_per_image == 4 * (6 * 8 * 8 + 2 * 16 * 16)


def test_half_precision_keeps_probabilities_wide():
    seen = summarize(Classifier(kind="group").eval().bfloat16(), torch.rand(1, 1, 16, 16).bfloat16())
    assert seen.bytes_per_image == 2 * 4 + 4 * 3  # the key is (4,)


def test_normalization_by_kind():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 1),
        nn.BatchNorm2d(4),
        nn.InstanceNorm2d(4),
        nn.BatchNorm2d(4, affine=False),
        nn.GroupNorm(2, 4),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.Conv2d(4, 2, 1),
    ).eval()
    found = summarize(model, torch.rand(1, 1, 8, 8)).normalization
    assert [(each.kind, each.layers, each.affine, each.stored) for each in found] == [
        ("BatchNorm2d", 3, 2, 2),
        ("GroupNorm", 1, 1, 0),
        ("InstanceNorm2d", 1, 0, 0),
    ]


def test_long_runs_of_one_build_are_shown_once():
    def block(width):
        return nn.Sequential(nn.Conv2d(4, width, 1), nn.ReLU(), nn.Conv2d(width, 4, 1))

    model = nn.Sequential(nn.Conv2d(1, 4, 1), *(block(width) for width in (2, 3, 4, 5, 6)), nn.Conv2d(4, 2, 1)).eval()
    layers = summarize(model, torch.rand(1, 1, 8, 8)).layers
    assert [layer.name for layer in layers] == ["0", "1.0", "1.1", "1.2", "2 … 5", "6"]
    run = layers[4]
    assert (run.kind, run.repeats, run.output) == ("Sequential", 4, (4, 8, 8))
    assert run.parameters == sum(4 * w + w + 4 * w + 4 for w in (3, 4, 5, 6))
    assert sum(layer.parameters for layer in layers) == sum(p.numel() for p in model.parameters())


def test_a_layer_with_several_names_is_shown_under_the_first():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.act = nn.Conv2d(1, 2, 1), nn.ReLU()
            self.both = nn.Sequential(self.conv, self.act)

        def forward(self, x):
            return self.both(x)

    seen = summarize(Block().eval(), torch.rand(1, 1, 4, 4))
    assert [layer.name for layer in seen.layers] == ["conv", "act"]
    assert sum(layer.parameters for layer in seen.layers) == seen.parameters == 4


def test_the_four_levels_of_a_unet_are_all_shown():
    layers = summarize(BasicUNet(2, 1, 2, features=(2,) * 6).eval(), torch.rand(1, 1, 32, 32)).layers
    assert not any(layer.repeats for layer in layers)


def test_looking_leaves_no_hook_and_no_change():
    model = Segmenter().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    summarize(model, torch.rand(1, 1, 16, 16))
    assert all(not layer._forward_hooks for layer in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_layers_that_changed_their_statistics_are_counted():
    for kind, changed in (("batch", 2), ("instance", 0), ("group", 0)):
        model, other = Segmenter(kind=kind), Segmenter(kind=kind)
        use_test_statistics(other)
        assert statistics_changed(model, other) == changed
    tracking = nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True))
    other = nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True))
    use_test_statistics(other)
    assert statistics_changed(tracking, other) == 1
