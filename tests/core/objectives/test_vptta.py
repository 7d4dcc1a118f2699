"""VPTTA: prompt, warm-up and memory by hand, a stream against one written out, contract, resuming, refusals."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch

import networks
from dltta import Adapter, Aligned, Fixed, MemoryBank, Proportional
from dltta.core.layer_rates import LAW, PALM
from dltta.core.objectives.vptta import VPTTA
from dltta.core.update import before_batch
from dltta.errors import InputError, NonFiniteError, NothingToAdaptError, SettingError
from dltta.models.parts.prompt import FrequencyPrompt
from dltta.testing import check_objective
from networks import stream, trained

NETWORKS = {
    "2-D": (lambda: networks.Segmenter(2), (1, 1, 8, 8)),
    "2-D not square": (lambda: networks.Segmenter(2, channels=2), (2, 2, 8, 12)),
    "sigmoid": (lambda: networks.Segmenter(2, classes=1), (1, 1, 8, 8)),
    "3-D": (lambda: networks.Segmenter(3), (2, 1, 8, 8, 4)),
    "classification": (networks.Classifier, (3, 1, 8, 8)),
}
ADAM = partial(torch.optim.Adam, betas=(0.9, 0.99))


def small(**settings):
    """A memory that is ready soon, a prompt of a few frequencies on small images."""
    return VPTTA(**{"fraction": 0.4, "capacity": 3, "neighbors": 2, "largest": 5, **settings})


# the prompt


def slow_prompt(x, factors, sides):
    """Amplitude times factors around zero frequency, phase kept; by numpy, image by image."""
    result = np.zeros_like(x)
    for b in range(x.shape[0]):
        for c in range(x.shape[1]):
            transform = np.fft.fftshift(np.fft.fftn(x[b, c]))
            amplitude, phase = np.abs(transform), np.angle(transform)
            for index in np.ndindex(*sides):
                place = tuple(n // 2 - s // 2 + i for n, s, i in zip(x.shape[2:], sides, index, strict=True))
                inner = tuple(f // 2 - s // 2 + i for f, s, i in zip(factors.shape[1:], sides, index, strict=True))
                amplitude[place] *= factors[(c, *inner)]
            result[b, c] = np.fft.ifftn(np.fft.ifftshift(amplitude * np.exp(1j * phase))).real
    return result


@pytest.mark.parametrize(
    ("shape", "sides"), [((2, 3, 10, 15), (2, 3)), ((1, 1, 8, 9, 20), (1, 1, 4)), ((1, 2, 40, 5), (5, 1))]
)
def test_the_prompt_agrees_with_numpy(shape, sides):
    prompt = FrequencyPrompt(len(shape) - 2, shape[1], fraction=0.2, largest=5).double()
    x = torch.randn(shape, dtype=torch.float64)
    assert torch.equal(prompt(x), x)  # ones
    with torch.no_grad():
        prompt.factors.copy_(torch.randn(prompt.factors.shape))
        assert prompt.amplitude(x).shape == (*shape[:2], *sides)
        wanted = torch.from_numpy(slow_prompt(x.numpy(), prompt.factors.numpy(), sides))
        torch.testing.assert_close(prompt(x), wanted)


def test_a_single_frequency_scales_the_mean_by_hand():
    prompt = FrequencyPrompt(2, 1, fraction=0.01, largest=16)
    with torch.no_grad():
        prompt.factors.fill_(3.0)
    x = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]]]])  # mean 3
    torch.testing.assert_close(prompt(x), x + 6)
    assert prompt.amplitude(x).flatten().tolist() == [12.0]


@pytest.mark.parametrize(("side", "number"), [(512, 5), (352, 3), (199, 1), (32, 1), (3000, 16)])
def test_the_published_sides(side, number):
    prompt = FrequencyPrompt(2, 3, fraction=VPTTA().fraction, largest=VPTTA().largest)
    assert prompt.amplitude(torch.zeros(1, 3, side, 8)).shape[2:] == (number, 1)


# warm-up and memory


@pytest.mark.parametrize(("images", "share"), [(1, 5 / 6), (25, 0.5), (100, 1 / 3)])
def test_warm_up_by_hand(images, share):
    objective = VPTTA()
    objective._progress.images = images
    assert objective._progress.share == pytest.approx(share)


def test_a_prompt_starts_from_its_nearest_by_hand():
    objective = VPTTA(capacity=3, neighbors=2, temperature=0.2, largest=1)
    objective.keys = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([3.0, 4.0])]
    objective.prompts = [torch.tensor([[[1.0]]]), torch.tensor([[[5.0]]]), torch.tensor([[[2.0]]])]
    cosines = [1.0, 0.6]  # of the first and the third; the second is orthogonal
    w = math.exp(cosines[0] / 0.2) / (math.exp(cosines[0] / 0.2) + math.exp(cosines[1] / 0.2))
    found = objective.start(torch.tensor([1.0, 0.0]))
    assert found.item() == pytest.approx(w * 1 + (1 - w) * 2, abs=1e-6)
    assert objective.start(torch.tensor([1.0])) is None  # no image of this size is known


def test_the_oldest_prompt_is_forgotten_and_several_steps_make_one():
    images = stream((1, 1, 8, 8), 5)
    adapter = Adapter(trained(networks.Segmenter()), small(), Fixed(0.1), steps=3)
    keys = []
    for number, x in enumerate(images):
        adapter.step(x)
        keys.append(torch.fft.fftn(x[0, 0]).abs()[0, 0].item())  # zero frequency, the middle of 3 × 3
        assert len(adapter.objective.keys) == len(adapter.objective.prompts) == min(number + 1, 3)
        assert torch.equal(adapter.objective.prompts[-1], adapter.adapted_parameters()["frequency_prompt.factors"])
    found = [key.view(3, 3)[1, 1].item() for key in adapter.objective.keys]
    assert found == pytest.approx(keys[-3:], rel=1e-5)


# a step


def slow_norm(layer, values, share):
    """Normalized values and the layer's part of the loss, channel by channel."""
    result, distance = torch.zeros_like(values), torch.zeros((), dtype=values.dtype)
    channels = values.shape[1]
    deviations = torch.zeros((), dtype=values.dtype)
    for c in range(channels):
        mine = values[:, c]
        mean = mine.sum() / mine.numel()
        variance = ((mine - mean) ** 2).sum() / (mine.numel() - 1)
        mixed = share * mean.detach() + (1 - share) * layer.running_mean[c]
        spread = share * variance.detach() + (1 - share) * layer.running_var[c]
        distance = distance + (mixed - mean).abs() / channels
        deviations = deviations + (spread.sqrt() - variance.sqrt()).abs() / channels
        result[:, c] = (mine - mixed) / (spread + layer.eps).sqrt() * layer.weight[c] + layer.bias[c]
    return result, distance + deviations


