"""TTT and ATTA as objectives: contract, what moves, and the arithmetic against code written separately."""

import copy

import pytest
import torch
import torch.nn.functional as F

import networks
from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.errors import SettingError, StateError
from dltta.models.encoder import shared_parameters
from dltta.models.parts.autoencoders import AutoEncoders, Levels
from dltta.models.parts.rotation import RotationHead
from dltta.objectives import ATTA, TTT
from dltta.testing import check_objective

NETWORKS = {
    "2-D": (lambda: networks.Segmenter(2), "bottleneck", 6, (2, 1, 8, 8)),
    "2-D not square": (lambda: networks.Segmenter(2), "bottleneck", 6, (2, 1, 8, 12)),
    "3-D": (lambda: networks.Segmenter(3), "bottleneck", 6, (2, 1, 8, 8, 4)),
    "classification": (networks.Classifier, "encoder", 4, (3, 1, 8, 8)),
}


def ttt(model, layer, channels, x):
    torch.manual_seed(3)
    return TTT(RotationHead(channels), layer, tuple(shared_parameters(model, layer, x)))


def atta(layer, x, *, output, **options):
    levels = Levels(watched=(("encoder",),), adapted=("encoder",), output=output)
    spatial = x.shape[2:]
    shapes = {"image": (1, *spatial), "level_0": (4, *(size // 2 for size in spatial))}
    if output:
        shapes["output"] = (3, *spatial)
    torch.manual_seed(4)
    return ATTA(AutoEncoders(shapes, width=8), levels, (4,), **options)


def make(method, name):
    build, layer, channels, shape = NETWORKS[name]
    model, x = networks.trained(build()), torch.randn(shape)
    if method == "ttt":
        return model, ttt(model, layer, channels, x), x
    return model, atta(layer, x, output=name != "classification"), x


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", ["ttt", "atta"])
def test_objective_keeps_the_contract(method, name):
    model, objective, x = make(method, name)
    check_objective(objective, model, x)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", ["ttt", "atta"])
def test_dynamic_rate_runs_on_top(method, name):
    model, objective, x = make(method, name)
    memory = MemoryBank(capacity=2 * len(x), neighbors=2)
    adapter = Adapter(model, objective, Proportional(0.1), memory=memory)
    steps = [adapter.step(torch.randn_like(x)) for _ in range(4)]
    assert steps[-1].rate == pytest.approx(0.1 * steps[-1].discrepancy)
    assert steps[-1].discrepancy > 0


def test_ttt_moves_the_shared_encoder_and_nothing_else():
    model, objective, x = make("ttt", "2-D")
    head = copy.deepcopy(objective.head.state_dict())
    adapter = Adapter(model, objective, Fixed(0.1))
    adapter.step(x)
    assert {name.split(".")[0] for name in adapter.adapted_parameters()} == {"encoder", "bottleneck"}
    assert torch.equal(adapter.model.head.weight, model.head.weight)
    assert all(torch.equal(adapter.objective.head.state_dict()[k], v) for k, v in head.items())


def test_ttt_step_agrees_with_one_written_out():
    model, objective, x = make("ttt", "2-D")
    adapter = Adapter(model, objective, Fixed(0.1))
    step = adapter.step(x)
    slow = copy.deepcopy(model).train()  # batch statistics
    slow.encoder[1].momentum = slow.bottleneck[1].momentum = 0.0
    turned = torch.cat([torch.rot90(image[None], k, (2, 3)) for image in x for k in range(4)])
    features = slow.bottleneck(slow.encoder(turned)).mean((2, 3))
    loss = F.cross_entropy(objective.head.layers(features), torch.arange(4).repeat(len(x)))
    loss.backward()
    assert step.loss == pytest.approx(loss.item(), abs=1e-6)
    with torch.no_grad():
        for parameter in (*slow.encoder.parameters(), *slow.bottleneck.parameters()):
            parameter -= 0.1 * parameter.grad
    torch.testing.assert_close(step.logits, slow(x).detach(), atol=1e-5, rtol=1e-5)


def test_ttt_of_another_network_is_refused():
    objective = TTT(RotationHead(6), "bottleneck", ("stem.weight",))
    with pytest.raises(StateError, match="another network: 'stem.weight'"):
        Adapter(networks.Segmenter(), objective, Fixed(0.1))


def test_atta_starts_as_the_network_with_batch_statistics_and_moves_only_adaptors():
    from dltta.objectives import PTBN

    model, objective, x = make("atta", "2-D")
    adapter = Adapter(model, objective, Fixed(0.0))
    torch.testing.assert_close(adapter.step(x).logits, Adapter(model, PTBN())(x), atol=1e-6, rtol=1e-6)
    adapter = Adapter(model, objective, Fixed(0.1))
    adapter.step(x)
    assert {name.split(".")[0] for name in adapter.adapted_parameters()} == {"input_adaptor", "adaptor_behind_encoder"}
    plain = model.state_dict()
    assert all(torch.equal(plain[name], adapter.model.state_dict()[name]) for name in plain)
    assert not torch.equal(adapter.step(x).logits, Adapter(model, PTBN())(x))


def test_atta_loss_is_weighted_errors_plus_orthogonality():
    model, _, x = make("atta", "2-D")
    plain = Adapter(model, atta("encoder", x, output=True), Fixed(0.0)).step(x).loss
    no_image = Adapter(model, atta("encoder", x, output=True, weights={"image": 0.0}), Fixed(0.0)).step(x).loss
    objective = atta("encoder", x, output=True)
    image_error = F.mse_loss(objective.autoencoders.parts["image"].eval()(x), x).item()
    assert plain - no_image == pytest.approx(image_error, rel=1e-5)
    with pytest.raises(SettingError, match="no auto-encoder 'picture'; there are image, level_0, output"):
        atta("encoder", x, output=True, weights={"picture": 1.0})


def test_atta_penalty_counts_once_adaptors_are_not_orthogonal():
    model, objective, x = make("atta", "2-D")
    adapter = Adapter(model, objective, Fixed(0.0))
    before = adapter.step(x).loss
    free = copy.deepcopy(adapter)
    free.objective.orthogonality = 0.0
    with torch.no_grad():
        for each in (adapter, free):
            each.model.adaptor_behind_encoder.convolution.weight.mul_(1.5)  # WᵀW − I = 1.25 I
    assert adapter.step(x).loss - free.step(x).loss == pytest.approx(1.25**2, rel=1e-4)
    assert before != adapter.step(x).loss


@pytest.mark.parametrize("method", ["ttt", "atta"])
def test_resuming_is_bit_exact(method):
    model, objective, x = make(method, "2-D")
    images = [torch.randn_like(x) for _ in range(6)]

    def adapter():
        return Adapter(model, objective, Proportional(0.1), memory=MemoryBank(capacity=4, neighbors=2))

    whole, stopped, resumed = adapter(), adapter(), adapter()
    expected = [whole.step(x).logits for x in images]
    for image in images[:3]:
        stopped.step(image)
    resumed.load_state_dict(stopped.state_dict())
    assert all(map(torch.equal, expected[3:], [resumed.step(x).logits for x in images[3:]]))


def test_atta_takes_two_forward_passes():
    model, objective, x = make("atta", "2-D")
    passes = []
    model.register_forward_hook(lambda *call: passes.append(1))
    Adapter(model, objective, Fixed(0.1)).step(x)
    assert len(passes) == 2
