"""NOTE: soft shrinkage, instance-aware normalization and the reservoir by hand; a stream against plain loops."""

import math

import pytest
import torch
from test_rotta import classify, segment
from torch import nn

import behaviors
import networks
import slow
from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.core.objectives.note import InstanceAwareBatchNorm, Reservoir, soft_shrink
from dltta.errors import NothingToAdaptError, SettingError
from dltta.objectives import NOTE
from dltta.testing import check_objective
from networks import stream, trained

IMAGE = torch.zeros(1, 1)


def test_soft_shrinkage_by_hand():
    found = soft_shrink(torch.tensor([-3.0, -1.0, 0.5, 2.5]), torch.tensor(1.0))
    assert found.tolist() == [-2.0, 0.0, 0.0, 1.5]


def layer(mean, variance, k):
    batch = nn.BatchNorm2d(1, eps=0.0).eval()
    with torch.no_grad():
        batch.running_mean.fill_(mean)
        batch.running_var.fill_(variance)
    return InstanceAwareBatchNorm(batch, "norm", k, 0.01).eval()


def test_an_image_that_stands_out_is_normalized_by_what_exceeds_the_standard_errors():
    """Stored mean 0 and variance 1; an image of 1, 3, 5, 7: mean 4, unbiased variance 20/3, n = 4.

    With k = 1: μ = 0 + (4 − √(1/4)) = 3.5; σ² = 1 + (20/3 − 1 − √(2/3)) = 20/3 − √(2/3).
    """
    x = torch.tensor([1.0, 3.0, 5.0, 7.0]).view(1, 1, 2, 2)
    variance = 20 / 3 - math.sqrt(2 / 3)
    expected = [(v - 3.5) / math.sqrt(variance) for v in (1, 3, 5, 7)]
    assert layer(0.0, 1.0, 1.0)(x).flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_an_image_within_the_standard_errors_keeps_the_stored_statistics():
    x = torch.tensor([1.0, 3.0, 5.0, 7.0]).view(1, 1, 2, 2)
    assert layer(3.0, 4.0, 4.0)(x).flatten().tolist() == pytest.approx([-1, 0, 1, 2], abs=1e-6)


def test_each_image_of_a_batch_is_normalized_alone_and_a_single_position_by_the_stored_statistics():
    norm = layer(0.5, 2.0, 1.0)
    x = torch.randn(3, 1, 4, 4) * torch.tensor([1.0, 5.0, 0.1]).view(3, 1, 1, 1)
    assert torch.allclose(norm(x), torch.cat([norm(image[None]) for image in x]), atol=1e-6)
    assert norm(torch.full((1, 1, 1, 1), 2.5)).item() == pytest.approx(2 / math.sqrt(2), abs=1e-6)


def test_the_reservoir_fills_then_replaces_from_the_largest_class():
    memory = Reservoir(3, seed=0)
    for label in (0, 0, 1):
        memory.add(IMAGE, label)
    memory.add(IMAGE, 1)  # class 0 has two: one of them gives its place
    assert sorted(label for _, label in memory.entries) == [0, 1, 1]
    memory.add(IMAGE, 2)  # class 1 is now the largest
    assert sorted(label for _, label in memory.entries) == [0, 1, 2]
    assert memory.came == {0: 2, 1: 2, 2: 1}


def test_of_the_largest_class_every_image_stays_with_the_same_probability():
    """Reservoir sampling: 4 of 40 are held, each with probability 1/10; 400 reservoirs hold 1600 in all."""
    counts = torch.zeros(40)
    for seed in range(400):
        memory = Reservoir(4, seed)
        for number in range(40):
            memory.add(torch.tensor([float(number)]), 0)
        assert len(memory.entries) == 4
        for image, _ in memory.entries:
            counts[int(image)] += 1
    quarters = counts.view(4, 10).sum(1)  # 400 expected, standard deviation about 18
    assert quarters.min() > 400 - 90
    assert quarters.max() < 400 + 90