def slow_forward(model, x, factors, sides, share):
    """Logits and loss of `networks.Segmenter` or `networks.Classifier` under a prompt."""
    axes = tuple(range(2, x.ndim))
    transform = torch.fft.fftshift(torch.fft.fftn(x, dim=axes), dim=axes)
    whole = torch.ones(x.shape[1:], dtype=x.dtype)
    place = [slice(n // 2 - s // 2, n // 2 - s // 2 + s) for n, s in zip(x.shape[2:], sides, strict=True)]
    inner = [slice(f // 2 - s // 2, f // 2 - s // 2 + s) for f, s in zip(factors.shape[1:], sides, strict=True)]
    whole[(slice(None), *place)] = factors[(slice(None), *inner)]
    changed = transform.abs() * whole * torch.exp(1j * transform.angle())
    x = torch.fft.ifftn(torch.fft.ifftshift(changed, dim=axes), dim=axes).real
    x, first = slow_norm(model.encoder[1], model.encoder[0](x), share)
    x = model.encoder[3](torch.tanh(x))
    if not hasattr(model, "bottleneck"):
        return model.head(x.mean((2, 3))), first
    x, second = slow_norm(model.bottleneck[1], model.bottleneck[0](x), share)
    return model.head(model.up(torch.tanh(x))), (first + second) / 2


def slow_stream(model, images, rate, *, largest, fraction, capacity, neighbors):
    """Losses and logits of a stream with gradient descent, from the facts; memory as plain lists."""
    model = copy.deepcopy(model).double()
    memory, seen, results = [], 0, []
    for x in images:
        x = x.double()
        seen += len(x)
        share = 1 / (math.sqrt(seen) / 5 + 1)
        sides = tuple(min(largest, max(1, int(fraction * n))) for n in x.shape[2:])
        low = torch.fft.fftshift(torch.fft.fftn(x, dim=tuple(range(2, x.ndim))), dim=tuple(range(2, x.ndim))).abs()
        place = [slice(n // 2 - s // 2, n // 2 - s // 2 + s) for n, s in zip(x.shape[2:], sides, strict=True)]
        key = low[(..., *place)].mean(0).flatten().numpy()
        factors = torch.ones(x.shape[1], *[largest] * (x.ndim - 2), dtype=torch.float64)
        if len(memory) >= neighbors:
            near = sorted(
                ((float(k @ key / np.linalg.norm(k) / np.linalg.norm(key)), v) for k, v in memory),
                key=lambda pair: -pair[0],
            )[:neighbors]
            powers = [math.exp(c / 0.2) for c, _ in near]
            factors = sum(w / sum(powers) * v for w, (_, v) in zip(powers, near, strict=True))
        factors = factors.clone().requires_grad_(True)
        _, loss = slow_forward(model, x, factors, sides, share)
        (slope,) = torch.autograd.grad(loss, factors)
        factors = factors.detach() - rate * slope
        memory = [*memory, (key, factors)][-capacity:]
        with torch.no_grad():
            results.append((loss.item(), slow_forward(model, x, factors, sides, share)[0].float()))
    return results


@pytest.mark.parametrize("name", NETWORKS)
def test_a_stream_agrees_with_one_written_out(name):
    build, shape = NETWORKS[name]
    model, images = trained(build()), stream(shape, 5)
    adapter = Adapter(model, small(), Fixed(0.5))
    wanted = slow_stream(model, images, 0.5, largest=5, fraction=0.4, capacity=3, neighbors=2)
    for x, (loss, logits) in zip(images, wanted, strict=True):
        step = adapter.step(x)
        assert step.loss == pytest.approx(loss, abs=1e-5)
        torch.testing.assert_close(step.logits, logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_vptta_keeps_the_contract(name):
    build, shape = NETWORKS[name]
    check_objective(small(), trained(build()), stream(shape, 1)[0])


def test_the_loss_falls_and_the_network_stays():
    model = trained(networks.Segmenter())
    x = stream((1, 1, 8, 8), 1)[0] + 4  # much brighter than the source
    adapter = Adapter(model, small(), Fixed(0.02), steps=20)
    losses = [update.loss for update in adapter.step(x).updates]
    assert losses[-1] < 0.8 * losses[0]
    assert set(adapter.adapted_parameters()) == {"frequency_prompt.factors"}
    for name, value in model.state_dict().items():
        assert torch.equal(adapter.model.state_dict()[name], value)


def test_a_stream_resumes_bit_for_bit_at_every_point():
    images = stream((1, 1, 8, 8), 6)

    def make():
        return Adapter(trained(networks.Segmenter()), small(), Fixed(0.05), optimizer=ADAM)

    whole = make()
    expected = [whole(x) for x in images]
    for stop in range(len(images)):
        first, second = make(), make()
        for x in images[:stop]:
            first.step(x)
        second.step(images[-1])
        second.load_state_dict(first.state_dict())
        assert torch.equal(second.predict(images[-1]), first.predict(images[-1]))
        assert all(torch.equal(second(x), y) for x, y in zip(images[stop:], expected[stop:], strict=True))
    whole.reset()
    assert torch.equal(whole(images[0]), expected[0])


def test_a_step_that_fails_is_neither_counted_nor_remembered():
    images = stream((1, 1, 8, 8), 2)
    adapter = Adapter(trained(networks.Segmenter()), small(), Fixed(0.05))
    adapter.step(images[0])
    before = copy.deepcopy(adapter.state_dict())
    adapter.rate = lambda signals: math.nan
    with pytest.raises(NonFiniteError):
        adapter.step(images[1])
    after = adapter.state_dict()
    assert after["_extra_state"]["objective"]["images"] == 1
    assert len(after["_extra_state"]["objective"]["keys"]) == 1
    name = "model.frequency_prompt.factors"
    assert torch.equal(after[name], before[name])


def test_images_of_other_sizes_share_the_stream_but_not_their_keys():
    adapter = Adapter(trained(networks.Segmenter()), small(neighbors=1), Fixed(0.5))
    adapter.step(torch.rand(1, 1, 8, 8))
    moved = adapter.adapted_parameters()["frequency_prompt.factors"].detach().clone()
    before_batch(adapter.objective, adapter.model, torch.rand(1, 1, 12, 8))
    assert (adapter.adapted_parameters()["frequency_prompt.factors"] == 1).all()
    before_batch(adapter.objective, adapter.model, torch.rand(1, 1, 8, 8))
    torch.testing.assert_close(adapter.adapted_parameters()["frequency_prompt.factors"].detach(), moved)


@pytest.mark.parametrize("rate", [Proportional(0.1), Aligned(0.1), LAW(0.1), PALM(0.1, limit=100.0)])
def test_other_rates_run_on_top(rate):
    memory = MemoryBank(capacity=2, neighbors=1, ready="neighbors") if isinstance(rate, Proportional) else None
    adapter = Adapter(trained(networks.Segmenter()), small(), rate, memory=memory)
    steps = [adapter.step(x) for x in stream((1, 1, 8, 8), 3)]
    assert steps[-1].rate > 0


@pytest.mark.parametrize("rate", [Fixed(0.1), Aligned(0.1), LAW(0.1), PALM(0.1)])
def test_no_graph_outlives_a_step(rate):
    adapter = Adapter(trained(networks.Segmenter()), small(), rate, predict="before")
    adapter.step(stream((1, 1, 8, 8), 1)[0])
    again = copy.deepcopy(adapter.model)  # torch refuses to copy what is part of a graph
    assert all(layer.take() is None for layer in again.modules() if hasattr(layer, "take"))


def test_a_network_that_is_a_sequence_of_layers_runs_the_prompt_first_and_once():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1), torch.nn.BatchNorm2d(3)).eval()
    adapter = Adapter(model, small(), Fixed(0.0))
    x = torch.rand(2, 1, 8, 8)
    factors = adapter.adapted_parameters()["frequency_prompt.factors"]
    with torch.no_grad():
        factors[:, 2, 2] = 2.0  # zero frequency: the mean is added once more
        doubled = adapter.model(x)
        factors.fill_(1.0)
        torch.testing.assert_close(doubled, adapter.model(x + x.mean((2, 3), keepdim=True)))


def test_a_constant_channel_gives_a_finite_gradient():
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 1), torch.nn.BatchNorm2d(3))
    with torch.no_grad():
        model[0].weight[1] = 0.0
    step = Adapter(model, small(), Fixed(0.1)).step(torch.rand(1, 1, 8, 8))
    assert step.logits.isfinite().all()


# refusals


@pytest.mark.parametrize("kind", ["instance", "group"])
def test_a_network_without_stored_statistics_is_refused(kind):
    with pytest.raises(NothingToAdaptError, match="VPTTA finds no statistics of the source in Segmenter"):
        Adapter(networks.Segmenter(kind=kind), VPTTA(), Fixed(0.1))


def test_a_network_without_convolution_needs_to_be_told_what_images_are_like():
    model = torch.nn.Sequential(
        torch.nn.Flatten(2), torch.nn.BatchNorm1d(2), torch.nn.Flatten(), torch.nn.Linear(32, 3)
    )
    with pytest.raises(SettingError, match="give channels and spatial_dims"):
        Adapter(model, VPTTA(), Fixed(0.1))
    adapter = Adapter(model.eval(), VPTTA(channels=2, spatial_dims=2), Fixed(0.1))
    assert adapter(torch.rand(1, 2, 4, 4)).shape == (1, 3)


def test_images_of_another_form_are_refused():
    adapter = Adapter(trained(networks.Segmenter()), VPTTA(), Fixed(0.1))
    with pytest.raises(InputError, match="the prompt is for 2-D images of 1 channels"):
        adapter.step(torch.rand(1, 2, 8, 8))


def test_wrong_settings_are_refused():
    for settings in ({"fraction": 0.0}, {"neighbors": 41}, {"temperature": 0.0}, {"largest": 0}, {"warmup": -1.0}):
        with pytest.raises(SettingError):
            VPTTA(**settings)
