"""DTTA: steps against ones written out, the best parameters predict, contract, resuming, refusals."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import networks
from dltta import Adapter, Aligned, Fixed, MemoryBank, Proportional
from dltta.errors import InputError, NonFiniteError, NothingToAdaptError, SettingError
from dltta.models.normalization import BATCH_STATISTICS
from dltta.models.parts.adaptors import insert_in_front
from dltta.models.parts.denoiser import Denoiser
from dltta.models.parts.normalizer import ImageNormalizer
from dltta.objectives import DTTA
from dltta.testing import check_objective
from networks import stream, trained

NETWORKS = {
    "2-D": (lambda: networks.Segmenter(2), 3, (1, 1, 8, 8)),
    "2-D batch": (lambda: networks.Segmenter(2, channels=2), 3, (2, 2, 8, 12)),
    "sigmoid": (lambda: networks.Segmenter(2, classes=1), 2, (1, 1, 8, 8)),
    "3-D": (lambda: networks.Segmenter(3), 3, (1, 1, 8, 8, 4)),
    "instance": (lambda: networks.Segmenter(2, kind="instance"), 3, (1, 1, 8, 8)),
    "group": (lambda: networks.Segmenter(2, kind="group"), 3, (1, 1, 8, 8)),
}


def make(name, **settings):
    """Network, objective and a stream."""
    build, classes, shape = NETWORKS[name]
    torch.manual_seed(5)
    normalizer = ImageNormalizer(len(shape) - 2, shape[1], width=3)
    denoiser = trained(Denoiser(len(shape) - 2, classes, (3, 4)), seed=6)
    return trained(build()), DTTA(denoiser, normalizer, **settings), stream(shape, 4)


@pytest.mark.parametrize("name", NETWORKS)
def test_dtta_keeps_the_contract(name):
    model, objective, images = make(name)
    check_objective(objective, model, images[0])


def slow_normalizer(weights, x):
    """x + conv(exp(−conv²/s²)) twice, written out."""
    conv = {4: F.conv2d, 5: F.conv3d}[x.ndim]
    z = x
    for first, bell in ((0, 1), (2, 3)):
        z = conv(z, weights[f"layers.{first}.weight"], weights[f"layers.{first}.bias"], padding=1)
        scale = weights[f"layers.{bell}.scale"].reshape(1, -1, *[1] * (x.ndim - 2))
        z = torch.exp(-((z / scale) ** 2))
    return x + conv(z, weights["layers.4.weight"], weights["layers.4.bias"], padding=1)


def slow_probabilities(logits):
    if logits.shape[1] == 1:
        p = 1 / (1 + torch.exp(-logits))
        return torch.cat([1 - p, p], dim=1)
    return torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)


def slow_dice(one, other):
    total = 0
    for b in range(one.shape[0]):
        for c in range(one.shape[1]):
            total = total + 2 * (one[b, c] * other[b, c]).sum() / (one[b, c].sum() + other[b, c].sum())
    return total / (one.shape[0] * one.shape[1])


def slow_image(model, objective, x, rate, steps, every):
    """Losses and prediction for one image from the source state, in double precision."""
    model = copy.deepcopy(model).double().eval()
    denoiser = copy.deepcopy(objective.denoiser).double().eval()
    weights = {name: p.detach().double() for name, p in objective.normalizer.named_parameters()}
    x = x.double()
    losses, checks, target = [], [], None
    for step in range(steps):
        moving = {name: p.clone().requires_grad_(True) for name, p in weights.items()}
        p = slow_probabilities(model(slow_normalizer(moving, x)))
        if step % every == 0:
            with torch.no_grad():
                target = slow_probabilities(denoiser(p))
                checks.append((slow_dice(p, target).item(), weights))
        loss = 1 - slow_dice(p, target)
        loss.backward()
        losses.append(loss.item())
        weights = {name: p.detach() - rate * p.grad for name, p in moving.items()}
    with torch.no_grad():
        p = slow_probabilities(model(slow_normalizer(weights, x)))
        checks.append((slow_dice(p, slow_probabilities(denoiser(p))).item(), weights))
        best = max(range(len(checks)), key=lambda i: checks[i][0])
        return losses, model(slow_normalizer(checks[best][1], x)).float(), best


@pytest.mark.parametrize("name", NETWORKS)
def test_images_agree_with_ones_written_out(name):
    model, objective, images = make(name, every=2)
    adapter = Adapter(model, objective, Fixed(0.3), steps=5, mode="image-specific")
    for x in images:
        losses, logits, _ = slow_image(model, objective, x, 0.3, 5, 2)
        step = adapter.step(x)
        assert [update.loss for update in step.updates] == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(step.logits, logits, atol=1e-5, rtol=1e-5)


def test_parameters_that_agreed_best_predict_wherever_they_were_met():
    """At a large rate the last step is not always the best."""
    chosen = set()
    model, objective, _ = make("2-D", every=1)
    adapter = Adapter(copy.deepcopy(model).double(), objective, Fixed(4.0), steps=4, mode="image-specific")
    for x in stream((1, 1, 8, 8), 12, seed=3):
        _, logits, best = slow_image(model, objective, x, 4.0, 4, 1)
        torch.testing.assert_close(adapter.step(x).logits.float(), logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(adapter.predict(x).float(), logits, atol=1e-5, rtol=1e-5)
        chosen.add(best)
    assert 4 in chosen
    assert len(chosen) > 1


def test_only_the_normalizer_moves():
    model, objective, images = make("2-D")
    adapter = Adapter(model, objective, Fixed(0.1))
    adapter.step(images[0])
    assert all(name.startswith("image_normalizer.") for name in adapter.adapted_parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(adapter.model.state_dict()[name], value)
    assert not torch.equal(adapter.model.image_normalizer.layers[0].weight, objective.normalizer.layers[0].weight)


@pytest.mark.parametrize("mode", ["continual", "image-specific"])
def test_a_stream_resumes_bit_for_bit(mode):
    images = make("2-D")[2]

    def build():
        model, objective, _ = make("2-D", every=2)
        return Adapter(model, objective, Fixed(1e-2), optimizer=torch.optim.Adam, steps=3, mode=mode)

    whole = build()
    expected = [whole(x) for x in images]
    for stop in range(len(images)):
        first, second = build(), build()
        for x in images[:stop]:
            first.step(x)
        second.step(images[-1])
        second.load_state_dict(first.state_dict())
        assert torch.equal(second.predict(images[-1]), first.predict(images[-1]))
        assert all(torch.equal(second(x), y) for x, y in zip(images[stop:], expected[stop:], strict=True))
    whole.reset()
    assert torch.equal(whole(images[0]), expected[0])


def test_a_step_that_fails_leaves_the_best_parameters_of_before():
    model, objective, images = make("2-D")
    adapter = Adapter(model, objective, Fixed(0.1))
    adapter.step(images[0])
    before = adapter.predict(images[2])
    adapter.rate = lambda signals: math.nan
    with pytest.raises(NonFiniteError):
        adapter.step(images[1])
    assert torch.equal(adapter.predict(images[2]), before)


@pytest.mark.parametrize("rate", [Proportional(0.1), Aligned(0.1)])
def test_other_rates_run_on_top(rate):
    model, objective, images = make("2-D")
    memory = MemoryBank(capacity=2, neighbors=1, ready="neighbors") if isinstance(rate, Proportional) else None
    adapter = Adapter(model, objective, rate, memory=memory)
    assert [adapter.step(x) for x in images][-1].rate > 0


def test_batch_statistics_are_a_choice():
    model, objective, images = make("2-D")
    _, other, _ = make("2-D", statistics=BATCH_STATISTICS)
    plain, batch = (Adapter(model, each, Fixed(0.0))(images[0]) for each in (objective, other))
    assert not torch.allclose(plain, batch, atol=1e-3)


def test_what_the_denoiser_does_not_know_is_refused():
    _, objective, images = make("2-D")
    with pytest.raises(InputError, match="knows 2-D segmentations of 3 classes, the network gives"):
        Adapter(trained(networks.Classifier()), objective, Fixed(0.1)).step(images[0])
    with pytest.raises(InputError, match="of 3 classes"):
        Adapter(trained(networks.Segmenter(classes=4)), objective, Fixed(0.1)).step(images[0])


def test_a_network_with_a_normalizer_in_front_needs_no_other():
    model, objective, images = make("2-D")
    behind = copy.deepcopy(model)
    insert_in_front(behind, "image_normalizer", copy.deepcopy(objective.normalizer))
    given, found = Adapter(model, objective, Fixed(0.1)), Adapter(behind, DTTA(objective.denoiser), Fixed(0.1))
    for x in images:
        assert torch.equal(given(x), found(x))
    with pytest.raises(NothingToAdaptError, match="DTTA finds no image normalizer in front of Segmenter"):
        Adapter(model, DTTA(objective.denoiser), Fixed(0.1))


def test_wrong_settings_are_refused():
    with pytest.raises(SettingError, match="every"):
        DTTA(Denoiser(2, 3, (3, 4)), every=0)
    with pytest.raises(SettingError, match="normalizer is for 3-D images, the denoiser for 2-D"):
        DTTA(Denoiser(2, 3, (3, 4)), ImageNormalizer(3, 1))