class Slow:
    """The method in double precision, written from the paper."""

    def __init__(self, model, forward, capacity, every, k=4.0, momentum=0.01):
        self.weights = slow.weights_of(model)
        self.names = [name for name in slow.NORMS if name in self.weights]
        self.stats = {n: b.double().clone() for n, b in model.named_buffers() if "running" in n}
        self.forward, self.capacity, self.every, self.k, self.momentum = forward, capacity, every, k, momentum
        self.reservoir, self.arrived = Reservoir(capacity, 0), 0

    def norm(self, batches):
        def normalize(name, x, weight, bias):
            shape = (1, -1, *[1] * (x.ndim - 2))
            mean, variance = self.stats[f"{name}.running_mean"], self.stats[f"{name}.running_var"]
            if batches is not None:
                axes, count = [0, *range(2, x.ndim)], x.numel() / x.shape[1]
                mean = x.sum(axes) / count
                variance = ((x - mean.view(shape)) ** 2).sum(axes) / (count - 1)
                batches[name] = mean.detach(), variance.detach()
            out = []
            for image in x:
                flat = image.flatten(1)
                n = flat.shape[1]
                own = flat.sum(1) / n
                spread = ((flat - own[:, None]) ** 2).sum(1) / (n - 1)
                channels = []
                for c in range(len(flat)):
                    m, v = mean[c], variance[c]
                    gap, widths = own[c] - m, spread[c] - v
                    limit, wider = self.k * (v / n) ** 0.5, self.k * v * math.sqrt(2 / (n - 1))
                    m = m + torch.sign(gap) * max(gap.abs() - limit, 0 * v)
                    v = v + torch.sign(widths) * max(widths.abs() - wider, 0 * v)
                    channels.append((image[c] - m) / (max(v, 0 * v) + 1e-5) ** 0.5 * weight[c] + bias[c])
                out.append(torch.stack(channels))
            return torch.stack(out)

        return normalize

    def step(self, x, rate):
        x = x.double()
        with torch.no_grad():
            answer = self.forward(self.weights, x, self.norm(None))
        for image, logits in zip(x, answer, strict=True):
            self.reservoir.add(image, 0 if answer.ndim > 2 else int(logits.argmax()))
        before, self.arrived = self.arrived, self.arrived + len(x)
        if self.arrived // self.every > before // self.every:
            self.update(rate)
        return answer

    def update(self, rate):
        moving = {name: self.weights[name].clone().requires_grad_(True) for name in self.names}
        batches = {}
        images = torch.stack([image for image, _ in self.reservoir.entries])
        rows = slow.rows(self.forward({**self.weights, **moving}, images, self.norm(batches)))
        loss = sum(slow.uncertainty(row) for row in rows) / len(rows)
        for name, part in zip(moving, torch.autograd.grad(loss, list(moving.values())), strict=True):
            self.weights[name] = self.weights[name] - rate * part
        for name, (mean, variance) in batches.items():
            for which, value in (("running_mean", mean), ("running_var", variance)):
                key = f"{name}.{which}"
                self.stats[key] = (1 - self.momentum) * self.stats[key] + self.momentum * value


@pytest.mark.parametrize(
    ("model", "forward", "shape", "capacity", "every"),
    [
        (networks.Segmenter(), segment, (1, 1, 8, 8), 3, 2),
        (networks.Segmenter(axes=3), segment, (2, 1, 4, 4, 4), 4, 2),
        (networks.Classifier(), classify, (4, 1, 8, 8), 6, 4),
    ],
)
def test_a_stream_is_that_of_a_slow_loop(model, forward, shape, capacity, every):
    model = trained(model, seed=2)
    reference = Slow(model, forward, capacity, every, momentum=0.2)
    adapter = Adapter(
        model, NOTE(capacity=capacity, every=every, momentum=0.2), Fixed(0.5), predict="before", layout="given"
    )
    for x in stream(shape, 5):
        assert torch.allclose(adapter.step(x).logits.double(), reference.step(x, 0.5), atol=1e-5)
    for name, parameter in adapter.adapted_parameters().items():
        assert torch.allclose(parameter.double(), reference.weights[name], atol=1e-5)
        assert not torch.equal(parameter, dict(model.named_parameters())[name])
    found = [part.double() for each in adapter.objective._layers for part in each.moments()]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, reference.stats.values(), strict=True))


