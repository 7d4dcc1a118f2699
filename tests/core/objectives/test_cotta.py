"""CoTTA: the averaged teacher, its target, the weights that return, and steps written out."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import behaviors
import networks
import slow
from dltta import Adapter, Fixed
from dltta.core.augmentation import random_view
from dltta.core.objectives.cotta import CoTTA, scaled
from dltta.errors import NothingToAdaptError, SettingError
from dltta.models.statistics import Running
from dltta.objectives import PTBN
from networks import decisive, stream, trained


class Counting(nn.Module):
    """Logits (0, w x) for each position or image; counts the passes of all its copies."""

    passes = 0

    def __init__(self, w=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([w]))

    def forward(self, x):
        Counting.passes += 1
        z = x * self.w
        return torch.cat([torch.zeros_like(z), z], 1)


class Pooled(Counting):
    def forward(self, x):
        return super().forward(x.mean((2, 3)))


def prepared(model, **settings):
    objective = CoTTA(**settings)
    objective.prepare(model.requires_grad_(False))
    Counting.passes = 0
    return objective


def share(z):
    return 1 / (1 + math.exp(-z))


# teacher and restore by hand


def test_the_teacher_averages_and_single_weights_return_by_hand():
    model = nn.Linear(50, 2)
    source = [parameter.detach().clone() for parameter in model.parameters()]
    objective = prepared(model, momentum=0.9, restored=0.3, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
        objective.after_update(model)
    generator = torch.Generator().manual_seed(5)
    for first, parameter, teacher in zip(source, model.parameters(), objective.teacher.parameters(), strict=True):
        torch.testing.assert_close(teacher, first + 0.1)  # 0.9 · source + 0.1 · (source + 1)
        drawn = torch.rand(first.shape, generator=generator) < 0.3
        assert 0 < drawn.sum() < drawn.numel() or drawn.numel() < 10
        assert torch.equal(parameter, torch.where(drawn, first, first + 1))
    assert torch.equal(next(objective.source.parameters()), source[0])


def test_the_teacher_learns_from_the_weights_before_some_return():
    model = nn.Linear(3, 2)
    objective = prepared(model, momentum=0.5, restored=1.0)
    source = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
        objective.after_update(model)
    torch.testing.assert_close(objective.teacher.weight, source + 0.5)
    assert torch.equal(model.weight, source)


@pytest.mark.parametrize("restored", [0.0, 1.0])
def test_none_or_all_weights_return(restored):
    ours = Adapter(behaviors.network("2-D batch"), CoTTA(restored=restored, scales=(1.0,)), Fixed(0.1))
    source = behaviors.network("2-D batch").state_dict()
    ours.step(stream((1, 1, 8, 8), 1)[0])
    returned = {name: torch.equal(parameter, source[name]) for name, parameter in ours.adapted_parameters().items()}
    assert all(returned.values()) == (restored == 1.0)
    assert returned["head.weight"] == (restored == 1.0)
    assert set(ours.adapted_parameters()) == set(dict(ours.model.named_parameters()))


# the target by hand


@pytest.mark.parametrize(("confidence", "views"), [(0.9, 0), (0.94, 5)])
def test_whether_views_are_averaged_depends_on_the_mean_confidence_of_the_batch(confidence, views):
    x = torch.stack([torch.full((1, 4, 4), z) for z in (4.0, 2.0)])  # confidence (0.9820 + 0.8808) / 2 = 0.9314
    model = Pooled()
    objective = prepared(model, confidence=confidence, views=5)
    target = objective.predict(model, x, model(x))
    assert Counting.passes == 1 + 2 + views  # ours, source and teacher
    if not views:
        assert torch.equal(target, model(x))


@pytest.mark.parametrize("w", [0.1, 10.0])
def test_the_confidence_is_the_sources_whatever_the_teacher_has_become(w):
    x = torch.full((1, 1, 4, 4), 4.0)  # the source says 4 with confidence 0.98, a teacher of 0.1 says 0.4
    for model, shape in ((Pooled(), "classes"), (Counting(), "dense")):
        objective = prepared(model, scales=(1.0,), views=5)
        with torch.no_grad():
            objective.teacher.w.fill_(w)
        target = objective.predict(model, x, model(x))
        assert Counting.passes == 1 + 2, shape  # no other views: the source is sure
        torch.testing.assert_close(target.softmax(1)[:, 1].mean().item(), share(4 * w))
    with torch.no_grad():
        model = Counting(0.1)  # now the source is unsure
        objective = prepared(model, scales=(1.0,))
        objective.teacher.w.fill_(10.0)
        objective.predict(model, x, model(x))
    assert Counting.passes == 1 + 2 + 1  # and the teacher sees the mirror image


def test_the_loss_is_the_cross_entropy_to_the_teachers_probabilities_by_hand():
    x = torch.full((1, 1, 4, 4), 4.0)
    model = Pooled()
    objective = prepared(model)
    with torch.no_grad():
        model.w.fill_(0.5)  # the student says 2, the teacher 4
    loss = objective(model, x, model(x))
    expected = -share(4) * math.log(share(2)) - share(-4) * math.log(share(-2))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert expected == pytest.approx(0.162900, abs=1e-5)


def test_the_target_is_the_teachers_mean_logit_over_views():
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    model = Pooled(3.0)
    objective = prepared(model, confidence=1.0, views=3, seed=7)
    generator = torch.Generator().manual_seed(7)
    expected = sum(3 * random_view(x, generator).mean((2, 3)) for _ in range(3)) / 3
    torch.testing.assert_close(objective.predict(model, x, model(x))[:, 1:], expected)


def test_dense_targets_are_decided_position_by_position():
    """Where the source is sure, the plain prediction; elsewhere the mean over mirror images, brought back."""

    class Leaning(Counting):
        def forward(self, x):  # further to the right, more of class 1: mirror images disagree
            return super().forward(x + torch.linspace(-1, 1, x.shape[-1]))

    x = torch.tensor([3.0, 0.1, -0.2, -3.0]).expand(1, 1, 4, 4)
    model = Leaning()
    objective = prepared(model, scales=(1.0,))
    plain, target = model(x).softmax(1)[0, 1, 0], objective.predict(model, x, model(x)).softmax(1)[0, 1, 0]
    z = [3.0 - 1, 0.1 - 1 / 3, -0.2 + 1 / 3, -3.0 + 1]
    mirrored = [3.0 + 1, 0.1 + 1 / 3, -0.2 - 1 / 3, -3.0 - 1]
    assert [max(share(a), share(-a)) > 0.69 for a in z] == [True, False, False, True]
    torch.testing.assert_close(target[[0, 3]], plain[[0, 3]])
    expected = torch.tensor([(share(z[i]) + share(mirrored[i])) / 2 for i in (1, 2)])
    torch.testing.assert_close(target[1:3], expected)


def test_dense_losses_are_the_cross_entropy_to_the_targets_classes_by_hand():
    x = torch.tensor([2.0, -1.0]).expand(1, 1, 2, 2)
    model = Counting()
    objective = prepared(model)
    loss = objective(model, x, model(x))
    assert loss.item() == pytest.approx(-(math.log(share(2)) + math.log(share(1))) / 2, abs=1e-6)


def test_views_are_made_only_where_a_position_needs_them():
    sure, unsure = torch.full((1, 1, 4, 4), 5.0), torch.zeros(1, 1, 4, 4)
    model = Counting()
    objective = prepared(model)
    for x, passes in ((sure, 2), (unsure, 2 + 13)):  # seven scales and mirror images, one of which is known
        Counting.passes = 0
        objective.predict(model, x.repeat(1, 1, 32, 32), model(x.repeat(1, 1, 32, 32)))
        assert Counting.passes == 1 + passes


@pytest.mark.parametrize(
    ("side", "scale", "expected"),
    [(128, 0.5, 64), (128, 1.25, 160), (352, 0.5, 192), (352, 2.0, 704), (20, 0.75, 16), (7, 0.5, 4), (8, 0.5, 8)],
)
def test_sides_stay_divisible(side, scale, expected):
    assert scaled(side, scale) == expected


# what is predicted


def test_the_prediction_is_the_target_before_the_update_and_made_once():
    images = stream((1, 1, 8, 8), 3, seed=4)
    ours = Adapter(behaviors.network("2-D batch"), CoTTA(momentum=0.5, scales=(1.0, 2.0)), Fixed(0.5))
    for x in images:
        before = ours.predict(x)
        assert torch.equal(ours(x), before)
        assert not torch.allclose(ours.predict(x), before)  # by now the teacher has moved


def test_a_state_that_is_loaded_is_not_answered_with_an_older_target():
    x = stream((1, 1, 8, 8), 1, seed=4)[0]
    ours = Adapter(behaviors.network("2-D batch"), CoTTA(momentum=0.5, scales=(1.0,)), Fixed(0.5))
    state = ours.objective.state_dict()
    objective = ours.objective
    objective(ours.model, x, ours.model(x))
    for parameter in objective.teacher.parameters():
        parameter.data += 0.5
    moved = {name: value.clone() for name, value in objective.teacher.state_dict().items()}
    objective.load_state_dict({**state, "teacher": moved})
    fresh = objective._target(ours.model, x)
    assert torch.equal(objective.predict(ours.model, x, ours.model(x)), fresh)


# steps written out


def slow_target(forward, source, teacher, x, generator, confidence, views, scales):
    """As logits for each class; log-probabilities in dense predictions."""
    plain = forward(teacher, x)
    sure = forward(source, x).softmax(1).max(1).values
    if plain.ndim == 2:
        if sure.sum() / len(sure) >= confidence:
            return plain
        return sum(forward(teacher, random_view(x, generator)) for _ in range(views)) / views
    total, mode = 0, "bilinear" if x.ndim == 4 else "trilinear"
    columns = torch.arange(x.shape[-1] - 1, -1, -1)
    for scale in scales:
        for mirrored in (False, True):
            view = x[..., columns] if mirrored else x
            size = [int(side * scale) for side in x.shape[2:]]
            view = F.interpolate(view, size=size, mode=mode) if scale != 1 else view
            p = forward(teacher, view).softmax(1)
            p = F.interpolate(p, size=x.shape[2:], mode=mode) if scale != 1 else p
            total = total + (p[..., columns] if mirrored else p)
    averaged = (total / (2 * len(scales))).log()
    target = plain.log_softmax(1)
    for place in (sure <= confidence).nonzero().tolist():
        b, *position = place
        target[(b, slice(None), *position)] = averaged[(b, slice(None), *position)]
    return target


def slow_cotta(forward, source, images, *, rate, confidence, views, scales, momentum, restored):
    """The prediction of every step."""
    student, teacher, generator, given = dict(source), dict(source), torch.Generator().manual_seed(0), []
    for x in images:
        x = x.double()
        target = slow_target(forward, source, teacher, x, generator, confidence, views, scales)
        given.append(target)
        moving = {name: value.clone().requires_grad_(True) for name, value in student.items()}
        terms = []
        for row, wanted in zip(slow.rows(forward(moving, x)), slow.rows(target), strict=True):
            p, q = slow.shares(row), slow.shares(wanted)
            terms.append(-torch.log(p[q.argmax()]) if target.ndim > 2 else -sum(q * torch.log(p)))
        (sum(terms) / len(terms)).backward()
        for name in student:
            student[name] = student[name] - rate * moving[name].grad
            teacher[name] = momentum * teacher[name] + (1 - momentum) * student[name]
        for name in student:
            drawn = torch.rand(student[name].shape, generator=generator) < restored
            student[name] = torch.where(drawn, source[name], student[name])
    return given


CASES = {
    "classes, sure and unsure": (networks.Classifier, slow.classifier, (4, 1, 8, 8), {"confidence": 0.66}),
    "classes, unsure": (networks.Classifier, slow.classifier, (4, 1, 8, 8), {"confidence": 0.99}),
    "2-D": (networks.Segmenter, slow.segmenter, (2, 1, 8, 8), {"confidence": 0.69}),
    "2-D instance": (
        lambda: networks.Segmenter(kind="instance"),
        lambda weights, x: slow.segmenter(weights, x, "instance"),
        (1, 1, 8, 12),
        {"confidence": 0.69},
    ),
    "3-D": (lambda: networks.Segmenter(3), slow.segmenter, (1, 1, 4, 4, 8), {"confidence": 0.69}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_equals_its_slow_reference(case):
    build, forward, shape, settings = CASES[case]
    images = stream(shape, 4, seed=4)
    model = decisive(trained(build()), torch.cat(images)).double()
    settings = {**settings, "views": 3, "scales": (1.0, 2.0), "momentum": 0.8, "restored": 0.2}
    ours = Adapter(model, CoTTA(**settings), Fixed(0.02))
    expected = slow_cotta(forward, slow.weights_of(model), images, rate=0.02, **settings)
    source = Adapter(model, CoTTA(**settings), Fixed(0.0))
    assert not torch.allclose([source(x) for x in images][-1].softmax(1), expected[-1].softmax(1), atol=1e-4)
    for x, logits in zip(images, expected, strict=True):
        torch.testing.assert_close(ours(x).softmax(1), logits.softmax(1), rtol=1e-5, atol=1e-5)


# along a stream


def make(**settings):
    return CoTTA(**{"views": 2, "scales": (1.0, 2.0), "momentum": 0.9, **settings})


@pytest.mark.parametrize("name", behaviors.NETWORKS)
def test_on_any_network(name):
    behaviors.check_networks(make(), name)


@pytest.mark.parametrize("name", ["2-D batch", "3-D batch", "classes batch"])
def test_with_the_authors_settings(name):
    behaviors.check_networks(CoTTA(), name)


@pytest.mark.parametrize("optimizer", behaviors.OPTIMIZERS)
@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_resumes_bit_for_bit(name, optimizer):
    behaviors.check_resumes(make(), name, optimizer=behaviors.OPTIMIZERS[optimizer])


@pytest.mark.parametrize("name", ["2-D batch", "classes batch"])
def test_rolled_back_guarded_and_under_every_rate(name):
    behaviors.check_rolled_back(make(), name)
    behaviors.check_guarded(make(), name)
    behaviors.check_rates(make(), name)


def test_other_statistics():
    behaviors.check_statistics(make)
    behaviors.check_resumes(make(statistics=Running(0.3)), "2-D batch")


def test_the_teacher_normalizes_by_the_statistics_of_the_stream():
    ours = Adapter(behaviors.network("2-D batch"), make(statistics=Running(0.3), confidence=0.0), Fixed(0.0))
    plain = Adapter(behaviors.network("2-D batch"), PTBN(Running(0.3)))
    for x in stream((1, 1, 8, 8), 4, seed=4):
        torch.testing.assert_close(ours(x), plain(x))  # it has not learned anything, so it is the network


def test_converting_the_adapter_takes_the_teacher_along():
    images = stream((1, 1, 8, 8), 3, seed=4)
    ours = Adapter(behaviors.network("2-D batch"), make(), Fixed(0.1))
    ours.step(images[0])
    ours.to(torch.float64)
    for network in (ours.objective.teacher, ours.objective.source):
        assert {parameter.dtype for parameter in network.parameters()} == {torch.float64}
    assert ours(images[1]).dtype == torch.float64


def test_settings_and_networks_that_cannot_be_used_are_refused():
    bad = ({"confidence": 1.5}, {"momentum": -0.1}, {"restored": 2.0}, {"views": 0}, {"scales": ()}, {"scales": (0.0,)})
    for settings in bad:
        with pytest.raises(SettingError):
            CoTTA(**settings)
    with pytest.raises(NothingToAdaptError, match="CoTTA finds nothing to adapt in ReLU: it has no parameters"):
        Adapter(nn.ReLU(), CoTTA(), Fixed(0.1))
