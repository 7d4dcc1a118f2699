"""TTT++: contrast, moments and queue by hand; a step against plain loops."""

import math

import pytest
import torch

import behaviors
import networks
import slow
from dltta import Adapter, Fixed, MemoryBank, Proportional
from dltta.core.augmentation import contrast_view
from dltta.errors import SettingError, StateError
from dltta.models.encoder import shared_parameters
from dltta.models.parts.contrast import (
    FeatureMoments,
    ProjectionHead,
    contrast_loss,
    covariance,
    covariance_distance,
    feature_moments,
    mean_distance,
)
from dltta.objectives import TTTPlus
from dltta.testing import check_objective
from networks import stream, trained


def test_contrast_by_hand():
    """Two images whose views agree and are orthogonal: partner at cosine 1, two others at 0; T = 0.5."""
    one = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    expected = 0.5 / 0.07 * math.log(1 + 2 * math.exp(-2))
    assert contrast_loss(one, 5 * one).item() == pytest.approx(expected, rel=1e-6)
    assert contrast_loss(one[:1], -one[:1]).item() == 0  # nothing to be told from


def test_moments_by_hand():
    rows = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    assert covariance(rows).tolist() == [[2.0, 4.0], [4.0, 8.0]]
    assert covariance_distance(covariance(rows), torch.zeros(2, 2)).item() == (4 + 16 + 16 + 64) / 16
    assert mean_distance(torch.tensor([1.0, 2.0]), torch.zeros(2)).item() == 2.5
    distance = FeatureMoments(torch.zeros(2), torch.zeros(2, 2), 0.5, 4.0).distance(rows)
    assert distance.item() == pytest.approx(0.5 * 2.5 / 0.5 + 6.25 / 4)
    assert FeatureMoments(torch.zeros(2), torch.zeros(2, 2), 0.5, 4.0).distance(rows[1:]).item() == 0.5 * 10 / 0.5


def test_moments_of_source_batches_by_hand():
    """Means (1,2), (3,4) and (1,2) around (5/3, 8/3); covariances as above, but of the third 4 times."""
    rows = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    found = feature_moments([rows, rows + 2, 2 * rows - torch.tensor([1.0, 2.0])])
    assert found.mean.tolist() == pytest.approx([5 / 3, 8 / 3])
    assert found.mean_distance == (4 + 0) / 2  # of the second and the third from the first
    assert found.covariance_distance == 0.5 * 9 * 6.25  # 3 times ((2,4),(4,8)) away, squared


def test_what_has_no_usual_distance_has_no_part():
    """Batches of one, as a segmentation's projections, have no covariance; a single batch is away from nothing."""
    rows = torch.tensor([[0.0, 0.0], [2.0, 4.0]])
    single = feature_moments([rows[:1], rows[1:]])
    assert (single.mean_distance, single.covariance_distance) == (10.0, 0.0)
    assert single.distance(5 * rows).item() == pytest.approx(0.5 * (4**2 + 8**2) / 2 / 10)  # (5,10) from (1,2)
    assert feature_moments([rows]).distance(5 * rows).item() == 0


def made(model, layer, x, size=3, **options):
    """With moments of its own that no feature has, so that both pull."""
    torch.manual_seed(1)
    with torch.no_grad():
        channels = dict(model.named_modules())[layer][0].out_channels
    head = ProjectionHead(channels, size)
    moments = [FeatureMoments(torch.randn(d), torch.randn(d, d), 0.3, 0.7) for d in (channels, size)]
    shared = shared_parameters(model, layer, x)
    return TTTPlus(head, layer, shared, *moments, weights=(2.0, 3.0), **options)


def slow_moments(rows, moments):
    rows = torch.stack(list(rows))
    n, d = rows.shape
    mean = sum(rows) / n
    total = sum((a - b) ** 2 for a, b in zip(mean, moments.mean.double(), strict=True)) / d / 2 / 0.3
    if n < 2:
        return total
    spread = sum(torch.outer(row - mean, row - mean) for row in rows) / (n - 1)
    return total + ((spread - moments.covariance.double()) ** 2).sum() / (4 * d**2) / 0.7


def slow_contrast(one, other):
    z = [row / row.norm() for row in (*one, *other)]
    terms = []
    for i in range(len(z)):
        partner = (i + len(one)) % len(z)
        others = [torch.exp(z[i] @ z[j] / 0.5) for j in range(len(z)) if j != i]
        terms.append(-torch.log(torch.exp(z[i] @ z[partner] / 0.5) / sum(others)))
    return 0.5 / 0.07 * sum(terms) / len(terms)


def project(head, maps):
    first, last = (tuple(p.detach().double() for p in head.layers[i].parameters()) for i in (0, 2))
    flat = maps.flatten(2).sum(2) / maps[0, 0].numel()
    return (flat @ first[0].T + first[1]).clamp_min(0) @ last[0].T + last[1]


def encoded(weights, x):
    conv, pool = (torch.conv3d, torch.nn.functional.avg_pool3d) if x.ndim == 5 else (
        torch.conv2d, torch.nn.functional.avg_pool2d
    )  # fmt: skip
    x = conv(x, weights["encoder.0.weight"], weights["encoder.0.bias"], padding=1)
    x = torch.tanh(slow.normalized(x, weights["encoder.1.weight"], weights["encoder.1.bias"], "batch"))
    if "bottleneck.0.weight" not in weights:
        return torch.nn.functional.max_pool2d(x, 2)
    x = conv(pool(x, 2), weights["bottleneck.0.weight"], weights["bottleneck.0.bias"], padding=1)
    return torch.tanh(slow.normalized(x, weights["bottleneck.1.weight"], weights["bottleneck.1.bias"], "batch"))