def test_between_updates_nothing_moves():
    adapter = Adapter(
        trained(networks.Segmenter()), NOTE(every=3), Fixed(0.5), optimizer=torch.optim.Adam, predict="before"
    )
    assert [adapter.step(x).rate for x in stream((1, 1, 8, 8), 7)] == [0, 0, 0.5, 0, 0, 0.5, 0]


def test_the_contract_is_kept_with_a_memory_and_a_dynamic_rate_too():
    for model, shape in (
        (networks.Segmenter(), (3, 1, 8, 8)),
        (networks.Segmenter(axes=3, classes=1), (2, 1, 4, 4, 4)),
        (networks.Classifier(), (3, 1, 8, 8)),
        (networks.Classifier(classes=1), (1, 1, 8, 8)),
    ):
        check_objective(NOTE(capacity=4, every=1), trained(model), stream(shape, 1)[0])
    memory = MemoryBank(capacity=2, neighbors=1)
    adapter = Adapter(trained(networks.Segmenter()), NOTE(every=2), Proportional(0.1), memory=memory)
    assert [step.rate > 0 for step in map(adapter.step, stream((1, 1, 8, 8), 6))] == [False, True] * 3


def test_the_statistics_follow_images_of_every_size_by_hand():
    """Two images of one size and one of another: a third of what is followed is the latter's."""
    model = trained(networks.Segmenter())
    images = [stream(size, 1, seed=i)[0] for i, size in enumerate([(1, 1, 8, 8), (1, 1, 4, 8), (1, 1, 8, 8)])]
    adapter = Adapter(model, NOTE(every=3, momentum=0.1), Fixed(0.1), layout="given", predict="before")
    for x in images:
        adapter.step(x)
    with torch.no_grad():
        pair, single = (model.encoder[0](x) for x in (torch.cat([images[0], images[2]]), images[1]))
    for of, stored, found in (
        (lambda x: x.mean((0, 2, 3)), model.encoder[1].running_mean, 0),
        (lambda x: x.var((0, 2, 3), correction=1), model.encoder[1].running_var, 1),
    ):
        expected = 0.9 * stored + 0.1 * (2 / 3 * of(pair) + 1 / 3 * of(single))
        torch.testing.assert_close(adapter.model.encoder[1].moments()[found], expected)


def test_the_temperature_divides_the_logits():
    model, x = trained(networks.Classifier()), stream((3, 1, 8, 8), 1)[0]
    other = trained(networks.Classifier())
    with torch.no_grad():
        other.head.weight /= 2
        other.head.bias /= 2
    one, same = Adapter(model, NOTE(every=1, temperature=2.0), Fixed(0.1)), Adapter(other, NOTE(every=1), Fixed(0.1))
    assert one.step(x).loss == pytest.approx(same.step(x).loss, abs=1e-6)


@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_resumes_bit_for_bit_and_is_rolled_back_and_guarded(name):
    for every in (3, 5):  # also between two updates
        behaviors.check_resumes(NOTE(capacity=3, every=every, momentum=0.3), name, optimizer=torch.optim.Adam)
    behaviors.check_rolled_back(NOTE(capacity=4, every=1), name)
    behaviors.check_guarded(NOTE(capacity=4, every=1), name)


def test_refusals():
    with pytest.raises(NothingToAdaptError, match="NOTE finds nothing to adapt in Classifier"):
        Adapter(networks.Classifier(kind="instance"), NOTE(), Fixed(0.1))
    with pytest.raises(SettingError, match="every must be at least 1, got 0"):
        NOTE(every=0)
    with pytest.raises(SettingError, match="temperature positive"):
        NOTE(temperature=0)
