"""GraTa and the rate `Aligned`: cosines by hand, a step against one written out, contract, resuming."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F

import networks
from dltta import Adapter, Aligned, Fixed, MemoryBank, Proportional
from dltta.core.aligned import cosine, flip_consistency
from dltta.errors import NonFiniteError, NothingToAdaptError, SettingError
from dltta.models.views import strong_view
from dltta.objectives import GraTa, Tent
from dltta.testing import check_objective, check_rate
from networks import stream, trained

NETWORKS = {
    "2-D": (lambda: networks.Segmenter(2), (1, 1, 8, 8)),
    "2-D not square": (lambda: networks.Segmenter(2), (2, 1, 8, 12)),
    "sigmoid": (lambda: networks.Segmenter(2, classes=1), (1, 1, 8, 8)),
    "3-D": (lambda: networks.Segmenter(3), (2, 1, 8, 8, 4)),
    "classification": (networks.Classifier, (3, 1, 8, 8)),
    "instance": (lambda: networks.Segmenter(2, kind="instance"), (1, 1, 8, 8)),
    "group": (lambda: networks.Segmenter(2, kind="group"), (2, 1, 8, 8)),
}


def make(name, rate=None, **options):
    build, shape = NETWORKS[name]
    model = trained(build())
    return model, Adapter(model, GraTa(**options), rate or Aligned(0.1)), stream(shape, 4)


@pytest.mark.parametrize("name", NETWORKS)
def test_grata_keeps_the_contract(name):
    build, shape = NETWORKS[name]
    check_objective(GraTa(), trained(build()), stream(shape, 1)[0])


def turned(x, view, back=False):
    kind, number = view
    if kind == "flip":
        return x.flip(2 + number)
    return torch.rot90(x, -number if back else number, (2, 3))


def slow_step(model, x, seed, rate):
    """One step with gradient descent, written out for a copy in double precision; loss, rate, logits after it."""
    slow = copy.deepcopy(model).double().train()
    slow.apply(lambda layer: layer.eval() if isinstance(layer, torch.nn.Dropout) else None)
    norms = [layer for layer in slow.modules() if "Norm" in type(layer).__name__]
    for layer in norms:
        layer.momentum = 0.0
    affine = [p for layer in norms for p in (layer.weight, layer.bias)]
    x = x.double()
    logits = slow(x)
    if logits.shape[1] == 1:
        p = 1 / (1 + torch.exp(-logits))
        leading = -(p * torch.log(p + 1e-6)).mean()
    else:
        p = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
        leading = -(p * torch.log(p)).sum(1).mean()
    first = torch.autograd.grad(leading, affine)
    start = [p.detach().clone() for p in affine]
    with torch.no_grad():
        for parameter, part in zip(affine, first, strict=True):
            parameter.sub_(part)
        views = [("turn", 0), ("flip", 0), ("flip", 1), ("turn", 2)]
        views += [("turn", 1), ("turn", 3)] if x.shape[2] == x.shape[3] else []
        wanted = []
        for view in views:
            seen = slow(turned(x, view))
            seen = seen.sigmoid() if seen.shape[1] == 1 else seen.softmax(1)
            wanted.append(turned(seen, view, back=True) if seen.ndim == x.ndim else seen)
        wanted = torch.stack(wanted).mean(0)
    strong = strong_view(x.float(), torch.Generator().manual_seed(seed)).double()
    logits = slow(strong)
    if logits.shape[1] == 1:
        loss = F.binary_cross_entropy_with_logits(logits, wanted)
    else:
        loss = F.cross_entropy(logits, wanted)
    second = torch.autograd.grad(loss, affine)
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (first, second))
    alignment = (one @ other / (one.norm() * other.norm())).item()
    rate = rate * (1 + alignment) ** 2 / 4
    with torch.no_grad():
        for parameter, value, part in zip(affine, start, second, strict=True):
            parameter.copy_(value - rate * part)
        return loss.item(), rate, slow(x).float()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_agrees_with_one_written_out(name):
    model, adapter, images = make(name, Aligned(2.0), seed=3)
    loss, rate, logits = slow_step(model, images[0], 3, 2.0)
    step = adapter.step(images[0])
    assert step.loss == pytest.approx(loss, abs=1e-5)
    assert step.rate == pytest.approx(rate, rel=1e-4)
    assert 0.02 < rate < 1.98  # neither aligned nor opposed: the cosine matters
    torch.testing.assert_close(step.logits, logits, atol=1e-5, rtol=1e-5)


def test_without_a_step_ahead_it_is_plain_consistency():
    _, adapter, images = make("2-D", Fixed(0.1), lookahead=0.0)
    _, ahead, _ = make("2-D", Fixed(0.1))
    assert adapter.step(images[0]).loss != pytest.approx(ahead.step(images[0]).loss, abs=1e-4)


@pytest.mark.parametrize("rate", [Fixed(0.1), Aligned(0.1)])
def test_a_stream_resumes_bit_for_bit(rate):
    images = stream((1, 1, 8, 8), 5)

    def build():
        return Adapter(trained(networks.Segmenter()), GraTa(), rate, optimizer=torch.optim.Adam)

    whole = build()
    expected = [whole(x) for x in images]
    for stop in range(len(images)):
        first, second = build(), build()
        for x in images[:stop]:
            first.step(x)
        second.step(images[-1])
        second.load_state_dict(first.state_dict())
        assert all(torch.equal(second(x), y) for x, y in zip(images[stop:], expected[stop:], strict=True))
    whole.reset()
    assert torch.equal(whole(images[0]), expected[0])


def test_a_step_that_fails_draws_nothing_and_moves_nothing():
    _, adapter, images = make("2-D")
    before = adapter.objective._generator.get_state()
    adapter.rate = lambda signals: math.nan
    with pytest.raises(NonFiniteError):
        adapter.step(images[0])
    assert torch.equal(adapter.objective._generator.get_state(), before)
    for name, parameter in adapter.adapted_parameters().items():
        assert torch.equal(parameter, trained(networks.Segmenter()).get_parameter(name))


def test_the_dynamic_rate_runs_on_top():
    memory = MemoryBank(capacity=2, neighbors=1, ready="neighbors")
    adapter = Adapter(trained(networks.Segmenter()), GraTa(), Proportional(0.1), memory=memory)
    steps = [adapter.step(x) for x in stream((1, 1, 8, 8), 3)]
    assert steps[-1].rate == pytest.approx(0.1 * steps[-1].discrepancy)


def test_a_network_without_affine_normalization_is_refused():
    with pytest.raises(NothingToAdaptError, match="GraTa finds nothing to adapt in Sequential"):
        Adapter(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1)), GraTa(), Fixed(0.1))


# the rate


def vectors(*rows):
    return {f"p{i}": torch.tensor(row) for i, row in enumerate(rows)}


def test_cosines_by_hand():
    assert cosine(vectors([3.0, 0.0], [4.0]), vectors([3.0, 0.0], [4.0])) == pytest.approx(1)
    assert cosine(vectors([3.0, 0.0], [4.0]), vectors([-3.0, 0.0], [-4.0])) == pytest.approx(-1)
    assert cosine(vectors([3.0, 0.0], [4.0]), vectors([0.0, 1.0], [0.0])) == 0
    assert cosine(vectors([3.0, 0.0], [4.0]), vectors([1.0, 0.0])) == pytest.approx(3 / 5)  # as one vector
    assert cosine(vectors([0.0]), vectors([1.0])) == 0


@pytest.mark.parametrize(("angle", "share"), [(1.0, 1.0), (0.0, 0.25), (-1.0, 0.0), (0.6, 0.64)])
def test_the_rate_follows_the_cosine(angle, share):
    from dltta import Signals

    gradient, other = vectors([1.0, 0.0]), vectors([angle, math.sqrt(1 - angle**2)])
    signals = Signals(None, 1.0, gradient, gradient, torch.nn.Identity(), torch.zeros(1, 1), torch.zeros(1, 1), other)
    assert Aligned(0.5)(signals) == pytest.approx(0.5 * share, abs=1e-6)


def test_aligned_keeps_the_contract():
    check_rate(Aligned(0.1))


def test_a_loss_is_aligned_with_itself():
    adapter = Adapter(trained(networks.Segmenter()), Tent(), Aligned(0.2, Tent()))
    assert adapter.step(stream((1, 1, 8, 8), 1)[0]).rate == pytest.approx(0.2, rel=1e-5)


@pytest.mark.parametrize("name", ["2-D not square", "3-D", "classification", "group"])
def test_another_objective_is_compared_with_flip_consistency(name):
    build, shape = NETWORKS[name]
    model, x = trained(build()), stream(shape, 1)[0]
    rate = Adapter(model, Tent(), Aligned(0.2)).step(x).rate
    slow = copy.deepcopy(model).double().train()
    slow.apply(lambda layer: layer.eval() if isinstance(layer, torch.nn.Dropout) else None)
    norms = [layer for layer in slow.modules() if "Norm" in type(layer).__name__]
    affine = [p for layer in norms for p in (layer.weight, layer.bias)]
    x = x.double()
    p = slow(x).softmax(1)
    first = torch.autograd.grad(-(p * p.log()).sum(1).mean(), affine)
    seen = [slow(x), slow(x.flip(2)), slow(x.flip(3))]
    if seen[0].ndim == x.ndim:
        seen = [seen[0], seen[1].flip(2), seen[2].flip(3)]
    wanted = sum(logits.detach().softmax(1) for logits in seen) / 3
    second = torch.autograd.grad(F.cross_entropy(seen[0], wanted), affine)
    one, other = (torch.cat([part.flatten() for part in parts]) for parts in (first, second))
    expected = 0.2 * (1 + (one @ other / one.norm() / other.norm()).item()) ** 2 / 4
    assert rate == pytest.approx(expected, rel=1e-4)
    assert 1e-3 < expected < 0.199


def test_asking_the_rate_changes_nothing():
    adapter = Adapter(trained(networks.Segmenter()), Tent(), Aligned(0.2))
    plain = Adapter(trained(networks.Segmenter()), Tent(), Fixed(0.0))
    x = stream((1, 1, 8, 8), 1)[0]
    rate = adapter.step(x).rate
    plain.rate = Fixed(rate)
    assert torch.equal(adapter.predict(x), plain(x))


def test_flip_consistency_is_zero_gradient_for_an_image_that_is_its_own_mirror():
    model = torch.nn.Conv2d(1, 2, 1)
    x = torch.ones(1, 1, 4, 4)
    loss = flip_consistency(model, x, model(x))
    assert all(g.abs().max() < 1e-6 for g in torch.autograd.grad(loss, list(model.parameters())))


def test_flip_consistency_by_hand():
    """Further to the right and below more of class 1: logits 1 … 4, the mean with those of two mirror images."""

    class Place(torch.nn.Module):
        def forward(self, x):
            z = x + torch.tensor([[1.0, 2.0], [3.0, 4.0]])
            return torch.cat([torch.zeros_like(z), z], 1)

    def share(z):
        return 1 / (1 + math.exp(-z))

    x = torch.zeros(1, 1, 2, 2)
    seen = {1: (1, 3, 2), 2: (2, 4, 1), 3: (3, 1, 4), 4: (4, 2, 3)}  # plain, upside down, left to right
    expected = 0.0
    for z, views in seen.items():
        wanted = sum(map(share, views)) / 3
        expected -= (wanted * math.log(share(z)) + (1 - wanted) * math.log(share(-z))) / 4
    model = Place()
    assert flip_consistency(model, x, model(x)).item() == pytest.approx(expected, abs=1e-6)


def test_a_loss_that_is_given_is_compared_with_also_where_the_objective_has_its_own():
    """GraTa's gradient one step ahead is not the consistency's here, nor the entropy's: the cosine is that given."""
    rates = {}
    for name, auxiliary in (("entropy", None), ("given", flip_consistency)):
        _, adapter, images = make("2-D", Aligned(0.2, auxiliary), seed=3)
        rates[name] = adapter.step(images[0]).rate
    assert rates["given"] != pytest.approx(rates["entropy"], rel=1e-2)


def test_wrong_alpha_is_refused():
    with pytest.raises(SettingError, match="alpha"):
        Aligned(-1.0)
