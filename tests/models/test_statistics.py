"""Normalization between source and test statistics, against numpy."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import networks
from dltta import Adapter, Fixed
from dltta.errors import SettingError
from dltta.models.normalization import use_test_statistics
from dltta.models.statistics import (
    Blended,
    InstanceStatistics,
    Moments,
    Pooled,
    Running,
    Shrinkage,
    batch_moments,
    excess,
    image_moments,
    stateful_layers,
)
from dltta.objectives import PTBN, Tent
from networks import stream, trained


def layer(eps=0.5):
    norm = nn.BatchNorm2d(2, eps=eps).eval()
    norm.running_mean.copy_(torch.tensor([1.0, -2.0]))
    norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, -1.0]))
        norm.bias.copy_(torch.tensor([0.5, 3.0]))
    return norm


def normalized(x, mean, variance, norm):
    """By loops over channels."""
    out = np.empty_like(x)
    for c in range(x.shape[1]):
        scale, shift = norm.weight[c].item(), norm.bias[c].item()
        out[:, c] = (x[:, c] - mean[c]) / np.sqrt(variance[c] + norm.eps) * scale + shift
    return out


def run(statistics, x):
    model = nn.Sequential(layer())
    use_test_statistics(model, statistics)
    with torch.no_grad():
        return model(x)


IMAGE = torch.randn(3, 2, 4, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_blend_mixes_mean_and_variance(weight):
    x = IMAGE.numpy()
    mean = (1 - weight) * np.array([1.0, -2.0]) + weight * x.mean((0, 2, 3))
    variance = (1 - weight) * np.array([4.0, 0.25]) + weight * x.var((0, 2, 3))
    np.testing.assert_allclose(run(Blended(weight), IMAGE), normalized(x, mean, variance, layer()), rtol=1e-5)


def test_a_weight_beyond_the_image_is_refused():
    with pytest.raises(SettingError, match="between 0 and 1, got 1.5"):
        Blended(1.5)


def moments(mean=(1.0, -2.0), spread=(0.5, 0.5), log_variance=(1.5, -0.3), log_spread=(0.2, 0.1)):
    return {"0": Moments(*(torch.tensor(values) for values in (mean, spread, log_variance, log_spread)))}


def test_shrinkage_follows_the_part_of_the_shift_that_chance_does_not_explain():
    x = IMAGE.double().numpy()
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    moved = mean - np.array([1.0, -2.0])
    widened = np.log(variance + 0.5) - np.array([1.5, -0.3])
    w_mean = max(0, 1 - 2 / sum((moved[c] / 0.5) ** 2 for c in range(2)))
    w_variance = max(0, 1 - 2 / sum((widened[c] / s) ** 2 for c, s in enumerate((0.2, 0.1))))
    assert 0 < w_mean < 1
    assert 0 < w_variance < 1
    new_mean = np.array([1.0, -2.0]) + w_mean * moved
    new_variance = (np.array([4.0, 0.25]) + 0.5) * np.exp(w_variance * widened) - 0.5
    np.testing.assert_allclose(
        run(Shrinkage(moments()), IMAGE), normalized(x, new_mean, new_variance, layer()), rtol=1e-4
    )


def test_an_ordinary_source_image_is_normalized_as_by_the_source():
    wide = moments(mean=(1.0, 1.0), spread=(9.0, 9.0), log_variance=(2.0, 2.0), log_spread=(9.0, 9.0))
    torch.testing.assert_close(run(Shrinkage(wide), IMAGE), layer()(IMAGE).detach())


def test_a_far_shift_is_followed_entirely():
    far = IMAGE * 40 + 1000
    narrow = moments(spread=(1e-3, 1e-3), log_spread=(1e-3, 1e-3), log_variance=(np.log(4.5), np.log(0.75)))
    model = nn.Sequential(layer())
    use_test_statistics(model)
    torch.testing.assert_close(run(Shrinkage(narrow), far), model(far).detach(), rtol=1e-3, atol=1e-3)


def test_shrinkage_trusts_the_mean_of_several_images_more():
    window, fading = 4, 1 - 1 / 4
    model = nn.Sequential(layer())
    use_test_statistics(model, Shrinkage(moments(), window))
    images, moved, widened = 0.0, np.zeros(2), np.zeros(2)
    for scale in (1.0, 0.9, 1.1, 1.0):
        x = (IMAGE * scale).double().numpy()
        images = fading * images + 1
        moved = fading * moved + x.mean((0, 2, 3)) - np.array([1.0, -2.0])
        widened = fading * widened + np.log(x.var((0, 2, 3)) + 0.5) - np.array([1.5, -0.3])
        d, u = moved / images, widened / images
        w_mean = max(0, 1 - 2 / (images * sum((d[c] / 0.5) ** 2 for c in range(2))))
        w_variance = max(0, 1 - 2 / (images * sum((u[c] / s) ** 2 for c, s in enumerate((0.2, 0.1)))))
        mean = np.array([1.0, -2.0]) + w_mean * d
        variance = (np.array([4.0, 0.25]) + 0.5) * np.exp(w_variance * u) - 0.5
        with torch.no_grad():
            found = model(IMAGE * scale)
            model[0].commit()
        np.testing.assert_allclose(found, normalized(x, mean, variance, layer()), rtol=1e-3, atol=1e-4)


def test_a_pass_that_is_not_stream_leaves_no_trace():
    model = nn.Sequential(layer())
    use_test_statistics(model, Shrinkage(moments()))
    with torch.no_grad():
        first = model(IMAGE)
        model(IMAGE * 7)
        assert torch.equal(model(IMAGE), first)


def test_excess_by_hand():
    assert excess(torch.tensor([3.0, 1.0])).item() == pytest.approx(1 - 2 / 10)
    assert excess(torch.tensor([3.0, 1.0]), 4.0).item() == pytest.approx(1 - 2 / 40)
    assert excess(torch.tensor([0.5, 0.5])).item() == 0


def test_unknown_layer_is_refused_at_construction():
    with pytest.raises(SettingError, match="knows nothing of layer '0'"):
        use_test_statistics(nn.Sequential(layer()), Shrinkage({}))


def test_running_statistics_remember_the_stream_and_return_with_reset():
    model = trained(networks.Segmenter())
    before = copy.deepcopy(model.state_dict())
    adapter = Adapter(model, PTBN(Running(0.5)))
    first, second = stream((1, 1, 8, 8), 2)
    logits = adapter(second)
    adapter.reset()
    adapter(first)
    assert not torch.equal(adapter(second), logits)
    adapter.reset()
    assert torch.equal(adapter(second), logits)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_running_statistics_by_hand():
    model = nn.Sequential(layer())
    use_test_statistics(model, Running(0.25))
    mean, variance = np.array([1.0, -2.0]), np.array([4.0, 0.25])
    for x in (IMAGE, IMAGE * 2, IMAGE - 1):
        mean = mean + 0.25 * (x.numpy().mean((0, 2, 3)) - mean)
        variance = variance + 0.25 * (x.numpy().var((0, 2, 3)) - variance)
        with torch.no_grad():
            found = model(x)
            model[0].commit()
        np.testing.assert_allclose(found, normalized(x.numpy(), mean, variance, layer()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("statistics", [Blended(0.5), Running(0.1)])
def test_tent_adapts_with_any_statistics_and_resumes(statistics):
    model = trained(networks.Segmenter())
    images = stream((1, 1, 8, 8), 4)
    whole = Adapter(model, Tent(statistics), Fixed(0.1))
    expected = [whole(x) for x in images]
    part = Adapter(model, Tent(statistics), Fixed(0.1))
    for x in images[:2]:
        part(x)
    resumed = Adapter(model, Tent(statistics), Fixed(0.1))
    resumed.load_state_dict(part.state_dict())
    assert all(torch.equal(resumed(x), y) for x, y in zip(images[2:], expected[2:], strict=True))


def test_own_statistics_do_not_depend_on_the_company():
    model = nn.Sequential(layer())
    use_test_statistics(model, InstanceStatistics())
    batch = torch.cat([IMAGE, IMAGE * 7 - 3])
    found = model(batch).detach()
    for i, x in enumerate(batch.numpy()):
        expected = normalized(x[None], x.mean((1, 2)), x.var((1, 2)), layer())
        np.testing.assert_allclose(found[i : i + 1], expected, rtol=1e-4, atol=1e-5)


def test_a_single_position_has_no_statistics_of_its_own():
    model = nn.Sequential(layer())
    use_test_statistics(model, InstanceStatistics())
    x = torch.rand(2, 2, 1, 1)
    torch.testing.assert_close(model(x), layer()(x))


def test_pooled_statistics_are_those_of_the_image_and_its_nearest_together():
    model = nn.Sequential(nn.BatchNorm2d(1, affine=False))
    use_test_statistics(model, Pooled(capacity=3, neighbors=1))
    dark, bright = ([0.0, 2.0], [1.0, 3.0]), ([100.0, 104.0], [101.0, 105.0])

    def given(values):
        found = model(torch.tensor(values).view(1, 1, 1, 2)).flatten().tolist()
        for layer in stateful_layers(model):
            layer.commit()
        return found

    def normalized(values, pool):
        pool = np.array(pool)
        return ((np.array(values) - pool.mean()) / np.sqrt(pool.var() + 1e-5)).tolist()

    assert given(dark[0]) == pytest.approx(normalized(dark[0], dark[0]), abs=1e-5)  # nothing before it
    assert given(bright[0]) == pytest.approx(normalized(bright[0], [*bright[0], *dark[0]]), abs=1e-5)
    assert given(dark[1]) == pytest.approx(normalized(dark[1], [*dark[1], *dark[0]]), abs=1e-5)  # not the bright one
    assert given(bright[1]) == pytest.approx(normalized(bright[1], [*bright[1], *bright[0]]), abs=1e-4)
    assert given(dark[0]) == pytest.approx(normalized(dark[0], [*dark[0], *dark[1]]), abs=1e-5)  # the first has left


def test_more_neighbors_than_are_kept_are_refused():
    with pytest.raises(SettingError, match="between 1 and the capacity of 4, got 5"):
        Pooled(capacity=4, neighbors=5)


@pytest.mark.parametrize("shape", [(2, 3, 8, 16), (1, 2, 6, 5, 4), (7, 3)])
def test_moments_are_exact_where_the_mean_is_a_thousand_times_the_spread(shape):
    x = 1000 + torch.randn(shape, generator=torch.Generator().manual_seed(0))
    mean, variance = batch_moments(x)
    axes = (0, *range(2, x.ndim))
    values = x.double().numpy()
    np.testing.assert_allclose(mean.numpy(), values.mean(axes), rtol=1e-6)
    np.testing.assert_allclose(variance.numpy(), values.var(axes), rtol=1e-4)  # E[x²] − E[x]² is off by percents


@pytest.mark.parametrize("shape", [(2, 3, 8, 16), (1, 2, 6, 5, 4), (1, 3, 170, 150), (2, 2, 20, 30, 40)])
def test_moments_with_channels_last_are_those_of_all_values(shape):
    """More positions than a piece has, and a rest: 25,500 and 48,000."""
    spatial = {4: torch.channels_last, 5: torch.channels_last_3d}[len(shape)]
    x = (5 + 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(memory_format=spatial)
    x[-1, :, -1] += 7  # the rest differs from what is before it
    axes = (0, *range(2, x.ndim))
    mean, variance = batch_moments(x)
    values = x.double().numpy()
    np.testing.assert_allclose(mean.numpy(), values.mean(axes), rtol=3e-6)
    np.testing.assert_allclose(variance.numpy(), values.var(axes), rtol=1e-5)
    for one, image in zip(zip(*image_moments(x), strict=True), values, strict=True):
        own = tuple(range(1, image.ndim))
        np.testing.assert_allclose(one[0].numpy(), image.mean(own), rtol=3e-6)
        np.testing.assert_allclose(one[1].numpy(), image.var(own), rtol=1e-5)


def test_moments_of_a_single_row_have_no_variance():
    mean, variance = batch_moments(torch.tensor([[1.0, 2.0]]))
    assert mean.tolist() == [1.0, 2.0]
    assert variance.tolist() == [0.0, 0.0]
