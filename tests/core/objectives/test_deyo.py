"""DeYO: blocks in another order, the probability that is lost with the shape, and steps written out."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import behaviors
import networks
import slow
from dltta import Adapter, Fixed
from dltta.core.objectives.deyo import DeYO, rearranged
from dltta.errors import InputError, NothingToAdaptError, SettingError
from dltta.models.statistics import Running
from networks import decisive, stream, trained


def share(z):
    return 1 / (1 + math.exp(-z))


def h(z):
    """Entropy of the logits (0, z)."""
    return -share(z) * math.log(share(z)) - share(-z) * math.log(share(-z))


# blocks


def test_blocks_get_their_places_by_hand():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    found = rearranged(x, (2, 2), torch.tensor([[3, 0, 1, 2]]))
    expected = [[10, 11, 0, 1], [14, 15, 4, 5], [2, 3, 8, 9], [6, 7, 12, 13]]
    assert found[0, 0].tolist() == expected
    assert torch.equal(rearranged(found, (2, 2), torch.tensor([[3, 0, 1, 2]]).argsort(1)), x)


@pytest.mark.parametrize(("shape", "cuts"), [((2, 3, 8, 4), (4, 2)), ((2, 1, 4, 6, 8), (2, 3, 4)), ((3, 2, 12), (4,))])
def test_blocks_equal_a_loop_over_places(shape, cuts):
    x = torch.randn(shape)
    order = torch.stack([torch.randperm(math.prod(cuts)) for _ in range(shape[0])])
    found = rearranged(x, cuts, order).numpy()
    sides = [side // cut for side, cut in zip(shape[2:], cuts, strict=True)]
    expected = np.zeros(shape, np.float32)
    for b in range(shape[0]):
        for place, index in enumerate(np.ndindex(*cuts)):
            origin = np.unravel_index(int(order[b, place]), cuts)
            to = tuple(slice(i * s, (i + 1) * s) for i, s in zip(index, sides, strict=True))
            of = tuple(slice(i * s, (i + 1) * s) for i, s in zip(origin, sides, strict=True))
            expected[(b, slice(None), *to)] = x.numpy()[(b, slice(None), *of)]
    assert np.array_equal(found, expected)


def test_sides_that_cannot_be_cut_evenly_are_resized_and_back():
    x = torch.linspace(0, 1, 10).expand(1, 1, 9, 10)
    found = rearranged(x, (4, 4), torch.arange(16)[None])
    assert found.shape == x.shape
    torch.testing.assert_close(found, x, atol=0.06, rtol=0)
    assert rearranged(torch.randn(1, 2, 2, 2), (4, 4), torch.arange(16)[None]).shape == (1, 2, 2, 2)


# by hand


class Corner(nn.Module):
    """Logits (0, w z) where z is the mean of the first block of 4 × 4."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.GroupNorm(1, 1)

    def forward(self, x):
        z = x[:, :, :2, :2].mean((2, 3)) * self.norm1.weight + 0 * self.norm1.bias
        return torch.cat([0 * z, z], 1)


def corner(z, elsewhere=0.0):
    x = torch.full((1, 1, 8, 8), elsewhere)
    x[:, :, :2, :2] = z
    return x


def order(images, blocks=16, seed=0):
    return torch.rand(images, blocks, generator=torch.Generator().manual_seed(seed)).argsort(1)


def moving_seed():
    """A seed whose first order moves another block into the corner."""
    return next(seed for seed in range(9) if order(1, seed=seed)[0, 0] != 0)


def loss(x, **settings):
    objective, model = DeYO(**{"seed": moving_seed(), **settings}), Corner()
    objective.prepare(model)
    return objective(model, x, model(x))


def test_the_loss_of_a_certain_prediction_that_the_shape_carries_by_hand():
    plpd = share(4) - 0.5
    assert plpd == pytest.approx(0.482014, abs=1e-6)
    weight = math.exp(0.4 * math.log(2) - h(4)) + math.exp(plpd)
    assert weight == pytest.approx(1.205824 + 1.619333, abs=1e-5)
    assert loss(corner(4.0)).item() == pytest.approx(weight * h(4), abs=1e-6)


def test_a_prediction_that_does_not_need_the_shape_does_not_count():
    assert not loss(corner(4.0, elsewhere=4.0)).requires_grad  # PLPD 0
    assert loss(corner(4.0, elsewhere=4.0), threshold=-0.1).requires_grad


