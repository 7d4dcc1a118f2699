"""The fast way of computing a network gives the same predictions, on every kind of network, and keeps to itself."""

import copy

import pytest
import torch
from monai.networks import nets
from torch import nn

import networks
from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.errors import SettingError
from dltta.models.encoder import shared_parameters
from dltta.models.fast import speed_up
from dltta.models.nets.unet import unet
from dltta.models.parts.autoencoders import UNET_LEVELS, AutoEncoders, LevelOutputs
from dltta.models.parts.rotation import RotationHead
from dltta.objectives import ATTA, PTBN, TTT, Source, Tent
from networks import stream, trained

FEATURES = (4, 8, 16, 32, 64, 4)


def instance(axes):
    return nets.BasicUNet(axes, 1, 3, (4, 4, 8, 8, 16, 4), norm=("instance", {"affine": True}))


NETWORKS = {
    "2-D": (lambda: networks.Segmenter(2), (1, 1, 8, 8)),
    "2-D batch": (lambda: networks.Segmenter(2, channels=3), (3, 3, 8, 6)),
    "3-D": (lambda: networks.Segmenter(3), (1, 1, 4, 4, 6)),
    "classifier": (lambda: networks.Classifier(), (5, 1, 6, 6)),
    "U-Net": (lambda: nets.BasicUNet(2, 1, 3, (4, 4, 8, 8, 16, 4), norm="batch"), (1, 1, 32, 48)),
    "U-Net 3-D": (lambda: nets.BasicUNet(3, 1, 2, (4, 4, 8, 8, 16, 4), norm="batch"), (1, 1, 32, 32, 32)),
    "instance norm": (lambda: instance(2), (1, 1, 32, 48)),
    "instance norm, batch": (lambda: instance(2), (2, 1, 32, 48)),
    "instance norm 3-D": (lambda: instance(3), (1, 1, 32, 32, 32)),
    "DenseNet": (lambda: nets.DenseNet(2, 3, 4, 8, 4, (2, 2)), (3, 3, 32, 32)),
    "group norm": (lambda: nets.SegResNet(2, 8, 1, 2), (1, 1, 32, 32)),
    "transformer": (lambda: nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2), (1, 1, 64, 64)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_stream_is_predicted_as_in_the_given_layout(name):
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make().eval()
    bank = MemoryBank(capacity=2 * shape[0], neighbors=2, ready="neighbors")
    given, auto = (
        Adapter(model, Tent(), Proportional(1e-2), memory=bank, layout=layout) for layout in ("given", "auto")
    )
    for x in stream(shape, 4):
        one, other = given.step(x), auto.step(x)
        torch.testing.assert_close(other.logits.softmax(1), one.logits.softmax(1), atol=2e-5, rtol=0)
        assert other.rate == pytest.approx(one.rate, rel=1e-3)
        assert other.loss == pytest.approx(one.loss, abs=1e-5)
        assert other.logits.is_contiguous()


@pytest.mark.parametrize("objective", [Source(), PTBN()])
def test_methods_without_a_loss_predict_alike(objective):
    model = trained(networks.Segmenter())
    x = stream((2, 1, 8, 8), 1)[0]
    one, other = (Adapter(model, objective, layout=layout)(x) for layout in ("given", "auto"))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def channels_last(model):
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    weights = [p for p in model.parameters() if p.ndim in formats and p.shape[1] > 1 and p[0, 0].numel() > 1]
    return bool(weights) and all(w.is_contiguous(memory_format=formats[w.ndim]) for w in weights)


@pytest.mark.parametrize(("name", "expected"), [("2-D batch", True), ("U-Net 3-D", True), ("group norm", False)])
def test_weights_lie_channels_last_where_that_is_faster_and_only_in_the_copy(name, expected):
    model = NETWORKS[name][0]()
    assert channels_last(Adapter(model, Tent(), Fixed(0.1)).model) == expected
    assert not channels_last(Adapter(model, Tent(), Fixed(0.1), layout="given").model)
    assert not channels_last(model)
    assert not channels_last(Adapter(model.double(), Tent(), Fixed(0.1)).model)


def test_activations_follow_from_the_first_layer_of_a_single_channel_image():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    speed_up(model)
    output = model(torch.rand(1, 1, 8, 8))
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert not output.is_contiguous()


def test_the_default_feature_layer_is_the_same():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 9, 1))  # as wide as can be
    for layout in ("given", "auto"):
        adapter = Adapter(model, Tent(), Fixed(0.1), memory=MemoryBank(capacity=2, neighbors=1), layout=layout)
        adapter.step(torch.rand(1, 1, 8, 8))
        assert adapter.memory.layer == "2"


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(1, 3, 5, 4), (3, 3, 5, 4), (1, 3, 5, 4, 2), (2, 3, 5, 4, 2)])
@pytest.mark.parametrize("last", [True, False])
def test_instance_normalization_and_its_gradient_by_any_kernel(shape, affine, last):
    axes = len(shape) - 2
    kind = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[axes]
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[axes](1, 1, 1)
    model = nn.Sequential(conv, kind(3, affine=affine, eps=0.1))
    for parameter in model[1].parameters():
        nn.init.normal_(parameter)
    slow = copy.deepcopy(model[1])
    speed_up(model)
    assert type(model[1]) is not kind
    assert isinstance(model[1], kind)
    x = torch.randn(shape)
    if last:
        x = x.contiguous(memory_format={2: torch.channels_last, 3: torch.channels_last_3d}[axes])
    x.requires_grad_()
    weights = torch.randn(shape)
    output, expected = model[1](x), slow(x)
    torch.testing.assert_close(output, expected)
    ours = torch.autograd.grad((weights * output).sum(), [x, *model[1].parameters()])
    theirs = torch.autograd.grad((weights * expected).sum(), [x, *slow.parameters()])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_instance_normalization_without_statistics_still_fails():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2))
    speed_up(model)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        model(torch.rand(2, 2, 1, 1))