@pytest.mark.parametrize(
    ("model", "layer", "shape", "queue"),
    [
        (networks.Segmenter(), "bottleneck", (1, 1, 4, 4), 6),
        (networks.Segmenter(), "bottleneck", (2, 1, 4, 4), 100),
        (networks.Segmenter(axes=3), "bottleneck", (1, 1, 4, 4, 4), 8),
        (networks.Classifier(), "encoder", (3, 1, 6, 6), 4),
        (networks.Classifier(), "encoder", (1, 1, 6, 6), 2),
    ],
)
def test_a_stream_is_that_of_a_slow_loop(model, layer, shape, queue):
    model, images = trained(model, seed=3), stream(shape, 4)
    objective = made(model, layer, images[0], queue=queue, seed=5)
    adapter = Adapter(model, objective, Fixed(0.02), layout="given")
    weights = slow.weights_of(model)
    dense = "bottleneck.0.weight" in weights
    queues = [[], []]
    for number, x in enumerate(images):
        moving = {name: weights[name].clone().requires_grad_(True) for name in objective.shared}
        now = {**weights, **moving}
        maps = encoded(now, x.double())
        rows = [list(maps.movedim(1, -1).reshape(-1, maps.shape[1])) if dense else list(maps.flatten(2).mean(2))]
        rows += [list(project(objective.head, maps))]
        loss = 0
        for which, (weight, moments) in enumerate(((2.0, objective.features), (3.0, objective.projections))):
            more = queues[which] if len(queues[which]) == queue else []
            loss = loss + weight * slow_moments([*rows[which], *more], moments)
            queues[which] = [*queues[which], *(row.detach() for row in rows[which])][-queue:]
        if len(x) > 1:
            generator = torch.Generator().manual_seed(5 + 1_000_003 * number)
            views = [contrast_view(x, generator).double() for _ in range(2)]
            loss = loss + slow_contrast(*(project(objective.head, encoded(now, view)) for view in views))
        step = adapter.step(x)
        assert step.loss == pytest.approx(loss.item(), rel=1e-4)
        for name, part in zip(moving, torch.autograd.grad(loss, list(moving.values())), strict=True):
            weights[name] = weights[name] - 0.02 * part
        for name, parameter in adapter.adapted_parameters().items():
            assert torch.allclose(parameter.double(), weights[name], atol=2e-5)
    assert len(queues[0]) >= min(queue, 4)


def test_views_keep_shape_and_range_and_follow_the_generator():
    for shape, channels in (((2, 1, 8, 6), 1), ((2, 3, 8, 8), 3), ((1, 1, 4, 6, 8), 1)):
        x = stream(shape, 1)[0] * 3
        one, again, other = (contrast_view(x, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
        assert one.shape == x.shape, channels
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
        assert one.min() >= x.min() - 1e-4
        assert one.max() <= x.max() + 1e-4


def test_the_contract_is_kept_with_a_memory_and_a_dynamic_rate_too():
    for model, layer, shape in (
        (networks.Segmenter(), "bottleneck", (2, 1, 8, 8)),
        (networks.Segmenter(axes=3), "bottleneck", (1, 1, 4, 4, 4)),
        (networks.Classifier(), "encoder", (3, 1, 8, 8)),
    ):
        model, x = trained(model), stream(shape, 1)[0]
        check_objective(made(model, layer, x, queue=5), model, x)
    model, images = trained(networks.Segmenter()), stream((1, 1, 8, 8), 5)
    memory = MemoryBank(capacity=2, neighbors=1)
    adapter = Adapter(model, made(model, "bottleneck", images[0]), Proportional(1e-3), memory=memory)
    assert all(step.rate > 0 for step in map(adapter.step, images))


@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_resumes_bit_for_bit_and_is_rolled_back_and_guarded(name):
    model, x = behaviors.network(name), stream(behaviors.NETWORKS[name][1], 1, seed=4)[0]
    layer = "bottleneck" if name == "2-D batch" else "encoder"
    for queue in (7, 40):  # full after the third batch of images, of positions, or never
        behaviors.check_resumes(made(model, layer, x, queue=queue), name, optimizer=torch.optim.Adam)
    behaviors.check_rolled_back(made(model, layer, x, queue=7), name)
    behaviors.check_guarded(made(model, layer, x, queue=7), name)


def test_a_head_in_training_mode_is_neither_trained_nor_random():
    model, x = trained(networks.Classifier()), stream((3, 1, 8, 8), 1)[0]
    objective = made(model, "encoder", x)
    objective.head.train()
    adapter = Adapter(model, objective, Fixed(0.1))
    adapter.step(x)
    assert not adapter.objective.head.training
    assert not any(parameter.requires_grad for parameter in adapter.objective.head.parameters())


def test_refusals():
    model, x = trained(networks.Segmenter()), stream((1, 1, 8, 8), 1)[0]
    with pytest.raises(StateError, match="the projection head belongs to another network: 'bottleneck.0.weight'"):
        Adapter(trained(networks.Classifier()), made(model, "bottleneck", x), Fixed(0.1))
    with pytest.raises(SettingError, match="queue is at least 1"):
        made(model, "bottleneck", x, queue=0)