@pytest.mark.parametrize(("threshold", "counts"), [(0.4819, True), (0.4821, False)])
def test_the_threshold_is_of_the_lost_probability(threshold, counts):
    assert loss(corner(4.0), threshold=threshold).requires_grad == counts


@pytest.mark.parametrize(("certain", "counts"), [(h(4) / math.log(2) + 1e-4, True), (h(4) / math.log(2) - 1e-4, False)])
def test_uncertain_predictions_do_not_count(certain, counts):
    assert loss(corner(4.0), certain=certain).requires_grad == counts


def test_only_images_that_may_count_are_cut_up():
    seen = []

    class Watching(Corner):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    objective, model = DeYO(seed=moving_seed()), Watching()
    objective.prepare(model)
    x = torch.cat([corner(0.1), corner(4.0), corner(0.2)])
    assert objective(model, x, model(x)).requires_grad
    assert seen == [3, 1]


class Pointwise(nn.Module):
    """Dense: logits (0, w x) of each position."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.GroupNorm(1, 1)

    def forward(self, x):
        z = x * self.norm1.weight + 0 * self.norm1.bias
        return torch.cat([torch.zeros_like(z), z], 1)


def test_positions_of_background_do_not_count_and_blocks_are_put_back_by_hand():
    """A network that looks at each position alone loses nothing once the blocks are back in their places."""

    x = torch.full((1, 1, 8, 8), -5.0)
    x[..., 2:5, 3] = torch.tensor([5.0, 4.0, 0.1])
    for threshold, counts in ((-1e-4, True), (1e-4, False)):
        objective, model = DeYO(threshold=threshold), Pointwise()
        objective.prepare(model)
        found = objective(model, x, model(x))
        assert found.requires_grad == counts
        if counts:  # the two certain positions of the foreground, with PLPD 0
            weighed = [(math.exp(0.4 * math.log(2) - h(z)) + 1) * h(z) for z in (5.0, 4.0)]
            assert found.item() == pytest.approx(sum(weighed) / 2, abs=1e-6)


def test_without_a_shape_there_is_nothing_to_destroy():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1 = nn.LayerNorm(2)

        def forward(self, x):
            return 9 * self.norm1(x)

    with pytest.raises(InputError, match="1 to 3 spatial axes"):
        Adapter(Flat(), DeYO(), Fixed(0.1)).step(torch.tensor([[1.0, -1.0]]))


# steps written out


def put(x, of, cuts, back=False):
    """Blocks moved by a loop; `of[place]` is where they come from."""
    out = torch.empty_like(x)
    sides = [side // cut for side, cut in zip(x.shape[1:], cuts, strict=True)]
    for place, index in enumerate(np.ndindex(*cuts)):
        origin = np.unravel_index(int(of[place]), cuts)
        to = (slice(None), *(slice(i * s, (i + 1) * s) for i, s in zip(index, sides, strict=True)))
        fr = (slice(None), *(slice(i * s, (i + 1) * s) for i, s in zip(origin, sides, strict=True)))
        if back:
            to, fr = fr, to
        out[to] = x[fr]
    return out


def slow_deyo(forward, weights, names, images, *, rate, threshold, certain, blocks):
    """Logits after each step, and how many predictions counted."""
    generator, given, counted = torch.Generator().manual_seed(0), [], []
    for x in images:
        x = x.double()
        cuts = [min(blocks, side) for side in x.shape[2:]]
        moving = {name: weights[name].clone().requires_grad_(True) for name in names}
        logits = forward({**weights, **moving}, x)
        dense = logits.ndim > 2
        flat = logits.flatten(2) if dense else logits[..., None]  # (B, C, N)
        candidates = []
        for b in range(len(x)):
            for n in range(flat.shape[2]):
                row = flat[b, :, n]
                value = slow.uncertainty(row)
                chosen = int(slow.shares(row).argmax())
                if value.item() < slow.limit(certain, row) and (not dense or chosen > 0):
                    candidates.append((b, n, value, slow.shares(row).detach(), chosen))
        chosen_images = sorted({b for b, *_ in candidates})
        orders = torch.rand(len(chosen_images), math.prod(cuts), generator=generator).argsort(1)
        mixed = torch.stack([put(x[b], orders[i], cuts) for i, b in enumerate(chosen_images)])
        with torch.no_grad():
            others = forward(weights, mixed)
        terms = []
        for b, n, value, p, best in candidates:
            i = chosen_images.index(b)
            other = put(others[i], orders[i], cuts, back=True).flatten(1)[:, n] if dense else others[i]
            lost = (p[best] - slow.shares(other)[best]).item()
            if lost > threshold:
                weight = math.exp(slow.limit(0.4, flat[b, :, n]) - value.item()) + math.exp(lost)
                terms.append(weight * value)
        counted.append(len(terms))
        (sum(terms) / len(terms)).backward()
        weights = {**weights, **{name: weights[name] - rate * moving[name].grad for name in names}}
        given.append(forward(weights, x))
    return given, counted


CASES = {
    "classes": (networks.Classifier, slow.classifier, ("encoder.1.weight", "encoder.1.bias"), (6, 1, 8, 8), 0.0, 0.9),
    "2-D": (networks.Segmenter, slow.segmenter, slow.NORMS, (2, 1, 8, 8), 0.3, 0.5),
    "2-D instance": (
        lambda: networks.Segmenter(kind="instance"),
        lambda weights, x: slow.segmenter(weights, x, "instance"),
        slow.NORMS,
        (1, 1, 8, 12),
        0.3,
        0.5,
    ),
    "3-D": (lambda: networks.Segmenter(3), slow.segmenter, slow.NORMS, (1, 1, 4, 4, 8), 0.3, 0.5),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_equals_its_slow_reference(case):
    build, forward, names, shape, threshold, certain = CASES[case]
    images = stream(shape, 3, seed=4)
    model = decisive(trained(build()), torch.cat(images)).double()
    settings = {"threshold": threshold, "certain": certain, "blocks": 4}
    ours = Adapter(model, DeYO(**settings), Fixed(0.01))
    given, counted = slow_deyo(forward, slow.weights_of(model), names, images, rate=0.01, **settings)
    assert 0 < sum(counted) < 3 * given[0][:, 0].numel()
    for x, logits in zip(images, given, strict=True):
        torch.testing.assert_close(ours(x), logits, rtol=1e-5, atol=1e-5)


# along a stream


def make(**settings):
    return DeYO(**{"certain": 1.5, "threshold": -0.9, **settings})


@pytest.mark.parametrize("name", behaviors.NETWORKS)
def test_on_any_network(name):
    behaviors.check_networks(make(), name)


@pytest.mark.parametrize("optimizer", behaviors.OPTIMIZERS)
@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_resumes_bit_for_bit(name, optimizer):
    behaviors.check_resumes(make(threshold=0.0), name, optimizer=behaviors.OPTIMIZERS[optimizer])


@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_rolled_back_guarded_and_under_every_rate(name):
    behaviors.check_rolled_back(make(), name)
    behaviors.check_guarded(make(), name)
    behaviors.check_rates(make(), name)


def test_other_statistics():
    behaviors.check_statistics(make)
    behaviors.check_resumes(make(statistics=Running(0.3)), "2-D batch")


def test_another_seed_is_another_order():
    images = stream((1, 1, 8, 8), 3, seed=4)
    one, two = (Adapter(behaviors.network("2-D batch"), make(threshold=0.1, seed=seed), Fixed(0.1)) for seed in (0, 1))
    assert not torch.equal([one(x) for x in images][-1], [two(x) for x in images][-1])


def test_no_step_where_nothing_counts():
    for settings in ({"certain": 1e-6}, {"threshold": 0.999}):
        ours = Adapter(
            behaviors.network("2-D batch"), make(**settings), Fixed(0.1), optimizer=behaviors.OPTIMIZERS["adam"]
        )
        before = [parameter.detach().clone() for parameter in ours.model.parameters()]
        step = ours.step(stream((1, 1, 8, 8), 1)[0])
        assert (step.loss, step.rate) == (0.0, 0.0)
        assert behaviors.same([parameter.detach() for parameter in ours.model.parameters()], before)
        assert not ours.get_extra_state()["optimizer"]["state"]


def test_settings_and_networks_that_cannot_be_used_are_refused():
    for settings in ({"certain": 0.0}, {"margin": 0.0}, {"threshold": 1.0}, {"blocks": 1}):
        with pytest.raises(SettingError):
            DeYO(**settings)
    with pytest.raises(NothingToAdaptError, match="DeYO finds nothing to adapt in Conv2d"):
        Adapter(nn.Conv2d(1, 2, 1), DeYO(), Fixed(0.1))