def test_stored_statistics_of_instance_normalization_are_kept_in_use():
    model = trained(nn.Sequential(nn.Conv2d(1, 2, 1), nn.InstanceNorm2d(2, track_running_stats=True)))
    x = torch.randn(1, 1, 4, 4)
    expected = model(x)
    torch.testing.assert_close(Adapter(model, Source())(x), expected)
    assert not torch.allclose(Adapter(model, PTBN())(x), expected)


def test_statistics_of_instance_normalization_are_collected_in_training():
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.InstanceNorm2d(2, track_running_stats=True)).train()
    slow = copy.deepcopy(model)
    speed_up(model)
    x = torch.randn(3, 2, 4, 4) + 5
    torch.testing.assert_close(model(x), slow(x))
    assert torch.equal(model[1].running_mean, slow[1].running_mean)
    assert model[1].running_mean.any()


def test_hooks_of_the_caller_survive():
    seen = []
    model = instance(2).eval()
    layer = next(module for module in model.modules() if isinstance(module, nn.InstanceNorm2d))
    layer.register_forward_hook(lambda *call: seen.append(1))
    Adapter(model, Tent(), Fixed(0.1)).step(torch.rand(1, 1, 32, 32))
    assert len(seen) == 2


def test_group_normalization_whose_input_needs_no_gradient_is_adapted_as_by_hand():
    """Torch's channels-last kernel ends the process there."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(4, 4), nn.Conv2d(4, 2, 1))
    for x in stream((2, 1, 8, 8), 3):
        by_hand = copy.deepcopy(model)
        p = by_hand(x).softmax(1)
        weight, bias = by_hand[1].weight, by_hand[1].bias
        slopes = torch.autograd.grad(-(p * p.log()).sum(1).mean(), [weight, bias])
        with torch.no_grad():
            weight -= 0.1 * slopes[0]
            bias -= 0.1 * slopes[1]
        step = Adapter(model, Tent(), Fixed(0.1)).step(x)
        torch.testing.assert_close(step.logits, by_hand(x).detach(), atol=1e-5, rtol=1e-5)
        assert not torch.allclose(step.logits, model(x), atol=1e-5)


def test_what_an_objective_brings_along_is_sped_up_too():
    model = nets.BasicUNet(2, 1, 3, (4, 4, 8, 8, 16, 4), norm="batch").eval()
    x = torch.rand(1, 1, 32, 32)
    probe, watch = copy.deepcopy(model).requires_grad_(False), LevelOutputs(UNET_LEVELS)
    watch.attach(probe)
    probe(x)
    shapes = {name: tuple(seen.shape[1:]) for name, seen in watch.take().items()}
    parts = AutoEncoders(shapes, width=8)
    atta = ATTA(parts, UNET_LEVELS, (4, 4, 8))
    one, other = (Adapter(model, atta, Fixed(1e-3), layout=layout) for layout in ("given", "auto"))
    assert channels_last(other.objective.autoencoders)
    assert not channels_last(one.objective.autoencoders)
    assert not channels_last(parts)
    for _ in range(2):
        torch.testing.assert_close(one.step(x).logits, other.step(x).logits, atol=2e-4, rtol=1e-3)


def test_the_saved_state_is_contiguous_and_resumes_bit_for_bit():
    model = nets.BasicUNet(2, 1, 3, (4, 4, 8, 8, 16, 4), norm="batch").eval()
    images = stream((1, 1, 32, 32), 6)
    shared = tuple(shared_parameters(model, "down_4", images[0]))

    def make():
        torch.manual_seed(0)
        ttt = TTT(RotationHead(16, 8), "down_4", shared)
        bank = MemoryBank("down_4", capacity=2, neighbors=1)
        return Adapter(model, ttt, Proportional(1e-3), memory=bank, optimizer=torch.optim.Adam)

    adapter, resumed = make(), make()
    for x in images[:3]:
        adapter.step(x)
    state = adapter.state_dict()
    moments = [m for slot in state["_extra_state"]["optimizer"]["state"].values() for m in slot.values()]
    assert len(moments) > 20
    tensors = [value for value in (*state.values(), *moments) if isinstance(value, torch.Tensor)]
    assert all(tensor.is_contiguous() for tensor in tensors)
    resumed.load_state_dict(state)
    assert channels_last(resumed.model)
    assert all(torch.equal(adapter.step(x).logits, resumed.step(x).logits) for x in images[3:])


def test_an_unknown_layout_is_refused():
    with pytest.raises(SettingError, match="layout must be 'auto' or 'given', got 'nhwc'"):
        Adapter(networks.Segmenter(), Tent(), Fixed(0.1), layout="nhwc")


def test_activations_in_place_change_neither_output_nor_gradient_of_the_paper_unet():
    outcomes = []
    for make in (unet, lambda *shape, width: nets.BasicUNet(*shape, FEATURES, act="relu", norm="batch")):
        torch.manual_seed(0)
        model = make(2, 1, 3, width=4).train()
        output = model(torch.linspace(-1, 1, 2 * 32 * 32).view(2, 1, 32, 32))
        output.square().mean().backward()
        outcomes.append([output, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *outcomes))
